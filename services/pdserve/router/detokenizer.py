"""Tokens to text, one at a time, over both phases of a request and over replays: one Detokenizer per answer."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# Bytes that never become a character are held this long, in tokens; decoding them again with each one costs.
_MAX_PENDING = 24
# The longest UTF-8 character, in bytes, and so in tokens.
_MAX_CHARACTER = 4


class Detokenizer:
    """Decodes an answer's tokens incrementally. The prompt is never fed, so that none of it can come out again."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._shown: list[int] = []  # tokens of the last piece of text: decoders look at what stands before
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        """The text that `token` completes; empty while bytes of a character are missing."""
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception as error:  # tokenizers raises bare Exceptions
            if "Invalid prefix encountered" not in str(error):
                raise
            return self._restart(self._pending, [])
        if text is not None:
            self._shown, self._pending = self._pending, []
            return text
        if len(self._pending) >= _MAX_PENDING:
            return self._release_garbage()
        return ""

    def flush(self) -> str:
        """What is left when the answer ends: incomplete characters become U+FFFD."""
        return self._restart(self._pending, [])

    def _release_garbage(self) -> str:
        """Let go of the beginning of what is held, where cutting there changes no character."""
        whole = self._decode(self._pending)
        for keep in range(_MAX_CHARACTER, 2 * _MAX_CHARACTER):
            first, rest = self._pending[:-keep], self._pending[-keep:]
            if self._decode(first) + self._decode(rest) == whole:
                return self._restart(first, rest)
        return ""

    def _restart(self, tokens: list[int], rest: list[int]) -> str:
        """The text of `tokens`, which follow what was shown; a fresh stream goes on with `rest`."""
        before = self._decode(self._shown)
        both = self._decode(self._shown + tokens)
        text = both[len(before) :] if both.startswith(before) else self._decode(tokens)
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._shown, self._pending = tokens or self._shown, rest
        if not self._decode(self._shown).endswith("\ufffd"):  # the stream would hold broken bytes, and show them again
            for token in self._shown:  # shown already: a fresh stream would take the next token for a text's first
                self._stream.step(self._tokenizer, token)
        for token in rest:
            text += self._stream.step(self._tokenizer, token) or ""
        return text

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip) if tokens else ""
