"""Links between real hubs over real Gloo groups: what arrives, what is dropped, and how links end."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from pdserve.transfer.gloo import GlooTransport
from pdserve.transfer.hub import IDLE_CLOSED
from pdserve.transfer.messages import (
    Announce,
    Commit,
    ControlMessage,
    Grant,
    Granted,
    KvReady,
    PullWanted,
    ReceiveFailed,
    Revoked,
    SendCommitted,
    SendFailed,
    SendStopped,
    TicketClosed,
    pull_of,
)
from pdserve.transfer.transport import Work
from pdserve.worker.channel import Channel
from pdserve.worker.messages import LinkClosed, LinkControl, LinkEstablished, LinkMessage, LinkOpened
from tests.integration.link_ends import LAYOUT, PATIENCE, End, join, push

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
    began = time.monotonic()
    decode.hub.grant("t", 1, "prefill", torch.tensor(here), tokens, held)
    prefill.hub.start_send("t", 1, "decode", torch.tensor(there), tokens)
    push(prefill, {"t": tokens}, chunk=24)
    prefill.hub.finish_send("t", 42)
    size = (tokens - held) * prefill.kv.layout.token_bytes
    assert decode.event(KvReady) == KvReady("t", 1, 42, size)
    committed = prefill.event(SendCommitted)
    assert (committed.ticket, committed.kv_bytes) == ("t", size)
    assert began < committed.at - committed.seconds < committed.at < time.monotonic()
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
    committed = prefill.event(SendCommitted)
    assert (committed.ticket, committed.kv_bytes, committed.seconds) == ("t", 0, 0.0)
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
    """Where all shares of the receive ring are out and in use, a worker says so; what waited for the link fails."""
    first, decode = End("first"), End("decode", ring_bytes=4096, open_timeout=1.0)
    join(first, decode)
    decode.hub.grant("busy", 1, "first", range(4), 4, 0)
    decode.hub.grant("t", 1, "second", range(4), 4, 0)
    decode.hub.open("second", 2, True, "gloo")
    assert "ring_bytes" in decode.downs.get(timeout=PATIENCE)
    failed = decode.event(ReceiveFailed)
    assert failed.ticket == "t" and "ring_bytes" in failed.reason
    _give(first, "busy", "decode", range(4))
    assert decode.event(KvReady).ticket == "busy"
    first.close()
    decode.close()


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
    sender._outbox.put((receiver.name, 1, TicketClosed("flush", 1, "flush")))
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


@pytest.mark.parametrize(("kind", "relative"), [("int8", 1 / 254), ("fp8", 1 / 16)])
@pytest.mark.parametrize("held", [0, 1, 4, 6])
def test_kv_travels_quantised_within_its_bound(kind: str, relative: float, held: int) -> None:
    """Each number arrives within the stated error, whatever block its frame began in; a frame weighs what it says."""
    layout = replace(LAYOUT, transfer_dtype=kind)
    prefill, decode = End("prefill", layout=layout), End("decode", layout=layout)
    join(prefill, decode)
    data = prefill.fill(range(61), seed=3)
    decode.hub.grant("t", 1, "prefill", range(61), 61, held)
    prefill.hub.start_send("t", 1, "decode", range(61), 61)
    push(prefill, {"t": 61}, chunk=9)
    prefill.hub.finish_send("t", 42)
    ready = decode.event(KvReady)
    prefill.event(SendCommitted)
    arrived = decode.pages(range(61))[:, :, held:]
    sent = data[:, :, held:]
    peaks = sent.abs().amax(dim=(2, 4), keepdim=True) if kind == "int8" else sent.abs()
    assert ((arrived - sent).abs() <= relative * peaks * 1.001 + 1e-6).all()
    assert not torch.equal(arrived, sent)
    bound = prefill.hub.report().error_bound
    assert 0 < (arrived - sent).abs().max() <= bound <= relative * sent.abs().max() * 1.001
    full = (61 - held) * LAYOUT.token_bytes
    assert ready.kv_bytes < full * 0.9
    prefill.close()
    decode.close()


def test_zeros_and_infinities_travel_quantised() -> None:
    """An empty block stays empty; a number that is none stays visible rather than turn into one."""
    layout = replace(LAYOUT, transfer_dtype="int8")
    prefill, decode = End("prefill", layout=layout), End("decode", layout=layout)
    join(prefill, decode)
    prefill.kv.data[:, :, :8] = 0
    prefill.kv.data[1, 0, 5, 1, 2] = float("inf")
    _carry(prefill, decode, "t", range(8))
    arrived = decode.pages(range(8))
    assert not arrived[0].any() and not arrived[1, :, :4].any()
    assert not arrived[1, 0, 5, 1].isfinite().all()
    prefill.close()
    decode.close()


def test_a_damaged_frame_fails_its_attempt_alone() -> None:
    """Checksum wrong, seen by the receiver, at once: the attempt fails with the reason, and the link serves on."""
    prefill, decode = End("prefill", checksum=True), End("decode", checksum=True)
    join(prefill, decode)
    deliver = prefill.deliver

    def damage(epoch: int, message: ControlMessage) -> None:
        if isinstance(message, Announce) and message.ticket == "bad" and message.number == 1:
            assert message.checksum is not None
            message = structs.replace(message, checksum=message.checksum ^ 1)
        deliver(epoch, message)

    prefill.deliver = damage
    decode.hub.grant("bad", 1, "prefill", range(40), 40, 0)
    prefill.hub.start_send("bad", 1, "decode", range(40), 40)
    push(prefill, {"bad": 40}, chunk=8)
    prefill.hub.finish_send("bad", 1)
    assert "checksum" in decode.event(ReceiveFailed).reason
    assert "checksum" in prefill.event(SendFailed).reason
    _carry(prefill, decode, "good", range(20))
    assert decode.hub.report().receive_aborts == prefill.hub.report().send_aborts == 1
    prefill.close()
    decode.close()


def test_a_link_measures_itself(linked: tuple[End, End]) -> None:
    """A probe tells a round trip and a rate for each size, up to what a frame may hold; nothing of it is kept."""
    prefill, decode = linked
    results: queue.SimpleQueue[tuple[float, list[tuple[int, float]]]] = queue.SimpleQueue()
    prefill.hub.probe("decode", 1, [256, 1 << 30], 4096, lambda *found: results.put(found))
    _carry(prefill, decode, "beside", range(30))
    round_trip, samples = results.get(timeout=PATIENCE)
    assert round_trip > 0 and [size for size, _ in samples] == [256, 1024] and all(rate > 0 for _, rate in samples)
    report, theirs = prefill.hub.report(), decode.hub.report()
    assert report.links[0].bytes_per_second == max(rate for _, rate in samples)
    assert theirs.stale_frames == 0 and theirs.bytes_received == report.bytes_sent == 30 * LAYOUT.token_bytes
    assert report.links[0].frames_in_flight == report.links[0].bytes_in_flight == 0
    for size in (128, 512):  # the second waits for the first
        prefill.hub.probe("decode", 1, [size], 4096, lambda *found: results.put(found))
    assert [[size for size, _ in results.get(timeout=PATIENCE)[1]] for _ in range(2)] == [[128], [512]]
    prefill.hub.probe("decode", 7, [256], 4096, lambda *found: results.put(found))
    assert results.get(timeout=PATIENCE) == (0.0, [])


def test_a_new_link_takes_the_place_of_the_one_that_idled_longest() -> None:
    """With room for two, a third link closes the least recently used one that carries nothing; a busy one is kept."""
    ends = [End(f"p{number}") for number in range(3)]
    decode = End("decode", ring_bytes=8192)
    for number, end in enumerate(ends[:2], 1):
        join(end, decode, number)
        decode.routes[end.name] = decode.deliver
    decode.fill(range(4), seed=1)
    ends[0].hub.start_send("busy", 1, "decode", range(4), 4)
    decode.hub.grant("busy", 1, "p0", range(4), 4, 0)
    join(ends[2], decode, 3)
    assert decode.downs.get(timeout=PATIENCE) == IDLE_CLOSED
    assert [report.peer for report in decode.hub.report().links] == ["p0", "p2"]
    ends[1].hub.close("decode", 2, "the peer ended the link")
    _carry(ends[2], decode, "t", range(8))
    push(ends[0], {"busy": 4}, chunk=4)
    ends[0].hub.finish_send("busy", 1)
    assert decode.event(KvReady).ticket == "busy"
    for end in (*ends, decode):
        end.close()


def test_a_new_link_waits_for_a_busy_one_to_become_idle() -> None:
    """With room for one, which carries something, the next link comes up as soon as that is through."""
    first, second, decode = End("first"), End("second"), End("decode", ring_bytes=4096)
    join(first, decode)
    decode.routes["first"] = decode.deliver
    decode.hub.grant("t", 1, "first", range(8), 8, 0)
    joining = threading.Thread(target=join, args=(second, decode, 2))
    joining.start()
    first.hub.start_send("t", 1, "decode", range(8), 8)
    push(first, {"t": 8}, chunk=8)
    first.hub.finish_send("t", 1)
    assert decode.event(KvReady).ticket == "t"
    joining.join(PATIENCE)
    assert [report.peer for report in decode.hub.report().links] == ["second"]
    for end in (first, second, decode):
        end.close()


def test_counters_tell_what_had_to_be_sent_and_what_came_to_nothing(linked: tuple[End, End]) -> None:
    """Produced is what the peer lacked, cached or computed, and no pull; each aborted attempt counts once on a side."""
    prefill, decode = linked
    decode.hub.grant("t", 1, "prefill", range(20), 20, 6)
    prefill.hub.start_send("t", 1, "decode", range(20), 20)
    push(prefill, {"t": 20}, chunk=8)
    prefill.hub.finish_send("t", 1)
    decode.event(KvReady)
    prefill.event(SendCommitted)
    assert prefill.hub.report().bytes_produced == prefill.hub.report().bytes_sent == 14 * LAYOUT.token_bytes
    prefill.hub.grant(pull_of("p", 1), 1, "decode", range(20, 28), 8, 0)
    decode.event(PullWanted)
    _give(decode, pull_of("p", 1), "prefill", range(8))
    prefill.event(KvReady)
    decode.event(SendCommitted)
    assert decode.hub.report().bytes_produced == 0 < decode.hub.report().bytes_sent
    for ticket in ("revoked", "lost"):
        decode.hub.grant(ticket, 1, "prefill", range(20), 20, 0)
        prefill.hub.start_send(ticket, 1, "decode", range(20), 20)
    decode.hub.revoke("revoked", "cancelled")
    decode.event(Revoked)
    prefill.event(SendFailed)
    for end, peer in ((prefill, "decode"), (decode, "prefill")):
        end.hub.close(peer, 1, "cut")
    prefill.event(SendFailed)
    decode.event(ReceiveFailed)
    assert prefill.hub.report().send_aborts == decode.hub.report().receive_aborts == 2


def test_kv_goes_both_ways_at_once(linked: tuple[End, End]) -> None:
    """A ticket's push and its pull share a link, in a group each, under names of their own."""
    prefill, decode = linked
    pushed, pulled = prefill.fill(range(30), seed=1), decode.fill(range(40, 60), seed=2)
    prefill.hub.grant(pull_of("t", 1), 1, "decode", range(40, 60), 20, 4)
    assert decode.event(PullWanted) == PullWanted(pull_of("t", 1), 1, "prefill", 4, 20)
    decode.hub.grant("t", 1, "prefill", range(30), 30, 0)
    prefill.hub.start_send("t", 1, "decode", range(30), 30, tells_grant=True)
    assert prefill.event(Granted) == Granted("t", 1, 0)
    decode.hub.start_send(pull_of("t", 1), 1, "prefill", range(40, 60), 20)
    push(prefill, {"t": 30}, chunk=8)
    push(decode, {pull_of("t", 1): 20}, chunk=20)
    decode.hub.finish_send(pull_of("t", 1), 0)
    prefill.hub.finish_send("t", 9)
    kinds = {decode.events.get(timeout=PATIENCE).__class__ for _ in range(2)}
    assert kinds == {prefill.events.get(timeout=PATIENCE).__class__ for _ in range(2)} == {KvReady, SendCommitted}
    assert torch.equal(decode.pages(range(30)), pushed)
    assert torch.equal(prefill.pages(range(44, 60)), pulled[:, :, 4:])
    prefill.hub.grant(pull_of("u", 1), 1, "decode", range(8), 8, 0)
    wanted = decode.event(PullWanted)
    decode.hub.refuse(wanted.ticket, wanted.attempt, wanted.peer, "not here")
    assert prefill.event(ReceiveFailed).reason == "not here"


def _give(source: End, ticket: str, peer: str, tokens: range) -> None:
    """The sender's half of a transfer of pages that are computed already."""
    source.hub.start_send(ticket, 1, peer, list(tokens), len(tokens))
    push(source, {ticket: len(tokens)}, chunk=len(tokens))
    source.hub.finish_send(ticket, 5)


def _carry(source: End, target: End, ticket: str, tokens: range) -> None:
    """One whole transfer of pages that are computed already."""
    target.hub.grant(ticket, 1, source.name, list(tokens), len(tokens), 0)
    _give(source, ticket, target.name, tokens)
    assert target.event(KvReady).ticket == source.event(SendCommitted).ticket == ticket
