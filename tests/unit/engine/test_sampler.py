"""Sampling is a function of a row's logits and request."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.sampling import SamplingParams
from pdserve.engine.noise import gumbel, noise_keys, token_hashes
from pdserve.engine.sampler import SampleRequest, sample

VOCAB = 3000


def request(tokens=(1, 2, 3), prompt_len=2, eos=(7,), position=None, **params):
    return SampleRequest(
        SamplingParams(**params), list(tokens), prompt_len, len(tokens) if position is None else position, eos
    )


def logits_of(rows=1, seed=0, vocab=VOCAB, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def one(logits, **options):
    (result,) = sample(logits.view(1, -1), [request(**options)])
    return result.token


def reference_hash(seed, position, token):
    """The noise's hash in plain Python integers, written from its definition."""

    def mix(x):
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
        return x ^ (x >> 16)

    keys = []
    for stream in (0x9E3779B9, 0x7F4A7C15):
        key = stream
        for part in (seed % 2**32, seed // 2**32, position):
            key = mix(key ^ part)
        keys.append(key)
    return mix((mix(token ^ keys[0]) + keys[1]) % 2**32)


def reference_choice(logits, params, position):
    """The token that params choose of one row without penalties, by full sorts in float64."""
    scaled = ((logits - logits.max()) / torch.tensor(params.temperature)).tolist()
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    kept = order[: params.top_k or None]
    mass, reached, nucleus = math.fsum(math.exp(scaled[token]) for token in kept), 0.0, []
    for token in kept:
        if params.top_p < 1 and reached >= params.top_p * mass:
            break
        nucleus.append(token)
        reached += math.exp(scaled[token])
    bound = torch.tensor(math.log(params.min_p) if params.min_p else -math.inf).item()
    nucleus = [token for token in nucleus if scaled[token] >= bound]
    noise = gumbel([noise_keys(params.seed, position)], torch.tensor(nucleus))
    noisy = (torch.tensor([scaled[token] for token in nucleus]) + noise[0]).tolist()
    return min(zip(nucleus, noisy, strict=True), key=lambda pair: (-pair[1], pair[0]))[0]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.lists(st.integers(0, 2**20), min_size=1, max_size=8))
def test_noise_hashes_equal_plain_integers(seed, position, tokens):
    got = token_hashes([noise_keys(seed, position)], torch.tensor(tokens))[0]
    assert [value % 2**32 for value in got.tolist()] == [reference_hash(seed, position, token) for token in tokens]


def test_noise_is_gumbel_and_finite():
    """Mean and variance are those of the standard Gumbel distribution, over tokens and over positions."""
    over_tokens = gumbel([noise_keys(5, 9)], torch.arange(200_000))[0].double()
    over_positions = gumbel([noise_keys(5, position) for position in range(20_000)], torch.tensor([11]))[:, 0].double()
    for noise in (over_tokens, over_positions):
        assert noise.isfinite().all()
        assert abs(noise.mean() - 0.5772) < 0.03
        assert abs(noise.var() - math.pi**2 / 6) < 0.06


@given(
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 3, 64, 65, 1500, VOCAB, 9999]),
    st.sampled_from([0.05, 0.7, 0.999, 1.0]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(0, 50),
    st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_choices_equal_the_reference(temperature, top_k, top_p, min_p, seed, coarse):
    """Top-k, top-p and min-p in any combination, with and without equal logits, choose what the definition chooses."""
    logits = logits_of(seed=seed, scale=1.0)[0]
    if coarse:
        logits = (logits * 2).round() / 2
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    (got,) = sample(logits.view(1, -1), [SampleRequest(params, [1, 2], 2, 2)])
    assert got.token == reference_choice(logits, params, 2)


VARIED = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"top_k": 5, "seed": 4},
    {"top_k": 900, "top_p": 0.9, "seed": 5},
    {"top_p": 0.5, "seed": 6, "logprobs": 3},
    {"top_p": 0.9999, "temperature": 3.0, "seed": 2**64 - 1},
    {"min_p": 0.2, "seed": 7},
    {"temperature": 0.0, "logprobs": 0, "repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "presence_penalty": 0.2, "seed": 8, "logprobs": 20},
    {"logit_bias": {5: 100.0}, "seed": 9},
    {"min_tokens": 9, "max_tokens": 9, "stop_token_ids": (4,), "seed": 10},
)


