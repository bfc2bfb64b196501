"""Blocks out of and into pages, as bytes, for caches beside the engine.

A block's bytes are [num_layers, 2, block_size, num_kv_heads, head_size] of the layout's dtype, native byte order.
"""

from __future__ import annotations

import torch

from pdserve.core.blocks import BlockPool
from pdserve.core.errors import NoCapacity
from pdserve.engine.kv_cache import KVCache


def _slots(kv: KVCache, block: int) -> torch.Tensor:
    return torch.arange(block * kv.block_size, (block + 1) * kv.block_size, device=kv.device)


def export_blocks(kv: KVCache, pool: BlockPool, hashes: list[bytes]) -> tuple[list[bytes], bytes]:
    """The content of those of `hashes` that are in the pool, and which those are."""
    found = [(digest, block) for digest in hashes for block in pool.match([digest])]
    payload = bytearray()
    for _, block in found:
        data = kv.read(0, kv.layout.num_layers, _slots(kv, block), None)
        payload += data.cpu().view(torch.uint8).numpy().tobytes()
    return [digest for digest, _ in found], bytes(payload)


def load_blocks(kv: KVCache, pool: BlockPool, hashes: list[bytes], payload: bytes) -> int:
    """Put blocks into pages, as cached ones; how many were new here. Stops, without error, when the pool is full.

    Only blocks that nobody holds are taken. Raises ValueError for a payload of another size than `hashes` says.
    """
    size, layout = kv.layout.block_bytes, kv.layout
    if len(payload) != size * len(hashes):
        raise ValueError(f"{len(payload)} bytes for {len(hashes)} blocks of {size}")
    shape = (layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_size)
    content = torch.frombuffer(bytearray(payload), dtype=kv.dtype).view(len(hashes), *shape) if hashes else None
    taken: list[int] = []
    for index, digest in enumerate(hashes):
        if content is None or pool.match([digest]):
            continue
        try:
            [block] = pool.allocate(1)
        except NoCapacity:
            break
        kv.write(0, _slots(kv, block), content[index].to(kv.device))
        pool.publish(block, digest)
        taken.append(block)
    pool.release(taken)
    return len(taken)
