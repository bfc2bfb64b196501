"""`python -m pdserve.rpc.healthcheck TARGET [--service NAME]`: is a service ready? For containers and scripts.

TARGET is host:port of a gRPC service, asked by `grpc.health.v1`, or an http:// URL, which has to answer 200. Asks once.
The exit status is 0 where it is ready; else 1, with the reason on stdout, where Docker keeps it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

TIMEOUT = 5.0  # seconds

# A probe runs every few seconds, so each kind loads only what it needs itself.


def grpc_problem(target: str, service: str, timeout: float) -> str | None:
    """Why the gRPC service `service` at `target` (host:port) is not SERVING, or None. Empty means: does it live?"""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.RpcError as error:
            call: Any = error  # which is a call too, but not by its type
            return f"{call.code().name}: {call.details()}"
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return None if name == "SERVING" else f"{service or target} is {name}"


def http_problem(url: str, timeout: float) -> str | None:
    """Why `url` does not answer 200, or None. Asks directly, whatever proxies the environment names."""
    import http.client
    import urllib.error
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as answer:
            return None if answer.status == 200 else f"{url} answered {answer.status}"
    except urllib.error.HTTPError as error:
        with error:
            return f"{url} answered {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{url}: {error}"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser("python -m pdserve.rpc.healthcheck", description="Ask whether a service is ready.")
    parser.add_argument("target", help="host:port of a gRPC service, or an http:// URL")
    parser.add_argument("--service", default="", help="full name of the gRPC service; default: does the process live?")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds to wait for the answer")
    options = parser.parse_args(argv)
    if options.target.startswith("http://"):
        if options.service:
            parser.error("--service is for gRPC services")
        problem = http_problem(options.target, options.timeout)
    else:
        problem = grpc_problem(options.target, options.service, options.timeout)
    if problem is None:
        return 0
    sys.stdout.write(f"{problem}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
