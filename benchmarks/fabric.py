"""How well KV moves: a link against a bare group, and what of a transfer a request sees.

    PYTHONPATH=shared:services python benchmarks/fabric.py [--rounds 5] [--model smollm2-135m-instruct] [--links]

Three parts, in one run:

- **Throughput.** Two processes, each with a hub of links and the pages of a 16-layer model with 8 KV heads of 128 in
  bfloat16, over loopback: one computed prompt is pushed from the first announcement to Committed, with frames of 4, 8
  and 16 MiB. The control: two processes with a bare two-member Gloo group that send as many bytes, as they lie in
  memory, in tensors of the same size, each copied once into its place by the receiver. In each round both start anew
  and push in turn, one idle meanwhile: what else the machine does changes within seconds, and where processes come to
  lie makes a tenth. `link_over_control` is the worst of the three sizes' ratios of medians, `link_gbps` and
  `control_gbps` belong to it.
- **Hand-off.** The demo model in a suite of one prefill and one decode worker, a core each, idle otherwise. For each
  prompt: `exposed` is the time from the end of the last layer until everything had landed, as a share of the time from
  the first frame until then; `handoff_ms` is from the end of prefill's last layer to the begin of decode's first step.
- **int8.** The same model, greedy, once with KV travelling as it is and once as int8: `int8_agreement` is the share of
  positions at which both answers have the same token, before and at their first difference.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from pdserve.core.layout import KVLayout
from pdserve.engine.kv_cache import KVCache
from pdserve.transfer.gloo import GlooTransport
from pdserve.transfer.hub import LinkHub, LinkSettings
from pdserve.transfer.messages import SendCommitted, TransferEvent
from pdserve.worker.channel import Channel
from pdserve.worker.messages import LinkControl, LinkMessage

LAYOUT = KVLayout(16, 16, 8, 128, "bfloat16", bytes(16))
FRAME_SIZES = [4 << 20, 8 << 20, 16 << 20]
LINK_SIZES = [1 << shift for shift in range(16, 24)]  # of `--links`
TOKENS = 4096  # 256 MiB
SHORT = (96, 200, 256, 333)  # more hand-offs, whose KV takes next to no time
REMOTE: dict[str, dict[str, object]] = {"router": {"local-prefill": False}}  # every prompt goes over the link
WARM_UP = (64, 1024, 4096)
TEXTS = [
    "A lighthouse keeper wrote in her diary every evening. On the last night of the year she began:",
    "List five things that a beginner should know before baking bread at home, and say why each matters.\n1.",
    'def merge(left, right):\n    """Merge two sorted lists into one."""\n',
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "In physics, momentum is the product of mass and velocity. When two bodies collide,",
    "Dear Sir or Madam,\nI am writing to you about the train from Leeds to York on Tuesday, which",
    "Question: A farmer has 17 sheep and buys 8 more, then sells 5. How many are left?\nAnswer: Let us count.",
    "The committee met on Monday to discuss the budget. First, the treasurer reported that",
    "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    "To compile the program, open a terminal, change to the folder with the sources and",
]
_seeds = itertools.count()
PUSHES = 4  # of each pair of processes, of which the first warms up


def link_end(fd: int, sends: bool, frame_bytes: int) -> None:
    """One end of a link whose control half is a socket."""
    channel: Channel[LinkMessage, LinkMessage] = Channel(socket.socket(fileno=fd), LinkMessage)  # type: ignore[arg-type]
    events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
    up = threading.Event()
    kv = KVCache(LAYOUT, LAYOUT.blocks_for(TOKENS), "cpu")
    kv.data.fill_(1.0)  # memory that was never written is not there yet
    hub = LinkHub(
        kv,
        LAYOUT,
        LinkSettings(frame_bytes, 4 * frame_bytes, target_bytes=frame_bytes // 4, sends=sends, receives=not sends),
        send_control=lambda peer, epoch, message: channel.send(LinkControl(peer, epoch, message)),
        established=lambda peer, epoch: up.set(),
        closed=lambda peer, epoch, reason: print(reason, file=sys.stderr),
        notify=events.put,
    )
    if not sends:
        for number in range(PUSHES):
            hub.grant(f"t{number}", 1, "peer", torch.arange(TOKENS), TOKENS, 0)
    hub.open("peer", 1, sends, "gloo")

    def listen() -> None:
        while isinstance(message := channel.receive(), LinkControl):
            hub.on_control("peer", 1, message.message)

    numbers = itertools.count()

    def push() -> None:
        ticket = f"t{next(numbers)}"
        hub.start_send(ticket, 1, "peer", torch.arange(TOKENS), TOKENS)
        for layer in range(LAYOUT.num_layers):
            hub.advance([(ticket, TOKENS)], layer)
        hub.finish_send(ticket, 0)
        if not isinstance(event := events.get(), SendCommitted):
            raise RuntimeError(event)

    listener = threading.Thread(target=listen)
    listener.start()
    if sends:
        up.wait()
        push_when_told(push)
        channel._sock.shutdown(socket.SHUT_RDWR)
    listener.join()
    hub.shutdown()


def control_end(port: int, sends: bool, frame_bytes: int) -> None:
    """One end of a bare group; the receiver copies each tensor into its place."""
    patience = timedelta(seconds=20)
    store = PrefixStore("control", TCPStore("127.0.0.1", port, 2, sends, patience))
    transport: Any = GlooTransport(store, 0 if sends else 1, patience, "127.0.0.1", "")
    count = TOKENS * LAYOUT.token_bytes // frame_bytes
    frame = torch.ones(frame_bytes, dtype=torch.uint8)
    memory = torch.ones(count, frame_bytes, dtype=torch.uint8)  # where the data lies, and where it goes
    done = torch.zeros(1, dtype=torch.uint8)
    back: Any = GlooTransport(PrefixStore("back", store), 1 if sends else 0, patience, "127.0.0.1", "")

    def push() -> None:
        for index in range(count):
            if sends:
                transport.send(memory[index]).wait()
            else:
                transport.recv(frame).wait()
                memory[index].copy_(frame)
        (back.recv if sends else back.send)(done).wait()

    if sends:
        push_when_told(push)
    else:
        for _ in range(PUSHES):
            push()
    transport.close()
    back.close()


def push_when_told(push: Callable[[], None]) -> None:
    """Push once for each line that comes, and say how many seconds it took."""
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        push()
        print(time.perf_counter() - started, flush=True)


class Pair:
    """Two processes of one kind, "link" or "control". Leaving lets both end, or makes them."""

    def __init__(self, kind: str, frame_bytes: int) -> None:
        if kind == "link":
            ours, theirs = socket.socketpair()
            with ours, theirs:
                self._ends = [
                    _child(kind, side, str(end.fileno()), frame_bytes, [end.fileno()])
                    for side, end in (("send", ours), ("recv", theirs))
                ]
        else:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = str(probe.getsockname()[1])
            self._ends = [_child(kind, side, port, frame_bytes, []) for side in ("send", "recv")]
        self._kind = kind

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for end in self._ends:
                end.communicate(timeout=20)
        finally:
            for end in self._ends:
                end.kill()

    def hear(self) -> str:
        """The sender's next line."""
        out = self._ends[0].stdout
        if out is None or not (line := out.readline()):
            raise RuntimeError(f"a {self._kind} failed")
        return line

    def push(self) -> float:
        """GB/s of one push."""
        told = self._ends[0].stdin
        assert told is not None
        told.write("push\n")
        told.flush()
        return TOKENS * LAYOUT.token_bytes / float(self.hear()) / 1e9


