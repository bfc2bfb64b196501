"""From logits to tokens: a pure function of each row's logits and request, whatever else is in the batch.

Order: logit bias, min_tokens (ends are impossible), repetition penalty, presence and frequency penalty; then the
largest (temperature 0), or top-k, top-p and min-p over logit / T and the largest of logit / T + Gumbel noise, which
is a sample of the softmax. Ties go to the lowest id. Log-probabilities are of the logits as the model gave them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pdserve.core.sampling import SamplingParams
from pdserve.engine.noise import gumbel, noise_keys

# How many candidates a row with top-k is cut down to first; more than the last: the whole vocabulary.
_CANDIDATES = (64, 1024)
_ID_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One row. `tokens` is the whole sequence, its first `prompt_len` the prompt; `position` is the index of the token
    being chosen, counted from the prompt's first."""

    params: SamplingParams
    tokens: Sequence[int]
    prompt_len: int
    position: int
    eos_token_ids: Sequence[int] = ()


class SampledToken(NamedTuple):
    """The chosen token; where asked for, its log-probability and the most likely (id, logprob), best first."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def sample(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken]:
    """Choose a token for each row of float32 logits [R, vocabulary], which stay as they are.

    Waits for the device once, at the end.
    """
    edited = _edit(logits, requests)
    tokens = _choose(edited, requests)
    wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if not wanted:
        return [SampledToken(token) for token in tokens.tolist()]
    # float64 holds ids and float32 log-probabilities exactly, so that one copy brings all.
    count = max(request.params.logprobs or 0 for request in requests)
    parts = (tokens.double(), *_logprobs(logits, tokens, wanted, count))
    numbers = torch.cat([part.flatten() for part in parts]).tolist()
    result = [SampledToken(int(token)) for token in numbers[: len(requests)]]
    chosen, rest = numbers[len(requests) :][: len(wanted)], numbers[len(requests) + len(wanted) :]
    half = len(rest) // 2
    for place, row in enumerate(wanted):
        span = slice(place * count, place * count + (requests[row].params.logprobs or 0))
        top = zip(map(int, rest[:half][span]), rest[half:][span], strict=True)
        result[row] = SampledToken(result[row].token, chosen[place], tuple(top))
    return result


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, rows: list[int], count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the given rows: the chosen token's log-probability [n], the `count` likeliest ids and theirs [n, count]."""
    raw, chosen = _take(logits, rows), _take(tokens, rows)
    normalizer = raw.logsumexp(dim=-1, keepdim=True)
    top_ids = _sorted_ids(raw, min(count, raw.shape[1])) if count else chosen.new_empty((len(rows), 0))
    values = raw.gather(1, torch.cat((chosen[:, None], top_ids), dim=1)) - normalizer
    return values[:, 0].double(), top_ids.double(), values[:, 1:].double()


