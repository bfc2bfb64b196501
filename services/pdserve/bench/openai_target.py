"""Any endpoint that speaks OpenAI's text completions, as a target: this suite's gateway, vLLM and others.

Prompts go as token ids. What OpenAI's own API lacks is asked for as vLLM names it: `ignore_eos`, without which lengths
would not be exact; `return_token_ids`, which says how many tokens a chunk holds; `cache_salt`. The first request finds
out which of the last two the endpoint refuses, and does without them.

How many tokens a chunk holds, by what it says: its token ids, else its log-probabilities, else the usage so far, else a
chunk with text is one token. The usage at the end then tells what was missed (see `Figures.assumed_tokens`).
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import httpx2
import msgspec

from pdserve.bench.record import Record, Told
from pdserve.bench.target import Asking, Facts, HttpFailure
from pdserve.core.errors import ConfigError, PdserveError, Unavailable

_REFUSED = (400, 422)  # what servers answer to a field that they do not know
_LONGEST = 300  # characters of an error to keep
_DONE = b"[DONE]"


class Logprobs(msgspec.Struct):
    tokens: list[str] | None = None


class Choice(msgspec.Struct):
    text: str | None = ""
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class Chunk(msgspec.Struct):
    """Of a stream, what is needed of it."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class OpenAITarget:
    """One connection pool. Never retries: each refusal is a figure."""

    def __init__(self, url: str, asking: Asking) -> None:
        base = url.rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        headers = {"authorization": f"Bearer {asking.api_key}"} if asking.api_key else {}
        # Deadlines are the caller's. A proxy of the environment would be measured along with the target.
        # Connections are left before servers do, commonly after 5 s: a race with that would be counted as an error.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
        self._http = httpx2.AsyncClient(base_url=base, headers=headers, timeout=None, limits=limits, trust_env=False)
        self._model = asking.model
        self._extras: dict[str, Any] = {"return_token_ids": True}
        if asking.salt:
            self._extras["cache_salt"] = asking.salt
        self._encode = msgspec.json.Encoder(enc_hook=list).encode  # prompts are arrays
        self._decode = msgspec.json.Decoder(Chunk).decode

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def facts(self) -> Facts:
        try:
            reply = await self._http.get("/models")
        except httpx2.HTTPError as error:
            raise Unavailable(f"{self._http.base_url}: {error or type(error).__name__}") from error
        if reply.status_code != 200:
            failure = _failure(reply.status_code, reply.content)
            raise HttpFailure(failure.status, f"{reply.url} answers with status {failure.status}: {failure}")
        try:
            cards = {card["id"]: card for card in reply.json()["data"]}
        except (ValueError, KeyError, TypeError) as error:
            raise PdserveError(f"{reply.url} answers, but lists no models: {error!r}") from error
        if not self._model and len(cards) == 1:
            self._model = next(iter(cards))
        if self._model not in cards:
            raise ConfigError(f"--model must be one of {', '.join(sorted(cards))}")
        length = cards[self._model].get("max_model_len")
        return Facts(self._model, length if isinstance(length, int) else None, notes=await self._negotiate())

    async def ask(self, prompt: Sequence[int], record: Record) -> None:
        body = self._body(prompt, record.arrival.output, self._extras)
        try:
            record.sending()
            async with self._http.stream("POST", "/completions", content=body, headers=_JSON) as reply:
                if reply.status_code != 200:
                    raise _failure(reply.status_code, await reply.aread())
                await self._read(reply.aiter_bytes(), record)
        except httpx2.HTTPError as error:
            raise _unavailable(error) from error

    async def _read(self, data: AsyncIterator[bytes], record: Record) -> None:
        """Note what a stream of server-sent events brings, to its end, so that its connection can be used again. Raises
        PdserveError where it is no whole answer."""
        seen, rest, done = 0, b"", False
        async for part in data:
            now, tokens, ids = record.clock(), 0, list[int]()
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if done or not line.startswith(b"data:"):
                    continue  # comments, names of events, and what parts them
                content = line[5:].strip()
                if content == _DONE:
                    done = True
                    continue
                chunk = self._chunk(content)
                count = _count(chunk, seen)
                seen, tokens = seen + count, tokens + count
                ids += itertools.chain.from_iterable(choice.token_ids or () for choice in chunk.choices)
                if chunk.usage is not None:
                    record.told = _told(chunk.usage)
            record.take(tokens, ids, now)
        if not done:
            raise Unavailable("the stream ended without [DONE]")

    def _chunk(self, content: bytes) -> Chunk:
        try:
            chunk = self._decode(content)
        except msgspec.MsgspecError as error:
            raise PdserveError(f"what came is no completion chunk: {content[:_LONGEST]!r}") from error
        if chunk.error is not None:
            raise _failure(200, content)
        return chunk

    def _body(self, prompt: Sequence[int], tokens: int, extras: dict[str, Any]) -> bytes:
        return self._encode(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **extras,
            }
        )

    async def _negotiate(self) -> tuple[str, ...]:
        """Find out which extra fields the endpoint takes, and say which not. Raises PdserveError where it refuses
        a request without any."""
        names, failure = list(self._extras), HttpFailure(0, "")
        for count in range(len(names), -1, -1):
            for chosen in itertools.combinations(names, count):
                extras = {name: self._extras[name] for name in chosen}
                reply = await self._probe(extras)
                if reply.status_code == 200:
                    self._extras = extras
                    return tuple(
                        f"this endpoint takes no {name}: {_WITHOUT[name]}" for name in names if name not in chosen
                    )
                failure = _failure(reply.status_code, reply.content)
                if reply.status_code not in _REFUSED:
                    raise failure
        raise failure

    async def _probe(self, extras: dict[str, Any]) -> httpx2.Response:
        try:
            return await self._http.post("/completions", content=self._body([_PROBE] * 2, 1, extras), headers=_JSON)
        except httpx2.HTTPError as error:
            raise _unavailable(error) from error


