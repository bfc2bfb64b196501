"""Which workers a sequence goes to. Pure: the same view, request and rules give the same decision.

A decision is a comparison of predicted seconds: for each prefill worker the prompts ahead, computing what it lacks of
this one, and the part of the transfer that shows; for each decode worker the gap between tokens once this answer has
joined. The pair that keeps both targets at the least cost wins; where none does, the least violation (see
`Rules.protect`). So a cached prefix decides between equals, but one that everybody shares does not pull everybody to
one worker: when its holder has a queue, computing it elsewhere is faster, and from then on there are two holders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from pdserve.policy.disaggregation import Places, Protect, Rules, gives_up, holds_prompt, prefill_places
from pdserve.policy.fleet import FleetView, PlacementRequest, Target, WorkerView
from pdserve.policy.options import (
    DecodeOption,
    Judge,
    Option,
    PrefillOption,
    decode_options,
    options,
    prefill_options,
    shortlist,
)

SHOWN = 6  # options that a decision keeps for whoever wants to know
OVERTAKEN = 32  # requests that may go before one that waits for short gaps; then it takes what there is
DEFAULT_RULES = Rules()


class Kind(StrEnum):
    REMOTE = "remote"  # a pair: prefill there, decode here
    LOCAL = "local"  # the decode worker does both
    PREFILL_ONLY = "prefill_only"  # one token: nobody takes the KV
    DEFER = "defer"  # wait for the prefill worker that is named; others need not wait with it
    WAIT = "wait"  # nothing now; ask again when the view has changed
    DOWN = "down"  # nobody is up, and nobody waits for that any longer
    NEVER = "never"  # no worker of this fleet could ever take it
    REJECT = "reject"  # it could wait, but would come too late: it is told at once


@dataclass(frozen=True, slots=True)
class Decision:
    """Where to, by worker id, and why; `options` are the best that it was chosen from, best first, of `considered`.
    `down`: nobody is up whom it could wait for. `lets_pass`: those behind it need not wait with it, as by DEFER."""

    kind: Kind
    reason: str
    prefill: str | None = None
    decode: str | None = None
    options: tuple[Option, ...] = ()
    considered: int = 0
    down: bool = False
    lets_pass: bool = False

    @property
    def placed(self) -> bool:
        return self.kind in (Kind.REMOTE, Kind.LOCAL, Kind.PREFILL_ONLY)


def choose_pair(view: FleetView, request: PlacementRequest, rules: Rules = DEFAULT_RULES) -> Decision:
    """Decide for one sequence. Changes nothing; the caller accounts for what it places before it asks again."""
    if request.remaining <= 1 and view.prefill:
        able = tuple(worker for worker in view.prefill if _could_hold(worker, request))
        if len(able) < len(view.prefill):
            everyone, view = (*view.prefill, *view.decode), replace(view, prefill=able)
            if not any(_could_hold(worker, request) for worker in everyone):
                return _never(request, everyone, "prefill or decode")
        if any(worker.usable for worker in able):
            return _prefill_only(view, request)
        if not any(worker.usable and _could_hold(worker, request) for worker in view.decode):
            return _nobody("no prefill worker is up, and no decode worker either", request, rules)
    if not any(worker.usable for worker in view.decode):
        return _nobody("no decode worker is up", request, rules)
    if not any(_could_hold(worker, request) for worker in view.decode):
        return _never(request, view.decode, "decode")
    places = prefill_places(view, rules)
    decodes = _decodes(view, request, computing=places.local and not places.remote)
    if not decodes:
        return Decision(Kind.WAIT, "no decode worker has room")
    computed = places.remote or places.local
    if not (computed or any(holds_prompt(request, option.worker) for option in decodes)):
        return _nobody(places.reason, request, rules) if places.down else Decision(Kind.WAIT, places.reason)
    prefills = _prefills(view, request) if places.remote else []
    found = options(view, request, places, prefills, decodes, rules)
    if not found and prefills:  # layouts that don't match; only fleets in the middle of a change have several
        layouts = {prefill.worker.layout for prefill in prefills}
        matching = [worker for worker in view.decode if worker.layout in layouts]
        decodes = decode_options(matching, view, request, computing=False)
        found = options(view, request, places, prefills, decodes, rules)
    if not found:
        return Decision(Kind.WAIT, "no prefill worker has room")
    return _decide(found, view, request, places, rules)


def choose_prefill(view: FleetView, request: PlacementRequest, decode: str, rules: Rules = DEFAULT_RULES) -> Decision:
    """Decide for a sequence that holds a reservation on the worker `decode` already: who fills it. Changes nothing.
    Others need not wait with it where nobody can."""
    worker = view.index.get(decode)
    if worker is None:
        return Decision(Kind.WAIT, f"decode worker {decode} is gone", lets_pass=True)
    peers = [peer for peer in view.prefill if peer.layout == worker.layout]
    if not any(peer.usable for peer in peers):
        reason = f"all prefill workers are down or draining ({len(peers)} known)"
        return Decision(Kind.WAIT, reason, lets_pass=True)
    places = Places(True, False, "it holds a reservation")
    # It has its pages and its seat; only the time to the next token is left to choose.
    held = DecodeOption(worker, request.held_tokens(worker), 0.0, False)
    found = options(view, request, places, _accepting(_prefills(view, request)), [held], rules)
    found = [option for option in found if option.prefill is not None]
    if not found:
        return Decision(Kind.WAIT, "no prefill worker has room")
    return Decision(Kind.REMOTE, _say(found, rules), found[0].prefill, None, tuple(found[:SHOWN]), len(found))


def choose_decode(view: FleetView, request: PlacementRequest, leaving: str) -> Decision:
    """Decide for a sequence that runs on the worker `leaving`, which is going to stop: who goes on with it. Its KV
    comes from there. Changes nothing. Others need not wait with it where nobody can."""
    worker = view.index.get(leaving)
    if worker is None:
        return Decision(Kind.WAIT, f"decode worker {leaving} is gone", lets_pass=True)
    peers = [peer for peer in view.decode if peer.layout == worker.layout and peer.usable and peer is not worker]
    if not peers:
        return Decision(Kind.WAIT, f"no decode worker is up that {leaving} could hand it to", lets_pass=True)
    found = _decodes(replace(view, decode=tuple(peers)), request)
    if not found:
        return Decision(Kind.WAIT, "no decode worker has room", lets_pass=True)
    best = found[0]
    reason = f"its KV comes from {leaving}, which drains; then {1e3 * best.gap:.1f} ms a token"
    return Decision(Kind.REMOTE, reason, None, best.worker.worker_id, (), len(found))


def _prefill_only(view: FleetView, request: PlacementRequest) -> Decision:
    """Where some prefill worker is up."""
    prefills = _accepting(_prefills(view, request))
    if not prefills:
        return Decision(Kind.WAIT, "no prefill worker has room")
    reason = "a single token needs no decode worker"
    judge = Judge(view, request, prefills, ())
    found = tuple(judge.alone(prefill) for prefill in prefills[:SHOWN])
    return Decision(Kind.PREFILL_ONLY, reason, prefills[0].worker.worker_id, None, found, len(found))


def _decide(found: list[Option], view: FleetView, request: PlacementRequest, places: Places, rules: Rules) -> Decision:
    """Take the best option now, or wait for it."""
    # A decode worker that takes no prompts now is waited for only where there is nobody else.
    found = [option for option in found if option.prefill or option.accepts] or found
    best, shown, count = found[0], tuple(found[:SHOWN]), len(found)
    if best.slow and rules.protect is Protect.ITL and _waits_for_gaps(view, request):
        reason = f"no decode worker would keep {1e3 * request.targets.itl:g} ms between tokens"
        return Decision(Kind.WAIT, reason, None, None, shown, count, lets_pass=True)
    if not best.accepts:
        if best.prefill is None:
            return Decision(Kind.WAIT, "every decode worker has prompts enough to compute", None, None, shown, count)
        return Decision(Kind.DEFER, f"{_say(found, rules)}; its queue is full", best.prefill, None, shown, count)
    kind = Kind.LOCAL if best.prefill is None else Kind.REMOTE
    reason = _say(found, rules)
    if kind is Kind.LOCAL and not places.remote:
        reason = f"{places.reason}; {reason}"
    return Decision(kind, reason, best.prefill, best.decode, shown, count)


def _waits_for_gaps(view: FleetView, request: PlacementRequest) -> bool:
    """Whether it should rather wait than get longer gaps than it asked for: where an idle worker would keep them, and
    those who don't wait have not gone before it too often."""
    if Target.ITL not in request.stated or request.overtaken >= OVERTAKEN:
        return False
    workers = (worker for worker in shortlist(view.decode, view, request) if worker.usable)
    return any(view.answer_speed(w).decode_seconds(1, request.tokens) <= request.planned.itl for w in workers)


