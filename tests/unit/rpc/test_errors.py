"""Errors cross a real connection and come out as what they were."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.client import NO_RETRIES, Client
from pdserve.core.errors import (
    ConfigError,
    IntegrityError,
    InvalidRequest,
    LayoutMismatch,
    ModelError,
    NoCapacity,
    PdserveError,
    TenantLimited,
    TooLate,
    Unavailable,
    UnknownModel,
)
from pdserve.rpc.errors import DeadlineExceeded, RpcError, abort, status_code
from pdserve.v1 import inference_pb2, inference_pb2_grpc


class Failing(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self) -> None:
        self.error: PdserveError = PdserveError()
        self.calls: list[float] = []
        """When each came, in seconds of the loop's clock."""

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        self.calls.append(asyncio.get_running_loop().time())
        await abort(context, self.error)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Failing, Client]]:
    server, service = grpc.aio.server(), Failing()  # type: ignore[abstract]
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with Client(f"127.0.0.1:{port}", retry=NO_RETRIES) as client:
            yield service, client
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    "error, code",
    [
        (InvalidRequest("sampling.top_p", "must be in (0, 1], got 2 — ☃"), grpc.StatusCode.INVALID_ARGUMENT),
        (UnknownModel("no model 'x'"), grpc.StatusCode.NOT_FOUND),
        (NoCapacity("full", 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (TenantLimited("yours", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (TooLate("late", 0.25), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (NoCapacity("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Unavailable("gone"), grpc.StatusCode.UNAVAILABLE),
        (ModelError("bad file"), grpc.StatusCode.FAILED_PRECONDITION),
        (ConfigError("bad flag"), grpc.StatusCode.FAILED_PRECONDITION),
        (LayoutMismatch("a, b"), grpc.StatusCode.FAILED_PRECONDITION),
        (IntegrityError("books"), grpc.StatusCode.INTERNAL),
        (RpcError(grpc.StatusCode.ABORTED, "closed"), grpc.StatusCode.ABORTED),
        (DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_round_trip(pair: tuple[Failing, Client], error: PdserveError, code: grpc.StatusCode) -> None:
    service, client = pair
    service.error = error
    assert status_code(error) is code
    with pytest.raises(type(error)) as caught:
        await client.models()
    assert type(caught.value) is type(error) and str(caught.value) == str(error)
    if isinstance(error, InvalidRequest):
        assert (caught.value.field, caught.value.message) == (error.field, error.message)  # type: ignore[attr-defined]
    if isinstance(error, NoCapacity):
        assert caught.value.retry_after == error.retry_after  # type: ignore[attr-defined]
    if isinstance(error, RpcError):
        assert caught.value.code is code  # type: ignore[attr-defined]


async def test_a_detail_reaches_the_client_and_not_our_logs(pair: tuple[Failing, Client]) -> None:
    service, client = pair
    service.error = InvalidRequest("chat.messages", "refused", detail="no role 'spy'")
    with pytest.raises(InvalidRequest, match=r"chat\.messages: refused: no role 'spy'") as caught:
        await client.models()
    assert (caught.value.field, caught.value.message) == ("chat.messages", "refused: no role 'spy'")
    assert str(service.error) == "chat.messages: refused"


async def test_long_messages_are_cut_to_fit_the_trailers(pair: tuple[Failing, Client]) -> None:
    service, client = pair
    service.error = InvalidRequest("text", "ü" * 100_000)
    with pytest.raises(InvalidRequest) as caught:
        await client.models()
    assert caught.value.field == "text" and caught.value.message.endswith("...")


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    async with Client("127.0.0.1:1", retry=NO_RETRIES) as client:
        with pytest.raises(Unavailable):
            await client.models()


# A client's own gRPC, told by a service config to try again when there is no room; its own guess would be far longer.
RETRYING = {
    "methodConfig": [
        {
            "name": [{"service": "pdserve.v1.InferenceService"}],
            "retryPolicy": {
                "maxAttempts": 2,
                "initialBackoff": "600s",
                "maxBackoff": "600s",
                "backoffMultiplier": 1,
                "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
            },
        }
    ]
}


@pytest.mark.parametrize("retry_after, calls", [(0.2, 2), (None, 1)], ids=["a time", "no time"])
async def test_a_client_with_a_retry_policy_comes_back_by_itself(retry_after: float | None, calls: int) -> None:
    """When the refusal says, and not at all where it says nothing: what is too large comes out the same each time."""
    server, service = grpc.aio.server(), Failing()  # type: ignore[abstract]
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    service.error = NoCapacity("full", retry_after)
    options = [("grpc.service_config", json.dumps(RETRYING))]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await inference_pb2_grpc.InferenceServiceStub(channel).ListModels(
                    inference_pb2.ListModelsRequest(), timeout=60.0
                )
    finally:
        await server.stop(0)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(service.calls) == calls
    if retry_after is not None:
        assert service.calls[1] - service.calls[0] > retry_after - 0.01  # some timers end a little early
