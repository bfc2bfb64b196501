"""Transformers as the reference: is an answer what greedy decoding gives, token by token?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

MARGIN = 1e-4  # below this difference of two logits, float32 cannot tell which token is the larger one


@dataclass(frozen=True)
class Verdict:
    """`mismatches` are (index, answered, expected); `near_ties` counts tokens that differ by less than MARGIN."""

    mismatches: list[tuple[int, int, int]]
    near_ties: int
    logprob_error: float


@lru_cache(maxsize=2)
def load_reference(folder: Path) -> Any:
    """The model in float32 on the CPU."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def check_greedy(
    folder: Path, prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float] | None = None
) -> Verdict:
    """Teacher-forced: given the prompt and the answer so far, is each token the reference's most likely one?

    Checking each step against what was really answered keeps one near-tie from making every later token differ.
    """
    model = load_reference(folder)
    tokens = torch.tensor([[*prompt, *answer]])
    logits = model(tokens[:, :-1]).logits[0, len(prompt) - 1 :].float()
    mismatches, near_ties = [], 0
    for index, token in enumerate(answer):
        expected = int(logits[index].argmax())
        if token != expected:
            if float(logits[index, expected] - logits[index, token]) < MARGIN:
                near_ties += 1
            else:
                mismatches.append((index, token, expected))
    error = 0.0
    if logprobs is not None:
        own = logits.log_softmax(-1).gather(1, torch.tensor(list(answer))[:, None])[:, 0]
        error = float((own - torch.tensor(list(logprobs))).abs().max())
    return Verdict(mismatches, near_ties, error)
