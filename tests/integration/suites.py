"""Whole suites of real processes, for tests."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.launch import ModelPart, Service
from pdserve.testing import Cluster

CHUNK = 64
LONG_ENOUGH = 12_000  # tokens of an answer that others act during: seconds, however fast the machine is
LONG_MODEL = {"max_position_embeddings": 16_384}  # what make_tiny_model has to be told for it
BLOCK = 16
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "block_size": BLOCK, "max_num_batched_tokens": CHUNK,
    "kv_cache_memory": 16 << 20,
}  # fmt: skip


def serve(
    logs: Path,
    *parts: ModelPart,
    prefix_caches: int = 0,
    gateways: int = 0,
    per_worker: Mapping[str, Mapping[str, object]] | None = None,
    local_prefill: bool = False,
    **options: Any,
) -> Cluster:
    """A Cluster of `parts` with settings that make tiny models cross every boundary: small blocks, chunks and pools.

    Prompts go over the links, which is what most tests are about: tiny ones are often quicker where they are decoded,
    and with `local_prefill` the router sends them there then.
    """
    settings = {**OPTIONS, **options}
    flags = dict(per_worker or {})
    flags["router"] = {"local-prefill": local_prefill, **flags.get("router", {})}
    counts = {"prefix_caches": prefix_caches, "gateways": gateways}
    return Cluster(parts, per_worker=flags, log_folder=logs, **counts, **settings)


def engine_of(worker: Service) -> int:
    """The pid of the process that computes."""
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    [engine] = [pid for pid in children if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(engine)


def prompt(length: int, seed: int = 0, vocab: int = 250) -> list[int]:
    """Token ids that differ by seed from the first one on."""
    return [(seed * 101 + index * 37 + (index * index) % 11 + 3) % vocab for index in range(length)]


async def complete_over_http(cluster: Cluster, token_ids: list[int], max_tokens: int) -> None:
    """A text completion through the first gateway, of the model "tiny". HTTPError where it is refused."""
    body = {"model": "tiny", "prompt": token_ids, "max_tokens": max_tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{cluster.http}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with await asyncio.to_thread(urllib.request.urlopen, request, timeout=30) as answer:
        assert answer.status == 200
