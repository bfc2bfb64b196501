"""Whom a request is accounted to.

The name is metadata of the call. An API key proves it, see router.callers; where keys are not asked for, what stands in
front of the routers has to set it, and to drop what its clients say.
"""

from __future__ import annotations

from pdserve.core.errors import InvalidRequest

TENANT = "x-tenant-id"
ANONYMOUS = ""  # all requests that name no tenant are one
MAX_TENANT = 128


def check_tenant(tenant: str) -> str:
    """`tenant`, once it is sure that it may stand in logs. Raises InvalidRequest."""
    if len(tenant) > MAX_TENANT:
        raise InvalidRequest(TENANT, f"at most {MAX_TENANT} characters, got {len(tenant)}")
    if not (tenant.isascii() and tenant.isprintable()):
        raise InvalidRequest(TENANT, "must be printable ASCII")
    return tenant
