"""Settings of the prefix-cache service."""

from __future__ import annotations

from pydantic import ByteSize, Field

from pdserve.rpc.settings import FleetSettings


class PrefixCacheSettings(FleetSettings):
    capacity: ByteSize = Field(
        ByteSize(1 << 30),
        gt=0,
        description='bytes of KV to keep in memory, such as "4GiB"; least recently used go first',
    )
    worker_id: str | None = Field(None, description="name in the fleet; default: prefix-cache and random digits")
