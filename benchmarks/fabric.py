"""How well KV moves: a link against a bare group, and what of a transfer a request sees.

    PYTHONPATH=shared:services python benchmarks/fabric.py [--rounds 5] [--model smollm2-135m-instruct] [--links]

Three parts, in one run:

- **Throughput.** Two processes, each with a hub of links and the pages of a 16-layer model with 8 KV heads of 128 in
  bfloat16, over loopback: one computed prompt is pushed from the first announcement to Committed, with frames of 4, 8
  and 16 MiB. The control, in turn with it: two processes with a bare two-member Gloo group that send as many bytes, as
  they lie in memory, in tensors of the same size, each copied once into its place by the receiver. `link_over_control`
  is the worst of the three sizes' ratios of medians, `link_gbps` and `control_gbps` belong to it.
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
from datetime import timedelta
from pathlib import Path
from typing import Any

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
ROUNDS_IN_ONE = 3  # pushes in one pair of processes, of which the first warms up


def link_end(fd: int, sends: bool, frame_bytes: int) -> list[float]:
    """One end of a link whose control half is a socket. The sending end returns each push's seconds."""
    torch.set_num_threads(1)
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
        for number in range(ROUNDS_IN_ONE):
            hub.grant(f"t{number}", 1, "peer", torch.arange(TOKENS), TOKENS, 0)
    hub.open("peer", 1, sends, "gloo")

    def listen() -> None:
        while isinstance(message := channel.receive(), LinkControl):
            hub.on_control("peer", 1, message.message)

    listener = threading.Thread(target=listen)
    listener.start()
    seconds = []
    if sends:
        up.wait()
        for number in range(ROUNDS_IN_ONE):
            started = time.perf_counter()
            hub.start_send(f"t{number}", 1, "peer", torch.arange(TOKENS), TOKENS)
            for layer in range(LAYOUT.num_layers):
                hub.advance([(f"t{number}", TOKENS)], layer)
            hub.finish_send(f"t{number}", 0)
            if not isinstance(event := events.get(), SendCommitted):
                raise RuntimeError(event)
            seconds.append(time.perf_counter() - started)
        channel._sock.shutdown(socket.SHUT_RDWR)
    listener.join()
    hub.shutdown()
    return seconds


def control_end(port: int, sends: bool, frame_bytes: int) -> list[float]:
    """One end of a bare group; the receiver copies each tensor into its place. The sender returns seconds."""
    torch.set_num_threads(1)
    store = PrefixStore("control", TCPStore("127.0.0.1", port, 2, sends, timedelta(seconds=20)))
    transport: Any = GlooTransport(store, 0 if sends else 1, timedelta(seconds=20), "127.0.0.1", "")
    count = TOKENS * LAYOUT.token_bytes // frame_bytes
    frame = torch.ones(frame_bytes, dtype=torch.uint8)
    memory = torch.ones(count, frame_bytes, dtype=torch.uint8)  # where the data lies, and where it goes
    done = torch.zeros(1, dtype=torch.uint8)
    back: Any = GlooTransport(PrefixStore("back", store), 1 if sends else 0, timedelta(seconds=20), "127.0.0.1", "")
    seconds = []
    for _ in range(ROUNDS_IN_ONE):
        started = time.perf_counter()
        for index in range(count):
            if sends:
                transport.send(memory[index]).wait()
            else:
                transport.recv(frame).wait()
                memory[index].copy_(frame)
        (back.recv if sends else back.send)(done).wait()
        seconds.append(time.perf_counter() - started)
    transport.close()
    back.close()
    return seconds


def in_pairs(kind: str, frame_bytes: int) -> list[float]:
    """GB/s of each push that counts, between this process's child and another."""
    if kind == "link":
        ours, theirs = socket.socketpair()
        ends = [("send", ours), ("recv", theirs)]
        children = [_child(kind, side, str(end.fileno()), frame_bytes, [end.fileno()]) for side, end in ends]
        ours.close()
        theirs.close()
    else:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        children = [_child(kind, side, port, frame_bytes, []) for side in ("send", "recv")]
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError(f"{kind} with {frame_bytes} bytes a frame failed")
    return [TOKENS * LAYOUT.token_bytes / s / 1e9 for s in json.loads(outputs[0].splitlines()[-1])[1:]]


def _child(kind: str, side: str, where: str, frame_bytes: int, fds: list[int]) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--end", kind, side, where, str(frame_bytes)]
    return subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True)


def throughput(rounds: int, sizes: list[int]) -> dict[str, Any]:
    """Link and control in turn, for each frame size."""
    table = []
    for size in sizes:
        link: list[float] = []
        control: list[float] = []
        for _ in range(rounds):
            control += in_pairs("control", size)
            link += in_pairs("link", size)
        a, b = statistics.median(link), statistics.median(control)
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
        run = link_end if kind == "link" else control_end
        print(json.dumps(run(int(where), side == "send", int(size))))
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
