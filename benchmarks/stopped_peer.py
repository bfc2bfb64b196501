"""Does a peer that stops, or dies, disturb anybody but its own tickets?

    PYTHONPATH=shared:services python benchmarks/stopped_peer.py [--rounds 3] [--streams 6] [--window 8]

Two prefill workers and a decode worker with a small random model. Streams follow one another without a pause; into
them come long prompts, and while prefill-0 has sent part of one of them it is stopped (SIGSTOP) for the window, then
continued. Each such round follows a control round: the same load, nobody stopped. In a last round prefill-0 is killed.
The decode worker's core is its own: what is measured is not that prefill-1 has more to do.

ITL is taken from streams whose KV came from prefill-1 and that were never continued elsewhere, in the window alone.
`holds` says whether the 99th percentile with a stopped peer is at most ALLOWED times that of its control round, by the
median of the rounds; the exit status is 1 where it is not. `moved_on_s` is how long the victims, requests that changed
workers, waited for their next token from the stop on (or from when they were asked, if later). The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.client import Finish, Output
from pdserve.testing import Cluster, wait_load
from pdserve.worker.config import available_cores

VICTIM, OTHER = "prefill-0", "prefill-1"
SHORT, LONG = 40, 1500  # tokens in a prompt
STREAM_TOKENS, VICTIM_TOKENS = 150, 20
VICTIMS = 3
ALLOWED = 1.2  # times the control's ITL p99
TRACES = 4096  # requests that the router remembers: more than there are in a round
SEEDS = itertools.count(1)  # no prompt comes twice, or it would be cached
SEND_AT_LEAST = 256 << 10  # bytes of a long prompt's KV, before its worker is stopped


@dataclass(slots=True)
class Run:
    """One request, as its client saw it; times on the monotonic clock."""

    asked: float
    arrivals: list[float] = field(default_factory=list)
    prefill_worker: str = ""
    workers: tuple[str, ...] = ()  # all that it was placed on

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Time between tokens of which the later one came in the window."""
        return [1e3 * (b - a) for a, b in itertools.pairwise(self.arrivals) if begin <= b <= end]

    def moved_on(self, mark: float) -> float:
        """Seconds from `mark` to the end of the longest wait that ended after it."""
        times = [self.asked, *self.arrivals]
        waits = [(b - a, b - max(a, mark)) for a, b in itertools.pairwise(times) if b > mark]
        return max(waits)[1] if waits else 0.0


