"""Link control survives the wire."""

from __future__ import annotations

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.core.layout import KVLayout
from pdserve.rpc.convert_link import (
    HEARTBEAT,
    Beat,
    Hello,
    control_from_proto,
    control_to_proto,
    hello_from_proto,
    hello_to_proto,
)
from pdserve.transfer.messages import (
    Announce,
    Commit,
    Committed,
    ControlMessage,
    Credit,
    Grant,
    StoreSet,
    TicketClosed,
)
from pdserve.v1 import kv_pb2

LAYOUT = KVLayout(16, 2, 2, 16, "float32", b"f" * 16)
HELLO = Hello("prefill-0", "abc", LAYOUT, "auto", "cpu", "node", 1, 2, ("mlx5_0", "mlx5_1"))


@pytest.mark.parametrize(
    "message",
    [
        StoreSet("key", b"\x00\xff"),
        Grant("t", 1, 32),
        Announce("t", 1, 2, 3, 4, 5, 6, 1 << 33),
        Credit(1 << 40),
        Commit("t", 2, 7, 99),
        Committed("t", 2),
        TicketClosed("t", 2, "cancelled"),
    ],
)
def test_every_control_message_comes_back_as_it_was(message: ControlMessage) -> None:
    wire = kv_pb2.LinkMessage.FromString(control_to_proto(message).SerializeToString())
    assert control_from_proto(wire) == message


def test_a_heartbeat_and_what_is_unknown_are_signs_of_life() -> None:
    assert control_from_proto(HEARTBEAT) is Beat.BEAT
    assert control_from_proto(kv_pb2.LinkMessage()) is Beat.BEAT


def test_hello_comes_back_as_it_was() -> None:
    wire = kv_pb2.LinkMessage.FromString(hello_to_proto(HELLO).SerializeToString())
    assert hello_from_proto(wire) == HELLO


def test_a_link_begins_with_a_hello_and_has_only_one() -> None:
    with pytest.raises(InvalidRequest, match="begins with a hello"):
        hello_from_proto(HEARTBEAT)
    with pytest.raises(InvalidRequest, match="second hello"):
        control_from_proto(hello_to_proto(HELLO))
    nameless = hello_to_proto(HELLO)
    nameless.hello.worker_id = ""
    with pytest.raises(InvalidRequest, match="worker_id"):
        hello_from_proto(nameless)