_JSON = {"content-type": "application/json"}
_PROBE = 100  # a token that every vocabulary has
_WITHOUT = {
    "cache_salt": "a prompt of an earlier run may still be cached; change --seed from run to run",
    "return_token_ids": "a chunk counts as one token where it says nothing else, and later turns cannot repeat the "
    "answers of those before",
}


def _count(chunk: Chunk, seen: int) -> int:
    """How many tokens a chunk brings, after `seen`."""
    known = [choice for choice in chunk.choices if choice.token_ids is not None]
    if known:
        return sum(len(choice.token_ids or ()) for choice in known)
    scored = [choice.logprobs.tokens for choice in chunk.choices if choice.logprobs and choice.logprobs.tokens]
    if scored:
        return sum(map(len, scored))
    if not chunk.choices:
        return 0  # the usage at the end: what it counts came before
    if chunk.usage is not None:
        return max(0, chunk.usage.completion_tokens - seen)
    return sum(bool(choice.text) for choice in chunk.choices)


def _told(usage: Usage) -> Told:
    details = usage.prompt_tokens_details
    return Told(usage.prompt_tokens, usage.completion_tokens, (details.cached_tokens or 0) if details else 0)


def _failure(status: int, content: bytes) -> HttpFailure:
    """What an error body says, as OpenAI has it or as it came."""
    try:
        said = msgspec.json.decode(content)
        error = said.get("error", said) if isinstance(said, dict) else said
        message = str(error.get("message", error) if isinstance(error, dict) else error)
    except msgspec.MsgspecError:
        message = content.decode(errors="replace")
    return HttpFailure(status, " ".join(message.split())[:_LONGEST] or "no message")


def _unavailable(error: Exception) -> Unavailable:
    return Unavailable(str(error) or type(error).__name__)
