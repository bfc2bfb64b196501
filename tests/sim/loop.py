"""An event loop in virtual time whose callbacks belong to simulated processes, which may be stopped.

Nothing waits: where nothing is ready the clock jumps to the next timer. Callbacks run in the order in which they were
scheduled, as asyncio has it; what a seed changes is when messages come.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import selectors
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any

PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class Stuck(AssertionError):
    """Somebody waits for what nobody will ever do."""


class Process:
    """One process: the tasks and timers that were made in it. It is `alive` until it is killed. `check` is called after
    each message that came to it."""

    def __init__(self, name: str, check: Callable[[], None] = lambda: None) -> None:
        self.name, self.check = name, check
        self.alive = True
        self.stopped = False
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self._parked: list[asyncio.Handle] = []
        with self.entered():
            self.context = contextvars.copy_context()

    @contextmanager
    def entered(self) -> Generator[None]:
        """Tasks and timers that are made in this scope are this process's."""
        token = PROCESS.set(self)
        try:
            yield
        finally:
            PROCESS.reset(token)

    def stop(self) -> None:
        """SIGSTOP: from now on nothing runs here."""
        self.stopped = True

    def go_on(self, loop: VirtualLoop) -> None:
        """SIGCONT: everything that was due meanwhile is due now, in its order."""
        self.stopped = False
        parked, self._parked = self._parked, []
        for handle in parked:
            loop._ready.append(handle)

    def kill(self, loop: VirtualLoop) -> None:
        """SIGKILL. What its tasks do on their way out reaches nobody: whoever carries messages asks `alive`."""
        self.alive = False
        self.go_on(loop)
        for task in list(self.tasks):
            task.cancel()

    def park(self, handle: asyncio.Handle) -> None:
        self._parked.append(handle)


class _Handle(asyncio.Handle):
    def _run(self) -> None:
        _run_or_park(self, super()._run)


class _TimerHandle(asyncio.TimerHandle):
    def _run(self) -> None:
        _run_or_park(self, super()._run)


def _run_or_park(handle: asyncio.Handle, run: Callable[[], object]) -> None:
    process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
    if process is not None and process.stopped:
        process.park(handle)
    elif not handle.cancelled():  # since it was parked
        run()


class _NoFiles(selectors.BaseSelector):
    """Nothing is ever read or written: a wait is a jump of the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._files: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._files[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)  # the loop's own wake-up socket
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("nothing is ready, and no timer is set")
        self.now += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._files


class VirtualLoop(asyncio.SelectorEventLoop):
    """`after_each` runs behind every round of callbacks."""

    def __init__(self) -> None:
        self._clock = _NoFiles()
        super().__init__(self._clock)
        self.set_task_factory(_owned)
        self.problems: list[str] = []
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._clock.now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[has-type]
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> Any:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[has-type]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _note(self, loop: asyncio.AbstractEventLoop, about: dict[str, Any]) -> None:
        self.problems.append(f"{about.get('message')}: {about.get('exception')!r} {about.get('task') or ''}")


def _owned(loop: asyncio.AbstractEventLoop, coroutine: Any, *, context: Context | None = None, **more: Any) -> Any:
    """A task of the process that makes it, also where it is given a context of its own."""
    process = PROCESS.get()
    if context is not None and context.get(PROCESS) is None:
        context.run(PROCESS.set, process)
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context, **more)
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda done: process.tasks.pop(done, None))
    return task


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> VirtualLoop:
    """Run `main` to its end in a loop of its own, which is closed then."""
    loop = VirtualLoop()
    try:
        loop.run_until_complete(main(loop))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return loop
