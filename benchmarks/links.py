"""How fast KV goes over a Gloo link on this machine, by frame size: two processes, each a hub, over loopback.

    PYTHONPATH=shared:services python benchmarks/links.py [--rounds 5] [--tokens 1024]

Pages are those of a 16-layer model with 8 KV heads of 128 in bfloat16: 4 KiB for a token of a layer. Each round pushes
one prompt that is computed already, from the first announcement to Committed. Medians over the rounds; `raw` is a bare
Gloo send of 1 MiB tensors between the same processes' kind, as the control. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from pdserve.core.layout import KVLayout
from pdserve.engine.kv_cache import KVCache
from pdserve.transfer.gloo import GlooTransport
from pdserve.transfer.hub import LinkHub, LinkSettings
from pdserve.transfer.messages import SendCommitted, TransferEvent
from pdserve.worker.channel import Channel
from pdserve.worker.messages import LinkControl, LinkMessage

LAYOUT = KVLayout(16, 16, 8, 128, "bfloat16", bytes(16))
FRAME_SIZES = [1 << shift for shift in range(16, 24)]


def serve(fd: int, sends: bool, frame_bytes: int, tokens: int, rounds: int) -> list[float]:
    """One end of a link whose control half is a socket. The sending end returns each round's seconds."""
    channel: Channel[LinkMessage, LinkMessage] = Channel(socket.socket(fileno=fd), LinkMessage)  # type: ignore[arg-type]
    events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
    up = threading.Event()
    hub = LinkHub(
        KVCache(LAYOUT, LAYOUT.blocks_for(tokens), "cpu"),
        LAYOUT,
        LinkSettings(frame_bytes, 4 * frame_bytes, target_bytes=frame_bytes // 4, sends=sends, receives=not sends),
        send_control=lambda peer, epoch, message: channel.send(LinkControl(peer, epoch, message)),
        established=lambda peer, epoch: up.set(),
        closed=lambda peer, epoch, reason: print(reason, file=sys.stderr),
        notify=events.put,
    )
    if not sends:
        for number in range(rounds):
            hub.grant(f"t{number}", 1, "peer", torch.arange(tokens), tokens, 0)
    hub.open("peer", 1, sends, "gloo")

    def listen() -> None:
        while isinstance(message := channel.receive(), LinkControl):
            hub.on_control("peer", 1, message.message)

    listener = threading.Thread(target=listen)
    listener.start()
    seconds = []
    if sends:
        up.wait()
        for number in range(rounds):
            started = time.perf_counter()
            hub.start_send(f"t{number}", 1, "peer", torch.arange(tokens), tokens)
            for layer in range(LAYOUT.num_layers):
                hub.advance([(f"t{number}", tokens)], layer)
            hub.finish_send(f"t{number}", 0)
            if not isinstance(event := events.get(), SendCommitted):
                raise RuntimeError(event)
            seconds.append(time.perf_counter() - started)
        channel._sock.shutdown(socket.SHUT_RDWR)
    listener.join()
    hub.shutdown()
    return seconds


def measure(frame_bytes: int, tokens: int, rounds: int) -> float:
    """GB/s, the median over all rounds but the first."""
    ours, theirs = socket.socketpair()
    arguments = ["--fd", str(theirs.fileno()), "--frame", str(frame_bytes), "--tokens", str(tokens)]
    command = [sys.executable, __file__, *arguments, "--rounds", str(rounds)]
    with theirs:
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    seconds = serve(ours.detach(), True, frame_bytes, tokens, rounds)
    child.wait()
    return tokens * LAYOUT.token_bytes / statistics.median(seconds[1:]) / 1e9


def raw(megabytes: int = 256) -> float:
    """GB/s of bare sends of 1 MiB over a Gloo pair in this process."""
    store, tensor, out = HashStore(), torch.zeros(1 << 20, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)

    def receive() -> None:
        transport: Any = GlooTransport(store, 1, timedelta(seconds=10), "127.0.0.1", "")
        for _ in range(megabytes):
            transport.recv(out).wait()
        transport.close()

    receiver = threading.Thread(target=receive)
    receiver.start()
    transport: Any = GlooTransport(store, 0, timedelta(seconds=10), "127.0.0.1", "")
    started = time.perf_counter()
    for _ in range(megabytes):
        transport.send(tensor).wait()
    receiver.join()
    transport.close()
    return megabytes * (1 << 20) / (time.perf_counter() - started) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--frame", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.fd is not None:
        serve(args.fd, False, args.frame, args.tokens, args.rounds)
        return
    result: dict[str, float] = {"raw_gb_per_s": round(raw(), 3)}
    for size in FRAME_SIZES:
        result[f"{size >> 10}KiB_gb_per_s"] = round(measure(size, args.tokens, args.rounds), 3)
        print(f"{size >> 10:6} KiB frames: {result[f'{size >> 10}KiB_gb_per_s']:.3f} GB/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
