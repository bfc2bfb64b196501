"""Links between real hubs over real Gloo groups: what arrives, what is dropped, and how links end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from pdserve.transfer.gloo import GlooTransport
from pdserve.transfer.messages import (
    Announce,
    Commit,
    ControlMessage,
    Grant,
    KvReady,
    ReceiveFailed,
    Revoked,
    SendCommitted,
    SendFailed,
    SendStopped,
    TicketClosed,
)
from pdserve.transfer.transport import Work
from pdserve.worker.channel import Channel
from pdserve.worker.messages import LinkClosed, LinkControl, LinkEstablished, LinkMessage, LinkOpened
from tests.integration.link_ends import PATIENCE, End, join, push

torch.set_num_threads(1)
SENTINEL = -7.0


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """A prefill and a decode worker, not linked yet."""
    prefill, decode = End("prefill"), End("decode")
    yield prefill, decode
    prefill.close()
    decode.close()


@pytest.fixture
def linked(ends: tuple[End, End]) -> tuple[End, End]:
    join(*ends)
    return ends


@pytest.mark.parametrize(("tokens", "held"), [(1, 0), (16, 0), (17, 0), (61, 0), (61, 1), (61, 60), (61, 37)])
def test_kv_arrives_layer_by_layer_behind_a_held_prefix(linked: tuple[End, End], tokens: int, held: int) -> None:
    """Everything but the held prefix arrives, the prefix is not touched, and both ends are told once."""
    prefill, decode = linked
    there, here = range(100, 100 + tokens), list(reversed(range(tokens)))
    data = prefill.fill(there, seed=1)
    decode.kv.data.fill_(SENTINEL)
    decode.hub.grant("t", 1, "prefill", torch.tensor(here), tokens, held)
    prefill.hub.start_send("t", 1, "decode", torch.tensor(there), tokens)
    push(prefill, {"t": tokens}, chunk=24)
    prefill.hub.finish_send("t", 42)
    size = (tokens - held) * prefill.kv.layout.token_bytes
    assert decode.event(KvReady) == KvReady("t", 1, 42, size)
    assert prefill.event(SendCommitted) == SendCommitted("t", size)
    assert torch.equal(decode.pages(here)[:, :, held:], data[:, :, held:])
    assert (decode.pages(here)[:, :, :held] == SENTINEL).all()
    assert prefill.hub.stats() == (size, 0) and decode.hub.stats() == (0, size)


def test_nothing_is_sent_of_a_prompt_that_is_held_whole(linked: tuple[End, End]) -> None:
    """A commit of no frames makes the ticket ready."""
    prefill, decode = linked
    prefill.hub.start_send("t", 1, "decode", range(8), 8)
    prefill.hub.finish_send("t", 3)
    decode.hub.grant("t", 1, "prefill", range(8), 8, 8)
    assert decode.event(KvReady) == KvReady("t", 1, 3, 0)
    assert prefill.event(SendCommitted) == SendCommitted("t", 0)
    assert not any(isinstance(message, Announce) for message in prefill.said)


def test_both_sides_may_be_early(ends: tuple[End, End]) -> None:
    """Grants, computed layers and even the commit wait for the link to come up."""
    prefill, decode = ends
    data = prefill.fill(range(20), seed=2)
    decode.hub.grant("t", 1, "prefill", range(20), 20, 0)
    prefill.hub.start_send("t", 1, "decode", range(20), 20)
    push(prefill, {"t": 20}, chunk=8)
    prefill.hub.finish_send("t", 1)
    join(prefill, decode)
    decode.event(KvReady)
    prefill.event(SendCommitted)
    assert torch.equal(decode.pages(range(20)), data)


def test_a_grant_may_come_before_its_ticket(linked: tuple[End, End]) -> None:
    """The prefill worker keeps a grant until its own side of the ticket starts; so it does with the ticket's end."""
    prefill, decode = linked
    for ticket in ("kept", "ended"):
        decode.hub.grant(ticket, 1, "prefill", range(8), 8, 0)
    decode.hub.revoke("ended", "cancelled")
    assert decode.event(Revoked) == Revoked("ended")
    _flush(decode, prefill)
    prefill.hub.start_send("ended", 1, "decode", range(8), 8)
    assert prefill.event(SendFailed) == SendFailed("ended", "cancelled")
    prefill.hub.start_send("kept", 1, "decode", range(8), 8)
    push(prefill, {"kept": 8}, chunk=8)
    prefill.hub.finish_send("kept", 1)
    decode.event(KvReady)
    prefill.event(SendCommitted)


