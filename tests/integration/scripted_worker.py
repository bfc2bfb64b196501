"""A worker that follows the protos and a script: for what a real model cannot be made to do on command.

It computes nothing. Its answer to every prompt is `answer`, token by token, then EOS; what goes wrong is taken from
`script`, one entry for each Submit (decode) or Prefill (prefill), "serve" when it is empty:
"refuse", "invalid", "stall" (never answers), "die" (the process is gone after the first token it makes); on a decode
worker also "preempt:N" (after N tokens of its own), "transfer_failed", "attempt_failed" (gives the first attempt up);
on a prefill worker "fail" (before the first token) and "mute" (hands the KV over and fails without its first token).

A decode worker answers a Rearm as its `rearms` say: "refuse" (no room), "hold" (until `gate` is set), "hold refuse",
"silent", and by the book when they are empty. `drain` tells routers that it is going to stop; a HandOff is answered as
its `hand_offs` say: "fail", "die" (once it has said Detached), and by the book when they are empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import grpc.aio

from pdserve.core.errors import InvalidRequest, NoCapacity, PdserveError, Unavailable
from pdserve.core.layout import KVLayout
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.rpc.channel import SERVER_OPTIONS
from pdserve.rpc.convert import end_reason_to_proto, layout_to_proto, spec_from_proto, token_to_proto
from pdserve.rpc.errors import RpcError, to_status
from pdserve.rpc.versions import PROTOCOL_MAX
from pdserve.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    sequence_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

LAYOUT = KVLayout(16, 2, 2, 16, "float32", bytes(16))
EOS = 258
Context = grpc.aio.ServicerContext[Any, Any]


class Wire:
    """What the KV links between scripted workers come to: an event for each ticket whose KV is complete.

    `log` is what both sides of all tickets did, in order. `on_change` is called after each line of it, and after
    anything else that a worker saw.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.on_change: list[Callable[[], object]] = []
        self.live: dict[str, int] = {}  # ticket -> the attempt that it waits for
        self.complete: dict[str, tuple[int, int, int]] = {}  # ticket -> attempt, tokens given, first token
        self._complete: dict[str, asyncio.Event] = {}

    def fill(self, ticket: str, attempt: int, given: int, first_token: int) -> bool:
        """Hand over an attempt's KV. False where nobody waits for it."""
        if self.live.get(ticket, attempt) != attempt:
            return False
        self.complete.setdefault(ticket, (attempt, given, first_token))
        self.of(ticket).set()
        return True

    def note(self, line: str) -> None:
        self.log.append(line)
        self.tell()

    def tell(self) -> None:
        for listener in tuple(self.on_change):
            listener()

    def of(self, ticket: str) -> asyncio.Event:
        return self._complete.setdefault(ticket, asyncio.Event())


