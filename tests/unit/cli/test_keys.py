"""`pdserve keys new`: an entry for the file on stdout, the key itself on stderr alone."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from pdserve.cli.app import app
from pdserve.rpc.api_keys import read_keys


def test_what_goes_to_the_file_opens_with_what_is_shown(tmp_path: Path) -> None:
    words = ["--models", "a", "--models", "b", "--tenant", "team", "--max-requests", "2", "--tokens-per-minute", "100"]
    result = CliRunner().invoke(app, ["keys", "new", "alice", *words])
    shown = result.stderr.split()[-1]
    (tmp_path / "keys").write_text("keys:\n" + result.stdout)
    key = read_keys(tmp_path / "keys").find(shown)
    assert result.exit_code == 0 and shown not in result.stdout and key is not None
    assert (key.name, key.models, key.tenant, key.max_requests, key.tokens_per_minute, key.admin) == (
        *("alice", {"a", "b"}, "team", 2, 100, False),
    )


def test_a_name_that_cannot_be_one_is_refused() -> None:
    result = CliRunner().invoke(app, ["keys", "new", "\n"])
    assert result.exit_code == 2 and "name" in result.stderr and not result.stdout
