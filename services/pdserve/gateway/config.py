"""The gateway's settings."""

from __future__ import annotations

from pydantic import ByteSize, Field

from pdserve.rpc.settings import CallingSettings, Endpoint

DEFAULT_PORT = 8000
DEFAULT_ROUTER = "127.0.0.1:50051"


class GatewaySettings(CallingSettings):
    """Where the routers are, and what one HTTP request may take."""

    port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="port to listen on; 0: any free one")
    # Longer than clients keep idle connections, so that none sends on one that is being closed.
    idle_seconds: float = Field(
        75.0,
        ge=1,
        le=86_400,
        description="how long a connection may be without a whole request head, then it is closed",
    )
    router: list[Endpoint] = Field(
        default_factory=lambda: [DEFAULT_ROUTER],
        min_length=1,
        description="host:port of a router; with several, each request goes to the one that has fewest of ours",
    )
    max_request_seconds: float = Field(600.0, gt=0, description="how long an answer may take; then it is a 504")
    unread_seconds: float = Field(
        60.0, gt=0, description="how long a client may leave unread what it was sent; then its connection is closed"
    )
    max_body_size: ByteSize = Field(ByteSize(16 << 20), gt=0, description='largest request body, such as "16MiB"')
    body_seconds: float = Field(30.0, gt=0, description="how long a client may take to send its body")
    max_prompts: int = Field(128, ge=1, description="prompts in one /v1/completions request; they run together")
