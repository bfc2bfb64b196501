"""What a session keeps for a reader that lags."""

from __future__ import annotations

import pytest

from pdserve.client.session import _KEPT, _Lane
from pdserve.v1 import inference_pb2 as pb


def output(number: int) -> pb.MultiplexItem:
    token = pb.Token(id=number)
    return pb.MultiplexItem(response=pb.GenerateResponse(output=pb.Output(index=number, tokens=[token], text="ab")))


PROMPT = pb.MultiplexItem(response=pb.GenerateResponse(prompt=pb.PromptInfo(request_id="r")))
FINISH = pb.MultiplexItem(response=pb.GenerateResponse(finish=pb.Finish()))


@pytest.mark.parametrize("count", [1, 2, _KEPT - 1, _KEPT, 10 * _KEPT + 7])
async def test_what_nobody_read_is_told_in_order_and_once(count: int) -> None:
    lane = _Lane()
    for item in (PROMPT, *map(output, range(count)), FINISH):
        lane.feed(item)
    first, middle, last = await lane.take()
    assert first.HasField("prompt") and last.HasField("finish")
    assert [token.id for token in middle.output.tokens] == list(range(count))
    assert middle.output.text == "ab" * count and middle.output.index == 0


async def test_messages_that_nobody_reads_do_not_pile_up() -> None:
    """They are joined as they come: a client that stopped reading holds tokens, and no message for each."""
    lane, count = _Lane(), 100 * _KEPT
    for number in range(count):
        lane.feed(output(number))
    assert len(lane._pending) <= count // _KEPT + _KEPT
    [taken] = await lane.take()
    assert len(taken.output.tokens) == count
