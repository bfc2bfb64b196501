"""Whether a network can carry KV: sizes, rates and times, from numbers alone.

Everything is in bytes, seconds, and bytes a second; "GB" is 1e9 bytes, "Gbit" is 1e9 bits, as networks count. KV of a
token is, in each layer, K and V, each `kv_width` numbers wide: KV heads times head size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pdserve.core.layout import DTYPE_BYTES, KVLayout

SCALE_BYTES = 4  # a float32
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)(B|b|bit|bits)(?:/s|ps)")
_PREFIXES = ["", "k", "M", "G", "T"]


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV of a model: `kv_width` numbers of `bits` each in one token's K of one layer; its heads are `head_size`
    wide."""

    layers: int
    kv_width: int
    bits: int = 16
    head_size: int = 128

    @property
    def token_bytes(self) -> float:
        """Bytes of one token in all layers: 2 (K and V) x layers x kv_width x bits / 8."""
        return 2 * self.layers * self.kv_width * self.bits / 8

    def narrow_token_bytes(self, block_size: int = 16) -> float:
        """Bytes of one token on the wire as int8 or fp8: one byte a number, and a float32 scale for each block of
        `block_size` tokens, head, and K or V: 2 x layers x kv_width x (1 + 4 / (head_size x block_size))."""
        return 2 * self.layers * self.kv_width * (1 + SCALE_BYTES / (self.head_size * block_size))


def wire_token_bytes(layout: KVLayout) -> float:
    """Bytes of one token in all layers as workers of `layout` send it, whole blocks."""
    width, bits = layout.num_kv_heads * layout.head_size, 8 * DTYPE_BYTES[layout.dtype]
    shape = KvShape(layout.num_layers, width, bits, layout.head_size)
    return shape.narrow_token_bytes(layout.block_size) if layout.transfer_dtype else shape.token_bytes


def needed_bandwidth(size: float, rate: float) -> float:
    """Bytes a second for `rate` hand-offs of `size` bytes each second: size x rate."""
    return size * rate


def transfer_seconds(size: float, bandwidth: float) -> float:
    """Seconds for `size` bytes over `bandwidth` bytes a second: size / bandwidth. No latency, nothing else on it."""
    return size / bandwidth


def headroom(bandwidth: float, needed: float) -> float:
    """How many times over `bandwidth` carries what is `needed`, both in bytes a second; infinite where that is 0."""
    return bandwidth / needed if needed > 0 else float("inf")


def verdict(bandwidth: float, needed: float, what: str, carrier: str = "This link") -> str:
    """One sentence: whether `carrier` with `bandwidth` carries `what`, which needs `needed` (both bytes a second)."""
    times = headroom(bandwidth, needed)
    if times == 0:
        return f"{carrier} cannot carry {what}: it carries nothing."
    if times < 1:
        return f"{carrier} cannot carry {what}: short by a factor {_factor(1 / times)}."
    if times == float("inf"):
        return f"{carrier} carries {what}: that is nothing."
    return f"{carrier} carries {what} {_factor(times)} times over."


def _factor(value: float) -> str:
    return f"{value:.2f}" if value < 1.95 else f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def parse_bandwidth(text: str) -> float:
    """Bytes a second of "900GB/s", "200Gbit/s", "25 GiB/s" or "100Gbps"; B is bytes, b and bit are bits.

    Raises ValueError.
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a bandwidth such as 900GB/s or 200Gbit/s")
    power = _PREFIXES.index(match[2].replace("K", "k"))
    unit = (1024.0 if match[3] else 1000.0) ** power
    return float(match[1]) * unit / (1 if match[4] == "B" else 8)


def say_bytes(size: float) -> str:
    """Three digits and a unit: "1.31 GB"."""
    return _say(size, "B", ("", "k", "M", "G", "T", "P"))


def say_rate(bandwidth: float) -> str:
    """Three digits and a unit: "25.0 GB/s"."""
    return say_bytes(bandwidth) + "/s"


def say_seconds(seconds: float) -> str:
    """Three digits and a unit: "1.67 ms"."""
    return _say(seconds * 1e9, "s", ("n", "u", "m", ""))


def _say(value: float, unit: str, prefixes: tuple[str, ...]) -> str:
    power = 0
    while value >= 999.5 and power < len(prefixes) - 1:
        value /= 1000.0
        power += 1
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    if power == 0 and value == int(value):
        digits = 0
    return f"{value:.{digits}f} {prefixes[power]}{unit}"