def test_tickets_interleave_both_ways(linked: tuple[End, End]) -> None:
    """Tickets of many lengths, computed together, all arrive; the link carries both directions at once."""
    expected = {}
    for sender, receiver in (linked, linked[::-1]):
        tickets = {f"{sender.name}{n}": 5 + 9 * n for n in range(5)}
        at = 0 if sender is linked[0] else 120
        for seed, (ticket, tokens) in enumerate(tickets.items()):
            slots = range(at, at + tokens)
            at += tokens
            expected[receiver.name, ticket] = (slots, sender.fill(slots, seed + 10))
            receiver.hub.grant(ticket, 1, sender.name, slots, tokens, 0)
            sender.hub.start_send(ticket, 1, receiver.name, slots, tokens)
    for end in linked:
        push(end, {f"{end.name}{n}": 5 + 9 * n for n in range(5)}, chunk=7)
        for n in range(5):
            end.hub.finish_send(f"{end.name}{n}", n)
    for end in linked:
        events = [end.events.get(timeout=PATIENCE) for _ in range(10)]
        assert sum(isinstance(event, KvReady) for event in events) == 5
        assert sum(isinstance(event, SendCommitted) for event in events) == 5
        for (name, _), (slots, data) in expected.items():
            if name == end.name:
                assert torch.equal(end.pages(slots), data)


def test_a_short_ticket_overtakes_a_long_one(linked: tuple[End, End]) -> None:
    """With all of a long ticket waiting to go, a short one that comes later is ready first."""
    prefill, decode = linked
    for ticket, slots in (("long", range(200)), ("short", range(200, 208))):
        decode.hub.grant(ticket, 1, "prefill", slots, len(slots), 0)
    decode.kv.gate.clear()
    prefill.hub.start_send("long", 1, "decode", range(200), 200)
    push(prefill, {"long": 200}, chunk=200)
    prefill.hub.finish_send("long", 1)
    assert decode.kv.arrived.acquire(timeout=PATIENCE)
    prefill.hub.start_send("short", 1, "decode", range(200, 208), 8)
    push(prefill, {"short": 8}, chunk=8)
    prefill.hub.finish_send("short", 2)
    decode.kv.gate.set()
    assert [decode.event(KvReady).ticket for _ in range(2)] == ["short", "long"]


def test_revoked_pages_are_quiet(linked: tuple[End, End]) -> None:
    """Revoked comes only after the frame that is being put in its pages; nothing comes after it; the link lives on."""
    prefill, decode = linked
    prefill.fill(range(100), seed=3)
    decode.kv.gate.clear()
    decode.hub.grant("t", 1, "prefill", range(100), 100, 0)
    prefill.hub.start_send("t", 1, "decode", range(100), 100)
    push(prefill, {"t": 100}, chunk=100)
    assert decode.kv.arrived.acquire(timeout=PATIENCE)
    decode.hub.revoke("t", "cancelled")
    assert prefill.event(SendFailed) == SendFailed("t", "cancelled")
    assert decode.events.empty()
    decode.kv.gate.set()
    assert decode.event(Revoked) == Revoked("t")
    decode.kv.data.fill_(SENTINEL)
    _transfer(prefill, decode, "next", range(120, 140))
    assert (decode.pages(range(100)) == SENTINEL).all()
    decode.hub.revoke("t", "again")
    assert decode.event(Revoked) == Revoked("t")


