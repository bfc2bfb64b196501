"""What was decided for one request, in bounded memory: what `pdserve explain` prints.

A request that waits is looked at again whenever the fleet changes, often with the same result. Such looks are one
entry, and noting one more of them costs about a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.core.slo import SloTargets
from pdserve.policy.disaggregation import Local
from pdserve.policy.fleet import PlacementRequest, Target
from pdserve.policy.options import Option
from pdserve.policy.routing import Decision, Kind
from pdserve.telemetry import names
from pdserve.v1 import decision_pb2

MOST = 16  # entries of one request

_KINDS = {kind: decision_pb2.DecisionKind.Value(f"DECISION_KIND_{kind.name}") for kind in Kind}
_LOCAL = {why: decision_pb2.LocalReason.Value(f"LOCAL_REASON_{why.name}") for why in Local}
_REMOTE = decision_pb2.LOCAL_REASON_UNSPECIFIED


@dataclass(slots=True)
class Entry:
    """Looks in a row with one result, as they were at the latest one. `first_ns` and `last_ns` are Unix time; `waited`
    is in seconds."""

    decision: Decision
    first_ns: int
    last_ns: int
    count: int
    waited: float
    tokens: int
    targets: SloTargets
    stated: frozenset[Target]

    @property
    def best(self) -> Option | None:
        """What was chosen, or would have been first; None where nothing was to choose from."""
        return self.decision.options[0] if self.decision.options else None


class DecisionLog:
    """One request's decisions. `on_new` hears of each that is not the one before once more."""

    __slots__ = ("_entries", "_on_new", "_waits", "dropped", "placed")

    def __init__(self, on_new: Callable[[Decision], None] | None = None) -> None:
        self._entries: list[Entry] = []
        self._waits: Entry | None = None  # the latest entry, where it is no placement
        self._on_new = on_new
        self.dropped = 0
        self.placed: Entry | None = None  # the latest placement

    def note(self, decision: Decision, request: PlacementRequest, now_ns: int) -> None:
        """Take in what was decided for `request` now, in Unix nanoseconds."""
        last = self._waits
        if last is not None and _again(decision, last.decision):
            last.decision, last.last_ns, last.waited = decision, now_ns, request.waited
            last.count += 1
            return
        entry = Entry(decision, now_ns, now_ns, 1, request.waited, request.tokens, request.targets, request.stated)
        if len(self._entries) == MOST:
            self._drop()
        self._entries.append(entry)
        if decision.placed:
            self.placed, self._waits = entry, None
        else:
            self._waits = entry
        if self._on_new is not None:
            self._on_new(decision)

    def over(self) -> None:
        """The request has ended: nobody is told of more, and whoever was is let go of."""
        self._on_new = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """In their order."""
        return tuple(self._entries)

    @property
    def telling(self) -> Decision | None:
        """What became of the request: its latest placement, or, where there was none, what it heard last."""
        entry = self.placed or self._entries[-1] if self._entries else None
        return entry.decision if entry is not None else None

    def told(self) -> list[decision_pb2.Decision]:
        """As the API tells them."""
        return [_entry_to_proto(entry) for entry in self._entries]

    def _drop(self) -> None:
        """The oldest wait goes, but not how it began; the oldest placement where there is no such wait."""
        waits = (index for index, entry in enumerate(self._entries) if index and not entry.decision.placed)
        del self._entries[next(waits, 1)]
        self.dropped += 1


def attributes(decision: Decision) -> dict[str, str | int | float]:
    """What a span says of the decision behind it."""
    found: dict[str, str | int | float] = {
        names.ROUTING_KIND: decision.kind.value,
        names.ROUTING_REASON: decision.reason,
        names.ROUTING_CANDIDATES: decision.considered,
    }
    if decision.options:
        found[names.ROUTING_TTFT_SECONDS] = decision.options[0].ttft
        found[names.ROUTING_GAP_SECONDS] = decision.options[0].gap
    return found


def _again(decision: Decision, before: Decision) -> bool:
    """Whether a request still waits for the same. The reason of a DEFER has figures in it that change all the time."""
    return (
        decision.kind is before.kind
        and decision.prefill == before.prefill
        and (decision.reason == before.reason or decision.kind is Kind.DEFER)
    )


def _entry_to_proto(entry: Entry) -> decision_pb2.Decision:
    decision, best = entry.decision, entry.best
    named = best is not None and (decision.prefill or decision.decode)
    return decision_pb2.Decision(
        kind=_KINDS[decision.kind],
        reason=decision.reason,
        prefill_worker=decision.prefill or "",
        decode_worker=decision.decode or "",
        first_unix_ns=entry.first_ns,
        last_unix_ns=entry.last_ns,
        count=entry.count,
        waited_ms=1e3 * entry.waited,
        tokens=entry.tokens,
        cached_tokens=best.cached if best and named else 0,
        decode_cached_tokens=best.there if best and named else 0,
        ttft_target_ms=1e3 * entry.targets.ttft,
        itl_target_ms=1e3 * entry.targets.itl,
        targets_stated=bool(entry.stated),
        candidates=map(_option_to_proto, decision.options),
        considered=decision.considered,
        local_reason=_local(best) if decision.kind is Kind.LOCAL else _REMOTE,
    )


def _option_to_proto(option: Option) -> decision_pb2.Candidate:
    return decision_pb2.Candidate(
        prefill_worker=option.prefill or "",
        decode_worker=option.decode or "",
        queue_ms=1e3 * option.queue,
        compute_ms=1e3 * option.compute,
        transfer_ms=1e3 * option.transfer,
        gap_ms=1e3 * option.gap,
        late=option.late,
        slow=option.slow,
        cost=option.cost,
        accepts=option.accepts,
        tight=option.tight,
        cached_tokens=option.cached,
        decode_cached_tokens=option.there,
        local_reason=_local(option),
        measured=option.measured,
    )


def _local(option: Option | None) -> decision_pb2.LocalReason.ValueType:
    return _LOCAL[option.local] if option is not None and option.local is not None else _REMOTE
