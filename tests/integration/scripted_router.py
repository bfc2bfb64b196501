"""A real gRPC server of the public API that answers, refuses, breaks off and hangs on command."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from pdserve.core.errors import PdserveError
from pdserve.core.sampling import SamplingParams
from pdserve.rpc.channel import SERVER_OPTIONS
from pdserve.rpc.convert import sampling_to_proto
from pdserve.rpc.errors import abort
from pdserve.v1 import inference_pb2, inference_pb2_grpc
from pdserve.v1.inference_pb2 import GenerateRequest, GenerateResponse

ANSWER = "hello"
SEED = 77  # what this router draws

Context = grpc.aio.ServicerContext[Any, Any]
Play = Callable[["ScriptedRouter", GenerateRequest, Context], Awaitable[None]]


class ScriptedRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Runs `plays` for one call of Generate each, then answers. `refusals` are for the calls that compute nothing."""

    def __init__(self, *plays: Play, refusals: Sequence[PdserveError] = ()) -> None:
        self.plays = deque(plays)
        self.refusals = deque(refusals)
        self.requests: list[GenerateRequest] = []
        self.remaining: list[float | None] = []  # seconds to the deadline, as each call came
        self.times: list[float] = []  # when each call came, on the loop's clock
        self.called = asyncio.Event()  # set with the first call
        self.cancelled = asyncio.Event()  # set when a call is cancelled by its client

    async def Generate(self, request: GenerateRequest, context: Context) -> None:  # type: ignore[override]
        self.called.set()
        self.requests.append(request)
        self.remaining.append(context.time_remaining())
        self.times.append(asyncio.get_running_loop().time())
        play = self.plays.popleft() if self.plays else answer
        try:
            await play(self, request, context)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        self.times.append(asyncio.get_running_loop().time())
        if self.refusals:
            await abort(context, self.refusals.popleft())
        models = [inference_pb2.Model(name="tiny", max_model_len=256, vocab_size=320)]
        return inference_pb2.ListModelsResponse(models=models)


@asynccontextmanager
async def listening(router: ScriptedRouter, port: int = 0) -> AsyncIterator[str]:
    """Serve `router` on loopback; its host:port."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def tell_prompt(request: GenerateRequest, context: Context) -> None:
    """PromptInfo with what the request set over this router's defaults."""
    drawn = request.sampling.seed if request.sampling.HasField("seed") else SEED
    sampling, stopping = sampling_to_proto(SamplingParams(seed=drawn, max_tokens=len(ANSWER)))
    info = inference_pb2.PromptInfo(
        request_id=request.request_id or "drawn", model="tiny", prompt_tokens=2, sampling=sampling, stopping=stopping
    )
    await context.write(GenerateResponse(prompt=info))


async def tell_tokens(context: Context, text: str, begin: int = 0) -> None:
    """Those from number `begin` on."""
    for index, character in list(enumerate(text))[begin:]:
        tokens = [inference_pb2.Token(id=ord(character))]
        await context.write(GenerateResponse(output=inference_pb2.Output(index=index, tokens=tokens, text=character)))


async def answer(router: ScriptedRouter, request: GenerateRequest, context: Context) -> None:
    await tell_prompt(request, context)
    await tell_tokens(context, ANSWER, len(request.resume.ids))
    usage = inference_pb2.Usage(prompt_tokens=2, completion_tokens=len(ANSWER))
    finish = inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_LENGTH, usage=usage)
    await context.write(GenerateResponse(finish=finish))


async def end_early(router: ScriptedRouter, request: GenerateRequest, context: Context) -> None:
    """A clean end of stream, and no finish."""
    await tell_prompt(request, context)
    await tell_tokens(context, ANSWER)


async def begin_anew(router: ScriptedRouter, request: GenerateRequest, context: Context) -> None:
    """As a router that knows nothing of resuming."""
    await tell_prompt(request, context)
    await tell_tokens(context, ANSWER)


def hang(*, told: str = "") -> Play:
    """PromptInfo, the tokens of `told`, and then nothing until the client goes away."""

    async def play(router: ScriptedRouter, request: GenerateRequest, context: Context) -> None:
        await tell_prompt(request, context)
        await tell_tokens(context, told)
        await asyncio.Event().wait()

    return play


def fail(error: PdserveError, *, prompt: bool = False, told: str = "") -> Play:
    """End with `error`, after PromptInfo and the tokens of `told` where they are asked for."""

    async def play(router: ScriptedRouter, request: GenerateRequest, context: Context) -> None:
        if prompt or told:
            await tell_prompt(request, context)
        await tell_tokens(context, told, len(request.resume.ids))
        await abort(context, error)

    return play