def test_a_row_does_not_depend_on_its_batch():
    """Each of many unlike requests gets the same alone, in a batch, and in the batch reversed."""
    logits = logits_of(len(VARIED), seed=1)
    requests = [request(**params) for params in VARIED]
    together = sample(logits, requests)
    assert sample(logits.flip(0), requests[::-1])[::-1] == together
    assert [sample(logits[i : i + 1], requests[i : i + 1])[0].token for i in range(len(VARIED))] == [
        r.token for r in together
    ]


def test_sampling_leaves_the_logits_alone():
    logits = logits_of(len(VARIED))
    before = logits.clone()
    sample(logits, [request(**params) for params in VARIED])
    assert torch.equal(logits, before)


def test_frequencies_follow_the_softmax():
    """Over 20,000 positions, three tokens come as often as their probabilities say."""
    logits, n = torch.tensor([0.0, 1.0, 2.0]), 20_000
    got = sample(logits.repeat(n, 1), [request(position=position, seed=1) for position in range(n)])
    counts = Counter(result.token for result in got)
    for token, probability in enumerate(logits.softmax(-1).tolist()):
        assert abs(counts[token] / n - probability) < 0.015


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(VOCAB)
    logits[[70, 30, 2000]] = 1.0
    assert one(logits, temperature=0.0) == 30
    assert one(logits, top_k=1, seed=12) == 30


def test_any_temperature_above_zero_works():
    logits = logits_of()[0]
    assert one(logits, temperature=1e-30) == int(logits.argmax())
    assert 0 <= one(logits, temperature=1e30) < VOCAB


def test_logprobs_are_of_the_raw_logits():
    """Bias, penalties and temperature change the choice and leave the log-probabilities as the model gave them."""
    logits = logits_of()[0]
    expected = logits.log_softmax(-1)
    options = {"temperature": 2.0, "logit_bias": {17: 100.0}, "repetition_penalty": 2.0, "logprobs": 5}
    (result,) = sample(logits.view(1, -1), [request(**options)])
    assert result.token == 17
    assert result.logprob == pytest.approx(expected[17].item(), abs=1e-5)
    values, ids = expected.topk(5)
    assert [token for token, _ in result.top] == ids.tolist()
    assert [value for _, value in result.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_tie_to_the_lowest_id_and_zero_gives_none_beside():
    logits = torch.zeros(VOCAB)
    (result,) = sample(logits.view(1, -1), [request(temperature=0.0, logprobs=3)])
    assert [token for token, _ in result.top] == [0, 1, 2]
    (result,) = sample(logits.view(1, -1), [request(temperature=0.0, logprobs=0)])
    assert result.top == () and result.logprob == pytest.approx(-math.log(VOCAB), abs=1e-5)


def test_min_tokens_holds_back_every_end():
    logits = torch.zeros(VOCAB)
    logits[7], logits[4], logits[9] = 9.0, 8.0, 7.0
    held = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (4,)}
    assert one(logits, tokens=(1, 2, 3), prompt_len=2, **held) == 9
    assert one(logits, tokens=(1, 2, 3, 3), prompt_len=2, **held) == 7


def test_repetition_penalty_counts_prompt_and_answer():
    """Positive logits are divided, negative ones multiplied."""
    logits = torch.full((VOCAB,), -50.0)
    logits[1], logits[3], logits[5] = 4.0, 3.9, 2.5
    assert one(logits, tokens=(1, 2, 3), prompt_len=2, temperature=0.0, repetition_penalty=2.0) == 5
    logits = torch.full((VOCAB,), -50.0)
    logits[1], logits[5] = -1.0, -1.5
    assert one(logits, tokens=(1, 2, 3), temperature=0.0, repetition_penalty=2.0) == 5


def test_presence_and_frequency_penalties_count_the_answer_only():
    logits = torch.full((VOCAB,), -50.0)
    logits[1], logits[3], logits[5] = 4.0, 5.0, 3.5
    assert one(logits, tokens=(1, 3, 3), prompt_len=1, temperature=0.0, frequency_penalty=0.4) == 3
    assert one(logits, tokens=(1, 3, 3), prompt_len=1, temperature=0.0, frequency_penalty=0.6) == 1
    assert one(logits, tokens=(1, 3, 3), prompt_len=1, temperature=0.0, presence_penalty=1.1) == 1
    assert one(logits, tokens=(3, 3, 1), prompt_len=2, temperature=0.0, presence_penalty=0.6) == 3


def test_bias_forces_and_forbids():
    logits = logits_of()[0]
    top = int(logits.argmax())
    assert one(logits, temperature=0.0, logit_bias={top: -100.0}) == logits.topk(2).indices[1]
    assert one(logits, logit_bias={42: 100.0}, seed=1) == 42
