"""A worker exports its engine's latest reports as they are, by names of Prometheus' kind that alerts keep to."""

from __future__ import annotations

import re

import pytest
import yaml
from msgspec.structs import replace
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.telemetry.metrics import histogram
from pdserve.transfer.messages import LinkReport, TransferReport
from pdserve.worker.metrics import WorkerMetrics, idle_load
from tests import promql

LINK = LinkReport(
    peer="d0",
    epoch=1,
    transport="nccl",
    path="nvlink",
    degraded="",
    bytes_sent=100,
    bytes_received=7,
    bytes_in_flight=4096,
    frames_in_flight=2,
    credit=1 << 20,
    bytes_per_second=40e9,
    round_trip=2e-5,
)
UNUSED = replace(LINK, bytes_in_flight=0, frames_in_flight=0)
SLOW = replace(UNUSED, peer="d1", path="sockets", degraded="no InfiniBand", bytes_per_second=2e9)
UNMEASURED = replace(UNUSED, peer="d2", credit=0, bytes_per_second=0.0)


def samples(metrics: WorkerMetrics) -> dict[str, float]:
    """Values by name and labels, as a scrape shows them: "pdserve_kv_links{path=sockets,transport=nccl}"."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def busy() -> WorkerMetrics:
    metrics = WorkerMetrics("p0", "prefill", "tiny")
    metrics.load = idle_load(64)
    metrics.report = TransferReport(
        links=[LINK, SLOW, UNMEASURED],
        bytes_sent=300,
        bytes_received=7,
        frames_sent=3,
        transfers=2,
        bytes_produced=512,
        send_aborts=1,
        links_lost=1,
    )
    metrics.observe_transfer(0.02, 0.001)
    metrics.observe_transfer(0.03, 0.0)
    return metrics


def test_a_scrape_shows_the_latest_reports() -> None:
    found = samples(busy())
    expected = {
        "pdserve_worker_info{model_name=tiny,role=prefill,worker_id=p0}": 1,
        "pdserve_kv_transfer_bytes_total{direction=sent}": 300,
        "pdserve_kv_transfer_bytes_total{direction=received}": 7,
        "pdserve_kv_transfer_frames_total{direction=sent}": 3,
        "pdserve_kv_transfers_total": 2,
        "pdserve_kv_transfer_aborts_total{side=send}": 1,
        "pdserve_kv_transfer_aborts_total{side=receive}": 0,
        "pdserve_kv_transfer_seconds_count": 2,
        "pdserve_kv_transfer_seconds_sum": 0.05,
        "pdserve_kv_transfer_exposed_seconds_sum": 0.001,
        "pdserve_kv_links{path=nvlink,transport=nccl}": 2,
        "pdserve_kv_links{path=sockets,transport=nccl}": 1,
        "pdserve_kv_links_degraded": 1,
        "pdserve_kv_links_lost_total": 1,
        "pdserve_kv_link_in_flight_bytes": 4096,
        "pdserve_kv_link_in_flight_frames": 2,
        "pdserve_kv_link_credit_bytes": 2 << 20,
        "pdserve_kv_link_bytes_per_second{path=sockets,peer=d1}": 2e9,
        "pdserve_kv_link_capacity_bytes_per_second": 42e9,
        "pdserve_kv_produced_bytes_total": 512,
        "pdserve_kv_stale_frames_total": 0,
        "pdserve_kv_threads_abandoned": 0,
        "pdserve_blocks{state=free}": 64,
        "pdserve_num_requests_running": 0,
        "pdserve_preemptions_total": 0,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "pdserve_kv_link_bytes_per_second{path=nvlink,peer=d2}" not in found, "not measured is not 0"


def test_a_link_that_is_gone_leaves_the_scrape_and_totals_stay() -> None:
    metrics = busy()
    metrics.report = TransferReport(links=[LINK], bytes_sent=301)
    found = samples(metrics)
    assert "pdserve_kv_links{path=sockets,transport=nccl}" not in found
    assert found["pdserve_kv_transfer_bytes_total{direction=sent}"] == 301
    assert found["pdserve_kv_link_capacity_bytes_per_second"] == 40e9


def test_single_families_can_be_asked_for_and_names_are_taken_once() -> None:
    metrics = busy()
    wanted = metrics.registry.restricted_registry(["pdserve_kv_transfers_total", "pdserve_blocks"])
    text = generate_latest(wanted).decode()
    assert "pdserve_kv_transfers_total 2.0" in text and 'pdserve_blocks{state="free"}' in text
    assert "pdserve_kv_links_degraded" not in text
    with pytest.raises(ValueError, match="pdserve_kv_transfers"):
        histogram(metrics.registry, "kv_transfers", "Another.", (1.0,))


def test_nothing_is_exported_twice_and_names_keep_to_the_conventions() -> None:
    """Counters, and they alone, end with _total; units are base units at the end; each family stands once."""
    families = list(text_string_to_metric_families(generate_latest(busy().registry).decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        assert re.fullmatch(r"pdserve_[a-z][a-z_]*", family.name), family.name
        assert family.documentation
        assert (family.type == "counter") == all(sample.name.endswith("_total") for sample in family.samples)
        assert not re.search(r"_(ms|milliseconds|kb|mb|percent|count|sum|bucket|info_total)$", family.name), family.name


def test_alerts_on_kv_name_only_what_a_worker_exposes() -> None:
    """The others are held against a running suite (integration/test_dashboards.py)."""
    exposed = {name.partition("{")[0] for name in samples(busy())}
    groups = yaml.safe_load(promql.ALERTS.read_text())["groups"]
    [rules] = [group["rules"] for group in groups if group["name"] == "pdserve-kv"]
    named = {rule["alert"]: {str(selector.name) for selector in promql.selectors(rule["expr"])} for rule in rules}
    assert len(named) == 4 and all(names and names <= exposed for names in named.values()), named