def test_a_stopped_send_reads_no_more(linked: tuple[End, End]) -> None:
    """SendStopped follows for live and unknown tickets, and the peer is told."""
    prefill, decode = linked
    decode.hub.grant("t", 1, "prefill", range(40), 40, 0)
    prefill.hub.start_send("t", 1, "decode", range(40), 40)
    push(prefill, {"t": 20}, chunk=20)
    for ticket in ("t", "unknown"):
        prefill.hub.stop_send(ticket)
        assert prefill.event(SendStopped) == SendStopped(ticket)
    assert decode.event(ReceiveFailed) == ReceiveFailed("t", 1, "the sender stopped")
    _transfer(prefill, decode, "next", range(20))


def test_frames_of_an_old_attempt_are_dropped(linked: tuple[End, End]) -> None:
    """A new attempt waits for the old one's frame that is being placed; frames behind it are dropped."""
    prefill, decode = linked
    prefill.fill(range(100), seed=4)
    decode.kv.gate.clear()
    decode.hub.grant("t", 1, "prefill", range(60), 60, 0)
    prefill.hub.start_send("t", 1, "decode", range(60), 60)
    push(prefill, {"t": 60}, chunk=60)
    assert decode.kv.arrived.acquire(timeout=PATIENCE)
    announced = [message for message in prefill.said if isinstance(message, Announce)]
    decode.hub.grant("t", 2, "prefill", range(60), 60, 0)
    prefill.event(SendFailed)
    assert not [message for message in decode.said if isinstance(message, Grant) and message.attempt == 2]
    decode.kv.gate.set()
    prefill.fill(range(100, 160), seed=5)
    prefill.hub.start_send("t", 2, "decode", range(100, 160), 60)
    push(prefill, {"t": 60}, chunk=60)
    prefill.hub.finish_send("t", 9)
    assert decode.event(KvReady) == KvReady("t", 2, 9, 60 * decode.kv.layout.token_bytes)
    assert torch.equal(decode.pages(range(60)), prefill.pages(range(100, 160)))
    assert announced and decode.hub.stats()[1] > 60 * decode.kv.layout.token_bytes


@pytest.mark.parametrize("closer", ["prefill", "decode"])
def test_a_closed_link_fails_its_attempts_at_once(linked: tuple[End, End], closer: str) -> None:
    """The control stream's end fails everything on the link within 0.2 s, and a new epoch serves again."""
    prefill, decode = linked
    for ticket in ("a", "b"):
        decode.hub.grant(ticket, 1, "prefill", range(100), 100, 0)
        prefill.hub.start_send(ticket, 1, "decode", range(100), 100)
        push(prefill, {ticket: 100}, chunk=20)
    started = time.monotonic()
    for end in linked if closer == "prefill" else linked[::-1]:
        end.hub.close("decode" if end is prefill else "prefill", 1, "stream reset")
    assert {decode.event(ReceiveFailed).ticket for _ in range(2)} == {"a", "b"}
    assert {prefill.event(SendFailed).reason for _ in range(2)} == {"stream reset"}
    assert time.monotonic() - started < 0.2
    for _, link in (*prefill.hub._leaving, *decode.hub._leaving):
        link.join(time.monotonic() + PATIENCE)
    join(prefill, decode, epoch=2)
    prefill.hub.close("decode", 1, "an echo of the old epoch")
    _transfer(prefill, decode, "a", range(50))


def test_a_link_that_cannot_come_up_fails_what_waits_for_it(ends: tuple[End, End]) -> None:
    """`close` for an epoch that never opened ends waiting attempts; so does a peer that says nothing."""
    prefill, decode = ends
    prefill.hub.start_send("t", 1, "decode", range(8), 8)
    decode.hub.grant("t", 1, "prefill", range(8), 8, 0)
    prefill.hub.close("decode", 1, "no route")
    decode.hub.close("prefill", 1, "no route")
    assert prefill.event(SendFailed) == SendFailed("t", "no route")
    assert decode.event(ReceiveFailed) == ReceiveFailed("t", 1, "no route")


