"""How fast does the simulator run, and do routing policies rank on a real trace as they were published?

Mooncake's conversation trace (12,031 requests) on 16 nodes, 8 of them for prefill, under its four policies (FAST 2025,
figure 5) and under what the router runs: mean time to first token, and the ratios beside the paper's, which does not
say how it divided the nodes. Then 1,000 nodes at ten times the rate; QUICK=1 leaves that out. One core. Traces are read
from --traces or $PDSERVE_TEST_TRACES. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.policy.routing import choose_pair
from pdserve.simulator.baselines import kv_aware, load_balance, policy, random_choice
from pdserve.simulator.costs import MOONCAKE
from pdserve.simulator.plan import Fetch, FleetPlan, Policy, WorkerLimits
from pdserve.simulator.report import Report
from pdserve.simulator.simulation import Simulation
from pdserve.simulator.workload import Arrival, read_trace, repeat

TRACE = Path("mooncake/conversation_trace.jsonl")
LAYOUT = KVLayout(512, 80, 8, 128, "bfloat16", bytes(16))  # a 70B model, in the trace's own blocks
LINK = 100e9  # bytes a second: 4 x 200 Gbit/s
LIMITS = WorkerLimits(
    total_blocks=3_000_000 // LAYOUT.block_size,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    lookahead_tokens=128,
    watermark_blocks=4,
)
TARGETS = SloTargets(30.0, 0.2, 90)
PAPER = {"local/global": 1.17, "load_balance/global": 1.72, "random/global": 6.4}


def fleet(prefill: int, decode: int, fetch: Fetch) -> FleetPlan:
    return FleetPlan(
        LAYOUT,
        MOONCAKE,
        prefill=prefill,
        decode=decode,
        prefill_limits=LIMITS,
        decode_limits=LIMITS,
        link_bytes_per_second=LINK,
        fetch=fetch,
    )


def run(name: str, plan: FleetPlan, choose: Policy, arrivals: Sequence[Arrival]) -> tuple[float, Report]:
    """Seconds of the core that it took, and what it came to. The core's, so that others on it don't count."""
    simulation = Simulation(plan, choose)
    began = time.process_time()
    simulation.run(arrivals)
    took = time.process_time() - began
    report = Report.of(simulation, TARGETS)
    print(
        f"{name:14} {took:6.1f} s  mean TTFT {report.ttft.mean:6.3f} s, p99 {report.ttft.p99:6.2f}, gaps' p99 "
        f"{1e3 * report.itl.p99:.1f} ms, cached {report.hit_rate:.1%}, prefill busy {report.use['prefill']:.0%}",
        flush=True,
    )
    return took, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=os.environ.get("PDSERVE_TEST_TRACES"))
    parser.add_argument("--requests", type=int, help="only so many of the trace's")
    args = parser.parse_args()
    if args.traces is None or not (args.traces / TRACE).is_file():
        sys.exit(f"needs {TRACE} of Mooncake's repository: --traces FOLDER, or PDSERVE_TEST_TRACES")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    arrivals = read_trace(args.traces / TRACE)[: args.requests]

    alone, pair, shared = (fleet(8, 8, fetch) for fetch in Fetch)
    runs: dict[str, tuple[FleetPlan, Policy]] = {
        "default": (pair, choose_pair),
        "default_global": (shared, choose_pair),
        "global": (shared, policy(kv_aware(MOONCAKE, LINK))),
        "local": (alone, policy(kv_aware(MOONCAKE))),
        "load_balance": (alone, policy(load_balance)),
        "random": (alone, policy(random_choice(random.Random(1)))),
    }
    found = {name: run(name, plan, choose, arrivals) for name, (plan, choose) in runs.items()}
    means = {name: report.ttft.mean for name, (_, report) in found.items()}
    seconds = found["default"][0]
    result = {
        "benchmark": "simulator",
        "requests": len(arrivals),
        "sim_seconds_16": round(seconds, 2),
        "sim_requests_s": round(len(arrivals) / seconds),
        "mean_ttft_s": {name: round(mean, 3) for name, mean in means.items()},
        "ratios": {
            f"{name}/global": round(means[name] / means["global"], 3) for name in ("local", "load_balance", "random")
        },
        "paper": PAPER,
        "default/each": {
            name: round(means["default"] / mean, 3) for name, mean in means.items() if "default" not in name
        },
    }
    if not os.environ.get("QUICK"):
        many = repeat(arrivals, 10)
        large = replace(pair, prefill=500, decode=500)
        result["sim_seconds_1000"] = round(run("1,000 nodes", large, choose_pair, many)[0], 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
