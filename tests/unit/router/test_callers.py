"""Callers: who they are by their keys, what they may do, and a file of keys that changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from pdserve.core.errors import ConfigError, InvalidRequest, PermissionDenied, Unauthenticated, UnknownModel
from pdserve.core.sampling import SamplingParams
from pdserve.router.callers import ANYBODY, OF_MANY, Caller, Callers
from pdserve.router.models import Models, ServedModel
from pdserve.rpc.api_keys import ApiKey, bearer, new_key

SERVED = Models(
    ServedModel(name, Path(name), frozenset({name}), cast(Any, None), SamplingParams(), ()) for name in ("a", "b")
)


class Heard:
    def __init__(self) -> None:
        self.strangers = self.unreadable = 0

    def unauthenticated(self) -> None:
        self.strangers += 1

    def keys_unreadable(self) -> None:
        self.unreadable += 1


class File:
    """A file of keys that anybody may write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *entries: str) -> None:
        self.path.write_text("keys:\n" + "".join(entries) if entries else "keys: []\n")


def caller(**fields: object) -> Caller:
    return Caller(ApiKey.model_validate({"name": "alice", "sha256": "0" * 64, **fields}))


async def test_who_shows_a_key_is_known_by_it(tmp_path: Path) -> None:
    (alice, first), (bob, second) = new_key("alice"), new_key("bob")
    file, heard = File(tmp_path / "keys"), Heard()
    file.write(first, second)
    callers = Callers(file.path, heard)
    for key, name in ((alice, "alice"), (bob, "bob")):
        found = await callers.of(dict(bearer(key)))
        assert found.key is not None and found.key.name == name
    for metadata in ({}, dict(bearer("pds-nobodys")), {"authorization": f"Basic {alice}"}):
        with pytest.raises(Unauthenticated):
            await callers.of(metadata)
        with pytest.raises(Unauthenticated):
            await callers.check("/pdserve.v1.InferenceService/ListModels", metadata)
        await callers.check(OF_MANY, metadata)
    assert heard.strangers == 6


async def test_without_a_file_nobody_is_asked() -> None:
    assert await Callers(None).of({}) is ANYBODY
    assert ANYBODY.tenant({"x-tenant-id": "any"}) == "any" and ANYBODY.sees is None and ANYBODY.may_use("a")


async def test_a_changed_file_holds_from_the_next_call_on(tmp_path: Path) -> None:
    (alice, first), (bob, second) = new_key("alice"), new_key("bob")
    file = File(tmp_path / "keys")
    file.write(first)
    callers = Callers(file.path)
    file.write(second, second.replace("bob", "bob too").replace("sha256: ", "sha256: '" + "0" * 64 + "' #"))
    found = await asyncio.gather(*(callers.of(dict(bearer(bob))) for _ in range(20)))
    assert {one.key.name for one in found if one.key} == {"bob"}
    with pytest.raises(Unauthenticated):
        await callers.of(dict(bearer(alice)))


@pytest.mark.parametrize("broken", ["keys: [", "keys: [{name: a}]", None])
async def test_a_file_that_cannot_be_read_changes_nothing_and_is_counted_once(
    tmp_path: Path, broken: str | None
) -> None:
    (alice, first), (bob, second) = new_key("alice"), new_key("bob")
    file, heard = File(tmp_path / "keys"), Heard()
    file.write(first)
    callers = Callers(file.path, heard)
    if broken is None:
        file.path.unlink()
    else:
        file.path.write_text(broken)
    for _ in range(3):
        assert (await callers.of(dict(bearer(alice)))).key is not None
    assert heard.unreadable == 1
    file.write(first, second)
    assert (await callers.of(dict(bearer(bob)))).key is not None


async def test_a_call_that_is_cancelled_while_the_file_is_read_leaves_it_to_the_next(tmp_path: Path) -> None:
    (_, first), (bob, second) = new_key("alice"), new_key("bob")
    file = File(tmp_path / "keys")
    file.write(first)
    callers = Callers(file.path)
    file.write(first, second)
    asking = asyncio.create_task(callers.of(dict(bearer(bob))))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert (await callers.of(dict(bearer(bob)))).key is not None


def test_a_file_that_cannot_be_read_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        Callers(tmp_path / "nothing")


def test_the_tenant_is_the_key_s() -> None:
    assert caller().tenant({}) == "alice" == caller().sees
    assert caller(tenant="team").tenant({"x-tenant-id": "team"}) == "team"
    with pytest.raises(PermissionDenied, match="'team'"):
        caller().tenant({"x-tenant-id": "team"})
    with pytest.raises(InvalidRequest):
        caller(admin=True).tenant({"x-tenant-id": "x" * 129})


def test_an_admin_may_speak_for_anybody_and_sees_all() -> None:
    admin = caller(admin=True)
    assert admin.tenant({"x-tenant-id": "team"}) == "team" and admin.tenant({}) == "alice" and admin.sees is None


def test_a_key_for_some_models() -> None:
    some = caller(models=["b", "c"])
    assert some.model("b", SERVED).name == "b" == some.model("", SERVED).name == caller().model("b", SERVED).name
    for name in ("a", "nothing"):  # whether it is there is not told
        with pytest.raises(PermissionDenied, match=f"'{name}'"):
            some.model(name, SERVED)
    for name, who, told in (("c", some, "b"), ("", caller(models=["c"]), ""), ("", caller(), "a, b")):
        with pytest.raises(UnknownModel, match=f"served: {told}$"):
            who.model(name, SERVED)