def _say(found: list[Option], rules: Rules) -> str:
    best = found[0]
    if not best.meets:
        rule = f"least violation ({rules.protect}) of {len(found)}"
    elif not best.tight and any(other.tight and other.meets and other.cost < best.cost for other in found):
        rule = f"least cost with room to its end of {len(found)}"
    else:
        rule = f"least cost of {len(found)}"
    return (
        f"{rule}: first token in {1e3 * best.ttft:.1f} ms ({1e3 * best.queue:.1f} queue, "
        f"{1e3 * best.compute:.1f} compute, {1e3 * best.transfer:.1f} transfer), then {1e3 * best.gap:.1f} ms a token"
    )


def _decodes(view: FleetView, request: PlacementRequest, *, computing: bool = False) -> list[DecodeOption]:
    some = shortlist(view.decode, view, request)
    found = decode_options(some, view, request, computing=computing)
    return found if found or some is view.decode else decode_options(view.decode, view, request, computing=computing)


def _prefills(view: FleetView, request: PlacementRequest) -> list[PrefillOption]:
    some = shortlist(view.prefill, view, request)
    found = prefill_options(some, view, request)
    if some is view.prefill or any(option.worker.accepts_prompt for option in found):
        return found
    return prefill_options(view.prefill, view, request)


def _accepting(prefills: list[PrefillOption]) -> list[PrefillOption]:
    return [prefill for prefill in prefills if prefill.worker.accepts_prompt]


def _could_hold(worker: WorkerView, request: PlacementRequest) -> bool:
    """Whether its given tokens fit into `worker` when nobody else is there."""
    return request.blocks(worker, decoding=False) <= worker.total_blocks


def _nobody(reason: str, request: PlacementRequest, rules: Rules) -> Decision:
    return Decision(Kind.DOWN if gives_up(request, rules) else Kind.WAIT, reason, down=True)


def _never(request: PlacementRequest, workers: tuple[WorkerView, ...], role: str) -> Decision:
    largest = max(worker.total_blocks * worker.layout.block_size for worker in workers)
    return Decision(Kind.NEVER, f"{request.tokens} tokens, the largest {role} worker has room for {largest}")
