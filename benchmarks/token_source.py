"""A decode worker without a model: it takes every prompt, and answers with tokens as fast as a router takes them.

One message a step with a token of every answer, as an engine's front sends them; the next step when that one is
written, and no sooner than an engine of the fast kind would have it: without that the first answers to come would be
over before the others began. It prints its endpoint, and serves until its input ends.

usage: python benchmarks/token_source.py
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from pdserve.core.layout import KVLayout
from pdserve.core.sequence import EndReason
from pdserve.rpc.channel import SERVER_OPTIONS
from pdserve.rpc.convert import end_reason_to_proto, layout_to_proto, token_to_proto
from pdserve.rpc.versions import our_versions
from pdserve.v1 import decode_pb2, decode_pb2_grpc, sequence_pb2, worker_pb2, worker_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
LAYOUT = KVLayout(16, 2, 2, 16, "float32", bytes(16))
BLOCKS, SEATS = 1 << 20, 4096
STEP = 5e-3  # seconds


class Source(worker_pb2_grpc.WorkerServiceServicer, decode_pb2_grpc.DecodeServiceServicer):
    """All of its sessions are steps of their own."""

    endpoint = ""

    async def Watch(self, request: worker_pb2.WatchRequest, context: Context) -> AsyncIterator[Any]:
        yield worker_pb2.WatchResponse(
            snapshot=worker_pb2.WorkerSnapshot(
                worker_id="source-0",
                incarnation="1",
                role=worker_pb2.ROLE_DECODE,
                model="tiny",
                layout=layout_to_proto(LAYOUT),
                max_model_len=8192,
                vocab_size=320,
                total_blocks=BLOCKS,
                max_num_seqs=SEATS,
                max_num_batched_tokens=1 << 20,
                endpoint=self.endpoint,
                protocol=our_versions(),
            )
        )
        number = 0
        while True:
            number += 1
            load = worker_pb2.WorkerLoad(free_blocks=BLOCKS)
            yield worker_pb2.WatchResponse(delta=worker_pb2.WorkerDelta(sequence=number, load=load))
            await asyncio.sleep(0.5)  # its heartbeat

    async def Session(self, requests: AsyncIterator[Any], context: Context) -> None:  # type: ignore[override]
        answers: dict[str, list[int]] = {}  # ticket: next position, tokens that are still due
        some = asyncio.Event()
        steps = asyncio.create_task(self._steps(answers, some, context))
        try:
            async for request in requests:
                if request.HasField("hello"):
                    welcome = decode_pb2.SessionWelcome(protocol_version=1, worker_id="source-0", incarnation="1")
                    await context.write(decode_pb2.SessionResponse(welcome=welcome))
                elif request.HasField("submit"):
                    sequence = request.submit.sequence
                    answers[request.submit.ticket] = [len(sequence.token_ids), sequence.stopping.max_tokens]
                    some.set()
                elif request.HasField("cancel"):
                    answers.pop(request.cancel.ticket, None)
        finally:
            steps.cancel()
            await asyncio.gather(steps, return_exceptions=True)

    async def _steps(self, answers: dict[str, list[int]], some: asyncio.Event, context: Context) -> None:
        number = 0
        while True:
            if not answers:
                some.clear()
                await some.wait()
            number += 1
            step = decode_pb2.Step(number=number)
            for ticket, answer in list(answers.items()):
                token = token_to_proto(97 + answer[0] % 26, None, ())
                step.tokens.append(sequence_pb2.StepToken(ticket=ticket, position=answer[0], token=token))
                answer[0] += 1
                answer[1] -= 1
                if answer[1] <= 0:
                    step.ends.add(ticket=ticket, reason=end_reason_to_proto(EndReason.LENGTH))
                    del answers[ticket]
            message = decode_pb2.SessionResponse(step=step)
            await asyncio.gather(context.write(message), asyncio.sleep(STEP))


async def main() -> None:
    source = Source()  # type: ignore[abstract]  # what it lacks is answered UNIMPLEMENTED
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(source, server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(source, server)
    source.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    print(source.endpoint, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
