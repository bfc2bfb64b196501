"""A router that is not up yet: commands wait for it a little, and say so, instead of failing at once."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdserve.rpc.access import Access, access_of
from pdserve.rpc.endpoint import parse_endpoint
from pdserve.rpc.tls import Tls

if TYPE_CHECKING:
    from pdserve.client import Client

ConnectTimeout = Annotated[
    float, typer.Option(min=0.0, metavar="SECONDS", help="How long to wait for a router that is not up yet.")
]
DEFAULT_CONNECT_TIMEOUT = 10.0
TLS: ContextVar[Tls | None] = ContextVar("tls", default=None)
"""Of the command that runs; set once, before it."""
InternalSecretFile = Annotated[
    Path | None,
    typer.Option(
        envvar="PDSERVE_INTERNAL_SECRET_FILE",
        show_envvar=True,
        help="File with the fleet's secret: this command asks workers themselves.",
    ),
]
SAY_AFTER = 1.0  # seconds; a router that is there answers sooner
_BETWEEN = 0.2  # seconds between two tries: nothing tells when a port opens
_SERVICE = "pdserve.v1.InferenceService"


@asynccontextmanager
async def router(
    target: str, connect_timeout: float = DEFAULT_CONNECT_TIMEOUT, *, serving: bool = False, **options: Any
) -> AsyncIterator[Client]:
    """A client of the router at `target`, with `options` and the key that PDSERVE_API_KEY has, once it listens;
    `serving`: once it has workers, too.

    After `connect_timeout` seconds it comes anyway: the call that follows says what is wrong.
    """
    from pdserve.client import Client

    await _wait(target, connect_timeout, serving)
    async with Client(target, api_key=own_api_key(), tls=own_tls(), **options) as client:
        yield client


def own_api_key() -> str:
    """The key of whoever runs this command. In a variable, because everybody on a machine sees its command lines."""
    return os.environ.get("PDSERVE_API_KEY", "")


def own_tls() -> Tls | None:
    """What `pdserve --tls-ca-file ...` says; None: no TLS."""
    return TLS.get()


def own_access(internal_secret_file: Path | None) -> Access:
    """What this command shows to workers. Raises ConfigError."""
    return access_of(internal_secret_file, own_tls())


async def _wait(target: str, seconds: float, serving: bool) -> None:
    said = asyncio.get_running_loop().call_later(SAY_AFTER, lambda: typer.echo(f"waiting for {target} ...", err=True))
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await _listening(target)
                if serving:
                    await _serving(target)
    finally:
        said.cancel()


async def _listening(target: str) -> None:
    """Until somebody takes connections there. A name that means nothing is not waited for."""
    host, port = parse_endpoint(target)
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except socket.gaierror:
            return
        except OSError:
            await asyncio.sleep(_BETWEEN)
        else:
            writer.close()
            return


async def _serving(target: str) -> None:
    """Until the router says that it serves. Who says anything else than "not yet" is not waited for."""
    import grpc.aio
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pdserve.rpc.channel import connect

    async with connect(target, Access(tls=own_tls())) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=_SERVICE))
        try:
            async for response in call:
                if response.status != health_pb2.HealthCheckResponse.NOT_SERVING:
                    return
        except grpc.aio.AioRpcError:
            return
        finally:
            call.cancel()
