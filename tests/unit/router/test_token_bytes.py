"""The bytes of single tokens, in the vocabularies that models come with."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdserve.router.token_bytes import TokenBytes
from tests.tiny_models import SPECIAL_TOKENS, write_tiny_tokenizer


def test_byte_level_tokens_are_their_bytes(tmp_path: Path) -> None:
    """Every byte, and every text: what the tokens of a text stand for is the text."""
    write_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    table = TokenBytes(tokenizer)
    assert [table[byte] for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert table[256] == SPECIAL_TOKENS[0].encode()
    text = "Gr\u00fc\u00dfe \U0001f600\n\t\x00"
    assert b"".join(table[token] for token in tokenizer.encode(text).ids) == text.encode()


@pytest.mark.parametrize("space", [decoders.Replace("\u2581", " "), decoders.Metaspace()], ids=["replace", "metaspace"])
def test_sentencepiece_tokens_have_spaces_and_fallback_bytes(space: decoders.Decoder) -> None:
    vocabulary = {"<unk>": 0, "<0x0A>": 1, "<0xF0>": 2, "\u2581Hello": 3, "w\u00f6rld": 4, "<0xZZ>": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    table = TokenBytes(tokenizer)
    expected = [b"<unk>", b"\n", b"\xf0", b" Hello", "w\u00f6rld".encode(), b"<0xZZ>", b"</s>"]
    assert [table[token] for token in range(7)] == expected


def test_other_vocabularies_and_unknown_ids() -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    table = TokenBytes(tokenizer)
    assert (table[1], table[99]) == (b"two", b"")
