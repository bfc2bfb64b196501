"""What the commands print, from values alone."""

from __future__ import annotations

import json

from pdserve.cli.demo import Answer, answer_rows, percentile
from pdserve.cli.generate import as_prompt, event_json
from pdserve.client import Finish, FinishReason, Output, Stages, Token, Usage

USAGE = Usage(277, 5, 272, 670_000, 17, Stages(2.0, 2.9, 94.3, 7.0, 50.4), 0, "prefill-0", "decode-0")
FINISH = Finish(FinishReason.STOP, USAGE, stop_token_id=2)


def test_percentiles_are_nearest_ranks() -> None:
    gaps = [float(value) for value in range(1, 101)]
    assert (percentile(gaps, 0.5), percentile(gaps, 0.99), percentile(gaps, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None


def test_the_demo_table_says_where_the_time_went() -> None:
    rows = dict(answer_rows([Answer("Paris.", 98.3, (49.0, 51.0), FINISH), Answer("x", 5.0, (), FINISH)]))
    assert rows["time to first token"] == ["98.3 ms", "5.0 ms"]
    assert rows["transfer exposed"][0] == "7.0 ms"
    assert rows["between tokens, p99"] == ["51.0 ms", "-"]
    assert rows["tokens in / out"][0] == "277 / 5"
    assert rows["KV moved"][0] == "0.67 MB"
    assert rows["blocks reused"][0] == "17"


def test_events_as_json_lines() -> None:
    output = json.loads(event_json(Output(3, (Token(5, -0.5, ((5, -0.5),)),), "é\n")))
    assert output["event"] == "output" and output["text"] == "é\n" and output["tokens"][0]["logprob"] == -0.5
    finish = json.loads(event_json(FINISH))
    assert (finish["event"], finish["reason"], finish["usage"]["stages"]["queue_ms"]) == ("finish", "stop", 2.0)


def test_chat_and_system_make_a_conversation() -> None:
    assert as_prompt("hi", chat=False, system=None) == "hi"
    assert as_prompt("hi", chat=True, system=None) == [{"role": "user", "content": "hi"}]
    assert as_prompt("hi", chat=False, system="be kind") == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    ]
