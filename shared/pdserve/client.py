"""The streaming client: typed requests in, typed events out, cancelled when you stop reading.

    async with Client("127.0.0.1:8080") as client:
        async for event in client.generate("Once upon a time", max_tokens=64):
            if isinstance(event, Output):
                print(event.text, end="")

Any gRPC client can do the same with the protos; this one adds types, errors and tracing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

import grpc.aio

from pdserve.core.errors import InvalidRequest
from pdserve.core.fabric import wire_token_bytes
from pdserve.core.sampling import SamplingParams
from pdserve.rpc.channel import connect
from pdserve.rpc.convert import layout_from_proto, sampling_from_proto
from pdserve.rpc.errors import error_from_call
from pdserve.telemetry.tracing import TRACEPARENT, current_traceparent
from pdserve.v1 import inference_pb2, inference_pb2_grpc, kv_pb2, worker_pb2

CALL_TIMEOUT = 10.0  # seconds, for calls that compute nothing
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """First event: what the router made of the request. `params` and `stop` are the values in force."""

    request_id: str
    model: str
    prompt_tokens: int
    params: SamplingParams
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One token; `logprob` is None, and `top` empty, unless log-probabilities were asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens from answer index `index` on, and text that may lag behind them."""

    index: int
    tokens: tuple[Token, ...]
    text: str

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class Stages:
    """Milliseconds, as in inference.proto."""

    queue_ms: float
    reserve_ms: float
    prefill_ms: float
    transfer_exposed_ms: float
    decode_wait_ms: float


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request took, as in inference.proto."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kv_transfer_bytes: int
    blocks_reused: int
    stages: Stages
    replays: int
    prefill_worker: str
    decode_worker: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Last event. At most one of `stop_string` and `stop_token_id` is set."""

    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    stop_token_id: int | None = None


Event = PromptInfo | Output | Finish


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer, as `Client.complete` returns it."""

    prompt: PromptInfo
    tokens: tuple[Token, ...]
    text: str
    finish: Finish

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class FleetLink:
    """A worker's end of a KV link, as in worker.proto: bytes, bytes a second (sending), seconds; 0 is not measured.

    `degraded` says why a slower path than expected was taken; empty where none was.
    """

    peer: str
    transport: str
    path: str
    degraded: str
    bytes_sent: int
    bytes_received: int
    bytes_per_second: float
    bytes_in_flight: int
    frames_in_flight: int
    credit_bytes: int
    round_trip_seconds: float


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """One worker as the router sees it. What it has not said yet is empty; blocks add up to `total_blocks`.

    `endpoint` is where the router reaches it, `own_endpoint` what it tells other workers. `kv_token_bytes` is what one
    token weighs on its links.
    """

    endpoint: str
    connected: bool
    worker_id: str
    incarnation: str
    role: str
    model: str
    draining: bool
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    owned_blocks: int
    reserved_blocks: int
    running: int
    waiting: int
    preemptions: int
    kv_bytes_sent: int
    kv_bytes_received: int
    outstanding_tokens: int
    own_endpoint: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    kv_token_bytes: float = 0.0
    prefill_tokens_per_second: float = 0.0
    links: tuple[FleetLink, ...] = ()


class Client:
    """A connection to a router. Use it with `async with`, or `close` it. Errors are those of pdserve.core.errors, and
    pdserve.rpc.errors.RpcError for what has no type there."""

    def __init__(self, target: str) -> None:
        """`target` is the router's host:port; it is connected to by the first call."""
        self._channel = connect(target)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, which cancels calls that still run."""
        await self._channel.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        max_tokens: int | None = None,
        min_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool | None = None,
        logprobs: int | None = None,
        skip_special_tokens: bool | None = None,
        request_id: str = "",
        priority: int | None = None,
        session_id: str = "",
        cache_salt: str = "",
        timeout: float | None = None,
        traceparent: str = "",
    ) -> AsyncGenerator[Event]:
        """Run one request and yield PromptInfo, then Outputs, then Finish.

        `prompt` is text, token ids, or chat messages (mappings with role and content). None takes the model's default.
        `timeout` is in seconds. Without a `traceparent` the current span's is sent. Leaving the loop cancels the
        request; use `contextlib.aclosing` to have that done at once.
        """
        request = inference_pb2.GenerateRequest(
            model=model,
            sampling=inference_pb2.SamplingOptions(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                repetition_penalty=repetition_penalty,
                logit_bias=logit_bias,
                seed=seed,
            ),
            stopping=inference_pb2.StoppingOptions(
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                stop=[stop] if isinstance(stop, str) else stop,
                stop_token_ids=stop_token_ids,
                ignore_eos=ignore_eos,
            ),
            response=inference_pb2.ResponseOptions(logprobs=logprobs, skip_special_tokens=skip_special_tokens),
            request_id=request_id,
            priority=priority,
            session_id=session_id,
            cache_salt=cache_salt,
        )
        _set_prompt(request, prompt)
        parent = traceparent or current_traceparent()
        metadata = ((TRACEPARENT, parent),) if parent else ()
        call = self._stub.Generate(request, timeout=timeout, metadata=metadata)
        try:
            async for response in call:
                yield _event(response)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from error
        finally:
            call.cancel()

    async def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """Run one request to its end; `options` as in `generate`."""
        info: PromptInfo | None = None
        finish: Finish | None = None
        tokens: list[Token] = []
        text: list[str] = []
        async for event in self.generate(prompt, **options):
            if isinstance(event, Output):
                tokens += event.tokens
                text.append(event.text)
            elif isinstance(event, PromptInfo):
                info = event
            else:
                finish = event
        if info is None or finish is None:
            raise RuntimeError("the stream ended without a finish")
        return Completion(info, tuple(tokens), "".join(text), finish)

    async def models(self, timeout: float = CALL_TIMEOUT) -> list[Model]:
        """The models that can be asked for now."""
        call = self._stub.ListModels(inference_pb2.ListModelsRequest(), timeout=timeout)
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from error
        finally:
            call.cancel()
        return [Model(model.name, model.max_model_len, model.vocab_size) for model in answer.models]

    async def fleet(self, timeout: float = CALL_TIMEOUT) -> list[FleetWorker]:
        """The router's view of its workers."""
        call = self._stub.GetFleet(inference_pb2.GetFleetRequest(), timeout=timeout)
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from error
        finally:
            call.cancel()
        return [_worker(worker) for worker in answer.workers]


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    """Raises TypeError for a list that mixes kinds."""
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and all(isinstance(part, Mapping) for part in prompt):
        messages = [inference_pb2.ChatMessage(**part) for part in prompt]  # type: ignore[arg-type]
        request.chat.CopyFrom(inference_pb2.Chat(messages=messages))
    elif all(isinstance(part, int) for part in prompt):
        request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=prompt))  # type: ignore[arg-type]
    else:
        raise TypeError("a prompt is text, token ids, or messages with role and content")


