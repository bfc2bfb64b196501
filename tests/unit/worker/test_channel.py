"""Messages cross the socket pair whole, in order, and its end is seen."""

from __future__ import annotations

import asyncio
import socket

from pdserve.core.layout import KVLayout
from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.engine.outputs import Ended, Load, PromptDone, TokenLogprobs, TokenOut
from pdserve.transfer.messages import Announce
from pdserve.worker.channel import AsyncChannel, Channel
from pdserve.worker.messages import (
    EngineStarted,
    FromEngine,
    LinkControl,
    LinkMessage,
    LoadBlocks,
    Reserve,
    StartPrefill,
    StepDone,
    ToEngine,
)

LOAD = Load(*range(11))
SPEC = SequenceSpec("r", (1, 2, 3), 2, SamplingParams(logit_bias={5: 1.5}, seed=2**63), (7,), 1, "salt", 2.5, "tp")


async def test_messages_cross_both_ways_in_order() -> None:
    near, far = socket.socketpair()
    front: AsyncChannel[FromEngine, ToEngine] = await AsyncChannel.open(near, FromEngine)  # type: ignore[arg-type]
    engine: Channel[ToEngine, FromEngine] = Channel(far, ToEngine)  # type: ignore[arg-type]
    down: list[ToEngine] = [
        StartPrefill("t", 1, SPEC, "peer"),
        Reserve("t", 2, SPEC, None),
        LoadBlocks([b"h" * 16], b"x" * (3 << 20)),
    ]
    for message in down:
        front.send(message)
    assert [await asyncio.to_thread(engine.receive) for _ in down] == down
    step = StepDone(
        3,
        LOAD,
        [TokenOut("t", 4, 5, TokenLogprobs(-1.0, [(5, -1.0)])), TokenOut("u", 1, 2)],
        [Ended("t", EndReason.STOP, "why")],
        [PromptDone("t", 16, 1, 0.5, 0.25)],
        stored=[b"a" * 16],
    )
    started = EngineStarted(KVLayout(16, 2, 2, 16, "float32", b"f" * 16), 10, 20, 30, 1, "cpu", ["gloo"], {}, {}, LOAD)
    for answer in (started, step):
        engine.send(answer)
        assert await front.receive() == answer
    await front.close()
    assert await asyncio.to_thread(engine.receive) is None
    engine.close()


async def test_the_end_of_the_engine_is_an_end_of_messages_and_sending_is_harmless() -> None:
    near, far = socket.socketpair()
    front: AsyncChannel[LinkMessage, LinkMessage] = await AsyncChannel.open(near, LinkMessage)  # type: ignore[arg-type]
    message = LinkControl("p", 1, Announce("t", 1, 0, 0, 1, 0, 16, 4096))
    engine: Channel[LinkMessage, LinkMessage] = Channel(far, LinkMessage)  # type: ignore[arg-type]
    engine.send(message)
    engine.close()
    assert await front.receive() == message
    assert await front.receive() is None
    front.send(message)
    await front.close()
