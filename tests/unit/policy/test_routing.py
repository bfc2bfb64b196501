"""Routing decisions on literal views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.policy.disaggregation import NoWorker, Protect, Rules, holds_prompt
from pdserve.policy.estimate import Speed
from pdserve.policy.fleet import BOTH, FleetView, LinkFacts, PlacementRequest, Role, Target, WorkerView
from pdserve.policy.routing import Kind, choose_pair

LAYOUT = KVLayout(16, 2, 2, 16, "float32", bytes(16))


def worker(worker_id: str, **options: object) -> WorkerView:
    """A worker by id: "p..." prefills, "d..." decodes; 100 blocks, all free."""
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    made = WorkerView(
        worker_id=worker_id,
        role=role,
        layout=LAYOUT,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        total_blocks=100,
        available_blocks=100,
    )
    return replace(made, **options)  # type: ignore[arg-type]


def view(*workers: WorkerView, unanswered: tuple[str, ...] = ()) -> FleetView:
    return FleetView.of_workers(workers, unanswered)


def request(tokens: int = 64, remaining: int = 100, **options: object) -> PlacementRequest:
    return PlacementRequest(tokens, remaining, **options)  # type: ignore[arg-type]


def test_a_pair_is_chosen_where_there_is_one() -> None:
    decision = choose_pair(view(worker("p0"), worker("d0")), request())
    assert (decision.kind, decision.prefill, decision.decode) == (Kind.REMOTE, "p0", "d0")
    assert decision.reason


def test_a_prefix_hit_decides_between_equals_on_both_sides() -> None:
    fleet = view(worker("p0"), worker("p1"), worker("d0"), worker("d1"))
    decision = choose_pair(fleet, request(held={"p1": 2, "d1": 1}))
    assert (decision.prefill, decision.decode) == ("p1", "d1")


def test_a_shared_prefix_does_not_pull_everybody_to_one_worker() -> None:
    busy = worker("d0", outstanding_tokens=1000)
    assert choose_pair(view(worker("p0"), busy, worker("d1")), request(held={"d0": 2})).decode == "d1"


@pytest.mark.parametrize(
    "option", [{"outstanding_tokens": 50}, {"reported_owned_blocks": 4}, {"placed": 1}, {"available_blocks": 99}]
)
def test_load_of_any_kind_sends_the_next_one_elsewhere(option: dict[str, int]) -> None:
    assert choose_pair(view(worker("d0", **option), worker("d1")), request()).decode == "d1"


def test_equal_idle_workers_take_turns_and_none_starves() -> None:
    workers = {name: worker(name) for name in ("d0", "d1", "d2")}
    for _ in range(9):
        chosen = choose_pair(view(*workers.values()), request()).decode
        assert chosen is not None
        workers[chosen] = replace(workers[chosen], placed=workers[chosen].placed + 1)
    assert {w.placed for w in workers.values()} == {3}


def test_room_counts_what_is_in_flight_and_the_look_ahead() -> None:
    five = worker("d0", available_blocks=5, lookahead_tokens=16)  # 64 tokens take four blocks, one more token a fifth
    assert choose_pair(view(five), request(64)).kind is Kind.LOCAL
    assert choose_pair(view(replace(five, lookahead_tokens=17)), request(64)).kind is Kind.WAIT
    assert choose_pair(view(replace(five, in_flight_blocks=1)), request(64)).kind is Kind.WAIT
    assert choose_pair(view(replace(five, lookahead_tokens=500)), request(64, remaining=16)).kind is Kind.LOCAL


def test_beside_others_the_worker_keeps_its_watermark() -> None:
    """As the worker itself does it: what the router places must not be refused."""
    five = worker("d0", available_blocks=5, lookahead_tokens=16, watermark_blocks=1)
    assert choose_pair(view(five), request(64)).kind is Kind.LOCAL
    assert choose_pair(view(replace(five, reported_sequences=1)), request(64)).kind is Kind.WAIT
    assert choose_pair(view(replace(five, sequences=1)), request(64)).kind is Kind.WAIT


@pytest.mark.parametrize("tokens, fits", [(79, True), (80, True), (81, False)])
def test_room_at_a_block_boundary(tokens: int, fits: bool) -> None:
    decision = choose_pair(view(worker("d0", available_blocks=5)), request(tokens))
    assert decision.placed is fits


def test_held_blocks_need_no_room() -> None:
    full = worker("d0", available_blocks=1)
    assert choose_pair(view(full), request(64, held={"d0": 3})).kind is Kind.LOCAL


def test_draining_disconnected_full_and_excluded_workers_are_no_candidates() -> None:
    good = worker("d9", outstanding_tokens=500)
    for bad in (
        worker("d0", draining=True),
        worker("d0", connected=False),
        worker("d0", sequences=8),
        worker("d0", reported_sequences=8),
    ):
        assert choose_pair(view(bad, good), request()).decode == "d9"
    assert choose_pair(view(worker("d0"), good), request(excluded=frozenset({"d0"}))).decode == "d9"


def test_prefill_workers_keep_short_queues() -> None:
    decision = choose_pair(view(worker("p0", reported_prefill_tokens=512), worker("d0")), request())
    assert (decision.kind, decision.prefill, decision.placed) == (Kind.DEFER, "p0", False)
    busy = view(worker("p0", prefill_tokens=511), worker("p1", prefill_tokens=512), worker("d0"))
    assert choose_pair(busy, request()).prefill == "p0"


def test_a_fleet_whose_prefill_workers_are_down_waits_and_says_so() -> None:
    for down in (worker("p0", connected=False), worker("p0", draining=True)):
        decision = choose_pair(view(down, worker("d0")), request())
        assert decision.kind is Kind.WAIT and "all prefill workers are down" in decision.reason


def test_a_fleet_without_prefill_workers_is_colocated_once_everybody_answered() -> None:
    assert choose_pair(view(worker("d0")), request()).kind is Kind.LOCAL
    decision = choose_pair(view(worker("d0"), unanswered=("10.0.0.1:1",)), request())
    assert decision.kind is Kind.WAIT and "10.0.0.1:1" in decision.reason


@pytest.mark.parametrize("tokens, held, whole", [
    (64, 3, True), (65, 4, True), (80, 4, True), (81, 4, False),
    (64, 2, False), (64, 4, True), (10, 0, False), (16, 1, False), (17, 1, True),
])  # fmt: skip
def test_a_decode_worker_holds_a_prompt_when_at_most_a_block_is_missing(tokens: int, held: int, whole: bool) -> None:
    decode = worker("d0")
    assert holds_prompt(request(tokens, held={"d0": held}), decode) is whole
    found = choose_pair(view(worker("p0"), decode), request(tokens, held={"d0": held}))
    assert found.kind is (Kind.LOCAL if whole else Kind.REMOTE)


def test_a_held_prompt_needs_no_prefill_worker_even_when_all_are_down() -> None:
    decision = choose_pair(view(worker("p0", connected=False), worker("d0")), request(64, held={"d0": 3}))
    assert decision.kind is Kind.LOCAL


def test_a_single_token_needs_no_decode_worker() -> None:
    decision = choose_pair(view(worker("p0"), worker("d0", draining=True)), request(remaining=1))
    assert (decision.kind, decision.prefill, decision.decode) == (Kind.PREFILL_ONLY, "p0", None)
    assert choose_pair(view(worker("d0")), request(remaining=1)).kind is Kind.LOCAL


def test_a_single_token_goes_to_a_decode_worker_where_the_rules_say() -> None:
    """No prefill worker is up, or none could ever hold it."""
    down, one = worker("p0", connected=False), request(remaining=1)
    fleet = view(down, worker("d0"))
    assert choose_pair(fleet, one, Rules(no_worker=NoWorker.LOCAL)).kind is Kind.LOCAL
    waits = choose_pair(fleet, one)
    assert (waits.kind, waits.down) == (Kind.WAIT, True) and "all prefill workers are down" in waits.reason
    nobody = choose_pair(view(down, worker("d0", draining=True)), one, Rules(no_worker=NoWorker.LOCAL))
    assert (nobody.kind, nobody.reason) == (Kind.WAIT, "no prefill worker is up, and no decode worker either")
    small, long = worker("p0", total_blocks=10, available_blocks=10), request(500, remaining=1)
    assert choose_pair(view(small, worker("d0")), long).kind is Kind.LOCAL
    assert choose_pair(view(small, worker("p1"), worker("d0")), long).prefill == "p1"
    large_is_down = view(small, worker("p1", connected=False), replace(small, worker_id="d0", role=Role.DECODE))
    assert (choose_pair(large_is_down, long).kind, choose_pair(large_is_down, long).down) == (Kind.WAIT, True)
    never = choose_pair(view(small, replace(small, worker_id="d0", role=Role.DECODE)), long)
    assert (never.kind, never.reason) == (
        Kind.NEVER, "500 tokens, the largest prefill or decode worker has room for 160"
    )  # fmt: skip


def test_pairs_have_equal_layouts() -> None:
    other = replace(LAYOUT, block_size=32)
    fleet = view(worker("p0", layout=other), worker("d0"))
    assert choose_pair(fleet, request()).kind is Kind.WAIT
    fleet = view(worker("p0", layout=other), worker("d0"), worker("d1", layout=other, outstanding_tokens=900))
    assert choose_pair(fleet, request()).decode == "d1"


def test_what_can_never_fit_is_told_at_once() -> None:
    assert choose_pair(view(worker("d0")), request(1601)).kind is Kind.NEVER
    assert choose_pair(view(worker("d0", available_blocks=0)), request(1600)).kind is Kind.WAIT
    assert choose_pair(view(worker("p0")), request(1601, remaining=1)).kind is Kind.NEVER


def test_an_empty_fleet_waits() -> None:
    assert choose_pair(view(), request()).kind is Kind.WAIT


DOWN = [worker("p0", connected=False), worker("d0")]


@pytest.mark.parametrize(
    "fleet, options, rules, kind",
    [
        (DOWN, {}, Rules(), Kind.WAIT),
        (DOWN, {"down_for": 29.9}, Rules(), Kind.WAIT),
        (DOWN, {"down_for": 30.0}, Rules(), Kind.DOWN),
        (DOWN, {}, Rules(no_worker=NoWorker.FAIL), Kind.DOWN),
        (DOWN, {}, Rules(no_worker=NoWorker.LOCAL), Kind.LOCAL),
        ([worker("p0")], {}, Rules(no_worker=NoWorker.LOCAL), Kind.WAIT),
        ([worker("p0")], {"down_for": 5.0}, Rules(no_worker=NoWorker.LOCAL, no_worker_seconds=5), Kind.DOWN),
        ([worker("p0", draining=True)], {"remaining": 1}, Rules(no_worker=NoWorker.FAIL), Kind.DOWN),
    ],
)
def test_without_a_worker_the_rules_say_what_to_do(
    fleet: list[WorkerView], options: dict[str, Any], rules: Rules, kind: Kind
) -> None:
    decision = choose_pair(view(*fleet), request(**options), rules)
    assert decision.kind is kind and decision.down is (kind is not Kind.LOCAL) and decision.reason


SPEED = Speed(step=0.01, token=1e-4, answer=1e-3, read=1e-7, prompts=9, answers=9)


def test_seconds_decide_and_not_tokens() -> None:
    """A worker that is three times as fast is the better choice until it has three times the work."""
    slow, fast = worker("p0", speed=SPEED), worker("p1", speed=replace(SPEED, step=0.003, token=3e-5))
    for tokens, chosen in ((100, "p1"), (400, "p0")):
        busy = replace(fast, reported_prefill_tokens=tokens)
        assert choose_pair(view(slow, busy, worker("d0")), request(100)).prefill == chosen


def test_a_holder_with_a_queue_is_waited_for_only_while_that_is_quicker() -> None:
    """And from then on there are two holders."""
    for queue, chosen in ((300, "p0"), (900, "p1")):
        holder = worker("p0", speed=SPEED, reported_prefill_tokens=queue, max_num_batched_tokens=4096)
        other = worker("p1", speed=SPEED, max_num_batched_tokens=4096)
        found = choose_pair(view(holder, other, worker("d0")), request(1000, held={"p0": 40}))
        assert found.prefill == chosen, queue


def test_of_equal_pairs_the_one_with_the_faster_link_wins() -> None:
    link = LinkFacts(1e9, "shared-memory")
    slow = worker("p0", links={"d0": replace(link, bytes_per_second=1e6)}, speed=SPEED)
    near = worker("p1", links={"d0": link}, speed=SPEED, placed=5)
    assert choose_pair(view(slow, near, worker("d0")), request(1000)).prefill == "p1"


def test_a_stated_target_between_tokens_keeps_prompts_waiting() -> None:
    """Where nobody stated it, or the time to first token is what is protected, it does not."""
    full = worker("d0", speed=SPEED, reported_sequences=7)  # one more answer: 18 ms a token
    targets = SloTargets(10.0, 0.015, 99.0)
    fleet = view(worker("p0", speed=SPEED), full)
    assert choose_pair(fleet, request(targets=targets, stated=BOTH)).kind is Kind.WAIT
    assert choose_pair(fleet, request(targets=targets)).kind is Kind.REMOTE
    assert choose_pair(fleet, request(targets=targets, stated=frozenset({Target.TTFT}))).kind is Kind.REMOTE
    assert choose_pair(fleet, request(targets=targets, stated=BOTH), Rules(protect=Protect.TTFT)).kind is Kind.REMOTE
    nobody_could = replace(targets, itl=0.001)
    assert choose_pair(fleet, request(targets=nobody_could, stated=BOTH)).kind is Kind.REMOTE


def test_which_violation_is_smaller_depends_on_what_is_protected() -> None:
    """One decode worker is full, the other one's link is slow: protecting gaps takes the slow link, and the reverse."""
    full = worker("d0", speed=SPEED, reported_sequences=7)
    far = worker("d1", speed=SPEED, links={})
    prefill = worker("p0", speed=SPEED, links={"d0": LinkFacts(1e10, "p2p"), "d1": LinkFacts(1e4, "sockets")})
    asked = request(targets=SloTargets(0.1, 0.015, 99.0))
    assert choose_pair(view(prefill, full, far), asked, Rules(Protect.ITL, local_prefill=False)).decode == "d1"
    assert choose_pair(view(prefill, full, far), asked, Rules(Protect.TTFT, local_prefill=False)).decode == "d0"


