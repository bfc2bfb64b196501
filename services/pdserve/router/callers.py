"""Who calls: the key that a call shows, and what that one may do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from pdserve.core.errors import ConfigError, PermissionDenied, Unauthenticated
from pdserve.router.models import Models, ServedModel
from pdserve.rpc.api_keys import ApiKey, KeyRing, read_keys, shown_key
from pdserve.rpc.tenant import ANONYMOUS, TENANT, check_tenant

log = structlog.get_logger(__name__)

# One stream for the requests of many: each of them shows a key of its own.
OF_MANY = "/pdserve.v1.InferenceService/Multiplex"


@dataclass(frozen=True, slots=True)
class Caller:
    """One call's. `key` None: keys are not asked for, and whoever reaches the router may do everything."""

    key: ApiKey | None = None

    def tenant(self, metadata: Mapping[str, str]) -> str:
        """Whom its requests are accounted to. An admin's key may speak for anybody, as a proxy does that knows who its
        users are. Raises InvalidRequest for a name that is none, PermissionDenied for another than its own."""
        said = check_tenant(metadata.get(TENANT, ANONYMOUS))
        if self.key is None:
            return said
        if said not in (ANONYMOUS, self.key.account) and not self.key.admin:
            raise PermissionDenied(f"{TENANT}: this key is not of tenant {said!r}")
        return said or self.key.account

    @property
    def sees(self) -> str | None:
        """The tenant of whose requests it is told; None: of everybody's."""
        return None if self.key is None or self.key.admin else self.key.account

    def may_use(self, model: str) -> bool:
        return self.key is None or self.key.models is None or model in self.key.models

    def model(self, name: str, models: Models) -> ServedModel:
        """The one of `models` that is meant by `name`, where empty is the only one that it may use. Raises
        UnknownModel, which names none of the others, and PermissionDenied, for models that there are and others alike.
        """
        if self.key is None:
            return models.get(name)
        if name and not self.may_use(name):
            raise PermissionDenied(f"this key is not for the model {name!r}")
        return Models(model for model in models if self.may_use(model.name)).get(name)


ANYBODY = Caller()


class KeyMeter(Protocol):
    """Who counts what goes wrong with keys."""

    def unauthenticated(self) -> None: ...
    def keys_unreadable(self) -> None: ...


class Callers:
    """Tells callers by their keys. The file is read again whenever it is another one, before the next call is judged;
    one that cannot be read changes nothing, which is logged and counted."""

    def __init__(self, path: Path | None, meter: KeyMeter | None = None) -> None:
        """None: keys are not asked for. Raises ConfigError for a file that cannot be read."""
        self._path = path.expanduser() if path else None
        self._meter = meter
        self._seen = self._stamp()
        self._ring = read_keys(self._path) if self._path else KeyRing(keys=())
        self._reading = asyncio.Lock()

    async def of(self, metadata: Mapping[str, str]) -> Caller:
        """Who shows this. Raises Unauthenticated."""
        if self._path is None:
            return ANYBODY
        if self._stamp() != self._seen:
            async with self._reading:
                await self._read(self._path)
        shown = shown_key(metadata)
        key = self._ring.find(shown) if shown else None
        if key is None:
            if self._meter is not None:
                self._meter.unauthenticated()
            what = "that key is not known here" if shown else "no API key: show one as authorization: Bearer KEY"
            raise Unauthenticated(what)
        return Caller(key)

    async def check(self, method: str, metadata: Mapping[str, str]) -> None:
        """For a Guard: every call shows a key. Raises Unauthenticated."""
        if method != OF_MANY:
            await self.of(metadata)

    async def _read(self, path: Path) -> None:
        stamp = self._stamp()
        if stamp == self._seen:
            return  # somebody has, while this call waited
        try:
            self._ring = await asyncio.to_thread(read_keys, path)
            log.info("api_keys_read", keys=len(self._ring.keys))
        except ConfigError as error:
            log.error("api_keys_unreadable", error=str(error), keys=len(self._ring.keys))
            if self._meter is not None:
                self._meter.keys_unreadable()
        self._seen = stamp  # from before it was read: what was written meanwhile is read by the next

    def _stamp(self) -> tuple[int, ...]:
        """Another one for another file; empty where there is none. A look takes about a microsecond."""
        try:
            status = self._path.stat() if self._path else None
        except OSError:
            return ()
        return (status.st_ino, status.st_size, status.st_mtime_ns) if status else ()
