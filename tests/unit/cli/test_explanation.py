"""What `pdserve explain` prints, from values alone."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from pdserve.cli.candidates import BAR, bar, cut, figure, legend, note, say_ms, table
from pdserve.cli.explanation import compared, explanation, sentences, summary
from pdserve.client import (
    Candidate,
    Decision,
    DecisionKind,
    Explanation,
    LatencyStats,
    LocalReason,
    RequestState,
)
from tests.unit.cli import samples
from tests.unit.cli.samples import MS, START

USAGE = dataclasses.replace(samples.USAGE, cached_tokens=64, decode_worker="decode-1")
REQUEST = dataclasses.replace(
    samples.REQUEST,
    duration_ms=30_460.0,
    ttft_ms=30_048.2,
    itl=LatencyStats(5, 13.0, 12.1, 19.8, 19.8, 19.8),
    usage=USAGE,
    workers=("prefill-0", "decode-1"),
)
BEST = Candidate(
    prefill_worker="prefill-0",
    decode_worker="decode-1",
    queue_ms=0.0,
    compute_ms=38.0,
    transfer_ms=2.0,
    gap_ms=12.5,
    late=0.0,
    slow=0.0,
    cost=0.33,
    accepts=True,
    tight=False,
    cached_tokens=64,
    decode_cached_tokens=0,
    local_reason=None,
    measured=True,
)
HERE = dataclasses.replace(
    BEST, prefill_worker="", queue_ms=100.0, transfer_ms=0.0, slow=0.6, local_reason=LocalReason.CONDITIONAL
)


def decided(kind: DecisionKind, at: float, *candidates: Candidate, last: float = 0.0, **fields: object) -> Decision:
    """`at` and `last` in milliseconds after the arrival."""
    made = Decision(
        kind=kind,
        reason="the rule",
        prefill_worker="",
        decode_worker="",
        first_ns=START + round(at * MS),
        last_ns=START + round((last or at) * MS),
        count=1,
        waited_ms=last or at,
        tokens=129,
        cached_tokens=64,
        decode_cached_tokens=0,
        ttft_target_ms=500.0,
        itl_target_ms=50.0,
        targets_stated=False,
        candidates=candidates,
        considered=len(candidates),
    )
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


WAITED = decided(DecisionKind.WAIT, 0.4, last=29_900.0, count=214, reason="no decode worker has room")
PLACED = decided(DecisionKind.REMOTE, 30_000.4, BEST, HERE, prefill_worker="prefill-0", decode_worker="decode-1")
FOUND = Explanation(REQUEST, (WAITED, PLACED))


def lines(found: Explanation, width: int, *, ascii_only: bool = True) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    for text in explanation(found, width, ascii_only=ascii_only):
        console.print(text)
    return out.getvalue().splitlines()


def test_a_wait_is_one_line_and_a_placement_a_sentence_a_rule_and_a_table() -> None:
    assert lines(FOUND, 80) == [
        "request r0, tiny: length after 30.5 s",
        "tokens 129 in (64 cached), 6 out",
        "targets 500 ms to the first token, 50 ms between tokens (the deployment's own)",
        "",
        "+0.4 ms  waited 30.0 s: no decode worker has room (x 214)",
        "",
        "+30.0 s  remote: prefill-0 computes the prompt, decode-1 the answer",
        "  the rule",
        "    prefill   decode   cached   queue  compute  transfer    = ms  ms/token",
        "  > prefill-0 decode-1     64     0.0     38.0       2.0    40.0      12.5",
        "    local     decode-1     64   100.0     38.0       0.0   138.0     12.5!",
        "",
        "! misses its target, with the wait so far",
        "",
        "                predicted        was",
        "first token       40.0 ms    47.8 ms   +19%  30.0 s after its arrival",
        "between tokens    12.5 ms    13.0 ms    +4%  mean; p99 19.8 ms, at most 19.8 ms",
    ]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_an_explanation_fits(width: int, ascii_only: bool) -> None:
    long = [dataclasses.replace(candidate, decode_worker="d" * 40 + "7") for candidate in (BEST, HERE)]
    for candidates in (PLACED.candidates, tuple(long)):
        placed = dataclasses.replace(PLACED, candidates=candidates, reason="word " * 40, considered=9)
        told = lines(Explanation(REQUEST, (WAITED, placed)), width, ascii_only=ascii_only)
        assert max(map(len, told)) <= width
        assert ascii_only == all(line.isascii() for line in told)
        assert any("cost" in line for line in told) == (width >= 120), "bars and costs where there is room"
        assert any("~" in line and "7 " in line for line in told) == (candidates != PLACED.candidates)
        assert "    and 7 more" in told


def test_only_what_was_chosen_is_marked_and_waits_are_short() -> None:
    waiting = decided(DecisionKind.DEFER, 1.0, *[BEST] * 6, prefill_worker="prefill-0", count=3)
    told = lines(Explanation(REQUEST, (waiting,)), 80)
    assert "+1.0 ms  waited 30.5 s for prefill-0 (x 3)" in told
    assert sum("prefill-0 decode-1" in line for line in told) == 3 and "    and 3 more" in told
    assert not any(">" in line for line in told)
    assert not any("predicted" in line for line in told), "nothing was placed"


def test_bars_are_on_one_scale() -> None:
    first, other = (bar(candidate, 138.0, ascii_only=True).plain for candidate in (BEST, HERE))
    assert len(first) == len(other) == BAR
    assert other.count("q") == round(BAR * 100 / 138) and other.rstrip().count("c") == BAR - other.count("q")
    assert first.rstrip() == "ccc"
    assert bar(dataclasses.replace(BEST, compute_ms=0.0, transfer_ms=0.0), 0.0, ascii_only=True).plain == " " * BAR


def test_what_speaks_against_a_candidate_is_said() -> None:
    bad = dataclasses.replace(BEST, late=0.1, slow=0.6, tight=True, accepts=False)
    assert note(bad) == "late 10%, slow 60%, tight, full" and note(BEST) == ""
    [_, narrow] = table(decided(DecisionKind.WAIT, 0.0, bad), 78)
    [_, wide] = table(decided(DecisionKind.WAIT, 0.0, bad), 158)
    assert narrow.plain.split()[-2:] == ["40.0!", "12.5!"] and wide.plain.endswith(note(bad))


def test_what_was_not_measured_is_marked_and_marks_are_explained() -> None:
    assumed, late = dataclasses.replace(BEST, measured=False), dataclasses.replace(BEST, late=0.1)
    [_, line] = table(decided(DecisionKind.WAIT, 0.0, assumed), 78)
    assert line.plain.split()[-2:] == ["~40.0", "~12.5"]
    assert [text.plain for text in legend([assumed, late])] == [
        "! misses its target, with the wait so far   ~ not measured yet"
    ]
    assert [text.plain for text in legend([BEST])] == []
    [_, line] = table(decided(DecisionKind.PREFILL_ONLY, 0.0, dataclasses.replace(BEST, decode_worker="")), 78)
    assert line.plain.split()[2] == "-" and line.plain.split()[-1] == "-"


@pytest.mark.parametrize(
    ("kind", "workers", "expected"),
    [
        (DecisionKind.REMOTE, ("p", "d"), "remote: p computes the prompt, d the answer"),
        (DecisionKind.REMOTE, ("p", ""), "remote: p goes on with the prompt, the reservation stands"),
        (DecisionKind.LOCAL, ("", "d"), "local (held): d computes prompt and answer"),
        (DecisionKind.PREFILL_ONLY, ("p", ""), "prefill only: p computes the only token"),
        (DecisionKind.DOWN, ("", ""), "given up: nobody is up"),
        (DecisionKind.NEVER, ("", ""), "refused: no worker could ever take it"),
        (DecisionKind.REJECT, ("", ""), "rejected: it would come too late"),
        (DecisionKind.UNKNOWN, ("", ""), "unknown"),
    ],
)
def test_each_kind_is_a_sentence(kind: DecisionKind, workers: tuple[str, str], expected: str) -> None:
    why = LocalReason.HELD if kind is DecisionKind.LOCAL else None
    made = decided(kind, 2.0, prefill_worker=workers[0], decode_worker=workers[1], local_reason=why)
    first, second = sentences(made, REQUEST, None, 80)
    assert (first.plain, second.plain) == (f"+2.0 ms  {expected}", "  the rule")


def test_a_prediction_is_compared_only_where_there_was_one() -> None:
    def told(found: Explanation) -> list[str]:
        return [line.plain.split("  mean")[0].split("  30.0 s")[0] for line in compared(found)][1:]

    running = dataclasses.replace(REQUEST, ttft_ms=None, itl=LatencyStats())
    assert told(Explanation(running, (PLACED,))) == [
        "first token       40.0 ms          -",
        "between tokens    12.5 ms          -",
    ]
    unmeasured = dataclasses.replace(PLACED, candidates=(dataclasses.replace(BEST, measured=False),))
    assert told(Explanation(REQUEST, (unmeasured,))) == [
        "first token             -    47.8 ms",
        "between tokens          -    13.0 ms",
    ]
    only = dataclasses.replace(PLACED, kind=DecisionKind.PREFILL_ONLY)
    assert len(told(Explanation(REQUEST, (only,)))) == 1
    assert told(Explanation(REQUEST)) == told(Explanation(REQUEST, (WAITED,))) == []


def test_the_placement_before_the_first_token_is_the_one_that_counts() -> None:
    later = decided(DecisionKind.REMOTE, 30_300.0, HERE)
    found = Explanation(REQUEST, (PLACED, later))
    assert found.deciding is PLACED and found.ttft_ms == pytest.approx(47.8)
    waiting = dataclasses.replace(found, request=dataclasses.replace(REQUEST, ttft_ms=None))
    assert waiting.deciding is later and waiting.ttft_ms is None


def test_how_a_request_ended_is_said_first() -> None:
    failed = dataclasses.replace(
        REQUEST, state=RequestState.FAILED, finish_reason=None, code="RESOURCE_EXHAUSTED", error="no room"
    )
    assert [text.plain for text in summary(Explanation(failed))][:2] == [
        "request r0, tiny: resource_exhausted after 30.5 s",
        "no room",
    ]
    running = dataclasses.replace(REQUEST, state=RequestState.RUNNING, finish_reason=None, duration_ms=12.0)
    assert next(summary(Explanation(running))).plain == "request r0, tiny: running for 12.0 ms"
    assert "no decision yet" in lines(Explanation(running), 80)
    asked = dataclasses.replace(PLACED, targets_stated=True)
    assert [*summary(Explanation(running, (asked,)))][-1].plain.endswith("(as asked for)")


def test_decisions_that_were_dropped_are_counted() -> None:
    assert "(7 more, which the router had no room for)" in lines(dataclasses.replace(FOUND, dropped=7), 80)


def test_markup_in_names_is_shown_as_it_is() -> None:
    odd = dataclasses.replace(PLACED, prefill_worker="[red]x[/red]", reason="[b]why[/b]")
    told = lines(Explanation(dataclasses.replace(REQUEST, error="[i]no[/i]"), (odd,)), 120)
    for text in ("[red]x[/red]", "[b]why[/b]", "[i]no[/i]"):
        assert any(text in line for line in told)


def test_long_names_keep_their_ends() -> None:
    assert cut("pdserve-decode-5d7f9c8b6-x2x1z", 12) == "pdser~-x2x1z" and cut("decode-0", 12) == "decode-0"


def test_times_read_well_at_every_scale() -> None:
    assert [say_ms(value) for value in (0.04, 999.94, 1500.0, 30_000.0)] == ["0.0 ms", "999.9 ms", "1.50 s", "30.0 s"]
    assert [figure(value) for value in (0.04, 9999.0, 123_456.7)] == ["0.0", "9999.0", "123457"]


def test_an_explanation_is_json_as_it_is() -> None:
    told = json.loads(json.dumps(dataclasses.asdict(FOUND)))
    assert told["request"]["ttft_ms"] == 30_048.2 and told["decisions"][0]["count"] == 214
    assert told["decisions"][1]["candidates"][1]["local_reason"] == "conditional"
