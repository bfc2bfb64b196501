"""Write docs/metrics.md: every metric that a service exports, as the services' own registries tell them.

`--check` compares instead of writing, and fails on any difference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric

from pdserve.core.slo import SloTargets
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.prefix_cache.metrics import CacheMetrics
from pdserve.prefix_cache.store import BlockStore
from pdserve.router.measure import Measure
from pdserve.router.metrics import RouterMetrics
from pdserve.telemetry import names
from pdserve.telemetry.metrics import CollectorRegistry
from pdserve.v1 import inference_pb2
from pdserve.worker.metrics import WorkerMetrics, idle_load

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEAD = """\
# Metrics

Written by `scripts/metrics_reference.py` from the services' own registries (`make metrics-reference`).

Each service takes `--metrics-port` and serves these at `/metrics`; the gateway has them at its own port, too. With
`--otlp-endpoint` the same figures go there every 15 seconds, under the same names without `_total`; those of the GenAI
conventions as these spell them. Histograms have `_bucket`, `_sum` and `_count`. All times are seconds.

`model_name` is a served model, never what a client made up; `pdserve_worker_info` says who an instance is:

```promql
rate(pdserve_engine_busy_seconds_total[5m]) * on (job, instance) group_left (role, worker_id) pdserve_worker_info
```
"""


def router() -> CollectorRegistry:
    """After one request, so that every family has a series and shows its labels."""
    metrics = RouterMetrics(SloTargets(0.5, 0.05, 99.0))
    metrics.serve(["m"])
    measure = Measure([metrics], names.OPERATION_CHAT)
    measure.started("m", SloTargets(0.5, 0.05, 99.0))
    for number in (1, 2):
        measure.timeline.token(measure.timeline.now(), number)
    measure.answered(inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_STOP))
    return metrics.registry


def worker() -> CollectorRegistry:
    metrics = WorkerMetrics("prefill-0", "prefill", "m")
    metrics.load = idle_load(1)
    return metrics.registry


def gateway() -> CollectorRegistry:
    metrics = GatewayMetrics()
    metrics.first_token("/", 0.0)
    metrics.ended("/", 200, 0.0)
    return metrics.registry


SERVICES = {
    "Router": router,
    "Prefill and decode workers": worker,
    "Prefix cache": lambda: CacheMetrics("prefix-cache-0", BlockStore(1), lambda: (0, 0)).registry,
    "Gateway": gateway,
}


def page() -> str:
    parts = [HEAD]
    for title, registry in SERVICES.items():
        parts.append(f"\n## {title}\n\n| metric | kind | labels | what it is |\n|---|---|---|---|\n")
        parts += [row(family) for family in sorted(registry().collect(), key=lambda family: family.name)]
    return "".join(parts)


def row(family: Metric) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = ", ".join(f"`{label}`" for label in labels_of(family))
    text = family.documentation.replace("|", "\\|")
    if convention := names.GENAI_METRICS.get(family.name):
        text += f" Over OTLP: `{convention}`."
    return f"| `{name}` | {family.type} | {labels} | {text} |\n"


def labels_of(family: Metric) -> Iterator[str]:
    known = getattr(family, "_labelnames", ()) or (family.samples[0].labels if family.samples else ())
    return (label for label in known if label != "le")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print("docs/metrics.md is not what the services export: make metrics-reference")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
