"""Endpoints that know less than this suite's gateway are measured as far as can be, and that is said."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.bench.figures import Figures, Means
from pdserve.bench.prompts import Prompts
from pdserve.bench.runner import Run, Runner
from pdserve.bench.target import Asking, HttpFailure, connect
from pdserve.core.errors import PdserveError
from pdserve.core.slo import SloTargets
from pdserve.simulator.workload import Arrival
from tests.integration.other_endpoint import Answer, endpoint, stream, text_alone

LOOSE = SloTargets(ttft=60.0, itl=60.0, itl_percentile=99.0)


async def run(answer: Answer, *arrivals: Arrival) -> Run:
    """Of an endpoint that behaves well until it was asked who it is."""
    begun = False

    def first_well(body: dict[str, Any]) -> tuple[int, bytes]:
        return answer(body) if begun else (200, b"{}")

    async with endpoint(first_well) as other, connect(other.url, Asking(salt="s")) as target:
        await target.facts()
        begun = True
        return await Runner(target, Prompts(0, range(500)), 60.0).closed_loop(arrivals, 1)


@pytest.mark.parametrize(
    ("refused", "kept"),
    [
        ((), {"return_token_ids", "cache_salt"}),
        (("return_token_ids",), {"cache_salt"}),
        (("cache_salt",), {"return_token_ids"}),
        (("return_token_ids", "cache_salt"), set()),
    ],
)
async def test_fields_that_it_refuses_are_left_out_and_named(refused: tuple[str, ...], kept: set[str]) -> None:
    async with endpoint(text_alone, refused) as other, connect(f"{other.url}/v1/", Asking(salt="s")) as target:
        facts = await target.facts()
        await Runner(target, Prompts(0, range(500)), 60.0).closed_loop([Arrival(0.0, 5, 4)], 1)
    assert (facts.model, facts.max_model_len, facts.vocab_size) == ("other", None, None)
    assert [note.split(":")[0] for note in facts.notes] == [f"this endpoint takes no {name}" for name in refused]
    body = other.asked[-1]
    assert kept == {"return_token_ids", "cache_salt"} & body.keys()
    assert (len(body["prompt"]), body["max_tokens"], body["ignore_eos"], body["temperature"]) == (5, 4, True, 0)
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}


async def test_no_salt_is_sent_where_none_is_wanted() -> None:
    async with endpoint(text_alone) as other, connect(other.url, Asking()) as target:
        await target.facts()
    assert other.asked and not any("cache_salt" in body for body in other.asked)


async def test_an_endpoint_that_must_not_be_asked_so_is_no_target() -> None:
    """Without ignore_eos lengths would not be exact."""
    async with endpoint(text_alone, ["ignore_eos"]) as other, connect(other.url, Asking()) as target:
        with pytest.raises(HttpFailure, match="unknown ignore_eos"):
            await target.facts()


async def test_the_usage_at_the_end_tells_what_was_missed() -> None:
    """Chunks of two tokens that look like one: tokens are counted right, and the gaps that nobody saw are told."""
    found = await run(text_alone, Arrival(0.0, 7, 8), Arrival(0.0, 9, 2))
    assert [(record.error, record.tokens, record.output) for record in found.records] == [(None, 4, 8), (None, 1, 2)]
    figures = Figures.of(found.records, 2.0, LOOSE, Means())
    assert (figures.assumed_tokens, figures.itl_ms.count, figures.output_tokens_per_second) == (5, 3, 5.0)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (429, b'{"error": {"message": "slow down"}}', "HTTP 429: slow down"),
        (500, b"oops", "HTTP 500: oops"),
        (200, stream({"choices": [{"text": "a"}]}, done=False), "UNAVAILABLE: the stream ended without [DONE]"),
        (200, stream({"error": {"message": "lost it"}}), "HTTP 200: lost it"),
        (200, b"data: <html>\n\n", "INTERNAL: what came is no completion chunk"),
        (200, stream({"choices": [{"text": "a"}]}), "WRONG_LENGTH: 3 prompt and 1 answer tokens"),
    ],
)
async def test_what_goes_wrong_is_an_error_by_its_name(status: int, body: bytes, error: str) -> None:
    found = await run(lambda _: (status, body), Arrival(0.0, 3, 2))
    assert found.records[0].error is not None and found.records[0].error.startswith(error)


async def test_a_model_that_it_does_not_list() -> None:
    async with endpoint(text_alone) as other, connect(other.url, Asking(model="mine")) as target:
        with pytest.raises(PdserveError, match="--model must be one of other"):
            await target.facts()


async def test_what_is_told_in_the_chunk_is_believed() -> None:
    """Token ids before anything else; they are what a later turn repeats."""

    def with_ids(body: dict[str, Any]) -> tuple[int, bytes]:
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 3}
        chunks = [{"choices": [{"text": "", "token_ids": [7, 8]}]}, {"choices": [{"text": "abc", "token_ids": [9]}]}]
        return 200, stream(*chunks, {"choices": [], "usage": usage})

    found = await run(with_ids, Arrival(0.0, 5, 3))
    record = found.records[0]
    assert (record.error, list(record.ids), record.tokens) == (None, [7, 8, 9], 3)


async def test_connections_are_used_again() -> None:
    """A new one for each request would be measured along with it."""
    async with endpoint(text_alone) as other, connect(other.url, Asking()) as target:
        await target.facts()
        found = await Runner(target, Prompts(0, range(500)), 60.0).closed_loop([Arrival(0.0, 5, 4)] * 6, 1)
    assert len(other.asked) == 7 and not any(record.error for record in found.records)
    assert other.connections == 1
