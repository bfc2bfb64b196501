"""Both ends of a link as processes of their own, told what to do by the test: what one GPU, or two, are needed for."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from pdserve.core.layout import KVLayout
from pdserve.engine.kv_cache import KVCache
from pdserve.transfer.connect import connector, warm_up
from pdserve.transfer.hub import LinkHub, LinkSettings
from pdserve.transfer.messages import TransferEvent
from pdserve.transfer.transport import LinkLost, Transport, Work

LAYOUT = KVLayout(16, 4, 2, 32, "bfloat16", b"tiny" * 4)
BLOCKS = 64
PATIENCE = 60.0  # seconds for anything at all, a first CUDA context included


def random_kv(tokens: int, seed: int) -> torch.Tensor:
    """[layers, 2, tokens, KV heads, head size] on the CPU."""
    shape = (LAYOUT.num_layers, 2, tokens, LAYOUT.num_kv_heads, LAYOUT.head_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


class HubEnd:
    """One worker's hub and pages. Control messages go straight to the other end's process, in order."""

    def __init__(self, name: str, peer: str, kind: str, device: str, control: Connection) -> None:
        self.kv = KVCache(LAYOUT, BLOCKS, device)
        self.peer, self.kind = peer, kind
        self._control = control
        self._events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        self._ups: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.hub = LinkHub(
            self.kv,
            LAYOUT,
            LinkSettings(frame_bytes=64 << 10, ring_bytes=1 << 20, target_bytes=16 << 10, open_timeout=20.0),
            send_control=lambda peer, epoch, message: control.send((epoch, message)),
            established=lambda peer, epoch: self._ups.put(epoch),
            closed=lambda peer, epoch, reason: None,
            notify=self._events.put,
        )

    def open(self, initiator: bool) -> None:
        self.hub.open(self.peer, 1, initiator, self.kind)

    def plug(self) -> None:
        """Both ends have opened the link: take in what the other one said."""
        threading.Thread(target=self._listen, daemon=True).start()
        self._ups.get(timeout=PATIENCE)

    def _listen(self) -> None:
        while True:
            try:
                epoch, message = self._control.recv()
            except (EOFError, OSError):
                return
            self.hub.on_control(self.peer, epoch, message)

    def push(self, ticket: str, slots: Sequence[int], seed: int) -> None:
        """Prefill: each layer's pages are written on the compute stream, behind other work, and reported."""
        data = random_kv(len(slots), seed).to(self.kv.device)
        at = torch.tensor(slots, device=self.kv.device)
        self.hub.start_send(ticket, 1, self.peer, slots, len(slots))
        for layer in range(LAYOUT.num_layers):
            if self.kv.device.type == "cuda":
                torch.cuda._sleep(10_000_000)  # some ms of "compute": a gather that does not wait for it reads zeros
            self.kv.append(layer, at, data[layer, 0], data[layer, 1])
            self.hub.advance([(ticket, len(slots))], layer)
        self.hub.finish_send(ticket, 7)

    def grant(self, ticket: str, slots: Sequence[int]) -> None:
        self.hub.grant(ticket, 1, self.peer, slots, len(slots), 0)

    def event(self) -> TransferEvent:
        return self._events.get(timeout=PATIENCE)

    def pages(self, slots: Sequence[int]) -> torch.Tensor:
        return self.kv.data[:, :, list(slots)].cpu()

    def close(self) -> None:
        self.hub.shutdown()
        self.hub.check_integrity()


