"""An attempt at a prompt: what the front keeps of it, and what its router is told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pdserve.core.errors import PdserveError
from pdserve.core.sequence import SequenceSpec
from pdserve.engine.outputs import Ended, PromptDone, TokenOut
from pdserve.rpc.convert import end_reason_to_proto, token_to_proto
from pdserve.rpc.errors import to_status
from pdserve.telemetry.tracing import Span
from pdserve.v1 import prefill_pb2, sequence_pb2
from pdserve.worker.messages import KvCommitted


@dataclass(frozen=True, slots=True)
class First:
    token: TokenOut
    prompt: PromptDone


@dataclass(eq=False, slots=True)
class Call:
    """A ticket from StartPrefill until the engine's Ended, which may come after its router has heard the last of it."""

    ticket: str
    attempt: int
    spec: SequenceSpec
    peer: str | None
    asked: float  # when it came; monotonic
    span: Span
    traceparent: str  # of `span`
    events: asyncio.Queue[First | KvCommitted | Ended | PdserveError] = field(default_factory=asyncio.Queue)
    started: bool = False
    sent_ns: int = 0  # to the engine; wall clock
    first_chunk_ns: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)


def accepted_response(call: Call) -> prefill_pb2.PrefillSessionResponse:
    """From now on the prompt is in the load that Watch tells."""
    accepted = prefill_pb2.PrefillAccepted(ticket=call.ticket, attempt=call.attempt)
    return prefill_pb2.PrefillSessionResponse(accepted=accepted)


def first_response(call: Call, first: First) -> prefill_pb2.PrefillSessionResponse:
    """The prompt is computed."""
    token, prompt, logprobs = first.token, first.prompt, first.token.logprobs
    message = prefill_pb2.FirstToken(
        attempt=call.attempt,
        token=sequence_pb2.StepToken(
            ticket=token.ticket,
            position=token.position,
            token=token_to_proto(token.token, logprobs.logprob if logprobs else None, logprobs.top if logprobs else ()),
        ),
    )
    if prompt.end is not None:
        message.end = end_reason_to_proto(prompt.end)
    message.cached_tokens, message.blocks_reused = prompt.cached_tokens, prompt.blocks_reused
    message.queued_ms, message.compute_ms = 1e3 * prompt.queued, 1e3 * prompt.compute
    message.pulled_tokens = prompt.pulled_tokens
    return prefill_pb2.PrefillSessionResponse(first_token=message)


def committed_response(call: Call, done: KvCommitted) -> prefill_pb2.PrefillSessionResponse:
    """The decode worker has all KV."""
    committed = prefill_pb2.PrefillCommitted(
        ticket=call.ticket,
        attempt=call.attempt,
        kv_bytes=done.kv_bytes,
        transfer_seconds=done.seconds,
        exposed_seconds=done.exposed,
    )
    return prefill_pb2.PrefillSessionResponse(committed=committed)


def failed_response(request: prefill_pb2.PrefillRequest, error: PdserveError) -> prefill_pb2.PrefillSessionResponse:
    """It will not have it."""
    status = to_status(error).SerializeToString()
    failed = prefill_pb2.PrefillFailed(ticket=request.ticket, attempt=request.attempt, status=status)
    return prefill_pb2.PrefillSessionResponse(failed=failed)
