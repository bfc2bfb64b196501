"""Where services are looked for, as people write it."""

from __future__ import annotations

import pytest

from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.rpc.endpoint import check_endpoint, parse_endpoint


@pytest.mark.parametrize(
    "target, parsed",
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:80", ("::1", 80)), ("decode:9000", ("decode", 9000))],
)
def test_an_endpoint_is_a_host_and_a_port(target: str, parsed: tuple[str, int]) -> None:
    assert parse_endpoint(target) == parsed


@pytest.mark.parametrize(
    "target",
    [
        "",
        "host",
        "host:",
        ":80",
        "host:0",
        "host:70000",
        "host:http",
        "\0:1",
        "a b:1",
        "x/y:1",
        "h:\u0661",
        "h" * 256 + ":1",
    ],
)
def test_anything_else_is_a_config_error(target: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        parse_endpoint(target)
    with pytest.raises(InvalidRequest, match="host:port"):
        check_endpoint(target, "endpoint")
