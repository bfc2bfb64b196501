"""Errors as OpenAI's clients know them: an HTTP status and `{"error": {message, type, param, code}}`.

The status follows from the gRPC code; `param` is the name that the client used, not the router's field path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import grpc
import msgspec
from starlette.responses import Response

from pdserve.core.errors import (
    InvalidRequest,
    NoCapacity,
    PdserveError,
    TenantLimited,
    TooLate,
    Unavailable,
    UnknownModel,
    UnknownRequest,
)
from pdserve.rpc.errors import status_code

# What clients of a service that is starting, draining or restarting should wait, in seconds.
UNAVAILABLE_RETRY = 1.0
_INVALID, _SERVER = "invalid_request_error", "server_error"
# gRPC code -> status, type, code.
_STATUS: dict[grpc.StatusCode, tuple[int, str, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, _INVALID, "invalid_value"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error", "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error", "permission_denied"),
    grpc.StatusCode.NOT_FOUND: (404, _INVALID, "model_not_found"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "no_capacity"),
    grpc.StatusCode.UNAVAILABLE: (503, _SERVER, "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, _SERVER, "timeout"),
}
# Of the 429s, those that have a code of their own.
_REFUSED: dict[type[PdserveError], str] = {TenantLimited: "rate_limit_exceeded", TooLate: "too_late"}
_INTERNAL = (500, _SERVER, "internal_error")
_GROUP = re.compile(r"^(sampling|stopping|response|chat)\.")


class ApiError(Exception):
    """A refusal. `retry_after` is in seconds; None: trying the same again is pointless, or nobody knows when."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The response's JSON, and a failed stream's last event."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds, as HTTP has it, and in milliseconds, which OpenAI's clients prefer; for a 401
        how to show a key."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.retry_after is None:
            return {}
        milliseconds = max(1, math.ceil(self.retry_after * 1000))
        return {"retry-after": str(math.ceil(milliseconds / 1000)), "retry-after-ms": str(milliseconds)}


def loggable(error: ApiError) -> dict[str, Any]:
    """What a log may say of `error`: of a mistake of the client's not the words, which may quote its prompt."""
    fields: dict[str, Any] = {"status": error.status, "param": error.param, "code": error.code}
    return fields if 400 <= error.status < 429 else {**fields, "error": error.message}


def error_response(error: ApiError) -> Response:
    """`error` as OpenAI's clients expect it."""
    body = msgspec.json.encode(error.body())
    return Response(body, error.status, error.headers(), media_type="application/json")


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """A 400 for one parameter."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def internal() -> ApiError:
    """A 500 that says nothing about the inside; the log does."""
    status, kind, code = _INTERNAL
    return ApiError(status, "something went wrong in the gateway; its log says what", kind=kind, code=code)


def from_pdserve(error: PdserveError, renames: Mapping[str, str] | None = None) -> ApiError:
    """The router's refusal. `renames` maps its field paths (without their group) to the parameters they came from."""
    grpc_code = status_code(error)
    status, kind, code = _STATUS.get(grpc_code, _INTERNAL)
    if isinstance(error, InvalidRequest):
        return invalid(_param(error.field, renames or {}), error.message)
    if isinstance(error, UnknownModel):
        return ApiError(status, str(error), kind=kind, param="model", code=code)
    if isinstance(error, UnknownRequest):
        return ApiError(status, str(error), kind=kind, param="request_id", code="request_not_found")
    retry = error.retry_after if isinstance(error, NoCapacity | Unavailable) else None
    if status in (429, 503) and retry is None:
        retry = UNAVAILABLE_RETRY
    return ApiError(status, str(error), kind=kind, code=_REFUSED.get(type(error), code), retry_after=retry)


def _param(field: str, renames: Mapping[str, str]) -> str | None:
    """``sampling.top_p`` is top_p, ``chat.messages[0].role`` messages[0].role; what is no parameter is None."""
    if field == "request":
        return None
    name = _GROUP.sub("", field)
    return renames.get(name, name)
