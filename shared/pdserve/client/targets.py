"""Routers that stand for each other: one is asked until it is lost."""

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
    """Equals, one of which new calls begin with. Threads may share it."""

    def __init__(self, items: Sequence[T]) -> None:
        self.items = list(items)
        self.at = 0


class Turn(Generic[T]):
    """One call's way through a Rotation."""

    def __init__(self, rotation: Rotation[T]) -> None:
        self._rotation, self._at = rotation, rotation.at

    @property
    def current(self) -> T:
        return self._rotation.items[self._at]

    @property
    def others(self) -> int:
        """How many there are beside the current one."""
        return len(self._rotation.items) - 1

    def move(self, *, lost: bool) -> None:
        """Go on to the next one. `lost`: calls to come need not begin with this one."""
        rotation, left = self._rotation, self._at
        self._at = (left + 1) % len(rotation.items)
        if lost and rotation.at == left:  # two that leave the same one at once move on by one
            rotation.at = self._at