def test_a_prompt_is_computed_where_it_delays_everybody_least() -> None:
    """By the decode worker while that is idle and the prefill worker is not; by nobody's decode worker that streams to
    many; never where the rules forbid it."""
    queue = worker("p0", speed=SPEED, reported_prefill_tokens=500)
    idle, busy = worker("d0", speed=SPEED), worker("d0", speed=SPEED, reported_sequences=6)
    assert choose_pair(view(queue, idle), request(100)).kind is Kind.LOCAL
    assert choose_pair(view(queue, busy), request(100)).kind is Kind.REMOTE
    assert choose_pair(view(worker("p0", speed=SPEED), idle), request(100)).kind is Kind.REMOTE
    assert choose_pair(view(queue, idle), request(100), Rules(local_prefill=False)).kind is Kind.REMOTE
    unmeasured = worker("d0")
    assert choose_pair(view(queue, unmeasured), request(100)).kind is Kind.REMOTE


def test_a_prompt_is_not_late_for_the_sake_of_answers_that_keep_their_targets() -> None:
    """Beside answers with targets a decode worker takes a prompt that would come too late elsewhere, in smaller chunks;
    it is spared where that is in time, and where an answer has no target or the prompt asks for no gaps itself."""
    queue = worker("p0", speed=SPEED, reported_prefill_tokens=900, max_num_batched_tokens=2048)
    asked = request(500, targets=SloTargets(0.14, 0.1, 99.0), stated=BOTH)
    bounded = worker("d0", speed=SPEED, max_num_seqs=64, reported_sequences=6, reported_bounded=6)
    found = choose_pair(view(queue, bounded), asked)
    assert found.kind is Kind.LOCAL and found.options[0].meets
    assert found.options[0].compute > SPEED.prompt_seconds(500, 500**2, 512)
    assert choose_pair(view(replace(queue, reported_prefill_tokens=300), bounded), asked).kind is Kind.REMOTE
    assert choose_pair(view(queue, replace(bounded, reported_bounded=5)), asked).kind is Kind.REMOTE
    assert choose_pair(view(queue, bounded), replace(asked, stated=frozenset({Target.TTFT}))).kind is Kind.REMOTE
    crowded = replace(bounded, reported_sequences=36, reported_bounded=36)  # they leave no time for it
    assert choose_pair(view(queue, crowded), asked).kind is Kind.REMOTE


