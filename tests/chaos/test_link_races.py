"""Orders of link events that random lifecycles found, each as one small case between hubs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from pdserve.transfer.messages import (
    Commit,
    Grant,
    KvReady,
    PullWanted,
    Revoked,
    SendCommitted,
    SendFailed,
    TicketClosed,
    pull_of,
)
from pdserve.worker.channel import AsyncChannel
from pdserve.worker.messages import LinkClosed, LinkMessage
from tests.integration.link_ends import End, join, push


@pytest.fixture
def linked() -> Iterator[tuple[End, End]]:
    prefill, decode = End("prefill"), End("decode")
    join(prefill, decode)
    yield prefill, decode
    prefill.close()
    decode.close()


def test_the_answer_to_an_old_commit_leaves_a_newer_grant_alone(linked: tuple[End, End]) -> None:
    """A commit crosses the fence of its attempt; the word that nobody waits for it comes after the next one's grant."""
    prefill, decode = linked
    decode.hub.grant("t", 1, "prefill", range(8), 8, 0)
    decode.hub.revoke("t", "attempt 2 takes its place")
    assert decode.event(Revoked) == Revoked("t")
    decode.hub.grant("t", 2, "prefill", range(8), 8, 0)
    decode.hub.on_control("prefill", 1, Commit("t", 1, 0, 5))
    prefill.hub.grant("flush", 1, "decode", range(8), 8, 0)  # answered behind all that decode said before
    decode.hub.start_send("flush", 1, "prefill", range(8), 8)
    push(decode, {"flush": 8}, chunk=8)
    decode.hub.finish_send("flush", 0)
    prefill.event(KvReady)
    decode.event(SendCommitted)
    closed = [said for said in decode.said if isinstance(said, TicketClosed | Grant) and said.ticket == "t"]
    assert [(type(said), said.attempt) for said in closed[-2:]] == [(Grant, 2), (TicketClosed, 1)]
    prefill.hub.start_send("t", 2, "decode", range(8), 8)
    push(prefill, {"t": 8}, chunk=8)
    prefill.hub.finish_send("t", 5)
    assert decode.event(KvReady).attempt == 2
    prefill.event(SendCommitted)


def test_a_grant_that_overtook_an_older_attempt_waits_for_its_own(linked: tuple[End, End]) -> None:
    """The prefill engine is in a step when its ticket is rearmed: both attempts' starts come after the second grant."""
    prefill, decode = linked
    decode.hub.grant("t", 1, "prefill", range(8), 8, 0)
    decode.hub.revoke("t", "attempt 2 takes its place")
    decode.event(Revoked)
    decode.hub.grant("t", 2, "prefill", range(8), 8, 0)
    decode.hub.grant("flush", 1, "prefill", range(8, 16), 8, 0)  # what is granted after it has come, so it has, too
    prefill.hub.start_send("flush", 1, "decode", range(8), 8)
    push(prefill, {"flush": 8}, chunk=8)
    prefill.hub.finish_send("flush", 0)
    assert decode.event(KvReady).ticket == "flush"
    prefill.event(SendCommitted)
    prefill.hub.start_send("t", 1, "decode", range(8), 8)
    assert prefill.event(SendFailed) == SendFailed("t", "attempt 2 took its place")
    prefill.hub.start_send("t", 2, "decode", range(8), 8)
    push(prefill, {"t": 8}, chunk=8)
    prefill.hub.finish_send("t", 5)
    assert decode.event(KvReady).attempt == 2
    assert prefill.event(SendCommitted).ticket == "t"


def test_a_pull_whose_link_ended_before_it_began_is_over(linked: tuple[End, End]) -> None:
    """Nobody will grant it again, so what was lent for it comes back at once, also once there is a new link."""
    prefill, decode = linked
    name = pull_of("t", 1)
    prefill.hub.grant(name, 1, "decode", range(8), 8, 0)
    assert decode.event(PullWanted).ticket == name
    decode.hub.close("prefill", 1, "stream reset")
    decode.hub.start_send(name, 1, "prefill", range(8), 8)
    assert decode.event(SendFailed).ticket == name
    assert not decode.hub._common.outgoing.by_ticket


async def test_a_front_that_writes_to_a_dead_engine_hears_of_its_end() -> None:
    """Whether the read or the write finds out first: `receive` says None."""
    for _ in range(20):
        ours, theirs = socket.socketpair()
        channel: AsyncChannel[LinkMessage, LinkMessage] = await AsyncChannel.open(ours, LinkMessage)  # type: ignore[arg-type]
        theirs.close()
        channel.send(LinkClosed("peer", 1, "x" * 4096))
        async with asyncio.timeout(5):
            assert await channel.receive() is None
        await channel.close()
