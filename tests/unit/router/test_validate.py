"""The door: what is resolved, and what is refused under which field."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.router.models import ModelFacts, ServedModel, load_model
from pdserve.router.validate import resolve
from pdserve.v1 import inference_pb2 as pb
from tests.tiny_models import write_tiny_tokenizer

FACTS = ModelFacts(max_model_len=64, vocab_size=320)
SEEDED, ONE_TOKEN = pb.SamplingOptions(seed=1), pb.StoppingOptions(max_tokens=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5, "top_k": 7}')
    return load_model("tiny", folder)


def request(text: str = "hello", **fields: Any) -> pb.GenerateRequest:
    made = pb.GenerateRequest(**fields)
    if made.WhichOneof("prompt") is None:
        made.text = text
    return made


async def test_every_value_is_resolved(model: ServedModel) -> None:
    resolved = await resolve(request(sampling=pb.SamplingOptions(top_k=0)), model, FACTS)
    params = resolved.spec.params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 0, 1.0, 59)
    assert resolved.spec.token_ids == tuple(b"hello") and resolved.spec.prompt_len == 5
    assert resolved.spec.eos_token_ids == (258,)
    assert resolved.spec.request_id.startswith("req-") and resolved.skip_special_tokens
    assert resolved.operation == "text_completion"


async def test_zero_is_a_value_and_not_unset(model: ServedModel) -> None:
    sampling = pb.SamplingOptions(temperature=0.0, seed=0)
    params = (await resolve(request(sampling=sampling), model, FACTS)).spec.params
    assert params.greedy and params.seed == 0


async def test_a_seed_is_drawn_once_for_each_request(model: ServedModel) -> None:
    seeds = {(await resolve(request(), model, FACTS)).spec.params.seed for _ in range(4)}
    assert len(seeds) == 4 and all(0 <= seed < 2**64 for seed in seeds)


async def test_a_chat_goes_through_the_template(model: ServedModel) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    resolved = await resolve(request(chat=chat), model, FACTS)
    assert resolved.spec.token_ids[0] == 257 and resolved.operation == "chat"


@pytest.mark.parametrize("length, max_tokens, fits", [(63, None, True), (60, 4, True), (1, 63, True)])
async def test_the_last_token_that_fits(model: ServedModel, length: int, max_tokens: int | None, fits: bool) -> None:
    stopping = pb.StoppingOptions(max_tokens=max_tokens)
    resolved = await resolve(request("x" * length, stopping=stopping), model, FACTS)
    assert resolved.spec.params.max_tokens == (max_tokens or 64 - length)


@pytest.mark.parametrize(
    "bad, field",
    [
        (request(""), "text"),
        (request(token_ids=pb.TokenIds()), "token_ids.ids"),
        (request(token_ids=pb.TokenIds(ids=[1, 320])), "token_ids.ids"),
        (request(chat=pb.Chat()), "chat.messages"),
        (request(chat=pb.Chat(messages=[pb.ChatMessage(content="x")])), "chat.messages[0].role"),
        (request("x" * 64), "text"),
        (request("x" * 10_000), "text"),
        (request(token_ids=pb.TokenIds(ids=[1] * 64)), "token_ids.ids"),
        (request("x" * 60, stopping=pb.StoppingOptions(max_tokens=5)), "stopping.max_tokens"),
        (request(stopping=pb.StoppingOptions(max_tokens=0)), "stopping.max_tokens"),
        (request(stopping=pb.StoppingOptions(max_tokens=2**32 - 1)), "stopping.max_tokens"),
        (request(stopping=pb.StoppingOptions(max_tokens=3, min_tokens=4)), "stopping.min_tokens"),
        (request("x" * 60, stopping=pb.StoppingOptions(min_tokens=5)), "stopping.min_tokens"),
        (request(stopping=pb.StoppingOptions(stop=[""])), "stopping.stop"),
        (request(stopping=pb.StoppingOptions(stop=["x" * 257])), "stopping.stop"),
        (request(stopping=pb.StoppingOptions(stop=["x"] * 17)), "stopping.stop"),
        (request(stopping=pb.StoppingOptions(stop_token_ids=[320])), "stopping.stop_token_ids"),
        (request(sampling=pb.SamplingOptions(temperature=-1)), "sampling.temperature"),
        (request(sampling=pb.SamplingOptions(temperature=float("nan"))), "sampling.temperature"),
        (request(sampling=pb.SamplingOptions(top_p=0)), "sampling.top_p"),
        (request(sampling=pb.SamplingOptions(min_p=2)), "sampling.min_p"),
        (request(sampling=pb.SamplingOptions(repetition_penalty=0)), "sampling.repetition_penalty"),
        (request(sampling=pb.SamplingOptions(logit_bias={320: 1.0})), "sampling.logit_bias"),
        (request(response=pb.ResponseOptions(logprobs=21)), "response.logprobs"),
        (request(request_id="x" * 129), "request_id"),
        (request(request_id="ümlaut"), "request_id"),
        (request(resume=pb.TokenIds(ids=[320]), sampling=SEEDED), "resume.ids"),
        (request(resume=pb.TokenIds(ids=[1] * 60), sampling=SEEDED), "resume.ids"),
        (request(resume=pb.TokenIds(ids=[1, 1]), sampling=SEEDED, stopping=ONE_TOKEN), "resume.ids"),
        (request(resume=pb.TokenIds(ids=[1])), "sampling.seed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_input_names_its_field(model: ServedModel, bad: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await resolve(bad, model, FACTS)
    assert caught.value.field == field


async def test_a_request_without_a_prompt_is_refused(model: ServedModel) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await resolve(pb.GenerateRequest(), model, FACTS)
    assert caught.value.field == "prompt"


async def test_the_length_error_has_both_numbers(model: ServedModel) -> None:
    with pytest.raises(InvalidRequest, match=r"60 tokens and max_tokens 5 .* 64"):
        await resolve(request("x" * 60, stopping=pb.StoppingOptions(max_tokens=5)), model, FACTS)


@pytest.mark.parametrize("named, counts", [(9, 3), (3, 3), (0, 0), (-5, -5)])
async def test_a_priority_counts_up_to_what_is_allowed(model: ServedModel, named: int, counts: int) -> None:
    resolved = await resolve(request(priority=named), model, FACTS, max_priority=3)
    assert resolved.spec.priority == counts


async def test_an_answer_to_go_on_with(model: ServedModel) -> None:
    resume = pb.TokenIds(ids=[97, 98])
    resolved = await resolve(request(resume=resume, sampling=pb.SamplingOptions(temperature=0)), model, FACTS)
    assert (resolved.resumed, resolved.spec.prompt_len, resolved.remaining) == ((97, 98), 5, 57)
    assert bytes(resolved.given) == b"helloab"
    resolved = await resolve(request(resume=resume, sampling=SEEDED), model, FACTS)
    assert resolved.spec.params.seed == 1 and resolved.spec.params.temperature == 0.5
