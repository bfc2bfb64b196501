"""API keys: made, kept as digests, found again, and never quoted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.policy.limits import Allowance, Whose
from pdserve.rpc.api_keys import KeyRing, bearer, new_key, read_keys, shown_key


def written(folder: Path, text: str) -> Path:
    path = folder / "keys.yaml"
    path.write_text(text)
    return path


def test_a_new_key_is_found_by_what_is_put_into_the_file(tmp_path: Path) -> None:
    """Entries are put below one another, as `pdserve keys new NAME >> FILE` does."""
    alice, first = new_key("alice", ["b", "a", "b"], max_requests=2, tokens_per_minute=100)
    bob, second = new_key("bob", tenant="team", admin=True)
    ring = read_keys(written(tmp_path, f"keys:\n{first}{second}"))
    found = ring.find(alice)
    assert found is not None and (found.name, found.account, found.admin) == ("alice", "alice", False)
    assert found.models == {"a", "b"} and found.allowance == Allowance(2, 100, Whose.KEY)
    assert (other := ring.find(bob)) is not None and (other.account, other.models, other.admin) == ("team", None, True)
    assert alice != bob and alice.startswith("pds-") and len(alice) == 47
    assert alice not in first and hashlib.sha256(alice.encode()).hexdigest() in first


@pytest.mark.parametrize("shown", ["", "pds-", "nobody's", "ß", "\udcff"])
def test_another_key_is_not_found(shown: str) -> None:
    key, _ = new_key("alice")
    ring = KeyRing.model_validate({"keys": [{"name": "alice", "sha256": hashlib.sha256(key.encode()).hexdigest()}]})
    assert ring.find(key) is not None
    assert ring.find(shown) is None and ring.find(key[:-1]) is None and ring.find(key + "x") is None


def test_json_is_taken_too_and_either_spelling(tmp_path: Path) -> None:
    entry = {"name": "a", "sha256": "0" * 64, "max_requests": 1}
    [key] = read_keys(written(tmp_path, json.dumps({"keys": [entry]}))).keys
    assert key.max_requests == 1


DIGEST = "a" * 64


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "valid dictionary"),
        ("keys: 3", "keys"),
        ("keys: [{name: a}]", "keys.0.sha256: Field required"),
        (f"keys: [{{name: a, sha256: {DIGEST}, admn: true}}]", "admn: Extra inputs"),
        (f"keys: [{{name: '', sha256: {DIGEST}}}]", "keys.0.name"),
        (f"keys: [{{name: a, sha256: {DIGEST}, max-requests: 0}}]", "max-requests"),
        (f"keys: [{{name: a, sha256: {DIGEST}}}, {{name: a, sha256: {'b' * 64}}}]", "another key has this name"),
        (f"keys: [{{name: a, sha256: {DIGEST}}}, {{name: b, sha256: {DIGEST}}}]", "another key has this sha256"),
        ("keys: [{name: a, sha256: pds-secret-in-the-wrong-place}]", "keys.0.sha256"),
        ("keys: [{name: a, sha256: pds-secret-in-the-wrong-place", "line "),
    ],
)
def test_what_is_wrong_with_a_file_is_told_and_its_values_are_not(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        read_keys(written(tmp_path, text))
    assert "keys.yaml" in str(error.value) and "pds-secret" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such file"):
        read_keys(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Basic abc", ""),
        ("Bearer", ""),
        ("Bearer two words", ""),
        ("Bearer schlüssel", ""),
        ("Bearer " + "x" * 513, ""),
        ("", ""),
    ],
)
def test_what_a_header_shows(header: str, key: str) -> None:
    assert shown_key({"authorization": header}) == key


def test_what_a_client_shows_is_checked_and_not_quoted() -> None:
    assert bearer("") == () and shown_key(dict(bearer("abc"))) == "abc"
    with pytest.raises(InvalidRequest, match="api_key") as error:
        bearer("geheim ß")
    assert "geheim" not in str(error.value)