def test_a_silent_peer_ends_the_link_while_it_opens() -> None:
    """A rendezvous has a deadline, and a transport that cannot run here is refused with its name."""
    end = End("lonely", open_timeout=0.1)
    end.hub.open("ghost", 1, True, "gloo")
    assert "did not set" in end.downs.get(timeout=PATIENCE)
    end.hub.open("ghost", 2, True, "nccl")
    assert "nccl" in end.downs.get(timeout=PATIENCE)
    end.close()


def test_a_frame_that_does_not_come_ends_the_link() -> None:
    """An announced frame that is not sent is over at the frame's deadline, on a link that both ends then lose."""
    prefill, decode = End("prefill", frame_timeout=0.3), End("decode", frame_timeout=0.3)
    join(prefill, decode)
    decode.hub.grant("t", 1, "prefill", range(8), 8, 0)
    decode.hub.on_control("prefill", 1, Announce("t", 1, 0, 0, 1, 0, 8, 8 * decode.kv.layout.layer_token_bytes))
    assert decode.event(ReceiveFailed).ticket == "t"
    assert decode.downs.get(timeout=PATIENCE)
    prefill.hub.close("decode", 1, "the decode worker ended the link")
    prefill.close()
    decode.close()


@pytest.mark.parametrize(
    "announce",
    [
        Announce("t", 1, 0, 0, 1, 0, 8, 1 << 40),
        Announce("t", 1, 0, 0, 1, 0, 0, 0),
    ],
)
def test_a_frame_beyond_the_credit_ends_the_link(linked: tuple[End, End], announce: Announce) -> None:
    """What a peer announces is checked before memory is touched."""
    _, decode = linked
    decode.hub.on_control("prefill", 1, announce)
    assert "beyond its credit" in decode.downs.get(timeout=PATIENCE)


def test_a_commit_that_contradicts_the_frames_fails_the_attempt(linked: tuple[End, End]) -> None:
    """READY needs every frame; a commit that names another number fails the attempt, not the link."""
    prefill, decode = linked
    decode.hub.grant("t", 1, "prefill", range(8), 8, 0)
    decode.hub.on_control("prefill", 1, Commit("t", 1, 3, 5))
    assert decode.event(ReceiveFailed) == ReceiveFailed("t", 1, "3 frames were committed, 0 landed")
    _transfer(prefill, decode, "next", range(20))


def test_a_commit_for_nobody_is_answered(linked: tuple[End, End]) -> None:
    """A sender whose grant and revocation crossed is told that nobody waits."""
    prefill, decode = linked
    prefill.hub.start_send("t", 1, "decode", range(8), 8)
    prefill.hub.on_control("decode", 1, Grant("t", 1, 0))
    push(prefill, {"t": 8}, chunk=8)
    prefill.hub.finish_send("t", 1)
    assert prefill.event(SendFailed) == SendFailed("t", "nobody here waits for this attempt")
    _transfer(prefill, decode, "next", range(20))


def test_one_direction_is_enough() -> None:
    """Of a worker that only sends and one that only receives, one group is made, and it serves."""
    prefill, decode = End("prefill", receives=False), End("decode", sends=False)
    join(prefill, decode)
    assert {t.name for t in (*prefill.hub_threads(), *decode.hub_threads())} <= {
        "kv-send-decode",
        "kv-recv-prefill",
        "kv-open-decode",
        "kv-open-prefill",
    }
    _transfer(prefill, decode, "t", range(30))
    prefill.close()
    decode.close()


def test_links_beyond_the_ring_are_refused() -> None:
    """A worker whose receive ring is leased out says so; the attempts that waited for the link fail."""
    end = End("small", ring_bytes=4096)
    end.hub.grant("t", 1, "second", range(4), 4, 0)
    end.hub.open("first", 1, True, "gloo")
    end.hub.open("second", 1, True, "gloo")
    assert "ring_bytes" in end.downs.get(timeout=PATIENCE)
    assert "ring_bytes" in end.event(ReceiveFailed).reason
    end.close()