class Load:
    """Streams one after the other, and long prompts on demand; every answer must have all its tokens."""

    def __init__(self, cluster: Cluster) -> None:
        self.runs: dict[str, Run] = {}  # by request id
        self._cluster = cluster
        self._stop = asyncio.Event()

    async def ask(self, length: int, tokens: int) -> None:
        seed = next(SEEDS)
        prompt = [(seed * 101 + i * (37 + seed // 250) + (i * i) % 11 + 3) % 250 for i in range(length)]
        run = Run(time.monotonic())
        request_id = f"run-{seed}"
        self.runs[request_id] = run
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
        async for event in self._cluster.client.generate(prompt, request_id=request_id, **options):
            if isinstance(event, Output):
                run.arrivals += [time.monotonic()] * len(event.tokens)
            elif isinstance(event, Finish):
                run.prefill_worker = event.usage.prefill_worker
        if len(run.arrivals) != tokens:
            raise RuntimeError(f"{len(run.arrivals)} tokens came, {tokens} were due")

    async def stream(self) -> None:
        while not self._stop.is_set():
            await self.ask(SHORT, STREAM_TOKENS)

    async def place(self) -> None:
        """Ask the router where its runs were: a rearm is told nowhere else."""
        for request in await self._cluster.client.traces(TRACES):
            if request.request_id in self.runs:
                self.runs[request.request_id].workers = request.workers

    def stop(self) -> None:
        self._stop.set()


def percentiles(gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 2) for name, share in at.items()}


@dataclass(slots=True)
class Round:
    itl_ms: list[float]
    moved_on: list[float]


async def play(cluster: Cluster, streams: int, window: float, harm: str) -> Round:
    """One round; `harm` is "none", "stop" or "kill"."""
    victim, load = cluster.workers[VICTIM], Load(cluster)
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(load.stream())
        seen = 0

        def sent(state: Any) -> bool:
            nonlocal seen
            seen = seen or state.kv_bytes_sent
            return bool(state.kv_bytes_sent > seen + SEND_AT_LEAST and state.pending_prefill_tokens > LONG // 8)

        for _ in range(VICTIMS):
            tasks.create_task(load.ask(LONG, VICTIM_TOKENS))
        await wait_load(victim.endpoint, sent, access=cluster.access)
        mark = time.monotonic()
        if harm == "kill":
            await cluster.kill(VICTIM)
        elif harm == "stop":
            os.killpg(victim.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(window)
        finally:
            if harm == "stop":
                with suppress(ProcessLookupError):
                    os.killpg(victim.pid, signal.SIGCONT)
        load.stop()
    await load.place()
    kept = [run for run in load.runs.values() if run.prefill_worker == OTHER and VICTIM not in run.workers]
    gaps = [gap for run in kept for gap in run.gaps_ms(mark, mark + window)]
    moved = [round(run.moved_on(mark), 2) for run in load.runs.values() if {VICTIM, OTHER} <= set(run.workers)]
    await cluster.assert_all_free()
    return Round(gaps, moved)


async def measure(model: Path, folder: Path, rounds: int, streams: int, window: float) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dtype": "float32", "block_size": 16, "max_num_batched_tokens": 32, "threads": 1, "max_num_seqs": 64
    }  # fmt: skip
    cores = sorted(available_cores())
    for_decode = {"cores": str(cores[-1])}
    for_prefill = {"cores": ",".join(map(str, cores[:-1] or cores))}  # both: one that stops leaves decode's core alone
    options["per_worker"] = {
        **{VICTIM: for_prefill, OTHER: for_prefill, "decode-0": for_decode},
        "router": {"trace-ring": TRACES, "local-prefill": False},
    }
    found: dict[str, list[Round]] = {"none": [], "stop": [], "kill": []}
    async with Cluster(model, prefill=2, decode=1, log_folder=folder, **options) as cluster:
        await play(cluster, streams, 1.0, "none")  # warm-up: links, pages, caches
        for harm in [*["none", "stop"] * rounds, "none", "kill"]:
            done = await play(cluster, streams, window, harm)
            found[harm].append(done)
            note = f", {len(done.moved_on)} moved on after {done.moved_on} s" if done.moved_on else ""
            print(f"{harm:>5}: {len(done.itl_ms)} gaps, ITL ms {percentiles(done.itl_ms)}{note}", flush=True)
    itl = {harm: percentiles([gap for one in found[harm] for gap in one.itl_ms]) for harm in found}
    ratios = [
        percentiles(b.itl_ms)["p99"] / percentiles(a.itl_ms)["p99"]
        for a, b in zip(found["none"], found["stop"], strict=False)
    ]
    moved = {harm: sorted(wait for one in found[harm] for wait in one.moved_on) for harm in ("stop", "kill")}
    return {
        "benchmark": "stopped_peer",
        "streams": streams,
        "window_s": window,
        "itl_ms": {"control": itl["none"], "stopped": itl["stop"], "killed": itl["kill"]},
        "p99_ratio": round(statistics.median(ratios), 3),
        "holds": statistics.median(ratios) <= ALLOWED,
        "p99_ratios": [round(ratio, 3) for ratio in ratios],
        "moved_on_s": {"stopped": moved["stop"], "killed": moved["kill"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--window", type=float, default=8.0, help="seconds; longer than the lease")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.tiny_models import make_tiny_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_model(folder / "model", num_hidden_layers=6, max_position_embeddings=2048)
        found = asyncio.run(measure(model, folder / "logs", args.rounds, args.streams, args.window))
    print(json.dumps(found))
    if not found["holds"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
