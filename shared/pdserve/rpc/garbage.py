"""The memory of large requests comes back soon.

An error holds the frames that it came through, and they hold the error. So what a refused request brought is freed by
Python's collector of cycles alone, whose full runs a quiet service has once in hours: megabytes would gather meanwhile.
And what is freed between things that live on, glibc gives back to the system only when it is told to.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc

LARGE = 1 << 20  # bytes of a request that are worth a run
REST = 5.0  # seconds from such a request's end to the run, which holds everything up for tens of milliseconds
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other libraries give memory back by themselves


class Garbage:
    """One service's."""

    def __init__(self) -> None:
        self._due: asyncio.TimerHandle | None = None

    def left(self, size: int) -> None:
        """A request of `size` bytes has ended, or soon will. Several in a row are one run."""
        if size >= LARGE and self._due is None:
            self._due = asyncio.get_running_loop().call_later(REST, self._collect)

    def _collect(self) -> None:
        self._due = None
        gc.collect()
        if _trim is not None:
            _trim(0)