@pytest.mark.parametrize("told", [True, False], ids=["control-stream-reset", "data-error-alone"])
def test_a_killed_sender_is_noticed_within_a_second(told: bool) -> None:
    """A process that dies with a frame announced and not sent: the receiver's attempt fails within 1 s."""
    decode = End("decode")
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(theirs.fileno())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with theirs:
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
    channel: Channel[LinkMessage, LinkMessage] = Channel(ours, LinkMessage)  # type: ignore[arg-type]
    decode.deliver = lambda epoch, message: _send_quietly(channel, LinkControl("decode", epoch, message))
    last_word: list[float] = []

    def listen() -> None:
        with suppress(ConnectionResetError):  # the way a socket ends whose peer left something unread
            while (message := channel.receive()) is not None:
                assert isinstance(message, LinkControl)
                if not last_word:  # the other process has started, however long that took
                    decode.hub.open("prefill", 1, True, "gloo")
                last_word[:] = [time.monotonic()]
                decode.hub.on_control("prefill", 1, message.message)
        if told:
            decode.hub.close("prefill", 1, "stream reset")

    decode.hub.grant("t", 1, "prefill", range(100), 100, 0)
    decode.cable.set()
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        failed = decode.events.get(timeout=60)
        assert isinstance(failed, ReceiveFailed) and failed.ticket == "t", failed
        assert time.monotonic() - last_word[0] < 1.0
        assert child.wait(PATIENCE) == -signal.SIGKILL
        assert decode.hub.stats()[1] > 0
    finally:
        child.kill()
        child.wait()
        listener.join(PATIENCE)
        decode.close()
        channel.close()


def _transfer(prefill: End, decode: End, ticket: str, slots: range) -> None:
    """One whole ticket, to show that a link still works."""
    data = prefill.fill(slots, seed=99)
    decode.hub.grant(ticket, 7, "prefill", slots, len(slots), 0)
    prefill.hub.start_send(ticket, 7, "decode", slots, len(slots))
    push(prefill, {ticket: len(slots)}, chunk=16)
    prefill.hub.finish_send(ticket, 5)
    assert decode.event(KvReady).ticket == ticket
    assert prefill.event(SendCommitted).ticket == ticket
    assert torch.equal(decode.pages(slots), data)


def _flush(sender: End, receiver: End) -> None:
    """Wait until what `sender` said so far was taken in: controls keep their order."""
    arrived = threading.Event()
    before = sender.deliver

    def deliver(epoch: int, message: ControlMessage) -> None:
        before(epoch, message)
        if message == TicketClosed("flush", 1, "flush"):
            arrived.set()

    sender.deliver = deliver
    sender._outbox.put((1, TicketClosed("flush", 1, "flush")))
    assert arrived.wait(PATIENCE)
    sender.deliver = before


def _send_quietly(channel: Channel[LinkMessage, LinkMessage], message: LinkMessage) -> None:
    with suppress(OSError):  # the other process is gone, which is what this test is about
        channel.send(message)


def _child(fd: int) -> None:
    """A prefill worker that is killed at its third frame, between announcing and sending it."""
    posts, announced = iter(range(1000)), threading.Semaphore(0)
    send = GlooTransport.send

    def send_or_die(self: GlooTransport, tensor: torch.Tensor) -> Work:
        number = next(posts)  # 0 is the warm-up
        if number:
            announced.acquire()
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(self, tensor)

    GlooTransport.send = send_or_die  # type: ignore[method-assign]
    channel: Channel[LinkMessage, LinkMessage] = Channel(socket.socket(fileno=fd), LinkMessage)  # type: ignore[arg-type]
    end = End("prefill")

    def deliver(epoch: int, message: ControlMessage) -> None:
        channel.send(LinkControl("prefill", epoch, message))
        if isinstance(message, Announce):
            announced.release()

    end.deliver = deliver
    end.hub.start_send("t", 1, "decode", range(100), 100)
    push(end, {"t": 100}, chunk=100)
    end.hub.open("decode", 1, False, "gloo")
    end.cable.set()
    while (message := channel.receive()) is not None:
        match message:
            case LinkControl(peer, epoch, control):
                end.hub.on_control(peer, epoch, control)
            case LinkOpened() | LinkEstablished() | LinkClosed():
                raise AssertionError(message)


if __name__ == "__main__":
    _child(int(sys.argv[1]))
