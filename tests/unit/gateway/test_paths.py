"""A path that does not exist: what is said about it."""

from __future__ import annotations

import pytest

from pdserve.gateway.app import near_path

KNOWN = ["/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health", "/"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/chat/completion", "/v1/chat/completions"),
    ],
)
def test_the_path_that_is_meant_is_named(path: str, meant: str) -> None:
    assert near_path(path, KNOWN) == f"; did you mean {meant}?"


@pytest.mark.parametrize("path", ["/nowhere", "/v1/embeddings", "/v1/", "/v1", "//", "x" * 200])
def test_nothing_is_guessed(path: str) -> None:
    assert near_path(path, KNOWN) == ""
