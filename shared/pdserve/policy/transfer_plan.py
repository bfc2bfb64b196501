"""Which KV goes next over a link: how a ticket's layers become frames, and whose turn it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.core.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Frame:
    """Tokens [token_start, token_start + token_count) of layers [layer_start, layer_start + layer_count)."""

    layer_start: int
    layer_count: int
    token_start: int
    token_count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Wire:
    """What KV weighs on the wire: each token of a layer, and what each block that a frame touches adds (its scales)."""

    token_bytes: int
    block_size: int = 1
    block_overhead: int = 0

    @classmethod
    def of(cls, layout: KVLayout) -> Wire:
        """One byte a number with a float32 scale for each block, head, and K or V; or everything as it is."""
        if not layout.transfer_dtype:
            return cls(layout.layer_token_bytes)
        heads = 2 * layout.num_kv_heads
        return cls(heads * layout.head_size, layout.block_size, 4 * heads)

    def blocks(self, start: int, count: int) -> int:
        """How many blocks tokens [start, start + count) touch."""
        return -(-(start + count) // self.block_size) - start // self.block_size

    def bytes(self, start: int, count: int) -> int:
        """What tokens [start, start + count) of one layer weigh."""
        overhead = self.block_overhead and self.block_overhead * self.blocks(start, count)
        return count * self.token_bytes + overhead

    def tokens_within(self, start: int, limit: int) -> int:
        """How many tokens of one layer, from `start` on, weigh at most `limit`."""
        count = limit // self.token_bytes
        while count > 0 and (excess := self.bytes(start, count) - limit) > 0:
            count -= -(-excess // (self.token_bytes + self.block_overhead))
        return max(0, count)


def next_frame(
    computed: Sequence[int],
    sent: Sequence[int],
    *,
    wire: Wire,
    max_bytes: int,
    target_bytes: int = 0,
    flush: bool = False,
) -> Frame | None:
    """The next frame of one ticket; None: nothing to send now.

    `computed` and `sent` are per layer, in tokens from the prompt's start. Layers are computed from the first to the
    last, one chunk after the other. Neighbouring layers that have the same range to send share a frame of up to
    `max_bytes`; of a layer that is larger, a part goes. Of several ranges the oldest chunk goes first, then the lowest
    layer. A frame below `target_bytes` waits while the chunk's next layer may still join it, unless `flush` says that
    nothing more will be computed. Raises ValueError where one token of one layer exceeds `max_bytes`.
    """
    if max_bytes < wire.bytes(0, 1):
        raise ValueError(f"a token of a layer has {wire.bytes(0, 1)} bytes, a frame at most {max_bytes}")
    pending = [layer for layer, (have, gone) in enumerate(zip(computed, sent, strict=True)) if have > gone]
    if not pending:
        return None
    first = min(pending, key=lambda layer: (computed[layer], layer))
    start, end = sent[first], computed[first]
    after = first + 1
    while after < len(sent) and (sent[after], computed[after]) == (start, end):
        after += 1
    layer_bytes = wire.bytes(start, end - start)
    growing = after < len(sent) and sent[after] == start and computed[after] < end
    if growing and not flush and (after - first) * layer_bytes < min(target_bytes, max_bytes):
        return None
    layers = min(after - first, max(1, max_bytes // layer_bytes))
    tokens = min(end - start, wire.tokens_within(start, max_bytes))
    return Frame(first, layers, start, tokens, layers * wire.bytes(start, tokens))


class DeficitRoundRobin:
    """Fair turns in bytes: a long ticket does not hold a short one up.

    Each key that has something to send gets `quantum` bytes of room a round and keeps its turn while they last. With a
    quantum of the largest frame every turn sends at least one. Shreedhar and Varghese, SIGCOMM 1995.
    """

    def __init__(self, quantum: int) -> None:
        self.quantum = quantum
        self._room: OrderedDict[str, int] = OrderedDict()  # in the order of turns; the first key has the turn
        self._fresh = True  # whether the first key's turn is still to begin

    def __len__(self) -> int:
        return len(self._room)

    def add(self, key: str) -> None:
        """Let `key` take part, last in this round. One that does already keeps its place."""
        self._room.setdefault(key, 0)

    def remove(self, key: str) -> None:
        """Forget `key`, which may be unknown."""
        if key in self._room:
            self._fresh = self._fresh or next(iter(self._room)) == key
            del self._room[key]

    def choose(self, size_of: Callable[[str], int]) -> str | None:
        """Whose turn it is, charged with its size; None when nobody has anything to send.

        `size_of` says how many bytes a key would send next, at most a quantum; 0: nothing now.
        """
        for _ in range(len(self._room) + 1):
            if not self._room:
                break
            key = next(iter(self._room))
            size = size_of(key)
            room = self._room[key] + (self.quantum if self._fresh else 0)
            if 0 < size <= room:
                self._room[key], self._fresh = room - size, False
                return key
            self._room[key] = room if size else 0  # who has nothing to send saves nothing up
            self._room.move_to_end(key)
            self._fresh = True
        return None
