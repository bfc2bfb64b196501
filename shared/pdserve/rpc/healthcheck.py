"""`python -m pdserve.rpc.healthcheck TARGET [--service NAME]`: is a service ready? For containers and scripts.

TARGET is host:port of a gRPC service, asked by `grpc.health.v1`, or a URL of http or https, which has to answer 200.
Asks once, or with --wait again and again until it is. With TLS the certificate has to be for the host that TARGET
names.
The exit status is 0 where it is ready; else 1, with the reason on stdout, where Docker keeps it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdserve.rpc.tls import Tls

from pdserve.core.errors import PdserveError

TIMEOUT = 5.0  # seconds
AGAIN = 0.2  # seconds between two questions

# A probe runs every few seconds, so each kind loads only what it needs itself.


def grpc_problem(target: str, service: str, timeout: float, tls: Tls | None = None) -> str | None:
    """Why the gRPC service `service` at `target` (host:port) is not SERVING, or None. Empty means: does it live?

    Raises ConfigError for files of `tls` that cannot be read.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    options = [("grpc.enable_http_proxy", 0)]
    made = grpc.secure_channel(target, tls.credentials(), options) if tls else grpc.insecure_channel(target, options)
    with made as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.RpcError as error:
            call: Any = error  # which is a call too, but not by its type
            return f"{call.code().name}: {call.details()}"
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return None if name == "SERVING" else f"{service or target} is {name}"


def http_problem(url: str, timeout: float, tls: Tls | None = None) -> str | None:
    """Why `url` does not answer 200, or None. Asks directly, whatever proxies the environment names.

    Raises ConfigError for files of `tls` that cannot be read.
    """
    import http.client
    import urllib.error
    import urllib.request

    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls.context()))
    opener = urllib.request.build_opener(*handlers)
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
    parser.add_argument("target", help="host:port of a gRPC service, or an http:// or https:// URL")
    parser.add_argument("--service", default="", help="full name of the gRPC service; default: does the process live?")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds to wait for the answer")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to ask again where it is not ready")
    for name, what in (("ca", "authorities to trust"), ("cert", "own certificate"), ("key", "its key")):
        variable = f"PDSERVE_TLS_{name.upper()}_FILE"
        parser.add_argument(f"--tls-{name}-file", default=os.environ.get(variable), help=f"{what}; default: {variable}")
    options = parser.parse_args(argv)
    until = time.monotonic() + options.wait
    try:
        while (problem := _problem(parser, options)) is not None and time.monotonic() < until:
            time.sleep(AGAIN)
    except PdserveError as error:
        problem = str(error)
    if problem is None:
        return 0
    sys.stdout.write(f"{problem}\n")
    return 1


def _problem(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str | None:
    tls = None
    if options.tls_ca_file:
        from pdserve.rpc.tls import Tls

        tls = Tls(options.tls_ca_file, options.tls_cert_file or None, options.tls_key_file or None)
    if options.target.startswith(("http://", "https://")):
        if options.service:
            parser.error("--service is for gRPC services")
        return http_problem(options.target, options.timeout, tls)
    return grpc_problem(options.target, options.service, options.timeout, tls)


if __name__ == "__main__":
    sys.exit(main())
