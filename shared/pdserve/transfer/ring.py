"""The memory that a worker receives frames into: one pool, a share of it for each link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from pdserve.core.errors import ConfigError, IntegrityError, NoCapacity

FRAMES_A_LINK = 4
ALIGNMENT = 16


class Ring:
    """One link's share, uint8 [capacity]: two halves that take turns, one being received into, one being emptied.

    A frame fits into a half. `capacity` bytes is also what the peer may have announced ahead: its credit.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.capacity = memory.numel()
        self.max_frame = self.capacity // 2
        self._halves = (memory[: self.max_frame], memory[self.max_frame :])
        self._turn = 0

    def slot(self, size: int) -> torch.Tensor:
        """The next half's first `size` bytes; it must have been emptied."""
        self._turn = 1 - self._turn
        return self._halves[self._turn][:size]


class RingPool:
    """Equal shares of `ring_bytes` on `device`, each of four frames; a lone one where the pool is smaller than that.

    `unit` is the size of the smallest frame: a token in a layer. Halves begin where any dtype may. Not thread-safe: the
    owner of the links locks.
    """

    def __init__(self, ring_bytes: int, frame_bytes: int, unit: int, device: torch.device) -> None:
        most = min(FRAMES_A_LINK * frame_bytes, ring_bytes) // 2
        half = most // ALIGNMENT * ALIGNMENT
        if half < unit:
            half = most // unit * unit  # tiny, as in tests; a token's bytes are aligned well enough
        if half == 0:
            raise ConfigError(f"ring_bytes {ring_bytes} and frame_bytes {frame_bytes} must hold {unit} bytes twice")
        self.total = ring_bytes // (2 * half)
        self._share = 2 * half
        self._memory = torch.empty(self.total * self._share, dtype=torch.uint8, device=device)
        self._free = list(reversed(range(self.total)))
        self._leased: dict[int, Ring] = {}

    @property
    def free(self) -> int:
        """How many shares may be leased."""
        return len(self._free)

    def lease(self) -> Ring:
        """A share, until `give_back`. Raises NoCapacity when all are out."""
        if not self._free:
            raise NoCapacity(f"all {self.total} shares of the receive ring are taken; more links need more ring_bytes")
        index = self._free.pop()
        ring = Ring(self._memory[index * self._share : (index + 1) * self._share])
        self._leased[index] = ring
        return ring

    def give_back(self, ring: Ring) -> None:
        """Return a share that nothing is received into any more."""
        index = next(index for index, leased in self._leased.items() if leased is ring)
        del self._leased[index]
        self._free.append(index)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless free and leased shares make up the pool."""
        if sorted([*self._free, *self._leased]) != list(range(self.total)):
            raise IntegrityError(f"{self._free} free and {list(self._leased)} leased of {self.total} ring shares")


class Rings:
    """The pools of one process, one a device, and those who wait for a share. `lock` guards them all."""

    def __init__(self, ring_bytes: int, frame_bytes: int, unit: int, lock: threading.Lock) -> None:
        self._sizes = (ring_bytes, frame_bytes, unit)
        self._pools: dict[torch.device, RingPool] = {}
        self._owner: dict[int, RingPool] = {}  # by the id of a leased ring
        self._returned = threading.Condition(lock)

    def lease(
        self, device: torch.device, patience: float, make_room: Callable[[], bool], gone: Callable[[], bool]
    ) -> Ring:
        """Wait up to `patience` seconds for a share. Called without the lock; the callables are called with it:
        `make_room`, where none is free, until it says that a share will be returned, and `gone` says that nobody wants
        one any more.

        Raises NoCapacity.
        """
        deadline = time.monotonic() + patience
        with self._returned:
            pool = self._pools.get(device)
            if pool is None:
                pool = self._pools[device] = RingPool(*self._sizes, device)
            made = False
            while not pool.free and not gone() and (left := deadline - time.monotonic()) > 0:
                made = made or make_room()
                self._returned.wait(left)
            ring = pool.lease()
            self._owner[id(ring)] = pool
            return ring

    def give_back(self, ring: Ring) -> None:
        """Return a share that nothing is received into any more. Called without the lock."""
        with self._returned:
            self._owner.pop(id(ring)).give_back(ring)
            self._returned.notify_all()

    def wake(self) -> None:
        """Whoever waits for a share looks again; with the lock held."""
        self._returned.notify_all()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the shares add up; with the lock held."""
        for pool in self._pools.values():
            pool.check_integrity()
