"""What is made of a dependency audit: a vulnerability fails, a silence is never taken for a clean answer."""

from __future__ import annotations

from typing import Any

import pytest

from scripts import audit

CLEAN: dict[str, Any] = {"name": "idna", "version": "3.20", "vulns": []}
UNKNOWN: dict[str, Any] = {"name": "nobody", "skip_reason": "not found"}
FOUND: dict[str, Any] = {
    "name": "jinja2",
    "version": "2.10",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.11"], "description": ""}],
}


def test_what_is_clean_and_what_is_not() -> None:
    assert audit.judge([CLEAN, CLEAN]) == (2, [])
    assert audit.judge([CLEAN, FOUND]) == (2, ["jinja2 2.10: PYSEC-1, fixed in 2.11"])


def test_an_advisory_that_was_accepted_by_either_name_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "ACCEPTED", {"CVE-1": "that part is not used"})
    assert audit.judge([FOUND]) == (1, [])


def test_a_pin_that_the_database_does_not_know_is_a_problem() -> None:
    assert audit.judge([CLEAN, UNKNOWN]) == (1, ["not found"])


def test_a_database_that_knows_nothing_has_not_said_that_all_is_well() -> None:
    with pytest.raises(audit.NotAudited, match="none of 2 pins"):
        audit.judge([UNKNOWN, UNKNOWN])


@pytest.mark.parametrize(
    ("writes", "raised", "says"),
    [
        ("import sys; sys.exit('requests.exceptions.ConnectionError: nobody')", audit.NotAudited, "cannot be reached"),
        ("import sys; sys.exit('ERROR: a bug')", RuntimeError, "a bug"),
        ("", RuntimeError, "ended with 0"),
    ],
)
def test_how_it_ends_by_itself(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, writes: str, raised: type[Exception], says: str
) -> None:
    """In place of pip-audit a module of its name that does nothing but end so."""
    (tmp_path / "pip_audit.py").write_text(writes)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(raised, match=says):
        audit.ask(["base.txt"])
