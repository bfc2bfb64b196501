"""The bytes that single tokens stand for. A token alone is often no whole character, so that text would lose them."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer


class TokenBytes:
    """Looks tokens up by id, and keeps what it found. Made for vocabularies of byte-level BPE (Llama 3, Qwen, SmolLM)
    and of SentencePiece (Llama 2, Mistral); in others a token's bytes are those of its text alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        kinds = _decoder_kinds(tokenizer)
        self._byte_level = "ByteLevel" in kinds
        self._sentencepiece = bool(kinds & {"ByteFallback", "Metaspace"})
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        """Empty for an id that the tokenizer does not know: a vocabulary may be padded."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def _look_up(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self._byte_level:
            return b"".join(_BYTES.get(character, character.encode()) for character in name)
        if self._sentencepiece:
            byte = _fallback_byte(name)
            return name.replace("\u2581", " ").encode() if byte is None else byte
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """Names of the tokenizer's decoders, those inside of sequences too."""
    if tokenizer.decoder is None:
        return set()
    kinds: set[str] = set()
    left: list[dict[str, Any]] = [json.loads(tokenizer.decoder.__getstate__())]
    while left:
        decoder = left.pop()
        kinds.add(decoder["type"])
        left += decoder.get("decoders", ())
    return kinds


def _fallback_byte(name: str) -> bytes | None:
    """``<0x0A>`` is how SentencePiece names a byte that is no character of its vocabulary."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            return None
    return None


def _byte_table() -> dict[str, bytes]:
    """Byte-level BPE writes each byte as a visible character: printable Latin-1 as itself, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): bytes([byte]) for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTES = _byte_table()
