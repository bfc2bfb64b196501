"""Between KV pages and frames: gather on the sending side, scatter on the receiving one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from pdserve.core.layout import KVLayout


class KVPages(Protocol):
    """The pages, as links see them; `slots` are int64 [n] on `device`; see engine.kv_cache."""

    @property
    def device(self) -> torch.device: ...

    def read(
        self, layer_start: int, layer_count: int, slots: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A contiguous copy [layer_count, 2, n, kv_heads, head_size]; into `out` when given."""

    def write(self, layer_start: int, slots: torch.Tensor, data: torch.Tensor) -> None:
        """Store `data`, shaped as `read` returns it."""


class PageMover:
    """One link direction's copies, on a stream of its own where pages are on a GPU.

    Both methods return when the copy is done: from then on the pages are quiet and the frame's bytes may be sent, or
    its slot reused. Used by one thread.
    """

    def __init__(self, kv: KVPages, layout: KVLayout) -> None:
        self._kv = kv
        self._shape = (layout.num_kv_heads, layout.head_size)
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._stream = (
            torch.cuda.Stream(kv.device) if kv.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        )

    def gather(
        self, layers: range, slots: torch.Tensor, frame: torch.Tensor, after: Iterable[torch.cuda.Event]
    ) -> None:
        """Copy pages into the uint8 `frame`, which they fill, once the events of their computation have completed."""
        out = self._view(frame, layers, slots)
        if self._stream is None:
            self._kv.read(layers.start, len(layers), slots, out)
            return
        for event in after:
            event.synchronize()
        with torch.cuda.stream(self._stream):
            if frame.device == self._kv.device:
                self._kv.read(layers.start, len(layers), slots, out)
            else:
                out.copy_(self._kv.read(layers.start, len(layers), slots))
        self._stream.synchronize()

    def scatter(self, layers: range, slots: torch.Tensor, frame: torch.Tensor, after: torch.cuda.Event | None) -> None:
        """Copy the uint8 `frame` into pages, once their last reader is through with them (`after`)."""
        data = self._view(frame, layers, slots)
        if self._stream is None:
            self._kv.write(layers.start, slots, data)
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            self._kv.write(layers.start, slots, data.to(self._kv.device))
        self._stream.synchronize()

    def _view(self, frame: torch.Tensor, layers: range, slots: torch.Tensor) -> torch.Tensor:
        return frame.view(self._dtype).view(len(layers), 2, len(slots), *self._shape)


def queued_work(device: torch.device) -> torch.cuda.Event | None:
    """Marks the work that was queued so far on the caller's stream; None on a CPU, where it is done already."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
