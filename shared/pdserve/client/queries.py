"""Calls that compute nothing: what each sends, and what is made of its answer. Both clients make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from pdserve.client.convert import messages_to_proto
from pdserve.client.convert_decisions import explanation_from_proto
from pdserve.client.convert_fleet import fleet_from_proto, models_from_proto
from pdserve.client.convert_traces import stats_from_proto, summary_from_proto, trace_from_proto
from pdserve.client.decisions import Explanation
from pdserve.client.fleet import FleetWorker, Model
from pdserve.client.stats import Stats
from pdserve.client.tokens import Tokenization
from pdserve.client.traces import RequestSummary, Trace
from pdserve.v1 import inference_pb2, stats_pb2

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Query(Generic[Answer]):
    """One call of InferenceService's `method`. It may be made again at any time."""

    method: str
    request: Message
    read: Callable[[Any], Answer]


def models() -> Query[list[Model]]:
    return Query("ListModels", inference_pb2.ListModelsRequest(), models_from_proto)


def fleet() -> Query[list[FleetWorker]]:
    return Query("GetFleet", inference_pb2.GetFleetRequest(), fleet_from_proto)


def stats() -> Query[Stats]:
    return Query("GetStats", stats_pb2.GetStatsRequest(), stats_from_proto)


def traces(limit: int) -> Query[list[RequestSummary]]:
    def read(answer: inference_pb2.ListTracesResponse) -> list[RequestSummary]:
        return [summary_from_proto(summary) for summary in answer.requests]

    return Query("ListTraces", inference_pb2.ListTracesRequest(limit=limit), read)


def trace(request_id: str) -> Query[Trace]:
    return Query("GetTrace", inference_pb2.GetTraceRequest(request_id=request_id), trace_from_proto)


def explain(request_id: str) -> Query[Explanation]:
    return Query("GetDecisions", inference_pb2.GetDecisionsRequest(request_id=request_id), explanation_from_proto)


def tokenize(
    prompt: str | Sequence[Mapping[str, str]], model: str, add_special_tokens: bool | None, token_bytes: bool
) -> Query[Tokenization]:
    request = inference_pb2.TokenizeRequest(
        model=model, add_special_tokens=add_special_tokens, token_bytes=token_bytes or None
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.chat.CopyFrom(messages_to_proto(prompt))

    def read(answer: inference_pb2.TokenizeResponse) -> Tokenization:
        return Tokenization(tuple(answer.ids), answer.max_model_len, tuple(answer.token_bytes))

    return Query("Tokenize", request, read)


def detokenize(ids: Sequence[int], model: str, skip_special_tokens: bool) -> Query[str]:
    request = inference_pb2.DetokenizeRequest(model=model, ids=ids, skip_special_tokens=skip_special_tokens)

    def read(answer: inference_pb2.DetokenizeResponse) -> str:
        return answer.text

    return Query("Detokenize", request, read)
