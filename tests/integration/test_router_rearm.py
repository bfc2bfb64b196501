"""A reservation that outlives its prefill worker, against workers that agree, refuse, and say nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.errors import Unavailable
from pdserve.rpc.errors import DeadlineExceeded
from tests.integration.router_suite import PATIENCE, pair, suite, tokenizer_only
from tests.integration.scripted_worker import ScriptedWorker, Wire


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_only(tmp_path_factory.mktemp("model") / "tiny")


def trio(**options: Any) -> tuple[ScriptedWorker, ScriptedWorker, ScriptedWorker]:
    wire = Wire()
    p0, p1 = (ScriptedWorker(name, "prefill", wire) for name in ("p0", "p1"))
    return p0, p1, ScriptedWorker("d0", "decode", wire, **options)


async def test_nothing_is_sent_for_a_new_attempt_before_the_decode_worker_agreed(folder: Path) -> None:
    """Submit and Prefill race; a second Prefill waits for Rearmed, and is given what was shown."""
    p0, p1, decode = trio()
    p0.script.append("die")
    decode.rearms.append("hold")
    async with suite(folder, p0, p1, decode) as made:
        asking = asyncio.create_task(made.client.complete("hi"))
        await made.until(lambda: len(decode.wire.log) >= 2)
        assert decode.wire.log == ["p0 prefill 1", "d0 rearm 2 by p1"]
        decode.gate.set()
        done = await asking
    assert decode.wire.log == ["p0 prefill 1", "d0 rearm 2 by p1", "d0 rearmed 2", "p1 prefill 2"]
    assert done.text == "hello" and done.finish.usage.replays == 0
    assert [bytes(spec.token_ids) for spec in (*p1.seen, *decode.rearmed)] == [b"hih", b"hih"]
    assert decode.tickets == p0.tickets == p1.tickets and len(decode.tickets) == 1
    assert (done.finish.usage.prefill_worker, done.finish.usage.decode_worker) == ("p0", "d0")


# By p1 where the failure was heard of before the complete KV was: a worker was looked for then, and is not needed.
SECOND_ATTEMPT = {"d0 rearm 2 by p0", "d0 rearm 2 by p1"}


async def test_kv_that_was_complete_in_time_needs_no_second_prefill(folder: Path) -> None:
    """The prefill worker dies with its first token unsaid: the decode worker knows it."""
    p0, p1, decode = trio(step=(step := asyncio.Event()))  # or the answer would be over before the failure is known
    p0.script.append("mute")
    async with suite(folder, p0, p1, decode) as made:
        asking = asyncio.create_task(made.client.complete("hi"))
        await made.until(lambda: SECOND_ATTEMPT & set(decode.wire.log))
        step.set()
        done = await asking
    assert done.text == "hello" and [token.id for token in done.tokens] == [*b"hello", 258]
    assert p1.seen == [] and len(decode.tickets) == 1 and decode.rearmed == []
    assert done.finish.usage.prefill_worker == "p0"


async def test_a_first_token_whose_logprobs_are_lost_is_made_again(folder: Path) -> None:
    """The decode worker knows the token, not its logprobs; those were asked for."""
    p0, p1, decode = trio(step=(step := asyncio.Event()))
    p0.script.append("mute")
    async with suite(folder, p0, p1, decode) as made:
        asking = asyncio.create_task(made.client.complete("hi", logprobs=1))
        await made.until(lambda: SECOND_ATTEMPT & set(decode.wire.log))
        step.set()
        assert (await asking).text == "hello"
    assert len(p1.seen) == 1 and len(decode.tickets) == 2


async def test_a_decode_worker_that_gives_an_attempt_up_is_believed(folder: Path) -> None:
    """Its prefill hangs; it is ended, and another worker fills the reservation."""
    p0, p1, decode = trio(script=("attempt_failed",))
    p0.script.append("stall")
    async with suite(folder, p0, p1, decode) as made:
        done = await made.client.complete("hi")
        await made.until(lambda: p0.cancelled == p0.tickets)
    assert done.text == "hello" and done.finish.usage.replays == 0
    assert len(decode.tickets) == 1 and p1.tickets == decode.tickets


async def test_a_rearm_that_is_refused_ends_the_try(folder: Path) -> None:
    p0, p1, decode = trio()
    p0.script.append("fail")
    decode.rearms.append("refuse")
    async with suite(folder, p0, p1, decode) as made:
        done = await made.client.complete("hi")
    assert done.text == "hello" and len(decode.tickets) == 2
    assert done.finish.usage.replays == 1, "the second try, and neither of its reasons by itself"


async def test_a_rearm_without_an_answer_ends_the_try(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.router.ticket.ANSWER", 0.2)
    p0, p1, decode = trio()
    p0.script.append("fail")
    decode.rearms.append("silent")
    async with suite(folder, p0, p1, decode) as made:
        done = await made.client.complete("hi")
    assert done.text == "hello" and len(decode.tickets) == 2


async def test_a_reservation_is_not_kept_for_long_without_a_prefill_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only prefill worker dies: the decode worker gets its pages back, and the request waits in the queue."""
    monkeypatch.setattr("pdserve.router.follow.REARM_PATIENCE", 0.3)
    prefill, decode = pair()
    prefill.script.append("die")
    async with suite(folder, prefill, decode) as made:
        asking = asyncio.create_task(made.client.complete("hi", timeout=PATIENCE))
        await made.until(lambda: decode.cancelled == decode.tickets != [])
        await made.until(lambda: made.service.waiting("tiny") == 1)
        port = int(prefill.endpoint.rpartition(":")[2])
        async with ScriptedWorker("p0", "prefill", prefill.wire, port=port) as again:
            done = await asking
        assert [bytes(spec.token_ids) for spec in again.seen] == [b"hih"]
    assert done.text == "hello" and len(decode.tickets) == 2


async def test_rearms_that_get_nowhere_are_bounded(folder: Path) -> None:
    p0, p1, decode = trio()
    for prefill in (p0, p1):
        prefill.script.extend(["fail"] * 9)
    async with suite(folder, p0, p1, decode, max_replays=2) as made:
        with pytest.raises(Unavailable, match="3 tries in a row failed"):
            await made.client.complete("hi")
        async with asyncio.timeout(PATIENCE):
            await decode.idle.wait()
        [model] = (await made.client.stats()).models
    assert len(decode.tickets) == 1 and len(p0.seen) + len(p1.seen) == 3 and model.replays == 0
    assert [line for line in decode.wire.log if "prefill" in line] == ["p0 prefill 1", "p1 prefill 2", "p0 prefill 3"]


async def test_a_rearmed_reservation_is_cancelled_with_its_request(folder: Path) -> None:
    p0, p1, decode = trio()
    p0.script.append("fail")
    p1.script.append("stall")
    async with suite(folder, p0, p1, decode) as made:
        with pytest.raises(DeadlineExceeded):
            await made.client.complete("hi", timeout=0.5)
        async with asyncio.timeout(PATIENCE):
            await decode.idle.wait()
            await p1.idle.wait()
    assert decode.cancelled == decode.tickets == p1.tickets
