"""Routing decisions on literal views."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.core.layout import KVLayout
from pdserve.policy.disaggregation import NoWorker, Rules, holds_prompt
from pdserve.policy.fleet import FleetView, PlacementRequest, Role, WorkerView
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
