"""An answer's tokens, text and ending, without any worker."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.core.sequence import EndReason
from pdserve.router.answer import Answer, Ending
from pdserve.router.models import ModelFacts, ServedModel, load_model
from pdserve.router.validate import resolve
from pdserve.v1 import inference_pb2 as pb
from tests.tiny_models import write_tiny_tokenizer

FACTS = ModelFacts(max_model_len=64, vocab_size=320)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder)
    return load_model("tiny", folder)


async def run(model: ServedModel, tokens: list[int], **stopping: Any) -> tuple[str, list[int], Ending | None]:
    request = pb.GenerateRequest(text="prompt", stopping=pb.StoppingOptions(**stopping))
    answer = Answer(await resolve(request, model, FACTS))
    text = ""
    ids: list[int] = []
    for token in tokens:
        answer.add(pb.Token(id=token))
        if output := answer.take():
            assert output.index == len(ids)
            text += output.text
            ids += [token.id for token in output.tokens]
        if answer.ending is not None:
            break
    return text, ids, answer.ending


async def test_length_flushes_what_was_held_back(model: ServedModel) -> None:
    text, ids, ending = await run(model, list(b"abST"), max_tokens=4, stop=["STOP"])
    assert (text, len(ids), ending) == ("abST", 4, Ending(EndReason.LENGTH))


async def test_a_stop_token_is_counted_but_not_shown(model: ServedModel) -> None:
    text, ids, ending = await run(model, [97, 98], stop_token_ids=[98])
    assert (text, ids, ending) == ("a", [97, 98], Ending(EndReason.STOP, stop_token_id=98))


async def test_eos_ends_unless_it_is_ignored(model: ServedModel) -> None:
    assert (await run(model, [97, 258, 98]))[1] == [97, 258]
    assert (await run(model, [97, 258, 98], max_tokens=3, ignore_eos=True))[0] == "ab"


async def test_min_tokens_holds_back_tokens_and_strings_alike(model: ServedModel) -> None:
    text, ids, ending = await run(model, list(b"xxyx"), min_tokens=4, stop=["x"])
    assert (text, len(ids)) == ("xxy", 4) and ending == Ending(EndReason.STOP, stop_string="x")
    assert (await run(model, [258, 258, 97], min_tokens=2))[1] == [258, 258]


async def test_a_stop_string_in_the_last_token_counts_as_stop(model: ServedModel) -> None:
    text, _, ending = await run(model, list(b"abc"), max_tokens=3, stop=["bc"])
    assert text == "a" and ending == Ending(EndReason.STOP, stop_string="bc")


async def test_half_a_character_before_the_end_is_not_lost(model: ServedModel) -> None:
    text, _, _ = await run(model, [97, 0xE2, 0x82, 258])
    assert text.startswith("a") and "\N{REPLACEMENT CHARACTER}" in text


async def test_the_prompt_never_comes_out(model: ServedModel) -> None:
    text, _, _ = await run(model, list("€".encode()), max_tokens=3)
    assert text == "€"


@pytest.mark.parametrize(
    "tokens, stopping",
    [
        (list("ab ST€é xSTOPy".encode()), {"stop": ["STOP", "b S"], "min_tokens": 5}),
        ([97, 0xE2, 0x82, 98, 0xE2, 258], {}),
        ([*"a€".encode(), 258, 258, 98], {"min_tokens": 6, "max_tokens": 7}),
    ],
    ids=["stop strings", "broken characters", "min_tokens"],
)
async def test_a_resumed_answer_is_the_undisturbed_one(
    model: ServedModel, tokens: list[int], stopping: dict[str, Any]
) -> None:
    """Wherever it broke off: the same text in the same places, the same end."""
    request = pb.GenerateRequest(text="prompt", stopping=pb.StoppingOptions(**stopping))

    async def tell(begin: int) -> tuple[list[tuple[int, str]], Ending | None]:
        answer = Answer(await resolve(request, model, FACTS))
        answer.resume(tuple(tokens[:begin]))
        assert answer.take() is None and answer.num_tokens == begin
        told: list[tuple[int, str]] = []
        for token in tokens[begin:]:
            if answer.ending is None:
                answer.add(pb.Token(id=token))
                output = answer.take()
                assert output is not None
                told.append((output.index, output.text))
        return told, answer.ending

    whole, ending = await tell(0)
    for begin in range(len(whole) + 1):
        assert await tell(begin) == (whole[begin:], ending)
    with pytest.raises(InvalidRequest, match=rf"the answer ends with token {len(whole)} of the {len(whole) + 1}"):
        Answer(await resolve(request, model, FACTS)).resume((*tokens[: len(whole)], 97))
