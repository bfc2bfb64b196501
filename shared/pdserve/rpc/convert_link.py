"""Link control: protobuf to the transfer floor's messages and back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pdserve.core.errors import InvalidRequest
from pdserve.core.layout import KVLayout
from pdserve.rpc.convert import layout_from_proto, layout_to_proto
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


@dataclass(frozen=True, slots=True)
class Hello:
    """How a worker introduces itself on a link. `transport`: the opener's wish, in the answer the choice.

    `rdma_devices`: names of the node's InfiniBand and RoCE devices.
    """

    worker_id: str
    incarnation: str
    layout: KVLayout
    transport: str
    device: str
    node: str
    protocol_min: int
    protocol_max: int
    rdma_devices: tuple[str, ...] = ()


class Beat(Enum):
    """A message without content: the peer lives."""

    BEAT = "beat"


HEARTBEAT = kv_pb2.LinkMessage(heartbeat=kv_pb2.Heartbeat())


def hello_to_proto(hello: Hello) -> kv_pb2.LinkMessage:
    return kv_pb2.LinkMessage(
        hello=kv_pb2.LinkHello(
            worker_id=hello.worker_id,
            incarnation=hello.incarnation,
            protocol_min=hello.protocol_min,
            protocol_max=hello.protocol_max,
            layout=layout_to_proto(hello.layout),
            transport=hello.transport,
            device=hello.device,
            node=hello.node,
            rdma_devices=hello.rdma_devices,
        )
    )


def hello_from_proto(message: kv_pb2.LinkMessage) -> Hello:
    """The first message of a link. Raises InvalidRequest for one that is no hello, or names nobody."""
    if message.WhichOneof("event") != "hello":
        raise InvalidRequest("message", "a link begins with a hello")
    hello = message.hello
    if not hello.worker_id or not hello.incarnation:
        raise InvalidRequest("message.hello", "worker_id and incarnation must be set")
    return Hello(
        worker_id=hello.worker_id,
        incarnation=hello.incarnation,
        layout=layout_from_proto(hello.layout),
        transport=hello.transport,
        device=hello.device,
        node=hello.node,
        protocol_min=hello.protocol_min,
        protocol_max=hello.protocol_max,
        rdma_devices=tuple(hello.rdma_devices),
    )


def control_to_proto(message: ControlMessage) -> kv_pb2.LinkMessage:
    match message:
        case Announce():
            return kv_pb2.LinkMessage(
                announce=kv_pb2.Announce(
                    ticket=message.ticket,
                    attempt=message.attempt,
                    number=message.number,
                    layer_start=message.layer_start,
                    layer_count=message.layer_count,
                    token_start=message.token_start,
                    token_count=message.token_count,
                    bytes=message.bytes,
                    checksum=message.checksum,
                )
            )
        case Credit(size):
            return kv_pb2.LinkMessage(credit=kv_pb2.Credit(bytes=size))
        case Grant(ticket, attempt, held, end):
            grant = kv_pb2.Grant(ticket=ticket, attempt=attempt, tokens_held=held, tokens_end=end)
            return kv_pb2.LinkMessage(grant=grant)
        case Commit(ticket, attempt, frames, token):
            commit = kv_pb2.Commit(ticket=ticket, attempt=attempt, frame_count=frames, first_token=token)
            return kv_pb2.LinkMessage(commit=commit)
        case Committed(ticket, attempt):
            return kv_pb2.LinkMessage(committed=kv_pb2.Committed(ticket=ticket, attempt=attempt))
        case TicketClosed(ticket, attempt, reason):
            closed = kv_pb2.TicketClosed(ticket=ticket, attempt=attempt, reason=reason)
            return kv_pb2.LinkMessage(ticket_closed=closed)
        case StoreSet(key, value):
            return kv_pb2.LinkMessage(store_set=kv_pb2.StoreSet(key=key, value=value))


def control_from_proto(message: kv_pb2.LinkMessage) -> ControlMessage | Beat:
    """One message after the hello. What this version does not know counts as a sign of life, and nothing more."""
    match message.WhichOneof("event"):
        case "announce":
            it = message.announce
            return Announce(
                it.ticket,
                it.attempt,
                it.number,
                it.layer_start,
                it.layer_count,
                it.token_start,
                it.token_count,
                it.bytes,
                it.checksum if it.HasField("checksum") else None,
            )
        case "credit":
            return Credit(message.credit.bytes)
        case "grant":
            given = message.grant
            return Grant(given.ticket, given.attempt, given.tokens_held, given.tokens_end)
        case "commit":
            made = message.commit
            return Commit(made.ticket, made.attempt, made.frame_count, made.first_token)
        case "committed":
            return Committed(message.committed.ticket, message.committed.attempt)
        case "ticket_closed":
            closed = message.ticket_closed
            return TicketClosed(closed.ticket, closed.attempt, closed.reason)
        case "store_set":
            return StoreSet(message.store_set.key, message.store_set.value)
        case "hello":
            raise InvalidRequest("message", "a second hello on one link")
        case _:
            return Beat.BEAT
