"""Protobuf to core types and back. Nothing deeper than this file knows the generated messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdserve.core.errors import InvalidRequest
from pdserve.core.layout import DTYPE_BYTES, TRANSFER_DTYPES, KVLayout
from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.policy.estimate import UNKNOWN, Speed
from pdserve.v1 import inference_pb2, kv_pb2, sequence_pb2, worker_pb2

FINGERPRINT_BYTES = 16

_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
_STOPPING_FIELDS = ("max_tokens", "min_tokens", "ignore_eos")

_END_REASONS: dict[EndReason, sequence_pb2.EndReason.ValueType] = {
    EndReason.STOP: sequence_pb2.END_REASON_STOP,
    EndReason.LENGTH: sequence_pb2.END_REASON_LENGTH,
    EndReason.CANCELLED: sequence_pb2.END_REASON_CANCELLED,
    EndReason.PREEMPTED: sequence_pb2.END_REASON_PREEMPTED,
    EndReason.TRANSFER_FAILED: sequence_pb2.END_REASON_TRANSFER_FAILED,
    EndReason.DEADLINE: sequence_pb2.END_REASON_DEADLINE,
    EndReason.NO_CAPACITY: sequence_pb2.END_REASON_NO_CAPACITY,
    EndReason.DRAINING: sequence_pb2.END_REASON_DRAINING,
    EndReason.INVALID: sequence_pb2.END_REASON_INVALID,
    EndReason.INTERNAL: sequence_pb2.END_REASON_INTERNAL,
    EndReason.HANDED_OFF: sequence_pb2.END_REASON_HANDED_OFF,
}
_FROM_END_REASONS = {value: reason for reason, value in _END_REASONS.items()}


def sampling_to_proto(
    params: SamplingParams,
) -> tuple[inference_pb2.SamplingOptions, inference_pb2.StoppingOptions]:
    """Both option groups with every field set. Floats become float32; stop strings are not the workers' business."""
    sampling = inference_pb2.SamplingOptions(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
    )
    stopping = inference_pb2.StoppingOptions(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )
    return sampling, stopping


def sampling_from_proto(
    sampling: inference_pb2.SamplingOptions, stopping: inference_pb2.StoppingOptions, logprobs: int | None
) -> SamplingParams:
    """Resolved options as core's type. Raises InvalidRequest for a field that is unset; ranges are not checked."""
    for name in _SAMPLING_FIELDS:
        if not sampling.HasField(name):  # type: ignore[arg-type]
            raise InvalidRequest(f"sampling.{name}", "must be set in a sequence")
    for name in _STOPPING_FIELDS:
        if not stopping.HasField(name):  # type: ignore[arg-type]
            raise InvalidRequest(f"stopping.{name}", "must be set in a sequence")
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        max_tokens=stopping.max_tokens,
        min_tokens=stopping.min_tokens,
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        logprobs=logprobs,
    )


def _whole(seconds: float | None, units: float) -> int:
    """Seconds in whole units, so many to a second: 0 for none, 1 for less, and what a field holds for more."""
    return 0 if seconds is None else min(max(1, round(seconds * units)), 2**63 - 1)


def spec_to_proto(spec: SequenceSpec) -> sequence_pb2.SequenceSpec:
    """A sequence for a worker. A deadline that has passed travels as 1 ms, because 0 means none."""
    sampling, stopping = sampling_to_proto(spec.params)
    remaining = spec.time_remaining
    return sequence_pb2.SequenceSpec(
        request_id=spec.request_id,
        token_ids=spec.token_ids,
        prompt_len=spec.prompt_len,
        sampling=sampling,
        stopping=stopping,
        eos_token_ids=spec.eos_token_ids,
        logprobs=spec.params.logprobs,
        priority=spec.priority,
        cache_salt=spec.cache_salt,
        time_remaining_ms=_whole(remaining, 1e3),
        traceparent=spec.traceparent,
        itl_target_us=_whole(spec.itl_target, 1e6),
    )


