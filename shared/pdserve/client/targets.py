"""Routers that stand for each other: one is asked until a call fails there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


def targets_of(target: str | Sequence[str]) -> list[str]:
    """Each host:port of one or several. Raises ValueError where there is none."""
    targets = [target] if isinstance(target, str) else list(target)
    if not targets:
        raise ValueError("at least one target is needed")
    return targets


class Rotation(Generic[T]):
    """Equals in turn. Threads may share it: that two leave the same one at once moves on by one."""

    def __init__(self, items: Sequence[T]) -> None:
        self._items = list(items)
        self._at = 0

    @property
    def current(self) -> T:
        return self._items[self._at]

    def leave(self, item: T) -> None:
        """It is the next one's turn, unless it is already."""
        at = self._items.index(item)
        if at == self._at:
            self._at = (at + 1) % len(self._items)
