"""What the gateway counts, all of it on one event loop. Scrapes may come from other threads: they read copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import Histogram

from pdserve.telemetry.metrics import NAMESPACE, CollectorRegistry, Metric, counter, gauge

# Seconds. From a cached answer of one token to the longest that anybody waits for.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)
STREAMED = ("/v1/chat/completions", "/v1/completions")


class GatewayMetrics:
    """Requests by route. A route is a path as it is declared, so that nobody's URL makes a new series."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests: Counter[tuple[str, ...]] = Counter()
        self._in_flight: Counter[str] = Counter()
        # From 0 on, so that a first one is an increase to whoever asks for one.
        self._disconnects = Counter(dict.fromkeys(STREAMED, 0))
        self._stream_errors = Counter(dict.fromkeys(STREAMED, 0))
        self._duration = self._histogram("request_duration_seconds", "From a request's head to the end of its answer.")
        self._first = self._histogram(
            "time_to_first_token_seconds", "From a request's head to the first token, of answers that had one."
        )
        self.registry.register(self)

    def begun(self, route: str) -> None:
        self._in_flight[route] += 1

    def ended(self, route: str, status: int, seconds: float) -> None:
        """`status` is what was sent; 499 where the client had gone before anything was."""
        self._in_flight[route] -= 1
        self._requests[route, str(status)] += 1
        self._duration.labels(route).observe(seconds)

    def first_token(self, route: str, seconds: float) -> None:
        self._first.labels(route).observe(seconds)

    def disconnected(self, route: str) -> None:
        self._disconnects[route] += 1

    def stream_failed(self, route: str) -> None:
        self._stream_errors[route] += 1

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        yield counter("gateway_requests_total", "Answered requests.", dict(self._requests), ["route", "status"])
        for name, text, values in (
            ("gateway_disconnects_total", "Requests whose client went away before the end.", self._disconnects),
            (
                "gateway_stream_errors_total",
                "Streams that ended with an error, or were not read.",
                self._stream_errors,
            ),
        ):
            yield counter(name, text, _by_route(values), ["route"])
        yield gauge("gateway_requests_in_flight", "Requests being answered.", _by_route(self._in_flight), ["route"])

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"gateway_{name}", text, ["route"], namespace=NAMESPACE, registry=self.registry, buckets=_BUCKETS
        )


def _by_route(values: Counter[str]) -> dict[tuple[str, ...], float]:
    return {(route,): value for route, value in dict(values).items()}
