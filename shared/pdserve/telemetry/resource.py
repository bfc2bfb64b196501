"""Who a process is, for everything that it sends over OTLP."""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource


def resource(service: str, instance: str = "") -> Resource:
    """A service by its kind ("router", "decode") and, where there are several, which one it is."""
    attributes = {"service.name": f"pdserve-{service}", "service.namespace": "pdserve"}
    if instance:
        attributes["service.instance.id"] = instance
    return Resource.create(attributes)