class TransportEnd:
    """One end of one direction, and an engine's steps beside it."""

    def __init__(self, kind: str, device: str, path: str) -> None:
        self.device = torch.device(device)
        self._kind, self._path = kind, path
        self._transport: Transport | None = None
        self._posted: Work | None = None

    def connect(self, rank: int, timeout: float) -> None:
        """Rank 0 sends, rank 1 receives."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        make = connector(self._kind, str(self.device), "127.0.0.1", "")
        self._transport = make(FileStore(self._path, 2), rank, timedelta(seconds=timeout))
        warm_up(self._transport, sends=rank == 0)

    def post(self) -> None:
        """Post a receive of a frame."""
        assert self._transport is not None
        self._posted = self._transport.recv(torch.empty(1 << 20, dtype=torch.uint8, device=self._transport.device))

    def wait(self) -> tuple[float, str]:
        """Wait for what was posted: seconds, and how it failed."""
        assert self._posted is not None
        began, lost = time.monotonic(), ""
        try:
            self._posted.wait()
        except LinkLost as error:
            lost = str(error) or "lost"
        return time.monotonic() - began, lost

    def steps(self, count: int) -> list[float]:
        """Seconds of each of `count` steps of a small network, synchronised once a step, as an engine does."""
        weights = torch.randn(1024, 1024, device=self.device) / 32
        durations = []
        for _ in range(count):
            began = time.perf_counter()
            x = torch.ones(256, 1024, device=self.device)
            for _ in range(16):
                x = torch.relu(x @ weights)
            x.sum().item()
            durations.append(time.perf_counter() - began)
        return durations

    def close(self) -> float:
        """Seconds that closing took."""
        began = time.monotonic()
        if self._transport is not None:
            self._transport.close()
        return time.monotonic() - began


class Remote:
    """A process with an end in it. `call` runs a method there; what it raises is raised here."""

    def __init__(self, process: SpawnProcess, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe

    def tell(self, method: str, *arguments: Any) -> None:
        """Start a method; `answer` has its outcome."""
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        assert self._pipe.poll(PATIENCE), "the other process does not answer"
        failed, value = self._pipe.recv()
        assert not failed, value
        return value

    def call(self, method: str, *arguments: Any) -> Any:
        self.tell(method, *arguments)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def both(method: str, one: Remote, other: Remote, *arguments: tuple[Any, ...]) -> None:
    """Run a method at both ends at the same time; `arguments` are of the first and of the second, or of neither."""
    for remote, given in zip((one, other), arguments or ((), ()), strict=True):
        remote.tell(method, *given)
    for remote in (one, other):
        remote.answer()


def _serve(kind: type[Any], arguments: tuple[Any, ...], pipe: Connection) -> None:
    end = kind(*arguments)
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, getattr(end, method)(*given)))
        except Exception as error:
            pipe.send((True, f"{method}: {error!r}"))


@contextmanager
def processes(kind: type[Any], *arguments: tuple[Any, ...]) -> Iterator[list[Remote]]:
    """A process for each tuple of arguments, killed at the end."""
    spawn = multiprocessing.get_context("spawn")
    remotes: list[Remote] = []
    try:
        for given in arguments:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(kind, given, theirs), daemon=True)
            process.start()
            theirs.close()
            remotes.append(Remote(process, ours))
        yield remotes
    finally:
        for remote in remotes:
            remote.end()


@contextmanager
def hub_ends(kind: str, devices: tuple[str, str]) -> Iterator[list[Remote]]:
    """A prefill and a decode worker, linked."""
    left, right = multiprocessing.get_context("spawn").Pipe()
    names = ("p", "d", kind, devices[0], left), ("d", "p", kind, devices[1], right)
    with processes(HubEnd, *names) as (prefill, decode):
        both("open", prefill, decode, (True,), (False,))
        both("plug", prefill, decode)
        yield [prefill, decode]


@contextmanager
def transport_ends(kind: str, devices: tuple[str, str], path: str, timeout: float) -> Iterator[list[Remote]]:
    """A sending and a receiving end, warm, with a deadline of `timeout` seconds a frame."""
    with processes(TransportEnd, *((kind, device, path) for device in devices)) as (sender, receiver):
        both("connect", sender, receiver, (0, timeout), (1, timeout))
        yield [sender, receiver]
