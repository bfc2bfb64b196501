"""Both Python clients behind one asyncio face, so that one test holds for both."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from pdserve.client import Client, Completion, Event, Model, SyncClient


class AnyClient(ABC):
    """What the tests do with a client."""

    @abstractmethod
    async def complete(self, prompt: Any, **options: Any) -> Completion: ...

    @abstractmethod
    async def models(self, **options: Any) -> list[Model]: ...

    @abstractmethod
    async def take(self, count: int, *, dropped: bool = False, wrong: Exception | None = None) -> list[Event]:
        """Stream up to `count` events of an answer, then leave its block; raising `wrong`, if given, from within it.
        `dropped`: use no block, and forget the stream."""

    @abstractmethod
    async def close(self) -> None: ...


class Asyncio(AnyClient):
    def __init__(self, target: str | list[str], **options: Any) -> None:
        self.client = Client(target, **options)

    async def complete(self, prompt: Any, **options: Any) -> Completion:
        return await self.client.complete(prompt, **options)

    async def models(self, **options: Any) -> list[Model]:
        return await self.client.models(**options)

    async def take(self, count: int, *, dropped: bool = False, wrong: Exception | None = None) -> list[Event]:
        taken: list[Event] = []
        if dropped:
            stream = self.client.generate("hi")
            taken = [await anext(stream) for _ in range(count)]
            del stream
            return taken
        async with self.client.generate("hi") as events:
            async for event in events:
                taken.append(event)
                if len(taken) == count:
                    break
            if wrong is not None:
                raise wrong
        return taken

    async def close(self) -> None:
        await self.client.close()


class Blocking(AnyClient):
    """Each call in a thread of its own, while the server runs on the loop."""

    def __init__(self, target: str | list[str], **options: Any) -> None:
        self.client = SyncClient(target, **options)

    async def complete(self, prompt: Any, **options: Any) -> Completion:
        return await asyncio.to_thread(self.client.complete, prompt, **options)

    async def models(self, **options: Any) -> list[Model]:
        return await asyncio.to_thread(self.client.models, **options)

    async def take(self, count: int, *, dropped: bool = False, wrong: Exception | None = None) -> list[Event]:
        return await asyncio.to_thread(self._take, count, dropped, wrong)

    def _take(self, count: int, dropped: bool, wrong: Exception | None) -> list[Event]:
        taken: list[Event] = []
        if dropped:
            stream = self.client.generate("hi")
            taken = [next(stream) for _ in range(count)]
            del stream
            return taken
        with self.client.generate("hi") as events:
            for event in events:
                taken.append(event)
                if len(taken) == count:
                    break
            if wrong is not None:
                raise wrong
        return taken

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)


KINDS: dict[str, type[AnyClient]] = {"asyncio": Asyncio, "blocking": Blocking}
