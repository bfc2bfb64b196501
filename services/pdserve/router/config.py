"""The router's settings."""

from __future__ import annotations

from pydantic import Field

from pdserve.rpc.settings import ServiceSettings


class RouterSettings(ServiceSettings):
    """What a router needs to know: which workers, which models, and its own limits."""

    worker: list[str] = Field(
        default_factory=list, description="host:port of a worker; a name that stands for several is asked again"
    )
    model: list[str] = Field(default_factory=list, description="served model: a folder, a hub id, or NAME=folder-or-id")
    max_queue: int = Field(1024, ge=1, description="requests that may wait for a worker, per model")
    max_request_seconds: float = Field(600.0, gt=0, description="limit for a request that comes without a deadline")
    max_replays: int = Field(5, ge=0, description="tries in a row that may fail without producing a token")
    lease_seconds: float = Field(5.0, gt=0, description="silence after which a worker counts as gone")
    resolve_seconds: float = Field(5.0, gt=0, description="how often names of workers are resolved again")
    startup_seconds: float = Field(
        15.0, ge=0, description="how long an endpoint that never answered is taken for a worker that still starts"
    )
