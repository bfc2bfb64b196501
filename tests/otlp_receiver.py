"""An OTLP collector small enough for tests: real gRPC, real protobuf, everything kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

Attributes = dict[str, str]


class OtlpReceiver(metrics_service_pb2_grpc.MetricsServiceServicer, trace_service_pb2_grpc.TraceServiceServicer):
    """Listens at `endpoint` on loopback while its scope is open."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.metrics: list[metrics_service_pb2.ExportMetricsServiceRequest] = []
        self.traces: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self._news = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(4))
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(self, self._server)
        # One class answers both services by the method's name, so each is told apart by its request.
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)

    def __enter__(self) -> Self:
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._news:
            if isinstance(request, metrics_service_pb2.ExportMetricsServiceRequest):
                self.metrics.append(request)
                answer: Any = metrics_service_pb2.ExportMetricsServiceResponse()
            else:
                self.traces.append(request)
                answer = trace_service_pb2.ExportTraceServiceResponse()
            self._news.notify_all()
        return answer

    def wait(self, until: Callable[[OtlpReceiver], Any], timeout: float = 30.0) -> None:
        """Wait for what has come to be as `until` wants it. AssertionError after `timeout` seconds."""
        with self._news:
            assert self._news.wait_for(lambda: until(self), timeout), f"{len(self.metrics)} exports were not enough"

    def series(self, service: str) -> Iterator[tuple[Metric, Attributes, Any]]:
        """The newest point of each series that `service` sent: metric, attributes, point."""
        newest: dict[tuple[str, str, tuple[tuple[str, str], ...]], tuple[Metric, Attributes, Any]] = {}
        for request in self.metrics:
            for resource in request.resource_metrics:
                about = attributes(resource.resource.attributes)
                if about["service.name"] != service:
                    continue
                for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                    for point in getattr(metric, str(metric.WhichOneof("data"))).data_points:
                        found = attributes(point.attributes)
                        key = (about.get("service.instance.id", ""), metric.name, tuple(sorted(found.items())))
                        newest[key] = metric, found, point
        return iter(newest.values())

    def names(self, service: str) -> set[str]:
        """Names of the metrics that `service` sent."""
        return {metric.name for metric, _, _ in self.series(service)}

    def tracers(self) -> set[str]:
        """The services that sent spans."""
        resources = (resource.resource for request in self.traces for resource in request.resource_spans)
        return {attributes(resource.attributes)["service.name"] for resource in resources}


def attributes(pairs: Any) -> Attributes:
    """String attributes as a dict."""
    items: list[KeyValue] = list(pairs)
    return {pair.key: pair.value.string_value for pair in items}
