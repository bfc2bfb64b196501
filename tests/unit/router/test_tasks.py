"""Tasks that end together, and a cancel that is never lost."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.core.errors import Unavailable
from pdserve.router.tasks import meanwhile, until_first_ends


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("forever")


async def fail() -> None:
    raise Unavailable("gone")


async def cancelled_by_itself() -> None:
    raise asyncio.CancelledError


async def test_the_first_end_ends_all_and_is_raised() -> None:
    ended: list[str] = []
    with pytest.raises(Unavailable, match="gone"):
        await until_first_ends(forever(ended), fail())
    assert ended == ["forever"]


async def test_a_call_that_was_cancelled_locally_is_no_cancel_of_the_caller() -> None:
    with pytest.raises(Unavailable):
        await until_first_ends(forever([]), cancelled_by_itself())


async def test_failures_leave_no_cancel_behind() -> None:
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(Unavailable):
        await until_first_ends(forever([]), fail())
    assert task.cancelling() == 0


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancel_comes_through_at_whatever_moment_a_child_fails(turns: int) -> None:
    trigger = asyncio.Event()

    async def fail_later() -> None:
        await trigger.wait()
        raise Unavailable("gone")

    async def reconnecting() -> None:
        while True:
            try:
                await until_first_ends(forever([]), fail_later())
            except Unavailable:
                await asyncio.Event().wait()

    task = asyncio.create_task(reconnecting())
    await asyncio.sleep(0)
    trigger.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=1)
    assert done and task.cancelled()


async def test_meanwhile_is_waited_for_and_tells_of_failure() -> None:
    ended: list[str] = []

    async def work(name: str) -> str:
        await asyncio.sleep(0)
        ended.append(name)
        return name

    async with meanwhile(work("a")) as future:
        assert ended == []
    assert (ended, future.result()) == (["a"], "a")

    with pytest.raises(RuntimeError, match="inside"):
        async with meanwhile(work("b")):
            raise RuntimeError("inside")
    assert ended == ["a", "b"]

    async def fail() -> None:
        raise ValueError("meanwhile")

    with pytest.raises(ValueError, match="meanwhile"):
        async with meanwhile(fail()):
            pass


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "while it is waited for"])
async def test_a_cancelled_scope_ends_what_goes_on_meanwhile(inside: bool) -> None:
    never, reached = asyncio.Event(), asyncio.Event()
    futures: list[asyncio.Future[bool]] = []

    async def scope() -> None:
        async with meanwhile(never.wait()) as future:
            futures.append(future)
            reached.set()
            if inside:
                await asyncio.Event().wait()

    task = asyncio.create_task(scope())
    await reached.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert futures[0].cancelled()
