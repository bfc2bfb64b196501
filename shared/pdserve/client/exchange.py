"""One request for an answer, over all its tries: what to send, and what to show."""

from __future__ import annotations

import grpc

from pdserve.client.convert import event_from_proto, request_to_proto
from pdserve.client.events import Completion, Event, Finish, Output, PromptInfo, Token
from pdserve.client.options import GenerateOptions, Prompt
from pdserve.rpc.api_keys import bearer
from pdserve.rpc.errors import RpcError
from pdserve.rpc.tenant import TENANT, check_tenant
from pdserve.telemetry.tracing import TRACEPARENT, current_traceparent
from pdserve.v1 import inference_pb2


class Exchange:
    """What was asked and what was shown of the answer. Does no I/O."""

    def __init__(self, prompt: Prompt, options: GenerateOptions) -> None:
        """Raises TypeError, as `request_to_proto` does, and InvalidRequest for a tenant or an API key that
        cannot be one."""
        self.request = request_to_proto(prompt, options)
        self.timeout = options.get("timeout")
        parent = options.get("traceparent") or current_traceparent()
        named = ((TRACEPARENT, parent), (TENANT, check_tenant(options.get("tenant", ""))))
        self.api_key = options.get("api_key", "")
        self.metadata = (*((key, value) for key, value in named if value), *bearer(self.api_key))
        self._info_shown = False
        self._text_alone = False
        self.finished = False

    @property
    def begun(self) -> bool:
        """Anything was shown, be it PromptInfo alone."""
        return self._info_shown or bool(self.shown)

    @property
    def shown(self) -> int:
        """Tokens of the answer that were shown."""
        return len(self.request.resume.ids)

    @property
    def repeatable(self) -> bool:
        """Whether a new try would go unnoticed. It goes on behind the tokens that were shown; text that was shown
        without one, which only an answer's last can be, would be shown twice."""
        return not (self._text_alone or self.finished)

    def take(self, response: inference_pb2.GenerateResponse) -> Event | None:
        """The event to show, None for one that was shown by an earlier try. Raises RpcError for a server that does not
        go on where the last one ended."""
        event = event_from_proto(response)
        if isinstance(event, PromptInfo):
            if self._info_shown:
                return None
            self._info_shown = True
            self._keep(response.prompt)
        elif isinstance(event, Output):
            if event.index != self.shown:
                message = f"token {event.index} came where token {self.shown} was due: this router resumes no answers"
                raise RpcError(grpc.StatusCode.UNIMPLEMENTED, message)
            self.request.resume.ids.extend(event.token_ids)
            self._text_alone = not event.tokens
        elif event is not None:
            self.finished = isinstance(event, Finish)
        return event

    def end(self) -> None:
        """The server ended the stream without an error. Raises RpcError where the answer is not complete."""
        if not self.finished:
            raise RpcError(grpc.StatusCode.INTERNAL, "the stream ended without a finish")

    def _keep(self, info: inference_pb2.PromptInfo) -> None:
        """Ask any further try for what the first one was told: the same id, and above all the seed that was drawn. With
        the tokens that were shown it goes on from these, whichever router it asks."""
        self.request.request_id, self.request.model = info.request_id, info.model
        self.request.sampling.CopyFrom(info.sampling)
        self.request.stopping.CopyFrom(info.stopping)


class Collector:
    """Gathers events to a Completion."""

    def __init__(self) -> None:
        self._info: PromptInfo | None = None
        self._finish: Finish | None = None
        self._tokens: list[Token] = []
        self._text: list[str] = []

    def add(self, event: Event) -> None:
        if isinstance(event, Output):
            self._tokens += event.tokens
            self._text.append(event.text)
        elif isinstance(event, PromptInfo):
            self._info = event
        else:
            self._finish = event

    def completion(self) -> Completion:
        """After the last event. Raises RpcError for a server that told no PromptInfo."""
        if self._info is None or self._finish is None:
            raise RpcError(grpc.StatusCode.INTERNAL, "the stream held no PromptInfo")
        return Completion(self._info, tuple(self._tokens), "".join(self._text), self._finish)
