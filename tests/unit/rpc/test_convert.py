"""Core types survive the wire."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import InvalidRequest
from pdserve.core.layout import KVLayout
from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.rpc.convert import (
    end_reason_from_proto,
    end_reason_to_proto,
    layout_from_proto,
    layout_to_proto,
    spec_from_proto,
    spec_to_proto,
    token_to_proto,
)
from pdserve.v1 import kv_pb2, sequence_pb2

floats = st.floats(-100, 100, width=32)
ids = st.integers(0, 2**32 - 1)
params = st.builds(
    SamplingParams,
    temperature=floats,
    top_k=ids,
    top_p=floats,
    min_p=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    logit_bias=st.dictionaries(ids, floats, max_size=3),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=ids,
    min_tokens=ids,
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
names = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def specs(draw: st.DrawFn) -> SequenceSpec:
    tokens = tuple(draw(st.lists(ids, min_size=1, max_size=8)))
    return SequenceSpec(
        request_id=draw(names),
        token_ids=tokens,
        prompt_len=draw(st.integers(1, len(tokens))),
        params=draw(params),
        eos_token_ids=tuple(draw(st.lists(ids, max_size=3))),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        cache_salt=draw(names),
        time_remaining=draw(st.none() | st.integers(1, 10**9).map(lambda ms: ms / 1000)),
        traceparent=draw(names),
        itl_target=draw(st.none() | st.integers(1, 10**9).map(lambda us: us / 1e6)),
    )


@given(specs())
def test_a_sequence_survives_the_wire(spec: SequenceSpec) -> None:
    wire = spec_to_proto(spec).SerializeToString()
    assert spec_from_proto(sequence_pb2.SequenceSpec.FromString(wire)) == spec


@pytest.mark.parametrize("target, told", [(None, 0), (1e-9, 1), (0.0500004, 50000), (1e35, 2**63 - 1)])
def test_a_target_may_be_any_number(target: float | None, told: int) -> None:
    """What a client may state, a worker can be told."""
    message = spec_to_proto(SequenceSpec("r", (1,), 1, SamplingParams(), itl_target=target))
    assert message.itl_target_us == told and (spec_from_proto(message).itl_target is None) is (target is None)


@pytest.mark.parametrize(
    "remaining, told",
    [(None, 0), (-1.0, 1), (0.0, 1), (0.0004, 1), (1.0001, 1000), (1.0006, 1001), (2.0**64 / 1e3, 2**63 - 1)],
)
def test_a_deadline_never_becomes_none(remaining: float | None, told: int) -> None:
    spec = SequenceSpec("r", (1,), 1, SamplingParams(), time_remaining=remaining)
    assert spec_to_proto(spec).time_remaining_ms == told


def test_a_sequence_with_a_hole_names_it() -> None:
    whole = spec_to_proto(SequenceSpec("r", (1, 2), 2, SamplingParams()))
    for change, field in (
        (lambda m: m.ClearField("token_ids"), "token_ids"),
        (lambda m: m.ClearField("prompt_len"), "prompt_len"),
        (lambda m: setattr(m, "prompt_len", 3), "prompt_len"),
        (lambda m: m.sampling.ClearField("seed"), "sampling.seed"),
        (lambda m: m.stopping.ClearField("max_tokens"), "stopping.max_tokens"),
    ):
        message = sequence_pb2.SequenceSpec()
        message.CopyFrom(whole)
        change(message)
        with pytest.raises(InvalidRequest) as caught:
            spec_from_proto(message)
        assert caught.value.field == field


def test_layouts_survive_and_impossible_ones_do_not() -> None:
    layout = KVLayout(16, 2, 4, 64, "bfloat16", bytes(range(16)))
    assert layout_from_proto(layout_to_proto(layout)) == layout
    for bad in (replace(layout, block_size=0), replace(layout, dtype="int3"), replace(layout, model_fingerprint=b"x")):
        with pytest.raises(InvalidRequest):
            layout_from_proto(layout_to_proto(bad))
    with pytest.raises(InvalidRequest):
        layout_from_proto(kv_pb2.KvLayout())


def test_every_end_reason_has_its_value() -> None:
    assert all(end_reason_from_proto(end_reason_to_proto(reason)) is reason for reason in EndReason)
    values = {end_reason_to_proto(reason) for reason in EndReason}
    assert values | {sequence_pb2.END_REASON_UNSPECIFIED} == set(sequence_pb2.EndReason.values())
    assert end_reason_from_proto(sequence_pb2.END_REASON_UNSPECIFIED) is None


def test_log_probabilities_are_there_only_when_asked_for() -> None:
    assert not token_to_proto(5, None, ()).HasField("logprob")
    token = token_to_proto(5, -0.5, [(5, -0.5), (6, -math.inf)])
    assert token.logprob == -0.5 and [top.token_id for top in token.top_logprobs] == [5, 6]
