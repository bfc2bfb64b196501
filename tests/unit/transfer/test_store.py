"""The rendezvous store that has no port."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from pdserve.transfer.messages import StoreSet
from pdserve.transfer.store import MAX_KEYS, MAX_VALUE_BYTES, MirrorStore
from pdserve.transfer.transport import LinkLost


def pair(timeout: float = 5.0) -> tuple[MirrorStore, MirrorStore]:
    ends: list[MirrorStore] = []
    for other in (1, 0):
        ends.append(MirrorStore(lambda m, other=other: ends[other].put(m.key, m.value), timedelta(seconds=timeout)))  # type: ignore[misc]
    return ends[0], ends[1]


def test_a_key_is_on_both_ends() -> None:
    """What one sets, both get; text is taken as UTF-8."""
    one, other = pair()
    one.set("key", "value")
    other.set("bytes", b"\0\xff")
    assert one.get("key") == other.get("key") == b"value"
    assert one.get("bytes") == b"\0\xff"
    assert one.check(["key", "bytes"]) and not one.check(["key", "missing"])


def test_get_waits_for_the_peer() -> None:
    """A read blocks until the peer's word arrives."""
    one, other = pair()
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(one.get("late")))
    reader.start()
    other.set("late", b"1")
    reader.join()
    assert got == [b"1"]


def test_reads_end_at_their_deadline() -> None:
    """The shorter of the store's timeout and the caller's holds."""
    one, _ = pair(timeout=0.01)
    with pytest.raises(LinkLost, match=r"did not set never within 0\.01 s"):
        one.get("never")
    with pytest.raises(LinkLost, match=r"within 0\.001 s"):
        one.wait(["never"], timedelta(seconds=0.001))


def test_the_end_of_a_link_wakes_its_reader() -> None:
    """Nobody waits out a timeout for a link that is gone."""
    one, _ = pair(timeout=60)
    errors: list[str] = []

    def read() -> None:
        with pytest.raises(LinkLost) as raised:
            one.get("never")
        errors.append(str(raised.value))

    reader = threading.Thread(target=read)
    reader.start()
    one.abort("stream reset")
    reader.join()
    assert errors == ["stream reset"]


def test_a_peer_cannot_overfill_it() -> None:
    """Its size is bounded in keys and in bytes."""
    mirrored: list[StoreSet] = []
    store = MirrorStore(mirrored.append, timedelta(seconds=1))
    for number in range(MAX_KEYS):
        store.put(str(number), b"")
    with pytest.raises(LinkLost, match="overfills"):
        store.put("more", b"")
    with pytest.raises(LinkLost, match="overfills"):
        MirrorStore(mirrored.append, timedelta(seconds=1)).put("big", bytes(MAX_VALUE_BYTES + 1))
    assert not mirrored
