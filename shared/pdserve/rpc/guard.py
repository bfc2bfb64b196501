"""Who may call a server at all: asked before a message is read, for each method but health.

Whatever is added to a server later is guarded too. A refusal is not logged: anybody who reaches the port could fill a
disk with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from pdserve.core.errors import PdserveError, Unauthenticated
from pdserve.rpc.access import INTERNAL, Secret
from pdserve.rpc.errors import abort

if TYPE_CHECKING:  # generic for type checkers alone
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]

OPEN = "/grpc.health.v1.Health/"  # for probes, which have nothing to show
Check = Callable[[str, Mapping[str, str]], Awaitable[None]]
"""Takes a method ("/pdserve.v1.WorkerService/Watch") and its call's metadata. Raises PdserveError to refuse."""


class Guard(grpc.aio.ServerInterceptor):
    """Asks `check` for every call."""

    def __init__(self, check: Check) -> None:
        self._check = check

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method
        if not method.startswith(OPEN):
            try:
                await self._check(method, texts(handler_call_details.invocation_metadata))
            except PdserveError as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def texts(metadata: Any) -> dict[str, str]:
    """A call's metadata without what is bytes; of a name that is said again the last one counts."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def fleet_only(secret: Secret) -> Check:
    """Lets in who shows `secret`."""

    async def check(method: str, metadata: Mapping[str, str]) -> None:
        shown = metadata.get(INTERNAL)
        if shown is None:
            raise Unauthenticated("this service answers its own fleet alone, and the call shows no internal secret")
        if not secret.matches(shown):
            raise Unauthenticated("the internal secret that the call shows is not the one of this fleet")

    return check


def _refusing(error: PdserveError) -> Handler:
    """A handler that ends any call with `error`. As a stream's, which reads nothing: on the wire all kinds are one."""

    async def refuse(requests: Any, context: Context) -> NoReturn:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