def test_whose_gaps_nobody_bounded_is_counted_by_whoever_knows_more() -> None:
    mine = worker("d0", sequences=5, bounded=3, reported_sequences=4, reported_bounded=4)
    assert mine.unbounded == 2
    others = worker("d0", sequences=2, bounded=2, reported_sequences=6, reported_bounded=3)
    assert others.unbounded == 3


def test_a_conversation_goes_where_it_was_among_equals() -> None:
    fleet = view(worker("p0"), worker("p1"), worker("d0"), worker("d1"))
    found = choose_pair(fleet, request(near=frozenset({"p1", "d1"})))
    assert (found.prefill, found.decode) == ("p1", "d1")
    busy = view(worker("p0"), worker("p1", reported_prefill_tokens=100), worker("d0"), worker("d1", placed=3))
    found = choose_pair(busy, request(near=frozenset({"p1", "d1"})))
    assert (found.prefill, found.decode) == ("p0", "d1")


def test_an_answer_that_would_outgrow_its_worker_goes_where_it_has_room() -> None:
    small = worker("d0", available_blocks=12)
    fleet = view(worker("p0"), small, worker("d1", outstanding_tokens=500))
    found = choose_pair(fleet, request(64, remaining=400, expected=300))
    assert found.decode == "d1" and found.reason.startswith("least cost with room to its end of ")
    found = choose_pair(fleet, request(64, remaining=400, expected=50))
    assert found.decode == "d0" and found.reason.startswith("least cost of ")


