"""Secrets: read from files, compared, and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from pdserve.rpc.access import MIN_SECRET, PLAIN, Secret, access_of, read_secret

TEXT = "a-secret-of-some-length"


def test_a_secret_is_read_without_the_white_space_around_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"\n  {TEXT}\r\n")
    assert read_secret(tmp_path / "secret").text == TEXT
    assert access_of(None) == PLAIN


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "this has 0"),
        (b"x" * (MIN_SECRET - 1) + b"\n" * 9, f"this has {MIN_SECRET - 1}"),
        (b"x" * 5000, "this has 5000"),
        ("geheim" * 5 + "ß", "printable ASCII"),
        (b"two words of some length", "one word"),
        (b"\xff" * 40, "no text"),
        (None, "no such file"),
    ],
)
def test_what_cannot_be_a_secret_is_refused_by_its_file_and_not_quoted(
    tmp_path: Path, content: bytes | str | None, says: str
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=says) as error:
        read_secret(path)
    assert str(path) in str(error.value)
    assert not content or "geheim" not in str(error.value)


@pytest.mark.parametrize("shown", ["", TEXT[:-1], TEXT + "x", TEXT.upper(), "ß", "\udcff"])
def test_only_the_same_text_matches(shown: str) -> None:
    assert Secret(TEXT).matches(TEXT)
    assert not Secret(TEXT).matches(shown)


def test_a_secret_is_in_no_text_about_what_holds_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(TEXT)
    access = access_of(tmp_path / "secret")
    assert access.secret is not None
    assert TEXT not in f"{access} {access!r} {access.secret} {access.secret!r} {vars(type(access.secret))}"
