"""pdserve beside vLLM's CPU build on the same cores, under one harness, in one run.

    make bench-peer                 hours; QUICK=1: less of everything
    .venv/bin/python benchmarks/peer.py --venv build/peer --loads mixed --chunks 512      a part of it

The field's rule is that disaggregation counts only against a co-located server that is well tuned. So there are

- A: vLLM, one process on all cores, chunked prefill and prefix cache on; its chunk is swept on the mixed load, and the
  best one is kept for everything else;
- B: vLLM's own disaggregation (`benchmarks/peer_pair.py`): a prefill and a decode engine, a core each; mixed load only;
- C: pdserve, one prefill and one decode worker, a core each;
- D: pdserve, one worker that does both, on all cores.

Each is started once. While one is measured the others stand still (SIGSTOP), so that nothing but it runs. The client is
`pdserve bench` for all of them: over gRPC for ours, over HTTP for vLLM, which costs ours nothing and vLLM its own API.
Targets are stated below, before anything is measured, and hold for all; C and D, which can be told, are told (`pdserve
serve --slo-ttft-ms --slo-itl-ms`). Goodput of a load is the requests a second
within both targets at the highest rate that keeps 90% of them there; they take turns load by load.

Interference: 8 streams (128 in, 200 out) with 2,048-token documents back to back from one more client, over the same
streams without: `interference_p99_ratio` of their ITL p99, and of A for comparison. It and the tokens a second of 32
streams are measured of a C and a D that are told no targets: a target is also a permission to come near it, and to turn
away who would miss it.

The last line is one JSON object; `runs` in it are all results, lost ones included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

MODEL = "smollm2-135m-instruct"
TTFT_MS, ITL_MS = 5000.0, 200.0
TOLD = ["--slo-ttft-ms", str(TTFT_MS), "--slo-itl-ms", str(ITL_MS)]
CHUNKS = (256, 512, 2048)
LOADS = {
    "chat": ["--mix", "100% 128/64"],
    "mixed": ["--mix", "80% 128/64 + 20% 2048/16"],
    "documents": ["--mix", "100% 2048/16"],
    "multiturn": ["--mix", "100% 128/64", "--turns", "4", "--system-tokens", "256", "--think", "2"],
}
OPTIONS = ["--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", "4096", "--served-model-name", "peer"]
OPTIONS += ["--enable-prefix-caching"]
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
# The client goes before all servers: it shares their cores, and one that waits for a turn measures that.
NICE = "5"
READY_SECONDS = 900.0
START = {"chat": 1.0, "mixed": 0.5, "documents": 0.25, "multiturn": 0.5}  # requests a second that a search begins at
QUICK_CHUNKS, QUICK_LOADS = (512, 2048), ("mixed", "chat")
STREAMS = ["--mix", "100% 128/200", "--streams", "8"]
DOCUMENTS = ["--mix", "100% 2048/16", "--streams", "1"]

Json = dict[str, Any]


def free_port() -> int:
    """Below those that the system hands out by itself: a server that is still starting would find its own taken."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def family(pid: int) -> list[int]:
    """A process and its descendants, parents first."""
    found = [pid]
    for one in found:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found.extend(map(int, children.read_text().split()))
    return found


