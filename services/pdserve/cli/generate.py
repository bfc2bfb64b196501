"""`pdserve generate`: one request, streamed as it is generated."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdserve.cli.console import DEFAULT_TARGET, Target, run, say_retry
from pdserve.cli.reach import DEFAULT_CONNECT_TIMEOUT, ConnectTimeout, router
from pdserve.core.errors import InvalidRequest

if TYPE_CHECKING:
    from pdserve.client import Client, Event, EventStream, Finish, Prompt

# For whoever asks from a terminal. The API's own default is all that fit: some models do not end by themselves.
DEFAULT_MAX_TOKENS = 256


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    target: Target = DEFAULT_TARGET,
    model: Annotated[str, typer.Option(help="May be left out where just one is served.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a chat message: use the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each event, a line each.")] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=0, help=f"At most this many new tokens; 0: all that fit. Default: {DEFAULT_MAX_TOKENS}."),
    ] = None,
    min_tokens: Annotated[int | None, typer.Option(min=0, help="No stop before this many.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="In (0, 1].")] = None,
    min_p: Annotated[float | None, typer.Option(help="In [0, 1].")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="In [-2, 2].")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="In [-2, 2].")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 0; 1 is none.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same request, same tokens.")] = None,
    stop: Annotated[list[str], typer.Option(help="End before this text. Repeat for more.")] = [],  # noqa: B006
    stop_token_id: Annotated[list[int], typer.Option(help="End after this token. Repeat for more.")] = [],  # noqa: B006
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="Log-probabilities of each token and of so many likely ones; with --json.")
    ] = None,
    cache_salt: Annotated[str, typer.Option(help="Requests with different salts share no cached KV.")] = "",
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="How long the request may take.")] = None,
    connect_timeout: ConnectTimeout = DEFAULT_CONNECT_TIMEOUT,
) -> None:
    """Generate text and print it as it comes. Ctrl-C cancels the request on the server too."""
    if logprobs is not None and not as_json:
        raise typer.BadParameter("log-probabilities are shown with --json only", param_hint="--logprobs")
    text = sys.stdin.read() if prompt == "-" else prompt
    options = {
        "model": model,
        "max_tokens": DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens or None,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop,
        "stop_token_ids": stop_token_id,
        "ignore_eos": ignore_eos or None,
        "logprobs": logprobs,
        "cache_salt": cache_salt,
        "timeout": timeout,
    }
    asking = router(target, connect_timeout, serving=True, on_retry=say_retry)
    run(_generate(asking, as_prompt(text, chat, system), options, as_json, by_default=max_tokens is None))


def as_prompt(text: str, chat: bool, system: str | None) -> Prompt:
    """The text as it is, or as a conversation."""
    if not chat and system is None:
        return text
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": text}]


async def _generate(
    asking: AbstractAsyncContextManager[Client],
    prompt: Prompt,
    options: dict[str, Any],
    as_json: bool,
    by_default: bool,
) -> None:
    """Print one answer. `by_default`: nobody asked for this max_tokens, so it gives way where it does not fit."""
    from pdserve.client import FinishReason

    async with asking as client:
        try:
            finish = await _print(client.generate(prompt, **options), as_json)
        except InvalidRequest as error:
            if not (by_default and error.field == "stopping.max_tokens"):
                raise
            finish = await _print(client.generate(prompt, **{**options, "max_tokens": None}), as_json)
    if not as_json:
        _write("\n")
    if by_default and finish is not None and finish.reason is FinishReason.LENGTH:
        typer.echo(f"stopped after {finish.usage.completion_tokens} tokens; --max-tokens says how many", err=True)


async def _print(stream: EventStream, as_json: bool) -> Finish | None:
    """Print events as they come, and return the last."""
    from pdserve.client import Finish, Output

    async with stream as events:
        async for event in events:
            if as_json:
                _write(event_json(event) + "\n")
            elif isinstance(event, Output):
                _write(event.text)
            if isinstance(event, Finish):
                return event
    return None


def event_json(event: Event) -> str:
    """One line: {"event": "prompt" | "output" | "finish", ...} with the client's fields; bytes are lists of numbers."""
    kind = {"PromptInfo": "prompt", "Output": "output", "Finish": "finish"}[type(event).__name__]
    return json.dumps({"event": kind, **dataclasses.asdict(event)}, ensure_ascii=False, default=list)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
