"""What can go wrong, as types that any floor may raise.

PdserveError
├── InvalidRequest      bad input; names the field
├── Unauthenticated     shows no credential that is known here
├── PermissionDenied    known, and this is not for it
├── UnknownModel        no such model here
├── UnknownRequest      no such request here, or not any more
├── NoCapacity          refused before anything was spent; may carry when to retry
│   ├── TenantLimited   its tenant, or its key, has as much as it may have
│   └── TooLate         predicted to miss its targets, or its deadline, for what is ahead of it
├── Unavailable         a part of the fleet is missing or leaving
├── ModelError          a model folder that cannot be served
├── ConfigError         settings that contradict each other or the hardware
├── LayoutMismatch      two workers whose KV pages differ
└── IntegrityError      an allocator's books do not add up: a bug in pdserve
"""

from __future__ import annotations


class PdserveError(Exception):
    """Base of every error that pdserve raises on purpose."""


class InvalidRequest(PdserveError):
    """A request that can never succeed. `field` is its path in the API, such as ``sampling.top_p``.

    `detail` is for the client only: it may quote what the request said, so str(), which logs and traces take, lacks it.
    """

    def __init__(self, field: str, message: str, *, detail: str = "") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self.detail = detail


class Unauthenticated(PdserveError):
    """A caller that shows no key or secret, or one that nobody has. The message does not repeat it."""


class PermissionDenied(PdserveError):
    """A caller that is known, and may not have what it asks for."""


class UnknownModel(PdserveError):
    """A model name that nobody here serves."""


class UnknownRequest(PdserveError):
    """A request id that this router never had, or has forgotten."""


class NoCapacity(PdserveError):
    """There is no room now. `retry_after` is in seconds; None: unknown."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TenantLimited(NoCapacity):
    """A tenant's or a key's requests or tokens are all taken. Others may well get in."""


class TooLate(NoCapacity):
    """The answer would come too late for whoever asked, so nothing is spent on it."""


class Unavailable(PdserveError):
    """A worker that is needed is gone, leaving or not there yet. `retry_after` is in seconds; None: unknown."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelError(PdserveError):
    """A model folder that cannot be served; the message names the file and, where it applies, the tensor."""


class ConfigError(PdserveError):
    """Settings that cannot work; the message names them."""


class LayoutMismatch(PdserveError):
    """Two KV layouts that differ; the message holds both."""


class IntegrityError(PdserveError):
    """An allocator's books do not add up."""
