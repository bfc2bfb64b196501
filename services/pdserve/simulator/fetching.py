"""Whether KV of a prompt's beginning comes from another worker's cache, and from whose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.policy.fleet import FleetView
from pdserve.policy.prefix_fetch import should_fetch
from pdserve.policy.pull import choose_pull
from pdserve.simulator.network import Network
from pdserve.simulator.plan import Fetch
from pdserve.simulator.request import Request


@dataclass(frozen=True, slots=True)
class Source:
    """`tokens` leading tokens of a prompt come from `worker_id`, as far as they are not there already."""

    worker_id: str
    tokens: int


def choose_source(
    fetch: Fetch,
    request: Request,
    held: Mapping[str, int],
    computes: str,
    decode: str | None,
    view: FleetView,
    network: Network,
    now: float,
) -> Source | None:
    """For a prompt that the worker `computes` computes and `decode` decodes, by what workers hold (leading blocks).

    None where nobody has more of it, or where taking it is not predicted to be faster than computing it: by the same
    functions as in workers, with the queue of both networks known.
    """
    fleet, layout = fetch is Fetch.FLEET, view.index[computes].layout
    if fetch is Fetch.NONE or (decode in (None, computes) and not fleet):
        return None
    found = [decode] if decode is not None else []
    if fleet:
        found = sorted(held, key=lambda name: (-held[name], network.free_at(name, computes), name))
    source = found[0] if found else computes
    start = held.get(computes, 0) * layout.block_size
    end = min(held.get(source, 0), (request.tokens - 1) // layout.block_size) * layout.block_size
    tokens, size = end - start, (end - start) * layout.token_bytes
    if tokens <= 0:
        return None
    waits = max(0.0, network.free_at(source, computes) - now)
    rate = size / (waits + network.seconds(size) + network.latency)
    worker = view.index[computes]
    seconds = view.prompt_speed(worker).prompt_seconds(tokens, end**2 - start**2, worker.max_num_batched_tokens)
    if source == decode:
        taken = choose_pull(
            tokens=tokens,
            size=size,
            bytes_per_second=rate,
            round_trip=network.latency,
            tokens_per_second=tokens / seconds,
        ).pull
    else:
        taken = should_fetch(tokens=tokens, size=size, fetch_rate=rate, compute_rate=tokens / seconds).fetch
    return Source(source, end) if taken else None
