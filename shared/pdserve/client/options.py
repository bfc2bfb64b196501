"""What can be asked for beside the prompt, said once for both clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypedDict

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages: mappings with role and content."""


class GenerateOptions(TypedDict, total=False):
    """Keyword options of `generate` and `complete`. None, or left out: the model's default. inference.proto has the
    ranges; the router checks them."""

    model: str
    """May be left out where the fleet serves just one."""
    temperature: float | None
    """0 is greedy."""
    top_k: int | None
    top_p: float | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    """By token id."""
    seed: int | None
    """Same seed, same request, same tokens. Left out, the router draws one and tells it in PromptInfo."""
    max_tokens: int | None
    """Left out: as many as the context window leaves."""
    min_tokens: int | None
    stop: str | Sequence[str]
    """The answer ends before the first of these texts."""
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None
    logprobs: int | None
    """Log-probabilities of each token and of this many likely ones; 0: of each token alone."""
    token_bytes: bool | None
    """Tell the bytes that each token stands for: a token alone may be no whole character."""
    skip_special_tokens: bool | None
    request_id: str
    """Stands in logs and traces. Left out, the router makes one and tells it in PromptInfo."""
    priority: int | None
    """Higher goes first."""
    slo_ttft_ms: float | None
    """Time to first token that this request counts as good within; None: the deployment's target."""
    slo_itl_ms: float | None
    """The same for the gaps between its tokens."""
    tenant: str
    """Whom it is accounted to, for fairness and limits; left out: nobody in particular. Sent as x-tenant-id."""
    api_key: str
    """The API key that this request shows; left out: the client's."""
    session_id: str
    cache_salt: str
    """Requests with different salts share no cached KV."""
    timeout: float | None
    """Seconds for the whole answer, retries included. None: the client's own; math.inf: none."""
    traceparent: str
    """W3C trace context; left out: that of the current OpenTelemetry span."""


def check_names(options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that does not exist, as Python does for a keyword: `**options` takes any."""
    known = GenerateOptions.__annotations__
    for name in options.keys() - known.keys():
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"there is no option {name!r}{hint}")
