"""Errors in OpenAI's shape, from the router's."""

from __future__ import annotations

import grpc
import pytest

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
from pdserve.gateway.errors import ApiError, from_pdserve, invalid, loggable
from pdserve.rpc.errors import DeadlineExceeded, RpcError


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequest("sampling.top_p", "no"), 400, "invalid_request_error", "invalid_value"),
        (UnknownModel("no"), 404, "invalid_request_error", "model_not_found"),
        (UnknownRequest("no"), 404, "invalid_request_error", "request_not_found"),
        (NoCapacity("full", 2.0), 429, "rate_limit_error", "no_capacity"),
        (TenantLimited("yours", 2.0), 429, "rate_limit_error", "rate_limit_exceeded"),
        (TooLate("late", 2.0), 429, "rate_limit_error", "too_late"),
        (Unavailable("gone"), 503, "server_error", "unavailable"),
        (DeadlineExceeded("late"), 504, "server_error", "timeout"),
        (RpcError(grpc.StatusCode.UNAUTHENTICATED, "who"), 401, "authentication_error", "invalid_api_key"),
        (RpcError(grpc.StatusCode.PERMISSION_DENIED, "no"), 403, "permission_error", "permission_denied"),
        (RpcError(grpc.StatusCode.INTERNAL, "oh"), 500, "server_error", "internal_error"),
        (RpcError(grpc.StatusCode.DATA_LOSS, "oh"), 500, "server_error", "internal_error"),
    ],
)
def test_status_by_grpc_code(error: PdserveError, status: int, kind: str, code: str) -> None:
    found = from_pdserve(error)
    assert (found.status, found.kind, found.code) == (status, kind, code)
    assert set(found.body()["error"]) == {"message", "type", "param", "code"}


def test_what_is_unknown_is_named() -> None:
    assert from_pdserve(UnknownModel("no")).param == "model"
    assert from_pdserve(UnknownRequest("no")).param == "request_id"


@pytest.mark.parametrize(
    ("error", "seconds", "milliseconds"),
    [
        (NoCapacity("full", 0.25), "1", "250"),
        (NoCapacity("full", 2.0), "2", "2000"),
        (NoCapacity("full"), "1", "1000"),
        (Unavailable("gone"), "1", "1000"),
    ],
)
def test_when_to_come_back(error: PdserveError, seconds: str, milliseconds: str) -> None:
    """HTTP has whole seconds, rounded up; OpenAI's clients look at the milliseconds first."""
    assert from_pdserve(error).headers() == {"retry-after": seconds, "retry-after-ms": milliseconds}


def test_others_do_not_say_when() -> None:
    for error in (InvalidRequest("text", "no"), UnknownModel("no"), DeadlineExceeded("late")):
        assert from_pdserve(error).headers() == {}


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling.top_p", "top_p"),
        ("stopping.max_tokens", "max_completion_tokens"),
        ("response.logprobs", "logprobs"),
        ("chat.messages[2].role", "messages[2].role"),
        ("text", "prompt"),
        ("request", None),
    ],
)
def test_fields_get_the_names_that_the_client_used(field: str, param: str | None) -> None:
    renames = {"max_tokens": "max_completion_tokens", "text": "prompt"}
    found = from_pdserve(InvalidRequest(field, "is wrong"), renames)
    assert found.param == param
    assert found.message == (f"{param}: is wrong" if param else "is wrong")


def test_a_log_says_of_a_bad_request_only_which_field_it_was() -> None:
    """The message may quote the prompt; of the fleet's own failures it is what the log is for."""
    bad = invalid("messages", "the model's chat template refuses them: no role wizard-of-secrets")
    assert loggable(bad) == {"status": 400, "param": "messages", "code": "invalid_value"}
    full = ApiError(429, "1024 requests wait already", kind="overloaded", code="no_capacity")
    assert loggable(full)["error"] == "1024 requests wait already"