@dataclass
class Server:
    """One competitor: a process group that listens at `target` once `health` answers."""

    name: str
    command: list[str]
    target: str
    health: str
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["nice", "-n", NICE, *self.command],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | self.environment,
            )
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process is not None
        self.signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()

    def wait_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + READY_SECONDS
        while not self._answers():
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended before it was ready; see {self.log}")
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name} was not ready in {READY_SECONDS:.0f} s; see {self.log}")
            time.sleep(1.0)

    def signal(self, number: signal.Signals) -> None:
        """To it and everything that it started: `pdserve serve` gives each service a session of its own."""
        assert self.process is not None
        for pid in family(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.health, timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


def bench_command(server: Server, vocabulary: Path, *arguments: str, seed: int = 1) -> list[str]:
    command = [sys.executable, "-m", "pdserve.cli", "bench", "--json", "--target", server.target, "--seed", str(seed)]
    if server.target.startswith("http"):
        command += ["--tokenizer", str(vocabulary)]
    return [*command, "--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS), *arguments]


def bench(server: Server, vocabulary: Path, *arguments: str, seed: int = 1) -> Json:
    """One result; what went wrong is in it, as `failed`."""
    done = subprocess.run(
        bench_command(server, vocabulary, *arguments, seed=seed), capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    found: Json = json.loads(lines[-1]) if lines else {"failed": done.stderr.strip()[-500:]}
    if not found.get("figures"):
        found.setdefault("failed", found.get("refused") or "nothing was answered")
    return {"server": server.name, **found}


class Contest:
    """The servers, of which one runs at a time, and everything that was measured."""

    def __init__(self, servers: list[Server], vocabulary: Path, quick: bool) -> None:
        self.servers, self.vocabulary, self.quick = servers, vocabulary, quick
        self.runs: list[Json] = []

    def alone(self, server: Server) -> None:
        """Let one run, and wait until it answers: a suite that stood still finds itself again first."""
        for other in self.servers:
            other.signal(signal.SIGCONT if other is server else signal.SIGSTOP)
        server.wait_ready()

    def goodput(self, server: Server, load: str) -> float:
        """Requests a second within both targets at the highest rate that keeps 90% of them there."""
        self.alone(server)
        requests, runs = ("32", "5") if self.quick else ("120", "10")
        search = ["--find-rate", "--rate", str(START[load]), "--max-runs", runs, "--precision", "0.1"]
        found = self._keep(load, bench(server, self.vocabulary, *LOADS[load], *search, "--requests", requests))
        if "failed" in found or not (best := found["find_rate"]["highest_rate"]):
            print(f"{load}: {server.name} keeps 90% within targets at no rate that was tried", flush=True)
            return 0.0
        goodput = float(found["figures"]["goodput"])
        print(f"{load}: {server.name} {goodput} requests/s within targets, at {best} a second", flush=True)
        return goodput

    def throughput(self, server: Server) -> float:
        """Output tokens a second of 32 streams."""
        self.alone(server)
        requests = "64" if self.quick else "192"
        found = self._keep(
            "32 streams", bench(server, self.vocabulary, *LOADS["chat"], "--streams", "32", "--requests", requests)
        )
        rate = 0.0 if "failed" in found else float(found["figures"]["output_tokens_per_second"])
        print(f"32 streams: {server.name} {rate:.1f} tokens/s", flush=True)
        return rate

    def interference(self, server: Server) -> tuple[float, float]:
        """ITL p99 of 8 streams with documents over without, and their longest gap over their median."""
        self.alone(server)
        count = ["--requests", "16" if self.quick else "48"]
        quiet = self._keep("8 streams", bench(server, self.vocabulary, *STREAMS, *count))
        documents = bench_command(server, self.vocabulary, *DOCUMENTS, "--requests", "100000", seed=2)
        with subprocess.Popen(documents, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as beside:
            disturbed = self._keep("8 streams, documents", bench(server, self.vocabulary, *STREAMS, *count))
            beside.terminate()
        if "failed" in quiet or "failed" in disturbed:
            return float("nan"), float("nan")
        before, after = (run["figures"]["itl_ms"] for run in (quiet, disturbed))
        ratio, longest = after["p99"] / before["p99"], after["greatest"] / after["p50"]
        print(f"8 streams and documents: {server.name} ITL p99 {ratio:.2f} times, longest gap {longest:.1f} medians")
        return ratio, longest

    def _keep(self, load: str, run: Json) -> Json:
        self.runs.append({"load": load, **run})
        if "failed" in run:
            print(f"{load}: {run['server']}: {run['failed']}", file=sys.stderr, flush=True)
        return run


def ours(name: str, folder: Path, *options: str) -> Server:
    grpc, http = free_port(), free_port()
    command = [sys.executable, "-m", "pdserve.cli", "serve", "--model", MODEL, *options]
    command += ["--port", str(grpc), "--http-port", str(http)]
    return Server(name, command, f"127.0.0.1:{grpc}", f"http://127.0.0.1:{http}/health", folder / f"{name}.log")


def theirs(venv: Path, model: Path, chunk: int, folder: Path) -> Server:
    port = free_port()
    command = [str(venv / "bin" / "vllm"), "serve", str(model), "--port", str(port), *OPTIONS]
    command += ["--max-num-batched-tokens", str(chunk)]
    cores = f"0-{(os.cpu_count() or 1) - 1}"  # its default leaves one core idle
    environment = {**SETTINGS, "VLLM_CPU_OMP_THREADS_BIND": cores}
    at = f"http://127.0.0.1:{port}"
    return Server(f"A, chunk {chunk}", command, at, f"{at}/health", folder / f"A-{chunk}.log", environment)


def their_pair(venv: Path, model: Path, folder: Path) -> Server:
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("peer_pair.py")), "--venv", str(venv)]
    command += ["--model", str(model), "--port", str(port), "--", *OPTIONS, "--max-num-batched-tokens", "2048"]
    at = f"http://127.0.0.1:{port}"
    return Server("B", command, at, f"{at}/health", folder / "B.log", SETTINGS)


def best_peer(venv: Path, model: Path, chunks: list[int], folder: Path, quick: bool, runs: list[Json]) -> Server:
    """The chunk with the most goodput on the mixed load, each measured with the machine to itself."""
    if len(chunks) == 1:
        return theirs(venv, model, chunks[0], folder)
    found: dict[int, float] = {}
    for chunk in chunks:
        with theirs(venv, model, chunk, folder) as server:
            contest = Contest([server], model, quick)
            found[chunk] = contest.goodput(server, "mixed")
            runs.extend(contest.runs)
    return theirs(venv, model, max(found, key=lambda chunk: found[chunk]), folder)


def compare(
    contest: Contest, loads: list[str], pair: Server | None, untold: dict[str, Server], servers: dict[str, Server]
) -> Json:
    """Everything, in turns; what is over soonest goes first. `servers` are A, C and D, and so are those `untold`."""
    tokens = {name: contest.throughput(server) for name, server in untold.items()}
    ratio, longest = contest.interference(untold["C"])
    peer_ratio, peer_longest = contest.interference(servers["A"])
    goodputs = {load: {name: contest.goodput(server, load) for name, server in servers.items()} for load in loads}
    if pair is not None and "mixed" in goodputs:
        goodputs["mixed"]["B"] = contest.goodput(pair, "mixed")

    def over(load: str, ours: str, theirs: str = "A") -> float | None:
        found = goodputs.get(load)
        return round(found[ours] / found[theirs], 3) if found and found.get(theirs) else None

    return {
        "goodput": goodputs,
        "goodput_mixed_c_over_a": over("mixed", "C"),
        "goodput_mixed_d_over_a": over("mixed", "D"),
        "goodput_mixed_c_over_b": over("mixed", "C", "B"),
        "goodput_documents_c_over_a": over("documents", "C"),
        "goodput_multiturn_c_over_a": over("multiturn", "C"),
        "goodput_chat_d_over_a": over("chat", "D"),
        "interference_p99_ratio": round(ratio, 3),
        "interference_longest_gap_over_median": round(longest, 2),
        "interference_p99_ratio_a": round(peer_ratio, 3),
        "interference_longest_gap_over_median_a": round(peer_longest, 2),
        "output_tokens_s": tokens,
        "tokens_c_over_a": round(tokens["C"] / tokens["A"], 3) if tokens["A"] else None,
        "tokens_d_over_a": round(tokens["D"] / tokens["A"], 3) if tokens["A"] else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="where scripts/peer.py has installed vLLM")
    parser.add_argument("--loads", nargs="+", choices=tuple(LOADS), help="default: all; QUICK=1: mixed and chat")
    parser.add_argument("--chunks", nargs="+", type=int, help="of the peer, to sweep; one alone is not swept")
    parser.add_argument("--no-pair", action="store_true", help="leave B out")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "pdserve-peer")
    args = parser.parse_args()
    quick = bool(os.environ.get("QUICK"))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the servers end, too
    args.logs.mkdir(exist_ok=True)
    import asyncio

    from pdserve.launch.models import resolve_model

    model = asyncio.run(resolve_model(MODEL, progress=print))
    cores, runs = os.cpu_count() or 1, []  # type: int, list[Json]
    chunks = args.chunks or (QUICK_CHUNKS if quick else CHUNKS)
    peer = best_peer(args.venv, model, list(chunks), args.logs, quick, runs)
    split = ["--prefill", "1", "--decode", "1"]
    servers = {
        "A": peer,
        "C": ours("C", args.logs, *split, *TOLD),
        "D": ours("D", args.logs, "--colocated", "1", "--threads", str(cores), *TOLD),
    }
    untold = {
        "A": peer,
        "C": ours("C without targets", args.logs, *split),
        "D": ours("D without targets", args.logs, "--colocated", "1", "--threads", str(cores)),
    }
    pair = None if args.no_pair else their_pair(args.venv, model, args.logs)
    everyone = [*servers.values(), untold["C"], untold["D"], *([pair] if pair else [])]
    with contextlib.ExitStack() as running:
        for server in everyone:
            running.enter_context(server)
        contest = Contest(everyone, model, quick)
        figures = compare(contest, list(args.loads or (QUICK_LOADS if quick else LOADS)), pair, untold, servers)
        runs += contest.runs
    facts = {"benchmark": "peer", "cores": cores, "peer": peer.name, "slo": {"ttft_ms": TTFT_MS, "itl_ms": ITL_MS}}
    print(json.dumps({**facts, **figures, "runs": runs}))


if __name__ == "__main__":
    main()