def _event(response: inference_pb2.GenerateResponse) -> Event:
    if response.HasField("output"):
        output = response.output
        return Output(output.index, tuple(_token(token) for token in output.tokens), output.text)
    if response.HasField("prompt"):
        info = response.prompt
        params = sampling_from_proto(info.sampling, info.stopping, None)
        return PromptInfo(info.request_id, info.model, info.prompt_tokens, params, tuple(info.stopping.stop))
    finish, usage = response.finish, response.finish.usage
    stages = usage.stages
    return Finish(
        reason=FinishReason.STOP if finish.reason == inference_pb2.FINISH_REASON_STOP else FinishReason.LENGTH,
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            kv_transfer_bytes=usage.kv_transfer_bytes,
            blocks_reused=usage.blocks_reused,
            stages=Stages(
                queue_ms=stages.queue_ms,
                reserve_ms=stages.reserve_ms,
                prefill_ms=stages.prefill_ms,
                transfer_exposed_ms=stages.transfer_exposed_ms,
                decode_wait_ms=stages.decode_wait_ms,
            ),
            replays=usage.replays,
            prefill_worker=usage.prefill_worker,
            decode_worker=usage.decode_worker,
        ),
        stop_string=finish.stop_string if finish.HasField("stop_string") else None,
        stop_token_id=finish.stop_token_id if finish.HasField("stop_token_id") else None,
    )


def _token(token: inference_pb2.Token) -> Token:
    return Token(
        id=token.id,
        logprob=token.logprob if token.HasField("logprob") else None,
        top=tuple((other.token_id, other.logprob) for other in token.top_logprobs),
    )


def _worker(worker: inference_pb2.FleetWorker) -> FleetWorker:
    snapshot, load = worker.snapshot, worker.load
    return FleetWorker(
        endpoint=worker.endpoint,
        connected=worker.connected,
        worker_id=snapshot.worker_id,
        incarnation=snapshot.incarnation,
        role=worker_pb2.Role.Name(snapshot.role).removeprefix("ROLE_").lower() if snapshot.role else "",
        model=snapshot.model,
        draining=snapshot.draining,
        total_blocks=snapshot.total_blocks,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        owned_blocks=load.owned_blocks,
        reserved_blocks=load.reserved_blocks,
        running=load.running,
        waiting=load.waiting,
        preemptions=load.preemptions,
        kv_bytes_sent=load.kv_bytes_sent,
        kv_bytes_received=load.kv_bytes_received,
        outstanding_tokens=worker.outstanding_tokens,
        own_endpoint=snapshot.endpoint,
        max_model_len=snapshot.max_model_len,
        vocab_size=snapshot.vocab_size,
        kv_token_bytes=_token_bytes(snapshot.layout),
        prefill_tokens_per_second=load.prefill_tokens_per_second,
        links=tuple(_link(link) for link in worker.links.links),
    )


def _token_bytes(layout: kv_pb2.KvLayout) -> float:
    """0 for a worker without a layout, or with one that only a newer client knows."""
    try:
        return wire_token_bytes(layout_from_proto(layout))
    except InvalidRequest:
        return 0.0


def _link(link: worker_pb2.LinkState) -> FleetLink:
    return FleetLink(
        peer=link.peer,
        transport=link.transport,
        path=link.path,
        degraded=link.degraded,
        bytes_sent=link.bytes_sent,
        bytes_received=link.bytes_received,
        bytes_per_second=link.bytes_per_second,
        bytes_in_flight=link.bytes_in_flight,
        frames_in_flight=link.frames_in_flight,
        credit_bytes=link.credit_bytes,
        round_trip_seconds=link.round_trip_seconds,
    )
