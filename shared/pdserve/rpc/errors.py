"""Errors on the wire: pdserve's types to google.rpc.Status and back.

Every refusal carries ErrorInfo (a reason in UPPER_SNAKE, domain ``pdserve``); an invalid request also carries the
field's path as a BadRequest violation, and no capacity carries RetryInfo where the time is known. The same time goes
along as gRPC's own hint, which a client with a retry policy in its service config keeps to by itself. The client's side
rebuilds the same type from it, so that callers on both ends handle one set of exceptions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, cast

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2  # type: ignore[import-untyped, unused-ignore]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped, unused-ignore]

from pdserve.core.errors import (
    ConfigError,
    IntegrityError,
    InvalidRequest,
    LayoutMismatch,
    ModelError,
    NoCapacity,
    PdserveError,
    PermissionDenied,
    TenantLimited,
    TooLate,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownRequest,
)

DOMAIN = "pdserve"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
# Trailers are limited to 8 KiB by default and hold the message up to three times, percent-encoded once.
_MAX_MESSAGE = 600


class RpcError(PdserveError):
    """A gRPC failure that none of core's types stands for. Aborting with one uses its `code`."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class DeadlineExceeded(RpcError):
    """The deadline passed, on whichever side noticed first."""

    def __init__(self, message: str) -> None:
        super().__init__(grpc.StatusCode.DEADLINE_EXCEEDED, message)


_KINDS: dict[type[PdserveError], tuple[grpc.StatusCode, str]] = {
    InvalidRequest: (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    Unauthenticated: (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    PermissionDenied: (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
    UnknownModel: (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
    UnknownRequest: (grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST"),
    NoCapacity: (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_CAPACITY"),
    TenantLimited: (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_LIMIT"),
    TooLate: (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_LATE"),
    Unavailable: (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
    ModelError: (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_ERROR"),
    ConfigError: (grpc.StatusCode.FAILED_PRECONDITION, "CONFIG_ERROR"),
    LayoutMismatch: (grpc.StatusCode.FAILED_PRECONDITION, "LAYOUT_MISMATCH"),
    IntegrityError: (grpc.StatusCode.INTERNAL, "INTEGRITY_ERROR"),
}
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_BY_REASON: dict[str, type[PdserveError]] = {reason: kind for kind, (_, reason) in _KINDS.items()}
_BY_CODE: dict[grpc.StatusCode, type[PdserveError]] = {
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.NOT_FOUND: UnknownModel,
    grpc.StatusCode.RESOURCE_EXHAUSTED: NoCapacity,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


def status_code(error: PdserveError) -> grpc.StatusCode:
    """The gRPC status code that `error` travels under."""
    return _kind(error)[0]


def to_status(error: PdserveError) -> Status:
    """`error` as a google.rpc.Status with its details; texts are cut to what fits into trailers."""
    code, reason = _kind(error)
    detail = f": {error.detail}" if isinstance(error, InvalidRequest) and error.detail else ""
    status = Status(code=code.value[0], message=_cut(str(error) + detail))
    _pack(status, error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    if isinstance(error, InvalidRequest):
        description = _cut(error.message + detail)
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=description)
        _pack(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, NoCapacity | Unavailable) and error.retry_after is not None:
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromNanoseconds(max(0, round(error.retry_after * 1e9)))
        _pack(status, info)
    return status


class Abortable(Protocol):
    """A call that can be ended: grpc's context, or what stands in for one."""

    async def abort_with_status(self, status: grpc.Status, /) -> NoReturn: ...


@dataclass(frozen=True)
class _Ending(grpc.Status):
    """What grpc ends a call with."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


async def abort(context: Abortable, error: PdserveError) -> NoReturn:
    """End the call with `error`. Never returns: grpc raises its own exception, which the handler must let pass."""
    status = to_status(error)
    trailers = ((DETAILS_KEY, status.SerializeToString()), *_pushback(error))
    await context.abort_with_status(_Ending(status_code(error), status.message, trailers))
    raise AssertionError("abort_with_status returned")


def _pushback(error: PdserveError) -> tuple[tuple[str, str], ...]:
    """When a client's gRPC may try again: after so many milliseconds, or not at all where room may never come.
    https://github.com/grpc/proposal/blob/master/A6-client-retries.md#pushback"""
    if not isinstance(error, NoCapacity | Unavailable):
        return ()
    if error.retry_after is not None:
        return ((PUSHBACK_KEY, str(max(0, math.ceil(error.retry_after * 1e3)))),)
    return ((PUSHBACK_KEY, "-1"),) if isinstance(error, NoCapacity) else ()


def error_from_call(error: grpc.RpcError) -> PdserveError:
    """What the server meant by a failed call, as either of grpc's APIs raises it. Without our details (a proxy, a dead
    peer) the code decides."""
    return _rebuilt(error.code(), error.details() or error.code().name, _details(error))


def error_from_status(data: bytes) -> PdserveError:
    """`error_from_call` for a serialized google.rpc.Status that came in a message. Raises DecodeError."""
    status = Status.FromString(data)
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return _rebuilt(code, status.message or code.name, _unpacked(status))


def _rebuilt(code: grpc.StatusCode, message: str, details: dict[str, Any]) -> PdserveError:
    info = details.get("ErrorInfo")
    reason = info.reason if isinstance(info, error_details_pb2.ErrorInfo) and info.domain == DOMAIN else ""
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code)
    if kind is InvalidRequest:
        bad = details.get("BadRequest")
        if isinstance(bad, error_details_pb2.BadRequest) and bad.field_violations:
            return InvalidRequest(bad.field_violations[0].field, bad.field_violations[0].description)
        return InvalidRequest("request", message)
    if kind is not None and issubclass(kind, NoCapacity | Unavailable):
        retry = details.get("RetryInfo")
        if isinstance(retry, error_details_pb2.RetryInfo):
            return kind(message, retry.retry_delay.ToNanoseconds() / 1e9)
    if kind is not None:
        return kind(message)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(message)
    return RpcError(code, message)


def from_server(error: grpc.RpcError) -> bool:
    """Whether a pdserve server refused the call, and not the connection to it failed."""
    return "ErrorInfo" in _details(error)


def _kind(error: PdserveError) -> tuple[grpc.StatusCode, str]:
    if isinstance(error, RpcError):
        return error.code, error.code.name
    for kind in type(error).__mro__:
        if kind in _KINDS:
            return _KINDS[kind]
    return grpc.StatusCode.INTERNAL, "INTERNAL"


def _pack(status: Status, detail: Message) -> None:
    packed = AnyProto()
    packed.Pack(detail)
    status.details.append(packed)


def _details(error: grpc.RpcError) -> dict[str, Any]:
    """The details that came in the trailers, by message name; empty where there are none or they are garbled."""
    found: dict[str, Any] = {}
    for key, value in cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ()):
        if key != DETAILS_KEY:
            continue
        try:
            found |= _unpacked(Status.FromString(cast("bytes", value)))
        except DecodeError:
            continue
    return found


def _unpacked(status: Status) -> dict[str, Any]:
    """A status' details by message name. Raises DecodeError."""
    found: dict[str, Any] = {}
    for packed in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            detail = kind()
            if packed.Unpack(detail):
                found[kind.DESCRIPTOR.name] = detail
    return found


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 3] + "..."
