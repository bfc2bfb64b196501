"""PromQL of dashboards and alerts, held against samples as they were scraped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml
from prometheus_client.parser import text_string_to_metric_families

DOCKER = Path(__file__).resolve().parent.parent / "docker"
ALERTS = DOCKER / "prometheus" / "alerts.yml"
DASHBOARDS = DOCKER / "grafana" / "dashboards"
# What Prometheus itself puts on every series, and makes up.
TARGET_LABELS = {"job", "instance"}
BUILT_IN = {"up"}

Series = list[dict[str, str]]
Scraped = Mapping[str, Series]


def alert_rules() -> list[dict[str, Any]]:
    """Alerting and recording rules, in the file's order."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def records() -> dict[str, str]:
    """Recording rules: expression by name."""
    return {rule["record"]: rule["expr"] for rule in alert_rules() if "record" in rule}


def series_of(texts: Iterable[str]) -> dict[str, Series]:
    """The labels of each series, by its name, of what several services answered a scrape with."""
    found: dict[str, Series] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append({"job": "", "instance": "", **sample.labels})
    return found


def selectors(expression: str) -> Iterator[promql.VectorSelector]:
    """Every selector of an expression; Grafana's variables take values first."""
    for node in nodes(promql.parse(with_values(expression))):
        if isinstance(node, promql.VectorSelector):
            yield node


def with_values(expression: str) -> str:
    return expression.replace("$__rate_interval", "1m").replace("$model", ".*")


def nodes(node: Any) -> Iterator[Any]:
    """`node` and everything below it."""
    yield node
    below = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param", "vector_selector")]
    for child in [*below, *getattr(node, "args", ())]:
        if isinstance(child, promql.Expr):
            yield from nodes(child)


def matching(selector: promql.VectorSelector, scraped: Scraped) -> Series:
    """The series that a selector takes."""
    return [
        labels
        for labels in scraped.get(selector.name or "", ())
        if all(_takes(matcher, labels.get(matcher.name, "")) for matcher in selector.matchers.matchers)
    ]


def _takes(matcher: promql.Matcher, value: str) -> bool:
    match = matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe)
    same = re.fullmatch(matcher.value, value) is not None if match else value == matcher.value
    return same is (matcher.op in (promql.MatchOp.Equal, promql.MatchOp.Re))


def problems(expression: str, scraped: Scraped, made: Mapping[str, str]) -> Iterator[str]:
    """What an expression asks for that does not exist: names, and labels. `made` are the recording rules."""
    tree = promql.parse(with_values(expression))
    for node in nodes(tree):
        if isinstance(node, promql.VectorSelector):
            name = node.name or ""
            if name in BUILT_IN:
                continue
            labels = labels_of(node, scraped, made)
            if not labels:
                yield f"nobody exports {name}"
            for matcher in node.matchers.matchers:
                if labels and matcher.name not in labels:
                    yield f"{name} has no label {matcher.name}, but {sorted(labels)}"
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            missing = set(node.modifier.labels) - labels_of(node.expr, scraped, made) - {"le"}
            if missing:
                yield f"no series below {node.op} has {sorted(missing)}"


def labels_of(node: Any, scraped: Scraped, made: Mapping[str, str]) -> set[str]:
    """Every label that a series below `node` has."""
    found: set[str] = set()
    for part in nodes(node):
        if isinstance(part, promql.VectorSelector):
            name = part.name or ""
            if name in made:
                found |= labels_of(promql.parse(made[name]), scraped, made)
            for labels in scraped.get(name, ()):
                found |= labels.keys()
            if name in BUILT_IN:
                found |= TARGET_LABELS
    return found


def without_data(expression: str, scraped: Scraped, made: Mapping[str, str]) -> Iterator[str]:
    """The selectors of an expression that take nothing."""
    for selector in selectors(expression):
        name = selector.name or ""
        if name in made:
            yield from without_data(made[name], scraped, made)
        elif name not in BUILT_IN and not matching(selector, scraped):
            yield str(selector)
