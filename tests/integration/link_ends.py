"""One end of a link for tests: a hub, its pages, and a thread that stands for the front's control stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from pdserve.core.layout import KVLayout
from pdserve.engine.kv_cache import KVCache
from pdserve.transfer.hub import LinkHub, LinkSettings
from pdserve.transfer.messages import ControlMessage, TransferEvent

LAYOUT = KVLayout(4, 3, 2, 4, "float32", b"tiny" * 4)  # a token has 64 bytes in each of three layers
PATIENCE = 10.0
E = TypeVar("E")


def settings(**changes: Any) -> LinkSettings:
    """Frames of 16 layer-tokens, a ring of four of them."""
    return LinkSettings(**{"frame_bytes": 1024, "ring_bytes": 4096, "target_bytes": 256, **changes})


class GatedPages(KVCache):
    """Pages whose writes wait, once `gate` is cleared, until it is set again, and say so."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks, "cpu")
        self.gate, self.arrived = threading.Event(), threading.Semaphore(0)
        self.gate.set()

    def write(self, layer_start: int, slots: torch.Tensor, data: torch.Tensor) -> None:
        if not self.gate.is_set():
            self.arrived.release()
            assert self.gate.wait(PATIENCE)
        super().write(layer_start, slots, data)


class End:
    """A worker's half. What its hub says to the other one goes through `deliver`, in order, on a thread."""

    def __init__(self, name: str, *, layout: KVLayout = LAYOUT, num_blocks: int = 64, **changes: Any) -> None:
        self.name = name
        self.kv = GatedPages(layout, num_blocks)
        self.events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        self.ups: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.downs: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.said: list[ControlMessage] = []
        self.routes: dict[str, Callable[[int, ControlMessage], None]] = {}  # for ends with several peers
        self.deliver: Callable[[int, ControlMessage], None] = lambda epoch, message: None
        self.hub = LinkHub(
            self.kv,
            layout,
            settings(**changes),
            send_control=lambda peer, epoch, message: self._outbox.put((peer, epoch, message)),
            established=lambda peer, epoch: self.ups.put(epoch),
            closed=lambda peer, epoch, reason: self.downs.put(reason),
            notify=self.events.put,
        )
        self.cable = threading.Event()  # plugged in, once both ends have opened the link, as hellos see to it
        self._outbox: queue.SimpleQueue[tuple[str, int, ControlMessage] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._relay, name=f"control-{name}", daemon=True)
        self._thread.start()

    def _relay(self) -> None:
        while (item := self._outbox.get()) is not None:
            peer, epoch, message = item
            self.said.append(message)
            self.cable.wait()
            self.routes.get(peer, self.deliver)(epoch, message)

    def event(self, kind: type[E]) -> E:
        """The next event, which must be a `kind`."""
        event = self.events.get(timeout=PATIENCE)
        assert isinstance(event, kind), event
        return event

    def fill(self, slots: Sequence[int], seed: int) -> torch.Tensor:
        """Random KV in pages; returns it: [layers, 2, tokens, kv_heads, head_size]."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.kv.layout.num_layers, 2, len(slots), self.kv.layout.num_kv_heads, self.kv.layout.head_size)
        data = torch.randn(shape, generator=generator).to(self.kv.dtype)
        self.kv.data[:, :, list(slots)] = data
        return data

    def pages(self, slots: Sequence[int]) -> torch.Tensor:
        return self.kv.data[:, :, list(slots)]

    def close(self) -> None:
        """Shut down; checks that every thread came back and every ring share too."""
        self.kv.gate.set()
        self.cable.set()
        self.hub.shutdown()
        self._outbox.put(None)
        self._thread.join()
        self.hub.check_integrity()
        assert not [thread.name for thread in self.hub_threads()]

    def hub_threads(self) -> list[threading.Thread]:
        """The threads of this end's links that still run."""
        links = [*self.hub._links.values(), *(link for _, link in self.hub._leaving)]
        return [thread for link in links for thread in link._threads if thread.is_alive()]


def join(one: End, other: End, epoch: int = 1) -> None:
    """Bring a link up between two ends in this process, and wait until it is."""
    one.deliver = lambda at, message: other.hub.on_control(one.name, at, message)
    other.deliver = lambda at, message: one.hub.on_control(other.name, at, message)
    for end in (one, other):
        end.cable.clear()
    one.hub.open(other.name, epoch, True, "gloo")
    other.hub.open(one.name, epoch, False, "gloo")
    for end in (one, other):
        end.cable.set()
    assert one.ups.get(timeout=PATIENCE) == other.ups.get(timeout=PATIENCE) == epoch


def push(end: End, tickets: dict[str, int], chunk: int, start: int = 0) -> None:
    """Report layer after layer of chunk after chunk, as an engine does, for several tickets at once."""
    for done in range(start + chunk, max(tickets.values()) + chunk, chunk):
        for layer in range(end.kv.layout.num_layers):
            end.hub.advance([(ticket, min(done, tokens)) for ticket, tokens in tickets.items()], layer)
