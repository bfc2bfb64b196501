"""The store over which the two ends of a link make their groups, carried on the link's own control stream.

A TCPStore would listen on all interfaces whatever address it is given; this one opens no port.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store

from pdserve.transfer.messages import StoreSet
from pdserve.transfer.transport import LinkLost

MAX_KEYS = 256
MAX_VALUE_BYTES = 1 << 16


class MirrorStore(Store):
    """What either end sets, both have. Each key is set by one end only: there is no `add` and no `compare_set`.

    `set`, `get` and `wait` are called by the thread that makes a group, `put` and `abort` by any. Reads wait for the
    key, up to the timeout, and raise LinkLost at its end or once the link is over.
    """

    def __init__(self, mirror: Callable[[StoreSet], None], timeout: timedelta) -> None:
        super().__init__()
        self._mirror = mirror
        self._patience = timeout.total_seconds()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._over = ""

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, data)
        self._mirror(StoreSet(key, data))

    def put(self, key: str, value: bytes) -> None:
        """Take in a key; the peer's come this way. Raises LinkLost for more than any rendezvous needs."""
        with self._changed:
            if len(self._values) >= MAX_KEYS or len(value) > MAX_VALUE_BYTES:
                raise LinkLost("the peer overfills the rendezvous store")
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        patience = self._patience if timeout is None else min(timeout.total_seconds(), self._patience)
        with self._changed:
            self._changed.wait_for(lambda: self._over or all(key in self._values for key in keys), patience)
            if self._over:
                raise LinkLost(self._over)
            if missing := [key for key in keys if key not in self._values]:
                raise LinkLost(f"the peer did not set {missing[0]} within {patience:g} s")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def abort(self, reason: str) -> None:
        """Wake whoever waits, with LinkLost; so do all waits from now on."""
        with self._changed:
            self._over = reason
            self._changed.notify_all()
