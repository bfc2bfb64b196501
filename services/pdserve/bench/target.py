"""Who is put under load: one small protocol, whichever API is spoken."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Protocol
from urllib.parse import urlsplit

from pdserve.bench.record import Record
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.rpc.endpoint import parse_endpoint
from pdserve.rpc.errors import status_code


@dataclass(frozen=True, slots=True)
class Facts:
    """What a target says of itself; None: it does not tell. `notes` are what a reader of the figures should know."""

    model: str
    max_model_len: int | None = None
    vocab_size: int | None = None
    gpus: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asking:
    """What goes with every request. `salt`: requests of different salts share no cached KV, so that a run does not find
    the last one's prompts cached; empty: none. `slo_ms`: the targets (TTFT, ITL) that are told to the router."""

    model: str = ""
    salt: str = ""
    slo_ms: tuple[float, float] | None = None
    api_key: str = field(default="", repr=False)


class Target(Protocol):
    """Somebody who answers prompts."""

    async def facts(self) -> Facts:
        """Ask who it is, and find out what it understands. Call it first. Raises PdserveError."""

    async def ask(self, prompt: Sequence[int], record: Record) -> None:
        """Ask greedily for exactly `record.arrival.output` tokens, and note in `record` when it was sent, each token
        that comes, and what the server tells at the end. Raises PdserveError; cancelling cancels the request."""


class HttpFailure(PdserveError):
    """An answer with another status than 200; an error within a stream has the status 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def told(error: PdserveError) -> str:
    """An error as results have it: "CODE: message", gRPC's code or "HTTP 429"."""
    code = f"HTTP {error.status}" if isinstance(error, HttpFailure) else status_code(error).name
    return f"{code}: {error}"


def is_refusal(said: str) -> bool:
    """Whether an error, as `told` has it, is of a target that had no room, or could not keep what it was asked to."""
    return said.startswith(("RESOURCE_EXHAUSTED: ", "HTTP 429: "))


def is_http(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def check_target(text: str) -> str:
    """`text` if it is host:port, grpc://host:port, or http(s)://host[:port][/v1]. Raises ConfigError."""
    if is_http(text):
        if not urlsplit(text).hostname:
            raise ConfigError(f"{text!r} names no host")
    else:
        parse_endpoint(text.removeprefix("grpc://"))
    return text


@asynccontextmanager
async def connect(text: str, asking: Asking) -> AsyncIterator[Target]:
    """The target that `text` names. Raises ConfigError."""
    if is_http(check_target(text)):
        if find_spec("httpx2") is None:
            raise ConfigError("an OpenAI endpoint as the target needs httpx2: pip install 'pdserve[bench]'")
        from pdserve.bench.openai_target import OpenAITarget

        async with OpenAITarget(text, asking) as endpoint:
            yield endpoint
    else:
        from pdserve.bench.router_target import RouterTarget

        async with RouterTarget(text.removeprefix("grpc://"), asking) as router:
            yield router