def _child(kind: str, side: str, where: str, frame_bytes: int, fds: list[int]) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--end", kind, side, where, str(frame_bytes)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, pass_fds=fds, stdin=pipe, stdout=pipe, text=True)


def throughput(rounds: int, sizes: list[int]) -> dict[str, Any]:
    """Link and control in turn, for each frame size."""
    table = []
    for size in sizes:
        rates: dict[str, list[float]] = {"control": [], "link": []}
        for _ in range(rounds):
            with ExitStack() as stack:
                pairs = {kind: stack.enter_context(Pair(kind, size)) for kind in rates}
                for pair in pairs.values():
                    pair.hear()  # that it is ready
                for number in range(PUSHES):
                    for kind, pair in pairs.items():
                        rate = pair.push()
                        if number:
                            rates[kind].append(rate)
        a, b = statistics.median(rates["link"]), statistics.median(rates["control"])
        table.append({"frame_bytes": size, "link_gbps": round(a, 3), "control_gbps": round(b, 3), "ratio": a / b})
        print(f"frames of {size >> 10} KiB: link {a:.2f} GB/s, control {b:.2f} GB/s, ratio {a / b:.3f}", flush=True)
    worst = min(table, key=lambda row: row["ratio"])
    return {
        "frames": [{**row, "ratio": round(row["ratio"], 3)} for row in table],
        "link_gbps": worst["link_gbps"],
        "control_gbps": worst["control_gbps"],
        "link_over_control": round(worst["ratio"], 3),
    }


