"""Make Grafana's dashboards in docker/grafana/dashboards/ from docker/grafana/dashboards.yaml.

`--check` compares instead of writing, and fails on any difference.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

GRAFANA = Path(__file__).resolve().parent.parent / "docker" / "grafana"
Json = dict[str, Any]

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
KINDS = {"timeseries": "timeseries", "bars": "timeseries", "stat": "stat", "gauge": "gauge", "heatmap": "heatmap"}
FIELDS = {"title", "kind", "help", "unit", "width", "height", "queries", "stack", "max", "thresholds", "colors"}


def dashboard(name: str, spec: Mapping[str, Any], names: list[str]) -> Json:
    """The whole of one dashboard. `names` are all there are, for links between them."""
    return {
        "uid": f"pdserve-{name}",
        "title": spec["title"],
        "description": spec["description"],
        "tags": ["pdserve"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,  # one crosshair over all panels
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [
            {"title": other, "type": "link", "url": f"/d/pdserve-{other}", "keepTime": True, "includeVars": True}
            for other in names
            if other != name
        ]
        + [{"title": "traces", "type": "link", "url": _explore_traces(), "keepTime": True, "targetBlank": True}],
        "templating": {"list": [_variable_datasource(), _variable_model()]},
        "panels": list(panels(spec["rows"])),
    }


def panels(rows: list[Json]) -> Iterator[Json]:
    """Every panel with its place: rows one below the other, panels from left to right."""
    number, top = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row["title"],
            "collapsed": False,
            "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": top},
            "panels": [],
        }
        top, left, deepest = top + 1, 0, 0
        for spec in row["panels"]:
            unknown = set(spec) - FIELDS
            if unknown:
                raise SystemExit(f"panel {spec.get('title')!r} has unknown fields {sorted(unknown)}")
            small = spec.get("kind") in ("stat", "gauge")
            width, height = spec.get("width", 8), spec.get("height", 5 if small else 8)
            if left + width > COLUMNS:
                top, left, deepest = top + deepest, 0, 0
            number += 1
            yield panel(spec, number, {"h": height, "w": width, "x": left, "y": top})
            left, deepest = left + width, max(deepest, height)
        top += deepest


def panel(spec: Json, number: int, place: Json) -> Json:
    """One panel of the kind that `spec` says."""
    made: Json = {"id": number, "title": spec["title"], "gridPos": place}
    if "help" in spec:
        made["description"] = spec["help"]
    kind = spec.get("kind", "timeseries")
    if kind == "alerts":
        states = {"firing": True, "pending": True, "noData": False, "normal": False, "error": True}
        return {**made, "type": "alertlist", "options": {"viewMode": "list", "maxItems": 20, "stateFilter": states}}
    heat = kind == "heatmap"
    made |= {
        "type": KINDS[kind],
        "datasource": SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": " ".join(expression.split()),
                "legendFormat": legend,
                "range": True,
                **({"format": "heatmap"} if heat else {}),
            }
            for index, (legend, expression) in enumerate(spec["queries"].items())
        ],
        "fieldConfig": {"defaults": _defaults(spec, kind), "overrides": list(_colors(spec.get("colors", {})))},
        "options": _options(spec, kind),
    }
    return made


def _defaults(spec: Json, kind: str) -> Json:
    unit = spec.get("unit", "short")
    if kind == "heatmap":
        return {}
    steps = [
        {"value": None if index == 0 else value, "color": color}
        for index, (value, color) in enumerate(spec.get("thresholds", {0: "green"}).items())
    ]
    made: Json = {"unit": unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if "max" in spec:
        made["max"] = spec["max"]
    if kind in ("stat", "gauge"):
        made["color"] = {"mode": "thresholds"}
        return made
    stacked = spec.get("stack", False)
    made["color"] = {"mode": "palette-classic"}
    made["custom"] = {
        "drawStyle": "bars" if kind == "bars" else "line",
        "lineWidth": 1 if stacked else 2,
        "fillOpacity": 45 if stacked else 8,
        "gradientMode": "none" if stacked else "opacity",
        "showPoints": "never",
        "spanNulls": 30_000,  # milliseconds: a missed scrape is no gap
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "line" if "thresholds" in spec else "off"},
    }
    return made


def _options(spec: Json, kind: str) -> Json:
    if kind == "stat":
        return {
            "colorMode": "value",
            "graphMode": "area",
            "textMode": "value_and_name" if len(spec["queries"]) > 1 or "{{" in "".join(spec["queries"]) else "value",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        }
    if kind == "gauge":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "showThresholdMarkers": True}
    if kind == "heatmap":
        return {
            "calculate": False,
            "yAxis": {"unit": spec["unit"]},
            "color": {"mode": "scheme", "scheme": "Turbo", "steps": 64},
            "cellGap": 1,
            "filterValues": {"le": 1e-9},
            "tooltip": {"mode": "single"},
            "legend": {"show": True},
        }
    return {
        "tooltip": {"mode": "multi", "sort": "desc"},
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"]},
    }


def _colors(colors: Mapping[str, str]) -> Iterator[Json]:
    for name, color in colors.items():
        fixed = {"mode": "fixed", "fixedColor": color}
        yield {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "color", "value": fixed}]}


def _variable_datasource() -> Json:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}


def _variable_model() -> Json:
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(pdserve_requests_total, model_name)", "refId": "model"},
        "definition": "label_values(pdserve_requests_total, model_name)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _explore_traces() -> str:
    query = {"refId": "A", "queryType": "search", "service": "pdserve-router"}
    pane = {"datasource": "jaeger", "queries": [query], "range": {"from": "now-1h", "to": "now"}}
    return "/explore?schemaVersion=1&orgId=1&panes=" + quote(json.dumps({"traces": pane}, separators=(",", ":")))


def render() -> dict[Path, str]:
    """Every dashboard's file, and what belongs into it."""
    specs = yaml.safe_load((GRAFANA / "dashboards.yaml").read_text())
    return {
        GRAFANA / "dashboards" / f"{name}.json": json.dumps(dashboard(name, spec, list(specs)), indent=2) + "\n"
        for name, spec in specs.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    files = render()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    stale += [path for path in (GRAFANA / "dashboards").glob("*.json") if path not in files]
    if check and stale:
        print(f"not as docker/grafana/dashboards.yaml says (make dashboards): {[path.name for path in stale]}")
        return 1
    if not check:
        for path, text in files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
