"""One attempt at a ticket's KV: one Prefill call, told as events."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from pdserve.core.errors import Unavailable
from pdserve.router.events import FirstToken, PrefillFailed, Sink
from pdserve.router.ledger import Entry
from pdserve.rpc.convert import end_reason_from_proto
from pdserve.rpc.errors import error_from_call, from_server
from pdserve.v1 import prefill_pb2, prefill_pb2_grpc

Call = grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]


def start_prefill(
    channel: grpc.aio.Channel,
    request: prefill_pb2.PrefillRequest,
    timeout: float | None,
    entry: Entry | None,
    sink: Sink,
) -> asyncio.Task[None]:
    """Make the call and tell `sink` of its first token and of its failure; success is told by nothing more.

    Closes `entry`, the call's account in the ledger, in the end. A cancel of the task ends the work over there too.
    """
    # Made here, not by the task: a first token waits for it, so it leaves before what is told to others.
    call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(request, timeout=timeout)
    task = asyncio.create_task(_follow(call, request, entry, sink), name=f"prefill {request.ticket[:8]}")

    def ended(_: asyncio.Task[None]) -> None:  # also where it was cancelled before it began
        call.cancel()
        if entry is not None:
            entry.close()

    task.add_done_callback(ended)
    return task


async def _follow(call: Call, request: prefill_pb2.PrefillRequest, entry: Entry | None, sink: Sink) -> None:
    alone = not request.decode_worker_id  # nobody takes the KV over
    complete = False
    try:
        await call.initial_metadata()
        if entry is not None:
            entry.settled()
        async for response in call:
            if response.HasField("first_token"):
                if entry is not None:
                    entry.prefilled()
                sink(_first_token(request.attempt, response.first_token))
                complete = complete or alone or response.first_token.end != 0
            else:
                complete = True
        if not complete:
            error = Unavailable("the prefill worker stopped before its KV was taken over")
            sink(PrefillFailed(request.attempt, error))
    except grpc.aio.AioRpcError as failure:
        if not complete:
            lost = failure.code() is grpc.StatusCode.UNAVAILABLE and not from_server(failure)
            sink(PrefillFailed(request.attempt, error_from_call(failure), lost))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Not this task was cancelled but the call, by its channel: the worker was silent for a lease.
        if not complete:
            sink(PrefillFailed(request.attempt, Unavailable("connection to the prefill worker lost"), lost=True))


def _first_token(attempt: int, message: prefill_pb2.FirstToken) -> FirstToken:
    return FirstToken(
        attempt=attempt,
        position=message.token.position,
        token=message.token.token,
        end=end_reason_from_proto(message.end),
        cached_tokens=message.cached_tokens,
        blocks_reused=message.blocks_reused,
        took=message.compute_ms / 1e3,
    )
