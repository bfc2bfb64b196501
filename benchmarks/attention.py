"""How decode attention should read a paged cache on a CPU: candidates beside what the torch backend does, one core.

    PYTHONPATH=shared:services python benchmarks/attention.py

Shapes of SmolLM2-135M (9 heads, 3 KV heads, head size 64), blocks of 16. Medians of interleaved rounds over several
layers' pages, so that no candidate finds its pages in a CPU cache. The last line is a JSON object of microseconds a
layer: dtype, then batch x context, then candidate. `gather` is a padded copy of all contexts into fresh memory and
one call, `views` a call for each sequence on its pages in place, `softmax` the same by bmm and softmax instead of
scaled_dot_product_attention, `blocks` an online softmax over one block of all sequences at a time; `scattered` and
`in_place` are the backend itself on scattered blocks and on blocks that lie side by side.

Measured on one core of a shared Xeon with AMX, torch 2.13 (load of others included; orders hold, digits do not):

    float32     gather  views  softmax  blocks  scattered  in_place
    1x160           57     43       57     561         57        59
    1x1024         353    219      208    3197        404       276
    32x160        2049   1973     2299    3986       1957      1923
    8x1024        3186   2346     2326    7527       3120      2508
    256x64        7951   8438    10740   11070       7696      7582
    bfloat16
    1x160           49     39      142     560         55        61
    1x1024         205    148      440    3127        236       203
    32x160        1305   1694     4175    3791       1315      1239
    8x1024        2107   1651     3529    6978       2056      1786
    256x64        5331   8607    26260   11791       5181      5118

So: views for long or few sequences, one padded copy for many short ones.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from pdserve.core.layout import KVLayout
from pdserve.engine.attention import HeadShape, SequenceChunk, select_backend
from pdserve.engine.kv_cache import KVCache

HEADS, KV_HEADS, SIZE, BLOCK, LAYERS = 9, 3, 64, 16, 6
SHAPES = ((1, 160), (1, 1024), (32, 160), (8, 1024), (256, 64))
ROUNDS = 15


def candidates(kv: KVCache, batch: int, context: int) -> dict[str, Callable[[int], torch.Tensor]]:
    """Functions from a layer's index to the batch's attention."""
    q = torch.randn(batch, HEADS, SIZE).to(kv.dtype)
    grouped = q.view(batch, KV_HEADS, -1, SIZE)
    count = context // BLOCK
    order = list(range(kv.num_blocks))
    ordered = torch.tensor(order[: batch * count]).view(batch, count)
    random.Random(0).shuffle(order)
    shuffled = torch.tensor(order[: batch * count]).view(batch, count)
    flat = shuffled.flatten()

    def gather(layer: int) -> torch.Tensor:
        pages = kv.data[layer].view(2, kv.num_blocks, -1)
        k, v = (part.index_select(0, flat).view(batch, context, KV_HEADS, SIZE).transpose(1, 2) for part in pages)
        return F.scaled_dot_product_attention(grouped, k, v)

    def views(layer: int) -> torch.Tensor:
        pages, rows = kv.data[layer], []
        for i in range(batch):
            k, v = pages[:, i * context : (i + 1) * context].unsqueeze(1).transpose(2, 3)
            rows.append(F.scaled_dot_product_attention(grouped[i : i + 1], k, v))
        return torch.cat(rows)

    def softmax(layer: int) -> torch.Tensor:
        pages, rows = kv.data[layer], []
        for i in range(batch):
            k, v = pages[:, i * context : (i + 1) * context].transpose(1, 2)
            rows.append(((grouped[i] * SIZE**-0.5) @ k.transpose(1, 2)).softmax(-1) @ v)
        return torch.stack(rows)

    def blocks(layer: int) -> torch.Tensor:
        pages = kv.data[layer].view(2, kv.num_blocks, BLOCK, KV_HEADS, SIZE)
        query = grouped.float() * SIZE**-0.5
        best = query.new_full((*query.shape[:3], 1), float("-inf"))
        total, out = torch.zeros_like(best), torch.zeros_like(query)
        for ids in shuffled.T:
            k, v = (part.index_select(0, ids).transpose(1, 2).float() for part in pages)
            scores = query @ k.transpose(2, 3)
            largest = torch.maximum(best, scores.amax(-1, keepdim=True))
            weights, kept = (scores - largest).exp_(), (best - largest).exp_()
            total, out, best = total * kept + weights.sum(-1, keepdim=True), out * kept + weights @ v, largest
        return (out / total).to(q.dtype)

    def backend(name: str, table: torch.Tensor) -> Callable[[int], torch.Tensor]:
        attention, _ = select_backend(name, "cpu", kv.dtype, BLOCK, HeadShape(HEADS, KV_HEADS, SIZE))
        meta = attention.build([SequenceChunk(1, context, row) for row in table.tolist()], kv)
        unused = q[:, :KV_HEADS]
        return lambda layer: attention.forward(layer, q, unused, unused, kv, meta, None)

    return {
        "gather": gather,
        "views": views,
        "softmax": softmax,
        "blocks": blocks,
        "scattered": backend("torch", shuffled),
        "in_place": backend("torch", ordered),
        "native": backend("native", shuffled),
    }


@torch.inference_mode()
def measure(dtype: str, batch: int, context: int) -> dict[str, int]:
    kv = KVCache(KVLayout(BLOCK, LAYERS, KV_HEADS, SIZE, dtype, bytes(16)), 2 * batch * context // BLOCK, "cpu")
    kv.data.normal_()
    functions = candidates(kv, batch, context)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.perf_counter()
            for layer in range(LAYERS):
                function(layer)
            times[name].append((time.perf_counter() - start) / LAYERS)
    return {name: round(statistics.median(values) * 1e6) for name, values in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results: dict[str, dict[str, dict[str, int]]] = {}
    for dtype in ("float32", "bfloat16"):
        results[dtype] = {}
        for batch, context in SHAPES:
            results[dtype][f"{batch}x{context}"] = figures = measure(dtype, batch, context)
            print(dtype, f"{batch}x{context}", *(f"{name} {value}" for name, value in figures.items()))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