def spec_from_proto(message: sequence_pb2.SequenceSpec) -> SequenceSpec:
    """What a worker was sent. Raises InvalidRequest where it is not whole: no tokens, no prompt, unset options.

    Values against a vocabulary or a context window are the worker's to check: `SamplingParams.check`.
    """
    token_ids = tuple(message.token_ids)
    if not token_ids:
        raise InvalidRequest("token_ids", "must not be empty")
    if not 1 <= message.prompt_len <= len(token_ids):
        raise InvalidRequest("prompt_len", f"must be in [1, {len(token_ids)}], got {message.prompt_len}")
    return SequenceSpec(
        request_id=message.request_id,
        token_ids=token_ids,
        prompt_len=message.prompt_len,
        params=sampling_from_proto(
            message.sampling, message.stopping, message.logprobs if message.HasField("logprobs") else None
        ),
        eos_token_ids=tuple(message.eos_token_ids),
        priority=message.priority,
        cache_salt=message.cache_salt,
        time_remaining=message.time_remaining_ms / 1000 if message.time_remaining_ms else None,
        traceparent=message.traceparent,
        itl_target=message.itl_target_us / 1e6 if message.itl_target_us else None,
    )


def layout_to_proto(layout: KVLayout) -> kv_pb2.KvLayout:
    return kv_pb2.KvLayout(
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_size=layout.head_size,
        dtype=layout.dtype,
        model_fingerprint=layout.model_fingerprint,
        transfer_dtype=layout.transfer_dtype,
    )


def layout_from_proto(message: kv_pb2.KvLayout) -> KVLayout:
    """A peer's layout. Raises InvalidRequest for one that no pages can have."""
    for name in ("block_size", "num_layers", "num_kv_heads", "head_size"):
        if getattr(message, name) < 1:
            raise InvalidRequest(f"layout.{name}", "must be 1 or more")
    if message.dtype not in DTYPE_BYTES:
        raise InvalidRequest("layout.dtype", f"must be one of {', '.join(DTYPE_BYTES)}, got {message.dtype!r}")
    if len(message.model_fingerprint) != FINGERPRINT_BYTES:
        raise InvalidRequest(
            "layout.model_fingerprint", f"must be {FINGERPRINT_BYTES} bytes, got {len(message.model_fingerprint)}"
        )
    if message.transfer_dtype not in TRANSFER_DTYPES:
        raise InvalidRequest("layout.transfer_dtype", f"must be int8, fp8 or empty, got {message.transfer_dtype!r}")
    return KVLayout(
        block_size=message.block_size,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_size=message.head_size,
        dtype=message.dtype,
        model_fingerprint=message.model_fingerprint,
        transfer_dtype=message.transfer_dtype,
    )


def speed_to_proto(speed: Speed) -> worker_pb2.WorkerSpeed:
    return worker_pb2.WorkerSpeed(
        step_seconds=speed.step,
        token_seconds=speed.token,
        square_seconds=speed.square,
        answer_seconds=speed.answer,
        read_seconds=speed.read,
        prompt_steps=speed.prompts,
        answer_steps=speed.answers,
    )


def speed_from_proto(message: worker_pb2.WorkerSpeed) -> Speed:
    """UNKNOWN where a worker says nothing, or nonsense: a router is not to be led by it."""
    seconds = (
        message.step_seconds,
        message.token_seconds,
        message.square_seconds,
        message.answer_seconds,
        message.read_seconds,
    )
    if not all(0 <= value < math.inf for value in seconds):
        return UNKNOWN
    return Speed(*seconds, prompts=message.prompt_steps, answers=message.answer_steps)


def end_reason_to_proto(reason: EndReason) -> sequence_pb2.EndReason.ValueType:
    return _END_REASONS[reason]


def end_reason_from_proto(value: sequence_pb2.EndReason.ValueType) -> EndReason | None:
    """None for UNSPECIFIED (no end); a value that this version does not know counts as INTERNAL."""
    if value == sequence_pb2.END_REASON_UNSPECIFIED:
        return None
    return _FROM_END_REASONS.get(value, EndReason.INTERNAL)


def token_to_proto(token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> inference_pb2.Token:
    """One sampled token, with log-probabilities where they were asked for (`logprob` None: they were not)."""
    if logprob is None:
        return inference_pb2.Token(id=token)
    likely = [inference_pb2.TokenLogprob(token_id=other, logprob=value) for other, value in top]
    return inference_pb2.Token(id=token, logprob=logprob, top_logprobs=likely)
