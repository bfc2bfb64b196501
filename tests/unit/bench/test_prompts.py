"""Prompts are exact in length, alike where their block ids are, and of plain tokens."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from pdserve.bench.prompts import Prompts, plain_ids, tokenizer_ids
from pdserve.core.errors import ConfigError
from pdserve.simulator.workload import Arrival

IDS = range(100, 900)


def test_lengths_and_tokens() -> None:
    """Full blocks, a block in part, and a rest without ids."""
    prompts = Prompts(1, IDS)
    for arrival in (Arrival(0, 8, 1, (1, 2), 4), Arrival(0, 7, 1, (1, 2), 4), Arrival(0, 30, 1, (1, 2), 4)):
        tokens = prompts.first(0, arrival)
        assert len(tokens) == arrival.prompt and set(tokens) <= set(IDS)


def test_equal_ids_are_equal_tokens_and_nothing_else_is() -> None:
    prompts = Prompts(1, IDS)
    one, other = (prompts.first(number, Arrival(0, 80, 1, (7, 8), 32)) for number in (0, 1))
    assert one[:64] == other[:64] and one[64:] != other[64:]
    assert prompts.first(2, Arrival(0, 80, 1, (9, 8), 32))[:32] != one[:32]
    assert Prompts(2, IDS).first(0, Arrival(0, 80, 1, (7, 8), 32))[:32] != one[:32]


def test_same_seed_same_tokens_whatever_came_before() -> None:
    arrival, used = Arrival(0, 50, 1, (3,), 16), Prompts(1, IDS)
    used.first(5, Arrival(0, 90, 1, (1, 2), 16))
    assert used.first(0, arrival) == Prompts(1, IDS).first(0, arrival)


def test_a_later_turn_begins_with_all_that_was_said() -> None:
    """And is as long as it should be even where an answer was cut short."""
    prompts, said = Prompts(1, IDS), array("I", range(20))
    assert prompts.next(3, Arrival(0, 30, 1), said)[:20] == said
    assert len(prompts.next(3, Arrival(0, 30, 1), said[:9])) == 30
    assert prompts.next(3, Arrival(0, 30, 1), said)[20:] != prompts.next(4, Arrival(0, 30, 1), said)[20:]


def test_plain_ids() -> None:
    """Neither the first nor the last of a vocabulary, where special tokens are."""
    assert plain_ids(320) == range(40, 240)
    with pytest.raises(ConfigError, match="no plain ones"):
        plain_ids(2)


def test_a_tokenizer_tells_its_plain_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "b": 2}, unk_token="a"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_ids(tmp_path) == [0, 2] == tokenizer_ids(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="cannot read"):
        tokenizer_ids(tmp_path / "none.json")
