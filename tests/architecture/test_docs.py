"""The docs are about what is there: every alert has its section, the settings tables are current, names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_each_alert_has_its_section_and_each_section_its_alert() -> None:
    rules = yaml.safe_load((ROOT / "docker" / "prometheus" / "alerts.yml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    page = (ROOT / "docs" / "operations.md").read_text()
    sections = dict(re.findall(r"^### (Pdserve\w+)\n\n(.+?)(?=^#|\Z)", page, flags=re.DOTALL | re.MULTILINE))
    assert sorted(alerts) == sorted(sections)
    assert all(len(text.split()) >= 10 for text in sections.values())


def test_the_settings_tables_are_what_the_models_say() -> None:
    """`scripts/config_reference.py --check` finds no difference."""
    run("scripts/config_reference.py", "--check")


def test_what_the_docs_name_exists() -> None:
    """Commands, options, make targets, links and headings, as `make check` looks them up."""
    run("-m", "scripts.check_docs")


def test_each_kind_of_fault_has_a_test_that_exists_or_a_reason() -> None:
    rows = re.findall(
        r"^\| (?!---|what goes wrong)(.+?) \| (.+) \|$", (ROOT / "docs/faults.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 45
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^(?:async )?def (test_\w+)", code, re.MULTILINE))
    for kind, held in rows:
        tests = re.findall(r"`(test_\w+)`", held)
        assert set(tests) <= there, f"{kind}: {set(tests) - there}"
        assert tests or len(held.split()) >= 8, f"{kind}: neither a test nor a reason"


def run(*arguments: str) -> None:
    result = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
