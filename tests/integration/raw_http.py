"""HTTP by hand: requests that no well-behaved client would send, and clients that go away in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Reply:
    """A response; header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The server-sent events of a streamed answer: JSON, and "[DONE]"."""
        texts = [event.removeprefix("data: ") for event in self.body.decode().split("\n\n") if event]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


@asynccontextmanager
async def opened(
    url: str, body: Any = None, headers: Mapping[str, str] = JSON, method: str = ""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which one request was sent: POST with a body, else GET. `body` is JSON, or bytes as they are. An
    empty header is left out."""
    parts = urlsplit(url)
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method or ('GET' if body is None else 'POST')} {parts.path} HTTP/1.1", f"host: {parts.netloc}"]
    fields = {"content-length": str(len(data)), "connection": "close", **headers}
    lines += [f"{name}: {value}" for name, value in fields.items() if value]
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        yield reader, writer
    finally:
        writer.close()


async def ask(url: str, body: Any = None, headers: Mapping[str, str] = JSON, method: str = "") -> Reply:
    """One request and its whole response, at most 60 s later."""
    async with asyncio.timeout(60), opened(url, body, headers, method) as (reader, _):
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    chunked = found.get("transfer-encoding") == "chunked"
    return Reply(int(first.split()[1]), found, _unchunk(rest) if chunked else rest)


def _unchunk(data: bytes) -> bytes:
    """What is there of a chunked body; the last chunk may be missing."""
    whole = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        whole, data = whole + data[:length], data[length + 2 :]
    return whole
