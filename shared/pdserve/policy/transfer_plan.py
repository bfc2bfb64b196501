"""Which KV goes next over a link: how a ticket's layers become frames, and whose turn it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frame:
    """Tokens [token_start, token_start + token_count) of layers [layer_start, layer_start + layer_count)."""

    layer_start: int
    layer_count: int
    token_start: int
    token_count: int
    bytes: int


def next_frame(
    computed: Sequence[int],
    sent: Sequence[int],
    *,
    layer_token_bytes: int,
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
    if max_bytes < layer_token_bytes:
        raise ValueError(f"a token of a layer has {layer_token_bytes} bytes, a frame at most {max_bytes}")
    pending = [layer for layer, (have, gone) in enumerate(zip(computed, sent, strict=True)) if have > gone]
    if not pending:
        return None
    first = min(pending, key=lambda layer: (computed[layer], layer))
    start, end = sent[first], computed[first]
    after = first + 1
    while after < len(sent) and (sent[after], computed[after]) == (start, end):
        after += 1
    layer_bytes = (end - start) * layer_token_bytes
    growing = after < len(sent) and sent[after] == start and computed[after] < end
    if growing and not flush and (after - first) * layer_bytes < min(target_bytes, max_bytes):
        return None
    layers = min(after - first, max(1, max_bytes // layer_bytes))
    tokens = min(end - start, max_bytes // layer_token_bytes)
    return Frame(first, layers, start, tokens, layers * tokens * layer_token_bytes)


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
