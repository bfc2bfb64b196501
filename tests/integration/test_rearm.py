"""A prefill worker is lost in the middle of a prompt: the reservation stands, and the client sees the same tokens."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.launch import ModelPart
from pdserve.rpc.channel import connect
from pdserve.rpc.convert import end_reason_from_proto, spec_to_proto
from pdserve.rpc.errors import RpcError
from pdserve.rpc.versions import our_versions
from pdserve.testing import wait_load
from pdserve.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2
from tests.integration.prefill_session import HandSession
from tests.integration.suites import prompt, serve
from tests.tiny_models import make_tiny_model

LENGTH = 1500
ANSWER = 12
SENT = 1 << 20  # of 2.3 MB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slow enough to be interrupted."""
    options = {"num_hidden_layers": 6, "max_position_embeddings": 2048}
    return make_tiny_model(tmp_path_factory.mktemp("rearm"), "llama", **options)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_prefill_worker_costs_one_rearm(model: Path, tmp_path: Path, how: signal.Signals) -> None:
    """What had landed is kept, another worker fills in the rest, and nothing is left behind."""
    part = ModelPart(model, "tiny", prefill=2, decode=1)
    asked = {"temperature": 0.8, "seed": 3, "max_tokens": ANSWER, "ignore_eos": True}
    async with serve(tmp_path, part, max_num_batched_tokens=8, kv_cache_memory=32 << 20) as suite:
        victim = suite.workers["prefill-0"]
        asking = asyncio.create_task(suite.client.complete(prompt(LENGTH), **asked))
        await wait_load(
            victim.endpoint,
            lambda load: load.kv_bytes_sent > SENT and load.pending_prefill_tokens > 0,
            access=suite.access,
        )
        os.killpg(victim.pid, signal.SIGSTOP)  # so that the prompt cannot be done meanwhile
        if how is signal.SIGKILL:
            await suite.kill("prefill-0")
        done = await asking
        await suite.kill("prefill-0")
        undisturbed = await suite.client.complete(prompt(LENGTH), cache_salt="another", **asked)
        await suite.assert_all_free()
    assert done.token_ids == undisturbed.token_ids and len(done.token_ids) == ANSWER
    assert (done.finish.usage.replays, undisturbed.finish.usage.replays) == (0, 0)
    assert done.finish.usage.prefill_worker == "prefill-1"
    rearms = [line for line in (tmp_path / "decode-0.log").read_text().splitlines() if "rearmed" in line]
    assert len(rearms) == 1
    held = re.search(r"tokens_held\W+(\d+)", rearms[0])
    assert held is not None and 0 < int(held[1]) < LENGTH


def spec(*more: int, length: int = 40) -> Any:
    tokens = (*prompt(length), *more)
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=1500, ignore_eos=True)  # not over soon
    return spec_to_proto(SequenceSpec("r", tokens, length, params))


class Session:
    """A router's session by hand; every wait has a deadline."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = decode_pb2_grpc.DecodeServiceStub(channel).Session()

    async def send(self, **command: Any) -> None:
        await self._call.write(decode_pb2.SessionRequest(**command))

    async def hear(self) -> Any:
        """The next event; of steps only what ended."""
        async with asyncio.timeout(20):
            while isinstance(response := await self._call.read(), decode_pb2.SessionResponse):
                kind = response.WhichOneof("event")
                if kind != "step":
                    return getattr(response, str(kind))
                if response.step.ends:
                    return response.step.ends[0]
        raise AssertionError("the session ended")

    async def submit(self, ticket: str, peer: str) -> None:
        await self.send(submit=decode_pb2.Submit(ticket=ticket, attempt=1, sequence=spec(), prefill_worker_id=peer))
        assert isinstance(await self.hear(), decode_pb2.Reserved)

    async def rearm(self, ticket: str, attempt: int, *more: int, peer: str = "prefill-0", length: int = 40) -> Any:
        rearm = decode_pb2.Rearm(
            ticket=ticket, attempt=attempt, prefill_worker_id=peer, sequence=spec(*more, length=length)
        )
        await self.send(rearm=rearm)
        return await self.hear()

    def close(self) -> None:
        self._call.cancel()


async def test_rearms_by_the_book_and_against_it(model: Path, tmp_path: Path) -> None:
    """Both workers' halves, by hand: what is agreed to, what is refused, and that a newer attempt ends an older one."""
    async with (
        serve(tmp_path, ModelPart(model, "tiny", prefill=1, decode=1)) as suite,
        connect(suite.workers["decode-0"].endpoint, suite.access) as to_decode,
        connect(suite.workers["prefill-0"].endpoint, suite.access) as to_prefill,
    ):
        session = Session(to_decode)
        await session.send(hello=decode_pb2.SessionHello(protocol=our_versions(), router_id="by hand"))
        assert isinstance(await session.hear(), decode_pb2.SessionWelcome)

        prefills = HandSession(to_prefill)
        await prefills.open()
        to = {"decode_worker_id": "decode-0", "decode_endpoint": suite.workers["decode-0"].endpoint}

        await session.submit("t", "nobody")
        await prefills.prefill("t", spec(), 1, **to)  # is granted nothing: the ticket waits for somebody else
        first = await prefills.first_token("t", 1)
        agreed = await session.rearm("t", 2, first)
        assert (type(agreed), agreed.attempt, agreed.tokens_held) == (decode_pb2.Rearmed, 2, 0)
        await prefills.prefill("t", spec(first), 2, **to)
        with pytest.raises(RpcError, match="takes its place"):
            await prefills.hear("t", 1)
        second = await prefills.first_token("t", 2)
        assert isinstance(await prefills.hear("t", 2), prefill_pb2.PrefillCommitted)
        ready = await session.hear()
        assert (type(ready), ready.attempt) == (decode_pb2.Ready, 2)
        late = await session.rearm("t", 3, first)
        assert (type(late), late.attempt, late.first_token) == (decode_pb2.AlreadyReady, 2, second)
        await session.send(cancel=decode_pb2.Cancel(ticket="t"))
        assert end_reason_from_proto((await session.hear()).reason) is EndReason.CANCELLED

        wrong: dict[str, dict[str, Any]] = {
            "not newer": {"attempt": 1},
            "does not go on": {"attempt": 2, "length": 39},
            "must be set": {"attempt": 2, "peer": ""},
        }
        for message, options in wrong.items():
            await session.submit(message, "nobody")
            end = await session.rearm(message, options.pop("attempt"), **options)
            assert message in end.detail and end_reason_from_proto(end.reason) is EndReason.INTERNAL
        unknown = await session.rearm("never heard of", 2)
        assert end_reason_from_proto(unknown.reason) is EndReason.TRANSFER_FAILED
        await session.submit("forgotten", "nobody")
        assert isinstance(await session.rearm("forgotten", 2), decode_pb2.Rearmed)
        session.close()  # takes the ticket with it
        await suite.assert_all_free()
