"""Every query of every dashboard and alert asks for what a running suite exports, and gets data where traffic ran."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.launch import ModelPart
from pdserve.testing import Cluster
from tests import promql
from tests.integration.scraping import heartbeats, read, scrape_until
from tests.integration.suites import CHUNK, complete_over_http, prompt, serve
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
# What a suite without trouble has no series of: answers of 5xx.
WITHOUT_DATA = {'pdserve_gateway_requests_total{status=~"5.."}'}


def dashboards() -> Iterator[tuple[str, str]]:
    """Panel and expression, for each query."""
    for path in sorted(promql.DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.stem}: {panel['title']}", target["expr"]


def rules() -> Iterator[tuple[str, str]]:
    for rule in promql.alert_rules():
        yield rule.get("alert") or rule["record"], rule["expr"]


@asynccontextmanager
async def busy_suite(tmp_path: Path) -> AsyncIterator[Cluster]:
    """1 router, 1 prefill, 2 decode, 1 prefix cache and 1 gateway, after traffic over both doors."""
    part = ModelPart(make_tiny_model(tmp_path / "model"), "tiny", prefill=1, decode=2)
    async with serve(tmp_path / "logs", part, prefix_caches=1, gateways=1, metrics=True) as cluster:
        await traffic(cluster)
        yield cluster


async def traffic(cluster: Cluster, turn: int = 0) -> None:
    """Four prompts over gRPC, others in each turn; over HTTP always the same one, which is cached."""
    ask, seeds = cluster.client.complete, range(4 * turn, 4 * turn + 4)
    await asyncio.gather(*(ask(prompt(3 * CHUNK, seed), max_tokens=4, ignore_eos=True) for seed in seeds))
    await complete_over_http(cluster, prompt(CHUNK, 7), max_tokens=3)


async def test_every_query_names_what_exists_and_has_data(tmp_path: Path) -> None:
    async with busy_suite(tmp_path) as cluster:
        await scrape_until(cluster, "prefill-0", lambda found: found["pdserve_kv_transfers_total"] >= 4)
        # A link is measured once it is idle, which may be later.
        await scrape_until(cluster, "prefill-0", lambda found: found["pdserve_kv_link_capacity_bytes_per_second"] > 0)
        texts = await asyncio.gather(*(read(url) for url in cluster.metrics.values()))
        assert sorted(cluster.metrics) == ["decode-0", "decode-1", "gateway-0", "prefill-0", "prefix-cache-0", "router"]
    scraped, made = promql.series_of(texts), promql.records()
    found = []
    for where, expression in (*dashboards(), *rules()):
        found += [f"{where}: {problem}" for problem in promql.problems(expression, scraped, made)]
        empty = set(promql.without_data(expression, scraped, made)) - WITHOUT_DATA
        found += [f"{where}: {selector} has no data" for selector in empty]
    assert not found, "\n".join(found)
    assert sum(1 for _ in dashboards()) > 80 and sum(1 for _ in rules()) > 30, "they were found at all"


def test_a_query_that_names_nothing_is_found_out() -> None:
    """The check itself: it can fail."""
    scraped = {"pdserve_workers": [{"role": "decode", "job": "", "instance": ""}]}
    assert not list(promql.problems('sum by (role) (pdserve_workers{role=~"$model"})', scraped, {}))
    assert list(promql.problems("sum(rate(pdserve_wokers[5m]))", scraped, {})) == ["nobody exports pdserve_wokers"]
    assert "has no label rule" in next(promql.problems('pdserve_workers{rule="decode"} > 0', scraped, {}))
    assert "has ['worker']" in next(promql.problems("sum by (worker) (pdserve_workers)", scraped, {}))
    assert list(promql.without_data('pdserve_workers{role="prefill"} == 0', scraped, {}))
    assert not list(promql.problems("a:b > 0", scraped, {"a:b": "pdserve_workers"}))


def test_dashboards_are_made_of_their_yaml() -> None:
    made = subprocess.run(
        [sys.executable, "scripts/dashboards.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr


def test_every_alert_is_explained() -> None:
    names = [name for name, _ in rules()]
    assert len(names) == len(set(names))
    for rule in promql.alert_rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
            assert rule["annotations"]["summary"] and rule["annotations"]["description"], rule["alert"]
    page = (ROOT / "docs" / "operations.md").read_text()
    missing = [rule["alert"] for rule in promql.alert_rules() if "alert" in rule and rule["alert"] not in page]
    assert not missing, f"docs/operations.md does not say what these mean: {missing}"


# With Prometheus itself, where it can be had (Debian: apt-get install prometheus). All of these are slow, however long
# they take: CI has it for `make test-e2e` only.

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="prometheus and promtool are not installed"
)


@needs_prometheus
@pytest.mark.slow
def test_prometheus_takes_the_rules_and_its_own_configuration() -> None:
    for arguments in (
        ["check", "config", str(promql.DOCKER / "prometheus" / "prometheus.yml")],
        ["test", "rules", str(ROOT / "tests" / "integration" / "alerts_test.yml")],
    ):
        done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
@pytest.mark.slow
async def test_prometheus_answers_every_query(tmp_path: Path) -> None:
    """The real thing: it scrapes the suite, evaluates the rules, and every panel has numbers to show."""
    async with busy_suite(tmp_path) as cluster, prometheus(cluster, tmp_path) as url:
        wanted = {expression: where for where, expression in dashboards()}
        last: dict[str, Any] = {}
        try:
            async with asyncio.timeout(200), aclosing(heartbeats(cluster, "decode-0")) as beats:
                turns = itertools.count(1)
                async for _ in beats:
                    await traffic(cluster, next(turns))  # what decode workers hold already would not be transferred
                    answers = {expression: await query(url, expression) for expression in wanted}
                    last = {expression: answer for expression, answer in answers.items() if not all_numbers(answer)}
                    if not last:
                        break
        except TimeoutError:
            found = [f"{wanted[expression]}: {answer}" for expression, answer in last.items()]
            raise AssertionError("no numbers in\n" + "\n".join(found)) from None
        for where, expression in rules():
            assert isinstance(await query(url, expression), list), where
        firing = {item["metric"]["alertname"] for item in await query(url, 'ALERTS{alertstate="firing"}')}
        assert not firing & {"PdserveNoDecodeWorker", "PdserveTargetDown", "PdserveErrorRate"}


def all_numbers(answer: list[dict[str, Any]]) -> bool:
    """Is there a series, and does each have a value? A share of nothing has none: Prometheus says NaN then."""
    return bool(answer) and all(math.isfinite(float(series["value"][1])) for series in answer)


def test_a_share_of_nothing_is_no_number() -> None:
    some, none = ({"metric": {}, "value": [1.0, value]} for value in ("0.5", "NaN"))
    assert all_numbers([some])
    assert not all_numbers([]) and not all_numbers([some, none])


@asynccontextmanager
async def prometheus(cluster: Cluster, tmp_path: Path) -> AsyncIterator[str]:
    """A Prometheus with our rules that scrapes `cluster` once a second; yields its URL."""
    targets = [url.removeprefix("http://").removesuffix("/metrics") for url in cluster.metrics.values()]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(promql.ALERTS)],
        "scrape_configs": [{"job_name": "pdserve", "static_configs": [{"targets": targets}]}],
    }
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    flags = [f"--config.file={path}", f"--storage.tsdb.path={tmp_path / 'tsdb'}", "--web.listen-address=127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec("prometheus", *flags, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            port = None
            while port is None:
                line = (await process.stderr.readline()).decode()
                assert line, "Prometheus ended"
                port = re.search(r'msg="Listening on".* address=127\.0\.0\.1:(\d+)', line)
        drain = asyncio.create_task(process.stderr.read())
        try:
            yield f"http://127.0.0.1:{port[1]}"
        finally:
            process.terminate()
            await drain
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def query(url: str, expression: str) -> list[dict[str, Any]]:
    """What Prometheus answers to an expression. AssertionError for one that it does not take."""
    asked = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': promql.with_values(expression)})}"
    answer = json.loads(await read(asked))
    assert answer["status"] == "success", answer
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result
