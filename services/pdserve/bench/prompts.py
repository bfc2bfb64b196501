"""Prompts as token ids, from a seed: of exactly the lengths that are asked for, alike where their block ids are."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path

from pdserve.core.errors import ConfigError
from pdserve.simulator.workload import Arrival

# Special tokens are the first or the last of a vocabulary; without its tokenizer, what is between is plain.
_PLAIN = (1 / 8, 3 / 4)


def plain_ids(vocab_size: int) -> range:
    """Ids that are taken for plain text where nothing but the vocabulary's size is known. Raises ConfigError."""
    first, last = (int(vocab_size * share) for share in _PLAIN)
    if last - first < 2:
        raise ConfigError(f"a vocabulary of {vocab_size} tokens has no plain ones to tell prompts apart by")
    return range(first, last)


def tokenizer_ids(path: Path) -> Sequence[int]:
    """All ids of a tokenizer.json, or of the one in a folder, but the added ones, which special tokens are among.

    Raises ConfigError.
    """
    from tokenizers import Tokenizer  # heavy; few runs need it

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more exact
        raise ConfigError(f"cannot read {file} as a tokenizer: {error}") from error
    added = tokenizer.get_added_tokens_decoder().keys()
    return sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()) - added)


class Prompts:
    """Draws prompts of `ids`. Same seed and same request, same tokens, whatever was drawn before."""

    def __init__(self, seed: int | str, ids: Sequence[int]) -> None:
        self._seed, self._ids = seed, ids
        self._blocks: dict[tuple[int, int], array[int]] = {}

    def first(self, number: int, arrival: Arrival) -> array[int]:
        """The prompt of request `number`: its blocks by their ids, the rest of its own."""
        tokens = array("I")
        for block in arrival.block_ids:
            tokens.extend(self._block(block, arrival.block_tokens))
        return self._exactly(tokens, number, arrival.prompt)

    def next(self, number: int, arrival: Arrival, said: Sequence[int]) -> array[int]:
        """A later turn's: what was `said`, prompts and answers, then new tokens of its own."""
        return self._exactly(array("I", said), number, arrival.prompt)

    def _exactly(self, tokens: array[int], number: int, length: int) -> array[int]:
        del tokens[length:]
        tokens.extend(self._draw(f"request/{number}", length - len(tokens)))
        return tokens

    def _block(self, block: int, length: int) -> array[int]:
        key = (block, length)
        if key not in self._blocks:
            self._blocks[key] = self._draw(f"block/{block}", length)
        return self._blocks[key]

    def _draw(self, name: str, count: int) -> array[int]:
        return array("I", random.Random(f"{self._seed}/{name}").choices(self._ids, k=count))
