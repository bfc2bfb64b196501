"""What a router keeps of its decisions for a request, and what it tells of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.client import DecisionKind, LocalReason
from pdserve.client.convert_decisions import explanation_from_proto
from pdserve.core.slo import SloTargets
from pdserve.core.trace import TraceSpan
from pdserve.policy.disaggregation import Local
from pdserve.policy.fleet import BOTH, PlacementRequest
from pdserve.policy.options import Option
from pdserve.policy.routing import Decision, Kind
from pdserve.router.decisions import MOST, DecisionLog, attributes
from pdserve.router.measure import Measure
from pdserve.router.meter import Meter
from pdserve.router.metrics import RouterMetrics
from pdserve.router.recent import Record
from pdserve.telemetry import tracing
from pdserve.v1 import inference_pb2

MS = 1_000_000
START = 1_700_000_000_000 * MS
TARGETS = SloTargets(0.3, 0.02, 99.0)
REQUEST = PlacementRequest(120, 50, targets=TARGETS, stated=BOTH, waited=0.001)
NO_ROOM = Decision(Kind.WAIT, "no decode worker has room")
BEST = Option("p0", "d0", 0.01, 0.03, 0.002, 0.012, 0.0, 0.1, 0.25, True, cached=64, there=32)
OTHER = Option(None, "d1", 0.0, 0.05, 0.0, 0.013, 0.2, 0.0, 0.5, False, True, 16, 16, Local.CONDITIONAL, False)
PLACED = Decision(Kind.REMOTE, "least cost of 5", "p0", "d0", (BEST, OTHER), 5)
HERE = Decision(Kind.LOCAL, "least cost of 1", None, "d1", (OTHER,), 1)


def defer(reason: str = "queue full", prefill: str = "p0") -> Decision:
    return Decision(Kind.DEFER, reason, prefill, None, (BEST,), 1)


def log_of(*decisions: Decision) -> DecisionLog:
    """One look a millisecond."""
    log = DecisionLog()
    for number, decision in enumerate(decisions):
        log.note(decision, replace(REQUEST, waited=number / 1e3), START + number * MS)
    return log


def counts(log: DecisionLog) -> list[tuple[Kind, int]]:
    return [(entry.decision.kind, entry.count) for entry in log.entries]


def test_looks_in_a_row_with_one_result_are_one_entry_as_of_the_latest() -> None:
    log = log_of(*[NO_ROOM] * 214, PLACED)
    waited, placed = log.entries
    assert counts(log) == [(Kind.WAIT, 214), (Kind.REMOTE, 1)]
    assert (waited.first_ns, waited.last_ns, waited.waited) == (START, START + 213 * MS, 0.213)
    assert log.placed is placed and log.dropped == 0


def test_what_a_request_waits_for_is_told_apart() -> None:
    other = Decision(Kind.WAIT, "no prefill worker has room")
    assert counts(log_of(NO_ROOM, other, other, NO_ROOM)) == [(Kind.WAIT, 1), (Kind.WAIT, 2), (Kind.WAIT, 1)]
    assert counts(log_of(defer(), defer(prefill="p1"))) == [(Kind.DEFER, 1), (Kind.DEFER, 1)]


def test_figures_that_change_do_not_make_a_new_decision() -> None:
    log = log_of(defer("first token in 90 ms"), defer("first token in 80 ms"))
    [entry] = log.entries
    assert (entry.count, entry.decision.reason) == (2, "first token in 80 ms")


def test_each_placement_is_its_own() -> None:
    """The second one is another try."""
    assert counts(log_of(PLACED, PLACED, HERE)) == [(Kind.REMOTE, 1), (Kind.REMOTE, 1), (Kind.LOCAL, 1)]


def test_of_too_many_the_first_the_placements_and_the_newest_stay() -> None:
    others = [Decision(Kind.WAIT, f"reason {number}") for number in range(100)]
    log = log_of(NO_ROOM, PLACED, *others)
    kept = [entry.decision.reason for entry in log.entries]
    newest = [f"reason {number}" for number in range(100 - (MOST - 2), 100)]
    assert kept == [NO_ROOM.reason, PLACED.reason, *newest]
    assert log.dropped == 102 - MOST


@given(st.lists(st.sampled_from([NO_ROOM, defer(), defer(prefill="p1"), PLACED, HERE]), max_size=200))
def test_no_look_is_lost_and_memory_is_bounded(decisions: list[Decision]) -> None:
    new: list[Decision] = []
    log = DecisionLog(new.append)
    for number, decision in enumerate(decisions):
        log.note(decision, REQUEST, START + number)
    entries = log.entries
    assert len(entries) <= MOST and len(entries) + log.dropped == len(new)
    if not log.dropped:
        assert sum(entry.count for entry in entries) == len(decisions)
    assert [entry.first_ns for entry in entries] == sorted(entry.first_ns for entry in entries)
    assert all(entry.first_ns <= entry.last_ns for entry in entries)
    if decisions:
        assert entries[-1].decision == decisions[-1] and entries[0].decision == decisions[0]
    placed = [decision for decision in decisions if decision.placed]
    assert (log.placed.decision if log.placed else None) == (placed[-1] if placed else None)


def test_noting_the_same_wait_again_costs_about_a_microsecond() -> None:
    """Every request at the head of a queue is looked at hundreds of times a second."""
    log, count = DecisionLog(), 20_000
    began = time.process_time()
    for _ in range(count):
        log.note(NO_ROOM, REQUEST, START)
    assert (time.process_time() - began) / count < 10e-6
    assert counts(log) == [(Kind.WAIT, count)]


def test_whoever_listens_hears_what_is_new_until_it_is_over() -> None:
    heard: list[Decision] = []
    log = DecisionLog(heard.append)
    for decision in (NO_ROOM, NO_ROOM, PLACED):
        log.note(decision, REQUEST, START)
    log.over()
    log.note(NO_ROOM, REQUEST, START)
    assert heard == [NO_ROOM, PLACED] and len(log.entries) == 3


def test_the_api_tells_what_was_decided() -> None:
    log = log_of(NO_ROOM, NO_ROOM, PLACED, HERE)
    answer = inference_pb2.GetDecisionsResponse(decisions=log.told(), dropped=3)
    found = explanation_from_proto(answer)
    waited, placed, here = found.decisions
    assert (waited.kind, waited.reason, waited.count, waited.candidates) == (DecisionKind.WAIT, NO_ROOM.reason, 2, ())
    assert (waited.first_ns, waited.last_ns, waited.waited_ms) == (START, START + MS, 1.0)
    assert not waited.placed and waited.chosen is None and found.dropped == 3
    assert (placed.prefill_worker, placed.decode_worker, placed.considered) == ("p0", "d0", 5)
    assert (placed.tokens, placed.cached_tokens, placed.decode_cached_tokens) == (120, 64, 32)
    assert (placed.ttft_target_ms, placed.itl_target_ms, placed.targets_stated) == (300.0, 20.0, True)
    best, other = placed.candidates
    assert placed.chosen is best and best.ttft_ms == pytest.approx(42.0) and best.slow == 0.1 and best.measured
    assert (best.queue_ms, best.compute_ms, best.transfer_ms, best.gap_ms) == pytest.approx((10.0, 30.0, 2.0, 12.0))
    assert (other.prefill_worker, other.decode_worker, other.late, other.accepts) == ("", "d1", 0.2, False)
    assert other.tight and not other.measured and other.local_reason is LocalReason.CONDITIONAL
    assert (here.kind, here.local_reason) == (DecisionKind.LOCAL, LocalReason.CONDITIONAL)
    assert placed.local_reason is None and found.deciding is here


def test_every_kind_and_every_reason_can_be_told() -> None:
    for kind in Kind:
        [told] = log_of(Decision(kind, "so")).told()
        answer = inference_pb2.GetDecisionsResponse(decisions=[told])
        assert explanation_from_proto(answer).decisions[0].kind.value == kind.value
    for why in Local:
        [told] = log_of(replace(HERE, options=(OTHER._replace(local=why),))).told()
        answer = inference_pb2.GetDecisionsResponse(decisions=[told])
        assert explanation_from_proto(answer).decisions[0].local_reason == why.value


@pytest.fixture
def _recording() -> Iterator[None]:
    stop = tracing.setup_tracing("router", None, ring=16)
    yield
    stop()


@pytest.mark.usefixtures("_recording")
def test_the_request_s_span_says_why_it_went_where_it_went() -> None:
    measure = Measure((), "chat")
    record = Record(tracing.start_span("chat tiny", ""), "chat tiny", "", measure)
    record.named("r", "tiny")
    for decision in (NO_ROOM, PLACED):
        measure.decisions.note(decision, REQUEST, START)
    record.done(inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_STOP))
    found = tracing.recent_spans(record.trace_id)
    assert found is not None
    [root] = [span for span in found[0] if span.name == "chat tiny"]
    assert isinstance(root, TraceSpan)
    assert {key: value for key, value in root.attributes.items() if ".routing." in key} == attributes(PLACED)
    assert root.attributes["pdserve.routing.kind"] == "remote"
    assert root.attributes["pdserve.routing.reason"] == "least cost of 5"
    assert root.attributes["pdserve.routing.ttft_seconds"] == pytest.approx(0.042)
    assert root.attributes["pdserve.routing.candidates"] == 5
    assert [entry.decision for entry in record.decisions.entries] == [NO_ROOM, PLACED], "kept when all is over"


def test_what_became_of_a_request_is_its_placement_or_what_it_heard_last() -> None:
    rejected = Decision(Kind.REJECT, "the first token would come after 900 ms")
    assert log_of().telling is None
    assert log_of(NO_ROOM, rejected).telling is rejected
    assert log_of(NO_ROOM, PLACED, NO_ROOM).telling is PLACED


class Heard(Meter):
    """Keeps what was predicted, and what was."""

    def __init__(self) -> None:
        self.pairs: list[tuple[float, float]] = []

    def predicted(self, model: str, predicted: float, actual: float) -> None:
        self.pairs.append((predicted, actual))


def measured(*meters: Meter) -> Measure:
    measure = Measure(meters, "chat")
    measure.started("tiny", TARGETS)
    measure.timeline.arrived -= 1000 * MS
    return measure


def first_token(measure: Measure, decided: float, came: float) -> None:
    """Place it `decided` ms after its arrival, and give it a token `came` ms after that."""
    timeline = measure.timeline
    measure.decisions.note(PLACED, REQUEST, timeline.arrived + timeline.offset + round(decided * MS))
    timeline.token(timeline.arrived + round(came * MS), 1)
    timeline.tell()


def test_a_prediction_is_held_against_what_came_after_the_decision() -> None:
    heard = Heard()
    measure = measured(heard)
    first_token(measure, 400, 463)
    measure.timeline.token(measure.timeline.arrived + 500 * MS, 2)
    measure.timeline.tell()
    assert heard.pairs == [(pytest.approx(0.042), pytest.approx(0.063))], "the wait before it was not predicted"


def test_what_stands_on_no_measurement_is_no_prediction() -> None:
    heard = Heard()
    measure = measured(heard)
    measure.decisions.note(HERE, REQUEST, START)
    measure.timeline.token(measure.timeline.arrived + MS, 1)
    measure.timeline.tell()
    measure = measured(heard)
    measure.timeline.token(measure.timeline.arrived + MS, 1)
    measure.timeline.tell()
    assert heard.pairs == []


def test_decisions_are_counted_by_kind_and_local_ones_by_reason() -> None:
    metrics = RouterMetrics(TARGETS)
    metrics.serve(["tiny"])

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"pdserve_routing_{name}", {"model_name": "tiny", **labels})

    for kind in Kind:
        assert value("decisions_total", kind=kind.value) == 0, "series begin at 0"
    measure = measured(metrics)
    for decision in (NO_ROOM, NO_ROOM, HERE):
        measure.decisions.note(decision, REQUEST, START)
    first_token(measure, 400, 463)
    assert value("decisions_total", kind="wait") == value("decisions_total", kind="local") == 1
    assert value("decisions_total", kind="remote") == 1
    assert value("local_prefills_total", reason="conditional") == 1
    assert (
        value("local_prefills_total", reason="held") == value("local_prefills_total", reason="no_prefill_workers") == 0
    )
    assert value("ttft_ratio_count") == 1 and value("ttft_ratio_sum") == pytest.approx(1.5)
