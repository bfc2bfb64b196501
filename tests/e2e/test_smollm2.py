"""The demo model, float32, through router, prefill, link and decode: transformers' own greedy answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.engine.fetch import resolve_model
from pdserve.launch import ModelPart
from tests.integration.suites import serve
from tests.reference import check_greedy

ANSWER = 64
LENGTHS = (1, 2, 5, 15, 16, 17, 40, 63, 64, 65, 100, 128, 200, 255, 256, 257, 500, 900, 1400, 2000)
TEXT = """The river rises in the hills behind the old mill, runs past {n} villages and two market towns, and meets the
sea where the harbour used to be. In the year {n}70 the council of the larger town decided to build a bridge. Who pays
for a bridge? Those who cross it, said the miller; those who own the fields on both sides, said the priest. def
crossing(toll, carts): return toll * carts + {n}. "A bridge is a promise," wrote the schoolteacher, "{n} times over."
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_twenty_prompts_of_up_to_two_thousand_tokens(tmp_path: Path) -> None:
    """Every token is the reference's, but for near-ties (below 1e-4), which are printed; logprobs are within 1e-4."""
    from tokenizers import Tokenizer

    model = resolve_model("smollm2-135m-instruct")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = []
    for number, length in enumerate(LENGTHS):
        text = "".join(TEXT.replace("{n}", str(number * 7 + part)) for part in range(length // 100 + 2))
        prompts.append(tokenizer.encode(text).ids[number : number + length])
        assert len(prompts[-1]) == length
    part = ModelPart(model, "smollm2", prefill=1, decode=1)
    async with serve(tmp_path, part, max_num_batched_tokens=256, kv_cache_memory=1 << 30, max_model_len=4096) as suite:
        answers = await asyncio.gather(
            *(
                suite.client.complete(tokens, temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=0)
                for tokens in prompts
            )
        )
        await suite.assert_all_free()
    ties, worst = 0, 0.0
    for tokens, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == ANSWER
        logprobs = [token.logprob for token in answer.tokens if token.logprob is not None]
        verdict = check_greedy(model, tokens, answer.token_ids, logprobs)
        assert verdict.mismatches == []
        ties, worst = ties + verdict.near_ties, max(worst, verdict.logprob_error)
    print(f"{ties} near-ties in {len(LENGTHS) * ANSWER} tokens, logprobs within {worst:.1e}")
    assert worst < 1e-4
