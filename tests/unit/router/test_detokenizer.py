"""Incremental decoding equals decoding at once, whatever the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdserve.router.detokenizer import Detokenizer
from tests.tiny_models import write_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def run(tokenizer: Tokenizer, tokens: list[int], skip: bool = True) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.feed(token) for token in tokens]
    return pieces, "".join(pieces) + detokenizer.flush()


def test_a_character_comes_when_its_last_byte_does(tokenizer: Tokenizer) -> None:
    pieces, text = run(tokenizer, list("a€😀".encode()))
    assert pieces == ["a", "", "", "€", "", "", "", "😀"] and text == "a€😀"


def test_the_end_flushes_an_incomplete_character(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, list("a€".encode())[:-1])[1] == tokenizer.decode([97, 0xE2, 0x82])


def test_special_tokens_are_left_out_or_not(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, [97, 258, 98])[1] == "ab"
    assert run(tokenizer, [97, 258, 98], skip=False)[1] == "a<|im_end|>b"


@settings(max_examples=60)
@given(st.text(max_size=30))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert run(tokenizer, list(text.encode("utf-8", "surrogatepass")))[1] == tokenizer.decode(
        list(text.encode("utf-8", "surrogatepass"))
    )


@settings(max_examples=60)
@given(st.lists(st.integers(0, 319), max_size=60))
def test_any_tokens_give_the_text_of_decoding_at_once(tokenizer: Tokenizer, tokens: list[int]) -> None:
    assert run(tokenizer, tokens)[1] == tokenizer.decode(tokens)


@pytest.mark.parametrize("byte", [0xA5, 0xE2, 0xFF, 0xF0])
def test_a_long_run_of_broken_bytes_is_neither_lost_nor_held_for_ever(tokenizer: Tokenizer, byte: int) -> None:
    tokens = [97, *[byte] * 200, 98]
    pieces, text = run(tokenizer, tokens)
    assert text == tokenizer.decode(tokens)
    assert sum(map(len, pieces[:150])) > 100


def test_a_decoder_that_changes_what_it_said_is_recovered_from() -> None:
    # WordPiece's clean-up joins "do" and " n't" to "don't": the text of the first tokens is no prefix of the whole.
    words = {"do": 0, "n't": 1, "x": 2, ".": 3, "[UNK]": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    _, text = run(tokenizer, [2, 0, 1, 3, 2])
    assert text.replace(" ", "") == "xdon't.x"


def test_a_space_survives_a_restart() -> None:
    """A Llama-style decoder strips the first token's space; after broken bytes the next word is not the first."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "\u2581b": 257}
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True)
    llama = Tokenizer(model)
    llama.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = [256, 0xC3, 0xA9, 0xFF, 256, 257]
    _, text = run(llama, tokens)
    assert text == "a\u00e9\ufffda b"
