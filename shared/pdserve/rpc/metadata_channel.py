"""A channel whose calls all carry the same metadata.

A wrapper of the multi-callables, and not grpc.aio's interceptors: those put a task and a queue before each stream.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

Metadata = tuple[tuple[str, str], ...]


class MetadataChannel(grpc.aio.Channel):
    """`channel`, with `metadata` in front of what each call says itself."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._channel, self._metadata = channel, metadata

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._with_metadata(self._channel.unary_unary(method, *args, **options))

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._with_metadata(self._channel.unary_stream(method, *args, **options))

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._with_metadata(self._channel.stream_unary(method, *args, **options))

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._with_metadata(self._channel.stream_stream(method, *args, **options))

    def _with_metadata(self, begin: Any) -> Any:
        ours = self._metadata

        def call(*args: Any, metadata: Any = None, **options: Any) -> Any:
            return begin(*args, metadata=(*ours, *(metadata or ())), **options)

        return call

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.__aexit__(kind, error, trace)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()
