"""Decisions, from the public API's messages."""

from __future__ import annotations

from pdserve.client.convert_traces import summary_from_proto
from pdserve.client.decisions import Candidate, Decision, DecisionKind, Explanation, LocalReason
from pdserve.v1 import decision_pb2, inference_pb2

_KINDS = {
    decision_pb2.DecisionKind.Value(f"DECISION_KIND_{kind.name}"): kind
    for kind in DecisionKind
    if kind is not DecisionKind.UNKNOWN
}
_LOCAL = {decision_pb2.LocalReason.Value(f"LOCAL_REASON_{why.name}"): why for why in LocalReason}


def explanation_from_proto(answer: inference_pb2.GetDecisionsResponse) -> Explanation:
    return Explanation(
        request=summary_from_proto(answer.request),
        decisions=tuple(map(_decision, answer.decisions)),
        dropped=answer.dropped,
    )


def _decision(decision: decision_pb2.Decision) -> Decision:
    return Decision(
        kind=_KINDS.get(decision.kind, DecisionKind.UNKNOWN),
        reason=decision.reason,
        prefill_worker=decision.prefill_worker,
        decode_worker=decision.decode_worker,
        first_ns=decision.first_unix_ns,
        last_ns=decision.last_unix_ns,
        count=decision.count,
        waited_ms=decision.waited_ms,
        tokens=decision.tokens,
        cached_tokens=decision.cached_tokens,
        decode_cached_tokens=decision.decode_cached_tokens,
        ttft_target_ms=decision.ttft_target_ms,
        itl_target_ms=decision.itl_target_ms,
        targets_stated=decision.targets_stated,
        candidates=tuple(map(_candidate, decision.candidates)),
        considered=decision.considered,
        local_reason=_LOCAL.get(decision.local_reason),
    )


def _candidate(candidate: decision_pb2.Candidate) -> Candidate:
    return Candidate(
        prefill_worker=candidate.prefill_worker,
        decode_worker=candidate.decode_worker,
        queue_ms=candidate.queue_ms,
        compute_ms=candidate.compute_ms,
        transfer_ms=candidate.transfer_ms,
        gap_ms=candidate.gap_ms,
        late=candidate.late,
        slow=candidate.slow,
        cost=candidate.cost,
        accepts=candidate.accepts,
        tight=candidate.tight,
        cached_tokens=candidate.cached_tokens,
        decode_cached_tokens=candidate.decode_cached_tokens,
        local_reason=_LOCAL.get(candidate.local_reason),
        measured=candidate.measured,
    )
