"""What is on its way to an engine is part of the load, once."""

from __future__ import annotations

from pdserve.engine.outputs import Load
from pdserve.worker.sent_prompts import SentPrompts

IDLE = Load(10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def test_a_prompt_counts_from_when_it_is_sent_until_the_engine_counts_it() -> None:
    sent = SentPrompts()
    assert sent.with_sent(IDLE) is IDLE
    sent.add(100, bounded=True)
    sent.add(20, bounded=False)
    told = sent.with_sent(IDLE)
    assert (told.waiting, told.pending_prefill_tokens, told.pending_prefill_squares) == (2, 120, 10_400)
    assert told.bounded == 1
    sent.taken(0)
    assert sent.with_sent(IDLE) == told
    sent.taken(1)
    assert sent.with_sent(IDLE).pending_prefill_tokens == 20
    sent.add(5, bounded=False)
    sent.taken(3)
    assert sent.with_sent(IDLE) is IDLE