def test_of_a_large_fleet_a_sample_is_looked_at_and_holders_always() -> None:
    workers = [worker(f"{role}{number}") for role in "pd" for number in range(200)]
    busy = [replace(w, reported_prefill_tokens=50) if w.worker_id != "p7" else w for w in workers]
    chosen = {choose_pair(view(*workers), request(draw=draw)).decode for draw in range(100)}
    assert len(chosen) > 30
    assert choose_pair(view(*busy), request(640, held={"p7": 39, "p8": 1})).prefill == "p7"
    assert choose_pair(view(*busy), request(near=frozenset({"p7"}))).prefill == "p7"
    full = [replace(w, available_blocks=0) if w.worker_id not in ("p3", "d9") else w for w in workers]
    found = choose_pair(view(*full), request())
    assert (found.prefill, found.decode) == ("p3", "d9")


def test_half_a_second_of_overload_is_spread() -> None:
    """Two routers that don't know of each other place 500 requests on 40 workers from the same report."""
    counts: dict[str, int] = {}
    for router in range(2):
        pool = {f"d{number}": worker(f"d{number}", max_num_seqs=64, available_blocks=2000, total_blocks=2000)
                for number in range(40)}  # fmt: skip
        for draw in range(250):
            found = choose_pair(view(worker("p0"), *pool.values()), request(draw=draw * 2 + router)).decode
            assert found is not None
            old = pool[found]
            pool[found] = replace(old, sequences=old.sequences + 1, outstanding_tokens=old.outstanding_tokens + 64)
            counts[found] = counts.get(found, 0) + 1
    assert max(counts.values()) <= 1.3 * 500 / 40
