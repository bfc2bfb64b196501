"""What is left of the goodput at three times capacity, and how are the others refused?

A router, a prefill and a decode worker with a small random model, settings as they come; every request states its
targets. First the capacity is looked for: the highest rate of Poisson arrivals at which 90% of the requests meet both
targets, by bisection. Then capacity and three times as much take turns, for equal times. Nobody waits for anybody: a
request is sent when it is due, its times count from then, and who is refused does not come back.

The client is a process of its own. Its share of a core and how late it sent say whether it was the bottleneck: a run
in which it was is not valid. A refusal's time is from the due time to the refusal's arrival. The last line is JSON.

usage: python benchmarks/overload.py [--rounds N] [--seconds S] [--probe S] [--ttft-ms T] [--itl-ms T]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ATTAINMENT = 0.9  # of the requests at capacity
KEPT = 0.9  # of the goodput at capacity that has to be left
OVER = 3.0  # times capacity
STEPS = 5  # halvings: to a thirtieth of the first bracket
CROWD, CROWD_SECONDS = 16, 8.0  # closed loop, for a first guess
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "max_position_embeddings": 2048,
}
OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_cache_memory": 256 << 20, "log_level": "warning"}
MIB = 1 << 20


class Client:
    """The process that asks (benchmarks/open_loop.py): one line of JSON for each window, one back."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, endpoint: str) -> Client:
        command = [sys.executable, str(Path(__file__).with_name("open_loop.py")), endpoint]
        pipe = subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))

    async def window(self, **wanted: Any) -> dict[str, Any]:
        """Play one window; see `open_loop.Window` for what is wanted and told."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the client ended")
        told: dict[str, Any] = json.loads(line)
        return told

    async def close(self) -> None:
        """The end of its input is its end."""
        await self._process.communicate(b"")


async def find_capacity(client: Client, targets: dict[str, float], seconds: float) -> float:
    """The highest rate that was seen to be served, in requests a second."""
    crowd = await client.window(**targets, crowd=CROWD, seconds=CROWD_SECONDS, seed=1)
    least, most = 0.0, 1.5 * crowd["answered_s"]
    print(f"{CROWD} at a time: {crowd['answered_s']:.1f} requests/s", flush=True)
    for step in range(STEPS):
        rate = (least + most) / 2
        told = await client.window(**targets, rate=rate, seconds=seconds, seed=2 + step)
        print(f"{rate:.2f} requests/s: {told['attainment']:.1%} meet their targets: {told}", flush=True)
        least, most = (rate, most) if told["attainment"] >= ATTAINMENT else (least, rate)
    if not least:
        raise RuntimeError("no rate was served: raise the targets")
    return least


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from benchmarks.processes import cpu_seconds, processes, resident_bytes
    from pdserve.launch import ModelPart
    from pdserve.testing import Cluster
    from tests.tiny_models import make_tiny_model

    part = ModelPart(make_tiny_model(folder / "small", **MODEL), "small", prefill=1, decode=1)
    targets = {"ttft_ms": args.ttft_ms, "itl_ms": args.itl_ms, "itl_percentile": args.itl_percentile}
    router = {"router": {"slo-itl-percentile": args.itl_percentile}}
    windows: dict[str, list[dict[str, Any]]] = {"capacity": [], "over": []}
    async with Cluster([part], per_worker=router, log_folder=args.logs or folder / "logs", **OPTIONS) as cluster:
        client = await Client.start(cluster.endpoint)
        try:
            capacity = args.capacity or await find_capacity(client, targets, args.probe)
            pids = processes(cluster.suite)
            memory = {name: resident_bytes(pid) for name, pid in pids.items()}
            for number in range(args.rounds):
                for name in ("capacity", "over") if number % 2 == 0 else ("over", "capacity"):
                    rate = capacity * (OVER if name == "over" else 1.0)
                    used = {who: cpu_seconds(pid) for who, pid in pids.items()}
                    told = await client.window(**targets, rate=rate, seconds=args.seconds, seed=100 + number)
                    took = told["took_s"]
                    told["cpu"] = {who: round((cpu_seconds(pid) - used[who]) / took, 2) for who, pid in pids.items()}
                    windows[name].append(told)
                    print(f"{name}: {told}", flush=True)
            await cluster.assert_all_free()
            grown = {name: resident_bytes(pid) - memory[name] for name, pid in pids.items()}
        finally:
            await client.close()
    return summary(capacity, windows, grown)


def summary(capacity: float, windows: dict[str, list[dict[str, Any]]], grown: dict[str, int]) -> dict[str, Any]:
    """What all windows say together: medians, and the worst where only the worst counts."""
    at, over = windows["capacity"], windows["over"]
    kept = [b["goodput_s"] / max(a["goodput_s"], 1e-9) for a, b in zip(at, over, strict=True)]
    refused = sum(window["refused"] for window in over)
    with_retry_info = sum(window["with_retry_info"] for window in over)
    errors = sum((Counter(window["errors"]) for window in (*at, *over)), Counter[str]())
    client_bound = any(window["client_was_late"] for window in (*at, *over))
    ratio = round(statistics.median(kept), 3)
    return {
        "benchmark": "overload",
        "capacity_rps": round(capacity, 2),
        "attainment_at_capacity": round(statistics.median(window["attainment"] for window in at), 3),
        "goodput_at_capacity": round(statistics.median(window["goodput_s"] for window in at), 2),
        "goodput_at_3x": round(statistics.median(window["goodput_s"] for window in over), 2),
        "goodput_kept": ratio,
        "goodput_kept_each": [round(one, 3) for one in kept],
        "refused_fraction": round(refused / sum(window["asked"] for window in over), 3),
        "refusals_with_retry_info": round(with_retry_info / refused, 3) if refused else None,
        "refusal_ms_p50": statistics.median(window["refusal_ms"]["p50"] for window in over),
        "refusal_ms_p99": max(window["refusal_ms"]["p99"] for window in over),
        "admitted_attainment_at_3x": round(statistics.median(window["admitted_attainment"] for window in over), 3),
        "errors": dict(errors),
        "rss_growth_mib": {name: round(size / MIB, 1) for name, size in grown.items()},
        "client_cpu": max(window["client_cpu"] for window in (*at, *over)),
        "client_was_the_bottleneck": client_bound,
        "load_average": round(os.getloadavg()[0], 2),
        "holds": ratio >= KEPT and with_retry_info == refused and not errors and not client_bound,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each window")
    parser.add_argument("--probe", type=float, default=20.0, help="seconds for each rate while capacity is looked for")
    parser.add_argument("--capacity", type=float, help="requests/s; do not look for it")
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--itl-ms", type=float, default=100.0)
    parser.add_argument("--itl-percentile", type=float, default=95.0)
    parser.add_argument("--logs", type=Path, help="folder for the services' logs, which is kept")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    with tempfile.TemporaryDirectory() as name:
        result = asyncio.run(measure(args, Path(name)))
    print(json.dumps(result))
    if not result["holds"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