class ScriptedWorker(
    worker_pb2_grpc.WorkerServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
    prefill_pb2_grpc.PrefillServiceServicer,
):
    """A scope: inside it the worker listens on `endpoint`."""

    def __init__(
        self,
        worker_id: str,
        role: str,
        wire: Wire,
        *,
        answer: bytes = b"hello",
        script: tuple[str, ...] = (),
        total_blocks: int = 64,
        max_model_len: int = 256,
        port: int = 0,
        step: asyncio.Event | None = None,
        seats: int | None = None,
    ) -> None:
        """`step`, where given, holds back every decode token but the first until it is set. With `seats` it refuses
        whoever comes when so many are there."""
        self.worker_id, self.role, self.wire, self.answer = worker_id, role, wire, answer
        self.script = deque(script)
        self.total_blocks, self.max_model_len, self.step = total_blocks, max_model_len, step
        self.seats, self.most, self.served = seats, 0, 0
        self.rearms: deque[str] = deque()
        self.hand_offs: deque[str] = deque()
        self._sends: list[Any] = []  # of the sessions that are open
        self._told: dict[str, int] = {}  # ticket -> how many tokens it has, as far as was told
        self.rearmed: list[SequenceSpec] = []
        self.gate = asyncio.Event()
        self.incarnation = secrets.token_hex(4)
        self.seen: list[SequenceSpec] = []
        self.tickets: list[str] = []
        self.cancelled: list[str] = []
        self.live: dict[str, int] = {}  # ticket -> blocks that it holds
        self.links: list[str] = []
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = False
        self.stored: list[bytes] = []
        self.told_held: list[int] = []  # what routers said decode holds, for each Prefill
        self.silent = False
        self._news = asyncio.Event()
        self._port = port
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self.endpoint = ""

    async def __aenter__(self) -> Self:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self._server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self.endpoint = f"127.0.0.1:{self._port}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        await self._server.stop(0)

    def tell(self) -> None:
        """Report the load, as an engine does after a step."""
        self._news.set()

    # WorkerService

    async def Watch(self, request: worker_pb2.WatchRequest, context: Context) -> AsyncIterator[Any]:
        role = worker_pb2.ROLE_PREFILL if self.role == "prefill" else worker_pb2.ROLE_DECODE
        yield worker_pb2.WatchResponse(
            snapshot=worker_pb2.WorkerSnapshot(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                role=role,
                model="tiny",
                layout=layout_to_proto(LAYOUT),
                max_model_len=self.max_model_len,
                vocab_size=320,
                total_blocks=self.total_blocks,
                max_num_seqs=8,
                max_num_batched_tokens=256,
                endpoint=self.endpoint,
                draining=self.draining,
            )
        )
        sequence, told = 0, 0
        while True:
            sequence += 1
            used = sum(self.live.values())
            load = worker_pb2.WorkerLoad(
                free_blocks=self.total_blocks - used,
                owned_blocks=used,
                running=len(self.live),
            )
            stored, told = self.stored[told:], len(self.stored)
            if not self.silent:
                delta = worker_pb2.WorkerDelta(sequence=sequence, load=load, stored=stored, draining=self.draining)
                yield worker_pb2.WatchResponse(delta=delta)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._news.wait()
            self._news.clear()

    async def OpenLink(self, request: worker_pb2.OpenLinkRequest, context: Context) -> worker_pb2.OpenLinkResponse:
        self.links.append(request.worker_id)
        return worker_pb2.OpenLinkResponse(transport="scripted")

    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:
        self.draining = True
        self.tell()
        return worker_pb2.DrainResponse()

    # PrefillService

    async def PrefillSession(self, requests: AsyncIterator[Any], context: Context) -> None:  # type: ignore[override]
        tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        lock = asyncio.Lock()  # grpc wants one write at a time

        async def send(**event: Any) -> None:
            async with lock:
                await context.write(prefill_pb2.PrefillSessionResponse(**event))

        try:
            async for request in requests:
                if request.HasField("hello"):
                    await send(welcome=self._welcome())
                elif request.HasField("prefill"):
                    prefill = request.prefill
                    tasks[prefill.ticket, prefill.attempt] = asyncio.create_task(self._prefill(prefill, send))
                elif task := tasks.get((request.cancel.ticket, request.cancel.attempt)):
                    task.cancel()
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _prefill(self, request: prefill_pb2.PrefillRequest, send: Any) -> None:
        ticket, attempt = request.ticket, request.attempt
        action = self._begin(ticket, spec := spec_from_proto(request.sequence))
        self.wire.note(f"{self.worker_id} prefill {attempt}")
        self.told_held.append(request.decode_tokens_held)
        try:
            await send(accepted=prefill_pb2.PrefillAccepted(ticket=ticket, attempt=attempt))
            if action == "refuse":
                raise NoCapacity("scripted refusal")
            if action == "invalid":
                raise InvalidRequest("sequence", "scripted")
            if action == "stall":
                await asyncio.Event().wait()
            if action == "fail":
                raise Unavailable("scripted failure")
            position = len(spec.token_ids)
            token = self._token(spec, position)
            if action == "mute":
                self.wire.fill(ticket, attempt, position, token)
                raise Unavailable("scripted silence")
            first = prefill_pb2.FirstToken(token=_step_token(ticket, position, token), attempt=attempt)
            end = self._end(spec, position, token)
            if end is not None:
                first.end = end_reason_to_proto(end)
            await send(first_token=first)
            if action == "die":
                self._kill_soon()
                await asyncio.Event().wait()
            if request.decode_worker_id and end is None:
                if not self.wire.fill(ticket, attempt, position, token):
                    raise RpcError(grpc.StatusCode.ABORTED, "nobody waits for this attempt")
                await send(committed=prefill_pb2.PrefillCommitted(ticket=ticket, attempt=attempt, kv_bytes=100))
        except PdserveError as error:
            status = to_status(error).SerializeToString()
            await send(failed=prefill_pb2.PrefillFailed(ticket=ticket, attempt=attempt, status=status))
        except asyncio.CancelledError:
            self.cancelled.append(ticket)
            self.wire.tell()
            raise
        finally:
            self._finish(ticket)

    # DecodeService

    async def Session(self, requests: AsyncIterator[Any], context: Context) -> None:  # type: ignore[override]
        tasks: dict[str, asyncio.Task[None]] = {}
        lock = asyncio.Lock()  # grpc wants one write at a time

        async def send(**event: Any) -> None:
            async with lock:
                await context.write(decode_pb2.SessionResponse(**event))

        self._sends.append(send)
        try:
            async for request in requests:
                if request.HasField("hello"):
                    await send(welcome=self._welcome())
                elif request.HasField("submit"):
                    tasks[request.submit.ticket] = asyncio.create_task(self._decode(request.submit, send))
                elif request.HasField("rearm"):
                    rearm = request.rearm
                    tasks[f"{rearm.ticket} {rearm.attempt}"] = asyncio.create_task(
                        self._rearm(rearm, tasks[rearm.ticket], send)
                    )
                elif request.HasField("hand_off"):
                    moved = request.hand_off
                    tasks[moved.new_ticket] = asyncio.create_task(self._hand_off(moved, tasks[moved.ticket], send))
                elif request.HasField("call_off"):
                    await self._call_off(request.call_off, tasks, send)
                elif request.HasField("cancel"):
                    self.cancelled.append(request.cancel.ticket)
                    self.wire.tell()
                    if task := tasks.get(request.cancel.ticket):
                        task.cancel()
        finally:
            self._sends.remove(send)
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def drain(self, seconds: float) -> None:
        """Say that it is going to stop, on every session."""
        self.draining = True
        self.tell()
        for send in self._sends:
            await send(draining=decode_pb2.Draining(remaining_ms=round(1e3 * seconds)))

    async def _hand_off(self, moved: decode_pb2.HandOff, decoding: asyncio.Task[None], send: Any) -> None:
        """Stop where it is, and hand over as soon as the other worker waits for the second attempt."""
        old, new, action = moved.ticket, moved.new_ticket, self.hand_offs.popleft() if self.hand_offs else ""
        self.wire.note(f"{self.worker_id} hands off to {moved.decode_worker_id}")
        if action == "fail":
            await send(hand_off_failed=decode_pb2.HandOffFailed(ticket=old, new_ticket=new, reason="scripted"))
            return
        decoding.cancel()
        tokens = self._told[old]
        await send(detached=decode_pb2.Detached(ticket=old, new_ticket=new, tokens=tokens))
        if action == "die":
            self._kill_soon()
            return
        changed = asyncio.Event()
        self.wire.on_change.append(changed.set)
        while self.wire.live.get(new) != moved.attempt + 1:
            await changed.wait()
            changed.clear()
        self.wire.on_change.remove(changed.set)
        self.wire.fill(new, moved.attempt + 1, tokens - 1, self.answer[tokens - 1 - self.seen[0].prompt_len])
        end = decode_pb2.End(ticket=old, reason=end_reason_to_proto(EndReason.HANDED_OFF))
        await send(step=decode_pb2.Step(ends=[end]))

    async def _call_off(self, called: decode_pb2.CallOff, tasks: dict[str, asyncio.Task[None]], send: Any) -> None:
        """Go on from where it was stopped, if it was."""
        self.wire.note(f"{self.worker_id} goes on")
        tasks[called.new_ticket].cancel()
        if tasks[called.ticket].cancelled():
            tasks[called.ticket] = asyncio.create_task(self._go_on(called.ticket, send))

    async def _go_on(self, ticket: str, send: Any) -> None:
        spec = self.seen[self.tickets.index(ticket)]
        end = None
        while end is None:
            position = self._told[ticket]
            token = self._token(spec, position)
            end = self._end(spec, position, token)
            self._told[ticket] += 1
            ends = [decode_pb2.End(ticket=ticket, reason=end_reason_to_proto(end))] if end else []
            await send(step=decode_pb2.Step(tokens=[_step_token(ticket, position, token)], ends=ends))

    async def _rearm(self, rearm: decode_pb2.Rearm, decoding: asyncio.Task[None], send: Any) -> None:
        ticket, action = rearm.ticket, self.rearms.popleft() if self.rearms else ""
        self.wire.note(f"{self.worker_id} rearm {rearm.attempt} by {rearm.prefill_worker_id}")
        if action.startswith("hold"):
            await self.gate.wait()
        if action == "silent":
            return
        if action.endswith("refuse"):
            decoding.cancel()
            end = decode_pb2.End(ticket=ticket, reason=end_reason_to_proto(EndReason.NO_CAPACITY))
            await send(step=decode_pb2.Step(ends=[end]))
        elif ticket in self.wire.complete:
            attempt, _, first_token = self.wire.complete[ticket]
            await send(already_ready=decode_pb2.AlreadyReady(ticket=ticket, attempt=attempt, first_token=first_token))
        else:
            self.wire.live[ticket] = rearm.attempt
            self.rearmed.append(spec_from_proto(rearm.sequence))
            self.wire.note(f"{self.worker_id} rearmed {rearm.attempt}")
            await send(rearmed=decode_pb2.Rearmed(ticket=ticket, attempt=rearm.attempt, tokens_held=0))

    async def _decode(self, submit: decode_pb2.Submit, send: Any) -> None:
        ticket, spec = submit.ticket, spec_from_proto(submit.sequence)
        action, _, count = self._begin(ticket, spec).partition(":")
        number = 0

        async def step(tokens: list[Any] = [], end: EndReason | None = None) -> None:  # noqa: B006
            nonlocal number
            number += 1
            ends = [decode_pb2.End(ticket=ticket, reason=end_reason_to_proto(end))] if end else []
            await send(step=decode_pb2.Step(number=number, tokens=tokens, ends=ends))

        try:
            if action in ("refuse", "invalid", "transfer_failed"):
                reasons = {"refuse": "NO_CAPACITY", "invalid": "INVALID", "transfer_failed": "TRANSFER_FAILED"}
                await step(end=EndReason[reasons[action]])
                return
            if action == "stall":
                await asyncio.Event().wait()
            await send(reserved=decode_pb2.Reserved(ticket=ticket, attempt=1, tokens_held=0))
            position, made = len(spec.token_ids), 0
            if submit.prefill_worker_id:
                if action == "attempt_failed":
                    failed = decode_pb2.AttemptFailed(ticket=ticket, attempt=1, reason="scripted")
                    await send(attempt_failed=failed)
                await self.wire.of(ticket).wait()
                attempt, given, _ = self.wire.complete[ticket]
                await send(ready=decode_pb2.Ready(ticket=ticket, attempt=attempt, kv_bytes=100))
                position = given + 1
            while True:
                if made and self.step is not None:
                    await self.step.wait()
                token = self._token(spec, position)
                end = self._end(spec, position, token)
                made += 1
                if action == "preempt" and made > int(count):
                    await step(end=EndReason.PREEMPTED)
                    return
                self._told[ticket] = position + 1
                await step([_step_token(ticket, position, token)], end)
                if action == "die":
                    self._kill_soon()
                    await asyncio.Event().wait()
                if end is not None:
                    return
                position += 1
        finally:
            self._finish(ticket)

    def _welcome(self) -> decode_pb2.SessionWelcome:
        return decode_pb2.SessionWelcome(
            protocol_version=PROTOCOL_MAX, worker_id=self.worker_id, incarnation=self.incarnation
        )

    def _token(self, spec: SequenceSpec, position: int) -> int:
        index = position - spec.prompt_len
        return self.answer[index] if index < len(self.answer) else EOS

    def _end(self, spec: SequenceSpec, position: int, token: int) -> EndReason | None:
        if token == EOS and not spec.params.ignore_eos:
            return EndReason.STOP
        return EndReason.LENGTH if position + 1 - spec.prompt_len >= spec.params.max_tokens else None

    def _begin(self, ticket: str, spec: SequenceSpec) -> str:
        self.seen.append(spec)
        self.tickets.append(ticket)
        self.wire.tell()
        if self.seats is not None and len(self.live) >= self.seats:
            return "refuse"
        self.served += 1
        self.live[ticket] = LAYOUT.blocks_for(len(spec.token_ids))
        self.most = max(self.most, len(self.live))
        self.idle.clear()
        self.tell()
        return self.script.popleft() if self.script else "serve"

    def _finish(self, ticket: str) -> None:
        self.live.pop(ticket, None)
        if not self.live:
            self.idle.set()
        self.tell()

    def _kill_soon(self) -> None:
        self._dying = asyncio.create_task(self.die())


def _step_token(ticket: str, position: int, token: int) -> sequence_pb2.StepToken:
    return sequence_pb2.StepToken(ticket=ticket, position=position, token=token_to_proto(token, None, ()))
