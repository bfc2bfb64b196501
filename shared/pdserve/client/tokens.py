"""What Tokenize answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tokenization:
    """A prompt's tokens. `token_bytes` has the bytes of each where they were asked for, else nothing."""

    ids: tuple[int, ...]
    max_model_len: int
    token_bytes: tuple[bytes, ...] = ()
