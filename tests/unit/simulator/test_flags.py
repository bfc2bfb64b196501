"""Flags over what a plan says: each reaches its key, and what contradicts it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.core.errors import ConfigError
from pdserve.simulator.flags import Flags, apply, parse_changes, put

TRACE = {"workload": {"trace": "a.csv", "copies": 2}}
STREAM = {"workload": {"synthetic": {"rate": 1, "prompt": 9}}}


@pytest.mark.parametrize(
    ("flags", "content", "result"),
    [
        (Flags(), {"fleet": {"prefill": 1}}, {"fleet": {"prefill": 1}}),
        (Flags(prefill=3), {"fleet": {"colocated": 4, "link": "x"}},
         {"fleet": {"colocated": 0, "link": "x", "prefill": 3}}),
        (Flags(colocated=4), {"fleet": {"prefill": 1, "decode": 1}},
         {"fleet": {"prefill": 0, "decode": 0, "colocated": 4}}),
        (Flags(colocated=4, prefill=1), {}, {"fleet": {"prefill": 1, "colocated": 4}}),
        (Flags(hardware="h100"), {"cost": "mooncake"}, {"cost": {"hardware": "h100", "devices": 1}}),
        (Flags(devices=8), {"cost": {"hardware": "a100"}}, {"cost": {"hardware": "a100", "devices": 8}}),
        (Flags(measured=Path("m")), {"cost": "mooncake"}, {"cost": {"measured": "m"}}),
        (Flags(rate=2.0, requests=5), TRACE, {"workload": {"trace": "a.csv", "copies": 2, "rate": 2.0, "limit": 5}}),
        (Flags(rate=2.0, requests=5), STREAM,
         {"workload": {"synthetic": {"rate": 2.0, "prompt": 9, "requests": 5}}}),
        (Flags(trace=Path("b.csv"), rate=3.0), STREAM, {"workload": {"trace": "b.csv", "rate": 3.0}}),
        (Flags(prompt=7, output=8, rate=3.0), TRACE,
         {"workload": {"copies": 2, "synthetic": {"rate": 3.0, "prompt": 7, "output": 8}}}),
        (Flags(ttft_ms=1.0, itl_ms=2.0, policy="random", model="m", seed=0, link="1GB/s"), {"seed": 5},
         {"slo": {"ttft_ms": 1.0, "itl_ms": 2.0}, "policy": "random", "model": "m", "seed": 0,
          "fleet": {"link": "1GB/s"}}),
    ],
)  # fmt: skip
def test_flags_are_put_over_a_plan(flags: Flags, content: dict[str, Any], result: dict[str, Any]) -> None:
    copy: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in content.items()}
    if "synthetic" in copy.get("workload", {}):
        copy["workload"]["synthetic"] = dict(copy["workload"]["synthetic"])
    apply(flags, copy)
    assert copy == result


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (Flags(measured=Path("m"), hardware="h100"), "--measured"),
        (Flags(trace=Path("t"), prompt=3), "--trace brings its own"),
    ],
)
def test_flags_that_contradict_each_other(flags: Flags, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        apply(flags, {})


def test_single_values_reach_into_parts_that_are_not_there_yet() -> None:
    """An empty part is one without keys; a value in the way is an error that names it."""
    content: dict[str, Any] = {"fleet": None}
    put(content, {"fleet.speeds.decode-0": 2, "seed": 3})
    assert content == {"fleet": {"speeds": {"decode-0": 2}}, "seed": 3}
    with pytest.raises(ConfigError, match="seed: must hold keys, not 3"):
        put(content, {"seed.of.it": 1})


def test_values_of_changes_are_yaml() -> None:
    assert parse_changes(["a=1", "b.c=[x, 2]", "d=", "e=true"]) == {"a": 1, "b.c": ["x", 2], "d": None, "e": True}
