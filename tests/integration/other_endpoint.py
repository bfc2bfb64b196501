"""An OpenAI endpoint that is not this suite's, over a real socket: what others refuse, leave out, or get wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[[dict[str, Any]], tuple[int, bytes]]
"""From a request's body to a status and a body."""

CARDS = json.dumps({"object": "list", "data": [{"id": "other", "object": "model"}]}).encode()


def stream(*chunks: Any, done: bool = True) -> bytes:
    """Server-sent events, with line ends as some servers have them."""
    events = [f"data: {json.dumps(chunk)}\r\n\r\n" for chunk in chunks]
    return "".join([": hello\r\n\r\n", *events, "data: [DONE]\r\n\r\n" if done else ""]).encode()


def text_alone(body: dict[str, Any]) -> tuple[int, bytes]:
    """Two tokens in each chunk, as text alone, and the usage at the end."""
    count = body["max_tokens"]
    texts = [{"choices": [{"text": "ab", "finish_reason": None}]} for _ in range(count // 2)]
    end = {"choices": [{"text": "", "finish_reason": "length"}]}
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
    return 200, stream(*texts, end, {"choices": [], "usage": usage})


@dataclass(slots=True)
class Endpoint:
    """`asked` are the bodies that it has answered, over so many `connections`."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0


@asynccontextmanager
async def endpoint(answer: Answer, refused: Collection[str] = ()) -> AsyncIterator[Endpoint]:
    """A body with a field that is `refused` is a 400; a connection serves one request after another."""
    found = Endpoint()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
                data = await reader.readexactly(int(fields.get("content-length", 0)))
                status, content = 200, CARDS
                if data:
                    body = json.loads(data)
                    wrong = sorted(set(refused) & body.keys())
                    if wrong:
                        status, content = 400, json.dumps({"error": {"message": f"unknown {wrong[0]}"}}).encode()
                    else:
                        found.asked.append(body)
                        status, content = answer(body)
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield found
    finally:
        server.close()
