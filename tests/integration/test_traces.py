"""One trace spans client, router, reserve, prefill chunks, transfer and decode, over real processes and real OTLP."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from pdserve.launch import ModelPart
from tests.integration.suites import CHUNK, prompt, serve
from tests.tiny_models import make_tiny_model

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"


class Collector(TraceServiceServicer):
    """Keeps every span that comes in, with its service's name."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []

    async def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> pb.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            self.spans += [(names["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
        return pb.ExportTraceServiceResponse()


async def test_one_trace_spans_everything(tmp_path: Path) -> None:
    collector, server = Collector(), grpc.aio.server()
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        part = ModelPart(make_tiny_model(tmp_path / "model", "llama"), "tiny", prefill=1, decode=1)
        async with serve(tmp_path / "logs", part, otlp_endpoint=f"127.0.0.1:{port}") as suite:
            await suite.client.complete(
                prompt(2 * CHUNK + 1), max_tokens=6, ignore_eos=True, traceparent=f"00-{TRACE_ID}-{CLIENT_SPAN}-01"
            )
        # The services flushed their spans when they stopped.
    finally:
        await server.stop(None)
    spans = [(service, span) for service, span in collector.spans if span.trace_id.hex() == TRACE_ID]
    names = [(service, span.name) for service, span in spans]
    for expected in ("reserve", "prefill", "prefill.chunk", "transfer", "decode"):
        assert any(name == f"pdserve.{expected}" for _, name in names), f"no span pdserve.{expected} in {names}"
    assert sum(name == "pdserve.prefill.chunk" for _, name in names) == 3
    [transfer] = [span for service, span in spans if service == "pdserve-prefill" and span.name == "pdserve.transfer"]
    values = {item.key: item.value for item in transfer.attributes}
    assert values["pdserve.kv_link.path"].string_value == "loopback"
    seconds, exposed = (values[f"pdserve.kv_transfer.{name}"].double_value for name in ("seconds", "exposed_seconds"))
    assert 0 <= exposed <= seconds and seconds > 0
    assert {service for service, _ in names} == {"pdserve-router", "pdserve-prefill", "pdserve-decode"}
    known = {span.span_id.hex() for _, span in spans} | {CLIENT_SPAN}
    assert {span.parent_span_id.hex() for _, span in spans} <= known, "a span hangs in the air"
