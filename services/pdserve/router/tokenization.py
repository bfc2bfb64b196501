"""Text to tokens: the model's own tokenizer and chat template. Long inputs are worked on off the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.router.token_bytes import TokenBytes

# About a millisecond of tokenizing; above it a thread does it (tokenizers lets go of the GIL).
LONG_TEXT = 4096
# Words whose tokens are kept. By itself a tokenizer keeps 10,000, some 3 kB each where they are long and make no sense.
CACHED_WORDS = 2048
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextCodec:
    """A model folder's tokenizer and chat template. Immutable after loading; may be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, special_tokens: Mapping[str, str]) -> None:
        tokenizer.no_truncation()  # both can be left behind in tokenizer.json by training code
        tokenizer.no_padding()
        if (resize := getattr(tokenizer.model, "_resize_cache", None)) is not None:
            resize(CACHED_WORDS)
        self.tokenizer = tokenizer
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None
        self._template_error = "the model has no chat template"
        self._longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        if template is not None:
            try:
                self._template = _environment().from_string(template)
            except jinja2.TemplateError as error:
                # The model still serves plain prompts; only a chat is refused, with the reason.
                self._template_error = f"the model's chat template is broken: {error}"

    @classmethod
    def load(cls, folder: Path) -> TextCodec:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises ModelError naming the file."""
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise ModelError(f"{path}: cannot be read as a tokenizer: {error}") from error
        config = read_json(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        template = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
        special = {name: _token_text(config[name]) for name in _SPECIAL_NAMES if config.get(name) is not None}
        return cls(tokenizer, template, special)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of single tokens, for who asks for them."""
        return TokenBytes(self.tokenizer)

    def require_plausible(self, characters: int, max_tokens: int, field: str) -> None:
        """Raise InvalidRequest for so much text that it cannot be `max_tokens` tokens, before work is spent on it."""
        least = characters // self._longest
        if least > max_tokens:
            raise InvalidRequest(field, f"at least {least} tokens, but max_model_len is {max_tokens}")

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""

        def encode() -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

        return encode() if len(text) < LONG_TEXT else await asyncio.to_thread(encode)

    async def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `tokens`; what is no UTF-8 becomes U+FFFD."""

        def decode() -> str:
            return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

        return decode() if len(tokens) < LONG_TEXT else await asyncio.to_thread(decode)

    async def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as the model's prompt text. Raises InvalidRequest for what its template cannot take."""
        size = sum(len(message["content"]) + len(message["role"]) for message in messages)
        return self._render(messages) if size < LONG_TEXT else await asyncio.to_thread(self._render, messages)

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        if self._template is None:
            raise InvalidRequest("chat", self._template_error)
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except Exception as error:  # a template is a program: it can fail in any way, and the input made it do so
            message = f"the model's chat template refuses them ({type(error).__name__})"
            raise InvalidRequest("chat.messages", message, detail=str(error)) from None  # its text may quote them


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)  # jinja2's own escapes for HTML


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _token_text(token: Any) -> str:
    """A special token, written as a string or as an added token's fields."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file. Raises ModelError for anything else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must hold an object")
    return content
