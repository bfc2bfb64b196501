"""An answer in the making: tokens in, text out, and whether it is over. Pure; one for each request, over all tries."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.errors import InvalidRequest
from pdserve.core.sequence import EndReason, Sequence
from pdserve.router.detokenizer import Detokenizer
from pdserve.router.stops import StopMatcher
from pdserve.router.validate import ResolvedRequest
from pdserve.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer is complete, and what matched where something did."""

    reason: EndReason
    stop_string: str | None = None
    stop_token_id: int | None = None


class Answer:
    """What one request has produced so far. `ending` is set once it is complete; then nothing may be added."""

    def __init__(self, resolved: ResolvedRequest) -> None:
        self.ending: Ending | None = None
        self._sequence = Sequence("", resolved.spec, 0)
        self._max_model_len = resolved.facts.max_model_len
        self._min_tokens = resolved.spec.params.min_tokens
        self._detokenizer = Detokenizer(
            resolved.model.codec.tokenizer, skip_special_tokens=resolved.skip_special_tokens
        )
        self._stops = StopMatcher(resolved.stops)
        self._token_bytes = resolved.model.codec.token_bytes if resolved.token_bytes else None
        self._index = 0
        self._tokens: list[inference_pb2.Token] = []
        self._text: list[str] = []

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer: what a worker that takes over is given."""
        return self._sequence.tokens

    @property
    def num_tokens(self) -> int:
        return self._sequence.num_answer

    def resume(self, tokens: tuple[int, ...]) -> None:
        """Begin behind `tokens`, which the client has, with their text: another router told it the same of them. Raises
        InvalidRequest where the answer ends before the last one."""
        for index, token in enumerate(tokens):
            if self.ending is not None:
                raise InvalidRequest("resume.ids", f"the answer ends with token {index} of the {len(tokens)}")
            self.add(inference_pb2.Token(id=token))
        self.take()

    def add(self, token: inference_pb2.Token) -> None:
        """Take the next token."""
        self._sequence.tokens.append(token.id)
        if self._token_bytes is not None:
            token.token_bytes = self._token_bytes[token.id]
            for other in token.top_logprobs:
                other.token_bytes = self._token_bytes[other.token_id]
        self._tokens.append(token)
        reason = self._sequence.end_after(token.id, self._max_model_len)
        if reason is EndReason.STOP:
            # What ends an answer is not part of its text, special token or not.
            self.finish(Ending(reason, stop_token_id=token.id))
            return
        self._show(self._detokenizer.feed(token.id))
        if reason is not None and self.ending is None:
            self.finish(Ending(reason))

    def finish(self, ending: Ending) -> None:
        """Complete the answer and let go of text that was held back, unless a stop string is in it."""
        self._show(self._detokenizer.flush())
        if self.ending is None:
            self._text.append(self._stops.flush())
            self.ending = ending

    def ended_by_worker(self, reason: EndReason) -> None:
        """A worker called the answer complete, by limits of its own."""
        last = self.token_ids[-1] if reason is EndReason.STOP and self.num_tokens else None
        self.finish(Ending(reason, stop_token_id=last))

    def take(self) -> inference_pb2.Output | None:
        """Everything new since the last call as one message; None when there is nothing."""
        text = "".join(self._text)
        if not self._tokens and not text:
            return None
        output = inference_pb2.Output(index=self._index, tokens=self._tokens, text=text)
        self._index += len(self._tokens)
        self._tokens, self._text = [], []
        return output

    def _show(self, text: str) -> None:
        if self.ending is not None or not text:
            return
        if self.num_tokens < self._min_tokens:
            self._text.append(text)  # stop strings do not count yet
            return
        shown, stop = self._stops.feed(text)
        self._text.append(shown)
        if stop is not None:
            self.ending = Ending(EndReason.STOP, stop_string=stop)
