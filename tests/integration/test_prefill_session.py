"""A prefill worker's half of a session, asked by hand: real processes, and everything is given back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.core.errors import InvalidRequest, Unavailable
from pdserve.launch import ModelPart
from pdserve.rpc.channel import connect
from pdserve.rpc.errors import DeadlineExceeded, RpcError, error_from_call
from pdserve.testing import Cluster
from pdserve.v1 import prefill_pb2
from tests.integration.prefill_session import HandSession, spec
from tests.integration.suites import LONG_MODEL, engine_of, prompt, serve
from tests.tiny_models import make_tiny_model

LONG = 4_000  # tokens of a prompt that others act during: many chunks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("prefill_session"), "llama", **LONG_MODEL)


@asynccontextmanager
async def asking(model: Path, logs: Path) -> AsyncIterator[tuple[Cluster, HandSession, dict[str, Any]]]:
    """A suite, a session with its prefill worker, and whom its KV may go to: one that waits for none."""
    async with (
        serve(logs, ModelPart(model, "tiny", prefill=1, decode=1)) as suite,
        connect(suite.workers["prefill-0"].endpoint, suite.access) as channel,
    ):
        session = HandSession(channel)
        welcome = await session.open()
        assert welcome.worker_id == "prefill-0" and welcome.incarnation
        to = {"decode_worker_id": "decode-0", "decode_endpoint": suite.workers["decode-0"].endpoint}
        yield suite, session, to


async def test_many_prompts_share_a_session(model: Path, tmp_path: Path) -> None:
    """Each hears of itself alone, in order; some are cancelled, some are wrong, and nobody else notices."""
    async with asking(model, tmp_path) as (suite, session, to):
        prompts = {f"t{number}": prompt(20 + number, seed=number) for number in range(48)}
        expected = {}
        for ticket, tokens in prompts.items():
            await session.prefill(f"{ticket} alone", spec(tokens))
            expected[ticket] = await session.first_token(f"{ticket} alone")
        rng = random.Random(1)
        order = list(prompts)
        rng.shuffle(order)
        session.order.clear()
        for number, ticket in enumerate(order):
            await session.prefill(ticket, spec(prompts[ticket]))
            if number % 6 == 0:  # its KV is never taken: it ends by the cancel
                await session.prefill(f"{ticket} cancelled", spec(prompts[ticket], 5), **to)
                await session.cancel(f"{ticket} cancelled")
                await session.cancel(f"{ticket} never heard of")
            if number % 6 == 1:
                await session.prefill(f"{ticket} wrong", spec([999_999]))
        assert {ticket: await session.first_token(ticket) for ticket in order} == expected
        for ticket in order[1::6]:
            assert isinstance(await session.failure(f"{ticket} wrong"), InvalidRequest)
        by_ticket: dict[str, list[str]] = {}
        for kind, ticket, _ in session.order:
            by_ticket.setdefault(ticket, []).append(kind)
        assert all(by_ticket[ticket] == ["accepted", "first_token"] for ticket in order)
        assert not any("failed" in by_ticket.get(f"{ticket} cancelled", []) for ticket in order)
        await suite.assert_all_free()


async def test_what_an_attempt_may_come_to(model: Path, tmp_path: Path) -> None:
    async with asking(model, tmp_path) as (suite, session, to):
        late = spec(prompt(LONG), time_remaining=0.001)
        await session.prefill("no time to compute", late)
        assert isinstance(await session.failure("no time to compute"), DeadlineExceeded)
        await session.prefill("no time to commit", spec(prompt(20), 5, time_remaining=1.0), **to)
        assert isinstance(await session.failure("no time to commit"), DeadlineExceeded)
        assert ("first_token", "no time to commit", 1) in session.order

        await session.prefill("twice", spec(prompt(20), 5), **to)
        await session.prefill("twice", spec(prompt(20), 5), **to)
        error = await session.failure("twice")
        assert isinstance(error, RpcError) and error.code is grpc.StatusCode.ABORTED
        await session.cancel("twice")

        await session.prefill("", spec(prompt(20)))
        await session.prefill("no such endpoint", spec(prompt(20), 5), decode_worker_id="d", decode_endpoint="nowhere")
        for ticket in ("", "no such endpoint"):
            assert isinstance(await session.failure(ticket), InvalidRequest)
        await session.prefill("after all", spec(prompt(20)))
        await session.first_token("after all")
        await suite.assert_all_free()


async def test_a_newer_attempt_waits_until_the_engine_let_go_of_the_older(model: Path, tmp_path: Path) -> None:
    """Not beyond its own deadline, and not after it was cancelled."""
    async with asking(model, tmp_path) as (suite, session, to):
        await session.prefill("t", spec(prompt(20), 5), **to)
        await session.first_token("t")
        engine = engine_of(suite.workers["prefill-0"])
        os.kill(engine, signal.SIGSTOP)
        await session.prefill("t", spec(prompt(20), 5, time_remaining=0.1), 2, **to)
        assert isinstance(await session.failure("t", 2), DeadlineExceeded)
        await session.prefill("t", spec(prompt(20), 5), 3, **to)
        await session.cancel("t", 3)
        await session.prefill("t", spec(prompt(20), 1), 4, **to)
        await session.prefill("", spec(prompt(20)))
        await session.failure("")  # so all that was said before it has come
        os.kill(engine, signal.SIGCONT)
        await session.first_token("t", 4)
        await session.prefill("t", spec(prompt(20), 1), 5, **to)  # on the heels of one whose first token was its last
        await session.first_token("t", 5)
        await suite.assert_all_free()
        assert [kind for kind, _, attempt in session.order if attempt in (2, 3)] == ["failed"]


@pytest.mark.parametrize("end", ["cancel", "second hello", "no command", "no message", "no hello"])
async def test_a_session_that_ends_takes_its_prompts_with_it(model: Path, tmp_path: Path, end: str) -> None:
    async with asking(model, tmp_path) as (suite, session, to):
        await session.prefill("computing", spec(prompt(LONG)))
        await session.prefill("waiting for its commit", spec(prompt(20), 5), **to)
        await session.first_token("waiting for its commit")
        if end == "no hello":
            async with connect(suite.workers["prefill-0"].endpoint, suite.access) as channel:
                other = HandSession(channel)
                await other.prefill("t", spec(prompt(20)))
                await refused(other.call, "begins with a hello")
            end = "cancel"  # of the first, which did not notice
        if end == "cancel":
            session.call.cancel()
        elif end == "second hello":
            await session.send(hello={})
            await refused(session.call, "second hello")
        elif end == "no command":
            await session.send()
            await refused(session.call, "unknown to this version")
        else:
            async with connect(suite.workers["prefill-0"].endpoint, suite.access) as channel:
                raw: Any = channel.stream_stream("/pdserve.v1.PrefillService/PrefillSession")()
                await raw.write(b"\xff\xff\xff")
                await refused(raw, "cannot be read")
            session.call.cancel()
        await suite.assert_all_free()


async def test_a_worker_that_drains_says_its_last_words(model: Path, tmp_path: Path) -> None:
    async with asking(model, tmp_path) as (suite, session, _):
        await session.prefill("running", spec(prompt(LONG)))
        assert isinstance(await session.hear("running"), prefill_pb2.PrefillAccepted)
        suite.workers["prefill-0"].terminate()
        first = await session.hear("running")
        assert isinstance(first, prefill_pb2.FirstToken) and first.end
        await refused(session.call, "the worker stops", Unavailable)


async def test_a_worker_that_is_killed_ends_its_sessions(model: Path, tmp_path: Path) -> None:
    async with asking(model, tmp_path) as (suite, session, _):
        await session.prefill("running", spec(prompt(LONG)))
        assert isinstance(await session.hear("running"), prefill_pb2.PrefillAccepted)
        suite.workers["prefill-0"].kill()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async with asyncio.timeout(20):
                while await session.call.read() is not grpc.aio.EOF:
                    pass
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


async def refused(call: Any, why: str, kind: type[Exception] = InvalidRequest) -> None:
    """The call ends with an error of that kind."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        async with asyncio.timeout(20):
            while await call.read() is not grpc.aio.EOF:
                pass
    error = error_from_call(failure.value)
    assert isinstance(error, kind) and why in str(error), error
