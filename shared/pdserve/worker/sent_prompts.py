"""Prompts on their way to the engine, which reads its messages between two steps only."""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from pdserve.engine.outputs import Load


class SentPrompts:
    """Keeps what the front sent and the engine's load does not show yet, so that nobody takes the worker for idle while
    a long step runs."""

    def __init__(self) -> None:
        self._sent = 0
        self._waiting: deque[tuple[int, int, bool]] = deque()  # number, tokens, bounded

    def add(self, tokens: int, *, bounded: bool) -> None:
        """A prompt of `tokens` tokens is on its way; what of it is cached the engine will find out. `bounded`: somebody
        asked for gaps."""
        self._sent += 1
        self._waiting.append((self._sent, tokens, bounded))

    def taken(self, number: int) -> None:
        """The engine has handled so many since it started."""
        while self._waiting and self._waiting[0][0] <= number:
            self._waiting.popleft()

    def with_sent(self, load: Load) -> Load:
        """`load` and what it does not know of yet."""
        if not self._waiting:
            return load
        return replace(
            load,
            waiting=load.waiting + len(self._waiting),
            pending_prefill_tokens=load.pending_prefill_tokens + sum(tokens for _, tokens, _ in self._waiting),
            pending_prefill_squares=load.pending_prefill_squares + sum(tokens**2 for _, tokens, _ in self._waiting),
            bounded=load.bounded + sum(bounded for _, _, bounded in self._waiting),
        )
