"""API keys: how one is made and shown, and the file that says who has which.

The file has digests and not the keys. A key is 256 random bits, so that nobody finds it from its digest by trying, and
a fast hash, SHA-256, is the right one: slow ones are for what people think of.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.policy.limits import Allowance, Whose
from pdserve.rpc.access import digest_of
from pdserve.rpc.tenant import MAX_TENANT

AUTHORIZATION = "authorization"
PREFIX = "pds-"  # so that people and scanners of repositories know one when they see it
_SCHEME = "bearer "
_BYTES = 32
_MAX_KEY = 512  # characters of what is looked at

_Name = Annotated[str, Field(min_length=1, max_length=MAX_TENANT, pattern=r"^[ -~]+$")]


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=_kebab, validate_by_name=True)


class ApiKey(_Strict):
    """One entry of the file. `models` None: all; `tenant` "": as the key is called."""

    name: _Name
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    models: frozenset[str] | None = None
    tenant: str = Field("", max_length=MAX_TENANT, pattern=r"^[ -~]*$")
    max_requests: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    admin: bool = False

    @property
    def account(self) -> str:
        """The tenant that its requests are of."""
        return self.tenant or self.name

    @property
    def allowance(self) -> Allowance:
        """What all requests with this key may have together."""
        return Allowance(self.max_requests, self.tokens_per_minute, Whose.KEY)


class KeyRing(_Strict):
    """All keys of a file."""

    keys: tuple[ApiKey, ...]
    _digests: tuple[bytes, ...] = PrivateAttr(())

    def model_post_init(self, context: Any) -> None:
        self._digests = tuple(bytes.fromhex(key.sha256) for key in self.keys)

    @model_validator(mode="after")
    def _check_each_once(self) -> Self:
        for what in ("name", "sha256"):
            seen: set[str] = set()
            for key in self.keys:
                if getattr(key, what) in seen:
                    raise ValueError(f"{key.name}: another key has this {what}")
                seen.add(getattr(key, what))
        return self

    def find(self, shown: str) -> ApiKey | None:
        """The entry of a key. Looks at all of them, so that the time it takes tells nothing about any: a fraction of a
        millisecond for a thousand."""
        digest, found = digest_of(shown), None
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(known, digest):
                found = self.keys[index]
        return found


def read_keys(path: Path) -> KeyRing:
    """A YAML or JSON file with a list `keys`. Raises ConfigError, naming the file and what is wrong where."""
    try:
        content = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        told = (isinstance(error, OSError) and error.strerror) or "it is no text"
        raise ConfigError(f"api-keys-file {path}: {told.lower()}") from None
    except yaml.MarkedYAMLError as error:  # without the lines that it quotes
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"api-keys-file {path}: {line}{error.problem or 'it is no YAML'}") from None
    except yaml.YAMLError:
        raise ConfigError(f"api-keys-file {path}: it is no YAML") from None
    try:
        return KeyRing.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"api-keys-file {path}: {'; '.join(_problems(error))}") from None


def new_key(name: str, models: Iterable[str] = (), **limits: Any) -> tuple[str, str]:
    """A key that never was, and its entry in YAML; `limits` are fields of ApiKey. Raises ConfigError."""
    text = PREFIX + secrets.token_urlsafe(_BYTES)
    fields = {"name": name, "sha256": digest_of(text).hex(), **limits}
    if models := sorted(set(models)):
        fields["models"] = models
    said = {_kebab(field): value for field, value in fields.items() if value}
    try:
        ApiKey.model_validate(said)
    except ValidationError as error:
        raise ConfigError("; ".join(_problems(error))) from None
    return text, yaml.safe_dump([said], sort_keys=False, default_flow_style=False)


def check_key(text: str) -> str:
    """`text`, once it is sure that it can be sent. Raises InvalidRequest, which does not quote it."""
    if len(text) > _MAX_KEY or not all("!" <= character <= "~" for character in text):
        raise InvalidRequest("api_key", f"must be one word of at most {_MAX_KEY} printable ASCII characters")
    return text


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """The metadata that shows a key; none for an empty one. Raises InvalidRequest."""
    return ((AUTHORIZATION, f"Bearer {check_key(key)}"),) if key else ()


def shown_key(metadata: Mapping[str, str]) -> str:
    """The key that a call or an HTTP request shows (RFC 6750); empty where it shows none, or something that is none."""
    text = metadata.get(AUTHORIZATION, "")
    if not text.lower().startswith(_SCHEME):
        return ""
    try:
        return check_key(text[len(_SCHEME) :].strip())
    except InvalidRequest:
        return ""


def _problems(error: ValidationError) -> Iterator[str]:
    """What is wrong, without the values: one that was put into the wrong place may be a key."""
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        where = ".".join(map(str, problem["loc"]))
        yield f"{where}: {problem['msg']}" if where else problem["msg"]
