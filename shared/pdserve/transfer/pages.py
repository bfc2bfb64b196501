"""Between KV pages and frames: gather on the sending side, scatter on the receiving one.

A frame is [layers, 2, tokens, KV heads, head size] of the pages' dtype. One that travels quantised is its scales,
float32 [layers, 2, blocks, KV heads], and then one-byte codes in the shape above.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from pdserve.core.layout import KVLayout
from pdserve.policy.transfer_plan import Wire
from pdserve.transfer.quantize import CODES, dequantize, error_bound, quantize


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
    its slot reused. `slots` are those of the whole sequence, `tokens` the part that moves. Used by one thread.
    """

    def __init__(self, kv: KVPages, layout: KVLayout) -> None:
        self._kv = kv
        self._layout = layout
        self._wire = Wire.of(layout)
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._stream = (
            torch.cuda.Stream(kv.device) if kv.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        )

    def gather(
        self, layers: range, slots: torch.Tensor, tokens: range, frame: torch.Tensor, after: Iterable[torch.cuda.Event]
    ) -> float:
        """Copy pages into the uint8 `frame`, which they fill, once the events of their computation have completed.

        Returns the largest error of a number that travels quantised; else 0.
        """
        part = slots[tokens.start : tokens.stop]
        if self._stream is None:
            return self._pack(layers, part, tokens, frame)
        for event in after:
            event.synchronize()
        with torch.cuda.stream(self._stream):
            bound = self._pack(layers, part, tokens, frame)
        self._stream.synchronize()
        return bound

    def scatter(
        self, layers: range, slots: torch.Tensor, tokens: range, frame: torch.Tensor, after: torch.cuda.Event | None
    ) -> None:
        """Copy the uint8 `frame` into pages, once their last reader is through with them (`after`)."""
        part = slots[tokens.start : tokens.stop]
        if self._stream is None:
            self._kv.write(layers.start, part, self._unpack(layers, tokens, frame))
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            self._kv.write(layers.start, part, self._unpack(layers, tokens, frame.to(self._kv.device)))
        self._stream.synchronize()

    def _pack(self, layers: range, slots: torch.Tensor, tokens: range, frame: torch.Tensor) -> float:
        kind = self._layout.transfer_dtype
        if not kind:
            out = frame.view(self._dtype).view(self._shape(layers, len(tokens)))
            if frame.device == self._kv.device:
                self._kv.read(layers.start, len(layers), slots, out)
            else:
                out.copy_(self._kv.read(layers.start, len(layers), slots))
            return 0.0
        data = self._kv.read(layers.start, len(layers), slots)
        scales, codes = self._split(layers, tokens, frame)
        made, found = quantize(data, kind, self._blocks(tokens, data.device))
        codes.copy_(made)
        scales.copy_(found)
        return error_bound(found, kind)

    def _unpack(self, layers: range, tokens: range, frame: torch.Tensor) -> torch.Tensor:
        if not self._layout.transfer_dtype:
            return frame.view(self._dtype).view(self._shape(layers, len(tokens)))
        scales, codes = self._split(layers, tokens, frame)
        return dequantize(codes, scales, self._blocks(tokens, frame.device), self._dtype)

    def _split(self, layers: range, tokens: range, frame: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self._wire.blocks(tokens.start, len(tokens))
        heads = self._layout.num_kv_heads
        cut = 4 * len(layers) * 2 * blocks * heads
        codes = frame[cut:].view(CODES[self._layout.transfer_dtype][0]).view(self._shape(layers, len(tokens)))
        return frame[:cut].view(torch.float32).view(len(layers), 2, blocks, heads), codes

    def _blocks(self, tokens: range, device: torch.device) -> torch.Tensor:
        size = self._layout.block_size
        return torch.arange(tokens.start, tokens.stop, device=device) // size - tokens.start // size

    def _shape(self, layers: range, tokens: int) -> tuple[int, ...]:
        return len(layers), 2, tokens, self._layout.num_kv_heads, self._layout.head_size


def checksum(frame: torch.Tensor) -> int:
    """CRC-32 of a uint8 frame."""
    numbers: Any = frame.cpu().numpy()
    return zlib.crc32(numbers)


def queued_work(device: torch.device) -> torch.cuda.Event | None:
    """Marks the work that was queued so far on the caller's stream; None on a CPU, where it is done already."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