def _edit(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """The logits after bias, min_tokens and penalties: a copy, or the same tensor where nobody asks for any."""
    bias, held_back, repeated, counted = _Edits(logits), _Edits(logits), _Edits(logits), _Edits(logits)
    for row, request in enumerate(requests):
        params, answer_len = request.params, len(request.tokens) - request.prompt_len
        if params.logit_bias:
            bias.add(row, params.logit_bias.keys(), params.logit_bias.values())
        if answer_len < params.min_tokens:
            ends = {*request.eos_token_ids, *params.stop_token_ids}
            held_back.add(row, ends, [-math.inf] * len(ends))
        if params.repetition_penalty != 1.0:
            seen = set(request.tokens)
            repeated.add(row, seen, [params.repetition_penalty] * len(seen))
        if params.presence_penalty or params.frequency_penalty:
            counts = Counter(request.tokens[request.prompt_len :])
            penalties = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
            counted.add(row, counts.keys(), penalties)
    if not (bias or held_back or repeated or counted):
        return logits
    edited = logits.clone()
    flat = edited.view(-1)
    for edits in (bias, held_back):
        if edits:
            places, values = edits.tensors()
            flat[places] += values
    if repeated:
        places, values = repeated.tensors()
        flat[places] = torch.where(flat[places] > 0, flat[places] / values, flat[places] * values)
    if counted:
        places, values = counted.tensors()
        flat[places] -= values
    return edited


class _Edits:
    """Values for places in the flattened logits, each place once."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._vocab_size, self._device = logits.shape[1], logits.device
        self._places: list[int] = []
        self._values: list[float] = []

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, row: int, token_ids: Iterable[int], values: Iterable[float]) -> None:
        self._places.extend(row * self._vocab_size + token for token in token_ids)
        self._values.extend(values)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        places, values = torch.tensor(self._places), torch.tensor(self._values, dtype=torch.float32)
        return places.to(self._device, non_blocking=True), values.to(self._device, non_blocking=True)


def _choose(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """int64 [R]. Rows are computed in groups that need the same work, so that no row pays for another's."""
    vocab_size = logits.shape[1]
    groups: dict[tuple[bool, bool, int], list[int]] = {}
    for row, request in enumerate(requests):
        params = request.params
        width = 0 if params.greedy else _candidates(params, vocab_size, logits.device)
        groups.setdefault((params.greedy, params.top_k > 0, width), []).append(row)
    tokens = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
    for (greedy, _, width), rows in groups.items():
        members = [requests[row] for row in rows]
        part = _take(logits, rows)
        if greedy:
            chosen = part.argmax(dim=-1)
        elif width == 0:
            chosen = _sample_all(_scale(part, members), members)
        else:
            chosen = _sample_cut(_scale(part, members), members, width)
        if len(rows) == len(requests):
            return chosen
        tokens.index_copy_(0, torch.tensor(rows).to(logits.device, non_blocking=True), chosen)
    return tokens


def _candidates(params: SamplingParams, vocab_size: int, device: torch.device) -> int:
    """How many of the most likely tokens must be put in order; 0: none, all tokens take part as they are."""
    if params.top_k and params.top_k < vocab_size:
        return next((width for width in _CANDIDATES if params.top_k <= width < vocab_size), vocab_size)
    if params.top_p < 1.0:
        # A sort of the whole vocabulary is cheap on a GPU; a CPU first tries whether the likeliest have the mass.
        # (top_k, if set, is the vocabulary or more here: no limit.)
        return (
            _CANDIDATES[-1]
            if device.type == "cpu" and not params.top_k and vocab_size > _CANDIDATES[-1]
            else vocab_size
        )
    return 0


def _scale(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """(logits - row's largest) / T: at most 0, and finite at the top for any T above 0."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted / _column([request.params.temperature for request in requests], logits)


def _sample_all(scaled: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    keys = [noise_keys(request.params.seed, request.position) for request in requests]
    noisy = scaled + gumbel(keys, torch.arange(scaled.shape[1], device=scaled.device))
    if any(request.params.min_p for request in requests):
        noisy.masked_fill_(scaled < _min_p_bounds(requests, scaled), -math.inf)
    return noisy.argmax(dim=-1)


def _sample_cut(scaled: torch.Tensor, requests: Sequence[SampleRequest], width: int) -> torch.Tensor:
    """Top-k, then top-p of the mass that is left, then min-p; computed on the `width` likeliest tokens, in order."""
    vocab_size = scaled.shape[1]
    ids = _sorted_ids(scaled, width)
    values = scaled.gather(1, ids)
    limits = _column([min(request.params.top_k or vocab_size, vocab_size) for request in requests], scaled)
    # In float64, so that which token is the last one in does not hang on how a device adds.
    weights = values.double().exp_().masked_fill_(torch.arange(width, device=ids.device) >= limits, 0.0)
    reached = weights.cumsum(dim=-1)
    mass = torch.where(limits < vocab_size, reached[:, -1:], scaled.double().exp_().sum(dim=-1, keepdim=True))
    shares = _column([request.params.top_p if request.params.top_p < 1.0 else math.inf for request in requests], mass)
    needed = mass * shares
    kept = (weights > 0) & (reached - weights < needed) & (values >= _min_p_bounds(requests, scaled))
    keys = [noise_keys(request.params.seed, request.position) for request in requests]
    noisy = (values + gumbel(keys, ids)).masked_fill_(~kept, -math.inf)
    best = noisy.amax(dim=-1, keepdim=True)
    chosen = ids.masked_fill(noisy < best, vocab_size).amin(dim=-1)
    if width < vocab_size and not requests[0].params.top_k:  # CPU, see _candidates: did the likeliest have the mass?
        short = (reached[:, -1:] < needed).flatten().nonzero().flatten().tolist()
        if short:
            chosen[short] = _sample_cut(scaled[short], [requests[row] for row in short], vocab_size)
    return chosen


def _sorted_ids(values: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [R, count]: ids of the largest of float32 values [R, n], largest first, equal ones by lowest id.

    torch.topk promises no order among equals, so the key is made unique: the float's bits, put in order, then the id.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    keys = (ordered << 32) + (_ID_MASK - torch.arange(values.shape[1], device=values.device))
    return _ID_MASK - (keys.topk(count, dim=-1).values & _ID_MASK)


def _min_p_bounds(requests: Sequence[SampleRequest], scaled: torch.Tensor) -> torch.Tensor:
    """[R, 1]: log(min_p), since the likeliest token's scaled logit is 0."""
    return _column([math.log(r.params.min_p) if r.params.min_p > 0 else -math.inf for r in requests], scaled)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    """[R, 1] of the dtype and on the device of `like`."""
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True).unsqueeze(1)


def _take(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows, ascending; the tensor itself when they are all of them."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor.index_select(0, torch.tensor(rows).to(tensor.device, non_blocking=True))
