"""A worker is one instance to whoever collects its telemetry, whether it was given a name or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import pytest

from pdserve.rpc.server import ServiceFailed
from pdserve.telemetry.export import Metrics
from pdserve.worker import front


class Server:
    """Stands in for GrpcServer: keeps what it should export, and does not start."""

    exports: list[Metrics] = []  # noqa: RUF012

    def __init__(self, settings: object, services: object, metrics: Metrics, check: object) -> None:
        self.exports.append(metrics)

    async def __aenter__(self) -> Self:
        raise ServiceFailed("no further")

    async def __aexit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("name", ["", "d7"])
def test_traces_and_metrics_are_of_the_same_instance(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    traced: list[str] = []
    fronts: list[front.WorkerFront] = []

    def setup_tracing(service: str, endpoint: str | None, *, ring: int, instance: str) -> Callable[[], None]:
        traced.append(instance)
        return lambda: None

    def make(made: front.WorkerFront) -> Any:
        fronts.append(made)
        return None, None

    monkeypatch.setattr(front, "setup_tracing", setup_tracing)
    monkeypatch.setattr(front, "GrpcServer", Server)
    monkeypatch.setattr(Server, "exports", [])
    assert front.run_worker("decode", make, ["--model", "tiny", *(["--worker-id", name] if name else [])]) == 1
    [instance] = traced
    assert instance == name or (not name and instance.startswith("decode-"))
    assert [metrics.instance for metrics in Server.exports] == [made.worker_id for made in fronts] == [instance]