async def handoffs(model: Path, rounds: int, folder: Path, gbps: float) -> dict[str, Any]:
    """One request at a time through a suite of two workers, a core each; their step logs tell the times."""
    from pdserve.testing import Cluster

    logs = {name: folder / f"{name}.json" for name in ("prefill-0", "decode-0")}
    flags: dict[str, dict[str, object]] = {**{name: {"step-log": path} for name, path in logs.items()}, **REMOTE}
    async with Cluster(model, prefill=1, decode=1, per_worker=flags, kv_cache_memory=512 << 20) as cluster:
        for length in (*WARM_UP, *(length for _ in range(rounds) for length in (4096, 1024, *SHORT))):
            generator = random.Random(f"{length} {next(_seeds)}")  # tokens that no cache knows
            prompt = [generator.randrange(1000, 40000) for _ in range(length)]
            await cluster.client.complete(prompt, max_tokens=4, ignore_eos=True)
    sent, taken = (json.loads(path.read_text()) for path in logs.values())
    transfers = sent["transfers"][len(WARM_UP) :]
    gaps = sorted((taken["joined"][ticket] - sent["computed"][ticket]) / 1e6 for ticket, *_ in transfers)
    result: dict[str, Any] = {
        "handoff_ms_p50": round(statistics.median(gaps), 2),
        "handoff_ms_p99": round(gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))], 2),
        "handoffs": len(gaps),
    }
    token_bytes = transfers[0][1] // 4096
    for length in (1024, 4096):
        rows = [row for row in transfers if row[1] == length * token_bytes]
        exposed = statistics.median(row[3] for row in rows)
        name = f"{length // 1024}k"
        result[f"exposed_fraction_{name}"] = round(statistics.median(row[3] / row[2] for row in rows), 4)
        result[f"exposed_ms_{name}"] = round(1e3 * exposed, 2)
        result[f"transfer_ms_{name}"] = round(1e3 * statistics.median(row[2] for row in rows), 1)
        result[f"exposed_over_wire_{name}"] = round(exposed / (rows[0][1] / gbps / 1e9), 3)
    return result


async def answers(model: Path, prompts: int, tokens: int, kind: str | None) -> list[list[int]]:
    """Greedy answers to the same prompts, their KV carried as `kind`."""
    from pdserve.testing import Cluster

    options: dict[str, Any] = {"per_worker": REMOTE, "kv_cache_memory": 512 << 20, "kv_transfer_dtype": kind}
    async with Cluster(model, prefill=1, decode=1, **options) as cluster:
        made = []
        for seed in range(prompts):
            text = TEXTS[seed % len(TEXTS)] * (1 + seed // len(TEXTS))
            answer = await cluster.client.complete(text, max_tokens=tokens, ignore_eos=True, temperature=0.0)
            made.append([token.id for token in answer.tokens])
    return made


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of positions with the same token."""
    same = sum(a == b for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))
    return same / sum(map(len, ours))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--links", action="store_true", help="throughput alone, for many frame sizes")
    parser.add_argument("--end", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.end:
        kind, side, where, size = args.end
        torch.set_num_threads(1)
        (link_end if kind == "link" else control_end)(int(where), side == "send", int(size))
        return
    if args.links:
        print(json.dumps({"benchmark": "links", **throughput(args.rounds, LINK_SIZES)}))
        return
    from pdserve.launch.models import resolve_model

    result: dict[str, Any] = {"benchmark": "fabric", **throughput(args.rounds, FRAME_SIZES)}
    model = asyncio.run(resolve_model(args.model))
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(handoffs(model, args.rounds, Path(folder), result["link_gbps"]))
    print(found, flush=True)
    result |= found
    plain = asyncio.run(answers(model, args.prompts, 64, None))
    for kind in ("int8", "fp8"):
        carried = asyncio.run(answers(model, args.prompts, 64, kind))
        result[f"{kind}_agreement"] = round(agreement(plain, carried), 4)
        result[f"{kind}_same_answers"] = sum(a == b for a, b in zip(plain, carried, strict=True))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
