"""What the commands print, from values alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.cli.console import show_table
from pdserve.cli.demo import Answer, answer_rows, percentile
from pdserve.cli.generate import as_prompt, event_json
from pdserve.cli.probe_links import PairReport, pairs_of
from pdserve.cli.probe_speed import COLUMNS, SpeedReport
from pdserve.cli.probe_speed import row as speed_row
from pdserve.cli.status import LINKS, WORKERS, degraded, link_rows, row
from pdserve.cli.trace import REQUESTS
from pdserve.client import Finish, FinishReason, FleetLink, FleetWorker, Output, Stages, Token, Usage
from pdserve.policy.estimate import Speed

USAGE = Usage(277, 5, 272, 670_000, 17, Stages(2.0, 2.9, 94.3, 7.0, 50.4), 0, "prefill-0", "decode-0")
FINISH = Finish(FinishReason.STOP, USAGE, stop_token_id=2)


def test_percentiles_are_nearest_ranks() -> None:
    gaps = [float(value) for value in range(1, 101)]
    assert (percentile(gaps, 0.5), percentile(gaps, 0.99), percentile(gaps, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None


def test_what_people_copy_is_never_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal that is too narrow for all, others fold."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # which is how rich is told that it writes to a terminal
    monkeypatch.setenv("COLUMNS", "80")
    name = f"req-{'a' * 24}"
    row = (name, "a model with a long name", "length", "prefill-0, decode-0", "3 s", "545", "35", "300 / 60")
    show_table("latest requests", REQUESTS, [row], numbers=range(4, len(REQUESTS)), whole=(0,))
    assert name in capsys.readouterr().out


def test_the_demo_table_says_where_the_time_went() -> None:
    rows = dict(answer_rows([Answer("Paris.", 101.3, (49.0, 51.0), FINISH), Answer("x", 5.0, (), FINISH)]))
    assert rows["time to first token"] == ["101.3 ms", "5.0 ms"]
    parts = [float(rows[f"  {part}"][0].split()[0]) for part in ("queue", "reserve", "prefill", "outside the router")]
    assert sum(parts) == pytest.approx(101.3)
    assert rows["  transfer, not hidden"][0] == "7.0 ms"
    assert rows["between tokens, p99"] == ["51.0 ms", "-"]
    assert rows["tokens in / out"][0] == "277 / 5"
    assert rows["KV moved"][0] == "0.67 MB"
    assert rows["blocks reused"][0] == "17"


WORKER = FleetWorker(
    endpoint="127.0.0.1:7001",
    connected=True,
    worker_id="prefill-0",
    incarnation="i",
    role="prefill",
    model="tiny",
    draining=False,
    total_blocks=100_000,
    free_blocks=99_000,
    cached_blocks=1_000,
    owned_blocks=0,
    reserved_blocks=0,
    running=12,
    waiting=3,
    preemptions=0,
    kv_bytes_sent=0,
    kv_bytes_received=0,
    outstanding_tokens=123_456,
)
LINK = FleetLink("decode-0", "nccl", "sockets", "no InfiniBand", 1, 0, 2.5e9, 3_000_000, 3, 0, 0.00012)


def test_status_shows_links_of_connected_workers_prefill_first() -> None:
    back = FleetLink("prefill-0", "nccl", "sockets", "", 0, 1, 0.0, 0, 0, 0, 0.0)
    decode = dataclasses.replace(WORKER, worker_id="decode-0", role="decode", links=(back,))
    gone = dataclasses.replace(WORKER, worker_id="prefill-1", connected=False, links=(LINK,))
    fleet = [gone, decode, dataclasses.replace(WORKER, links=(LINK,))]
    assert list(link_rows(fleet)) == [
        ("prefill-0", "decode-0", "nccl", "sockets", "2.50", "0.12", "3.00 MB", "!"),
        ("decode-0", "prefill-0", "nccl", "sockets", "-", "-", "0 B", ""),
    ]
    assert list(degraded(fleet)) == ["prefill-0 to decode-0 goes over sockets: no InfiniBand"]


def test_status_fits_into_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers are never broken over lines; here not even names are."""
    rows = [row(WORKER), row(dataclasses.replace(WORKER, worker_id="", role="", connected=False))]
    with console_of(80):
        show_table("workers", WORKERS, rows, numbers=range(3, len(WORKERS)))
        show_table("links", LINKS, link_rows([dataclasses.replace(WORKER, links=(LINK,))]), numbers=range(4, 7))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    names = ("prefill-0", "127.0.0.1:7001", "up", "unreachable")
    for word in (*names, "12 / 3", "99000 / 1000", "123456", "3.00 MB"):
        assert word in text


@contextlib.contextmanager
def console_of(width: int) -> Iterator[None]:
    """As on a terminal of that width."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setenv("FORCE_COLOR", "1")
        patch.setenv("TERM", "dumb")
        yield


def pair_report(rate: float, bandwidth: float, **fields: Any) -> PairReport:
    samples = ((1 << 16, bandwidth / 2), (1 << 20, bandwidth))
    return PairReport("p0", "d0", 1000.0, rate, samples=samples, **fields)


def test_a_probed_pair_is_one_sentence_and_a_verdict() -> None:
    """The fastest frame size against KV bytes a token times tokens a second."""
    good, bad = pair_report(1e3, 37e6), pair_report(1e3, 1e6 / 2.1)
    assert good.carries and good.sentence() == (
        "p0 to d0: this link carries the KV of this prefill worker 37 times over."
    )
    assert not bad.carries and bad.sentence() == (
        "p0 to d0: this link cannot carry the KV of this prefill worker: short by a factor 2.1."
    )
    unknown = pair_report(0.0, 1e9)
    assert not unknown.carries and "is not known" in unknown.sentence()
    failed = PairReport("p0", "d0", 1000.0, 1e3, error="no route")
    assert not failed.carries and failed.sentence() == "p0 to d0: this link could not be probed: no route"
    told = json.loads(good.to_json())
    assert told["carries"] is True and told["needed_bytes_per_second"] == 1e6 and told["samples"][1] == [1 << 20, 37e6]


def test_pairs_are_connected_and_of_one_model() -> None:
    def worker(name: str, role: str, model: str = "tiny", connected: bool = True) -> FleetWorker:
        return dataclasses.replace(WORKER, worker_id=name, role=role, model=model, connected=connected)

    fleet = [
        worker("d1", "decode"), worker("p0", "prefill"), worker("d0", "decode"), worker("d2", "decode", "other"),
        worker("d3", "decode", connected=False), worker("c", "prefix_cache", ""),
    ]  # fmt: skip
    pairs = [(prefill.worker_id, decode.worker_id) for prefill, decode in pairs_of(fleet)]
    assert pairs == [("p0", "d0"), ("p0", "d1")]


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


def test_a_speed_is_told_as_far_as_it_is_known() -> None:
    """In ms, for amounts that people can picture; what too few steps told of is not known."""
    speed = Speed(step=0.01, token=1e-4, square=2e-8, answer=1e-3, read=1e-7, prompts=9, answers=2)
    report = SpeedReport("decode-0", "decode", "tiny", "n", "cpu", speed)
    learned = "9 steps with prompts, 2 with answers"
    expected = ("decode", "decode-0", "10.000 ms", "100.000 ms", "1.311 ms", "-", "-", learned)
    assert speed_row(report) == expected and len(expected) == len(COLUMNS)
    known = speed_row(dataclasses.replace(report, speed=dataclasses.replace(speed, answers=9)))
    assert known[5:7] == ("1.000 ms", "0.100 ms")
