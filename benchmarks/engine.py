"""How near is the engine to what this machine's core can do? One core, the demo model, one run.

    make bench-engine

Two ceilings are measured first and last, and the better of each counts: how fast one core reads memory (the sum of 256
MiB in huge pages), and how fast it multiplies matrices of the engine's dtype (2,048 cubed). Between them the real
engine runs, its schedule and sampling (greedy) included: decode steps of 1 sequence and of 32, each at 160 tokens of
context, and the prefill of 1,024 tokens in one chunk, into pages that have been written to before.

- A decode step must read all weights and the batch's KV once, and multiply the weights with each of its rows. Its floor
  is the longer of the two (the roofline, https://doi.org/10.1145/1498765.1498785); `*_over_floor` is the median step
  over that. `*_over_memory` is the same step over reading alone: what faster multipliers would be held to.
- A prefill's arithmetic is two operations for each weight and token, those of the causal half of attention, and one row
  of the output matrix. `prefill_fraction_of_matmul` is what it reached of the matrix ceiling.

The last line is one JSON object; `profile` in it is the time of each kind of torch operation in a step, ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import SequenceSpec
from pdserve.engine.build import BuiltEngine, EngineOptions, build_engine
from pdserve.engine.native_linear import in_huge_pages
from pdserve.launch.models import DEMO_MODEL, resolve_model

CONTEXT, PROMPT, BATCH = 160, 1024, 32
_ids = count()


def best_seconds(work: Callable[[], object], rounds: int) -> float:
    """The fastest of so many: what is asked is what the machine can do."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def ceilings(dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    """Bytes read and operations done in a second, at best."""
    memory = in_huge_pages(2**28).view(torch.int64).fill_(1)  # a core reads small pages a third slower
    square = torch.randn(2048, 2048).to(dtype)
    read = best_seconds(memory.sum, rounds)
    multiplied = best_seconds(lambda: square @ square, rounds)
    return memory.nbytes / read, 2 * square.shape[0] ** 3 / multiplied


def add(built: BuiltEngine, prompt: int, answer: int) -> str:
    """One more sequence, whose prompt nothing has computed before."""
    index = next(_ids)
    tokens = tuple((index * 7919 + place * 104729) % (built.config.vocab_size - 1000) + 500 for place in range(prompt))
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    built.engine.add(str(index), SequenceSpec(str(index), tokens, prompt, params))
    return str(index)


def step_seconds(built: BuiltEngine) -> float:
    started = time.perf_counter()
    built.engine.step()
    seconds = time.perf_counter() - started
    built.engine.take_outputs()
    return seconds


def drain(built: BuiltEngine) -> None:
    while built.engine.has_work:
        step_seconds(built)


def decode_steps(built: BuiltEngine, batch: int, steps: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of steps around CONTEXT tokens, and what the operations of a few more took."""
    for _ in range(batch):
        add(built, CONTEXT - steps // 2, steps + 8)
    while any(sequence.in_prefill for sequence in built.engine.scheduler.running):
        step_seconds(built)
    step_seconds(built)
    seconds = [step_seconds(built) for _ in range(steps)]
    profile = profiled(lambda: [step_seconds(built) for _ in range(4)], 4)
    drain(built)
    return seconds, profile


def prefills(built: BuiltEngine, rounds: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of prompts of PROMPT tokens, each in one step, and the operations of one more."""

    def once() -> float:
        add(built, PROMPT, 1)
        return step_seconds(built)

    once()
    seconds = [once() for _ in range(rounds)]
    return seconds, profiled(once, 1)


def profiled(work: Callable[[], object], steps: int) -> dict[str, float]:
    """Milliseconds a step of the operations that take the longest, by name."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        work()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_cpu_time_total)
    return {row.key: round(row.self_cpu_time_total / 1e3 / steps, 2) for row in rows[:10]}


def weights(built: BuiltEngine) -> int:
    """Elements of the matrices that each token is multiplied with, the output matrix left out."""
    c = built.config
    q, kv = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
    return c.num_layers * c.hidden_size * (2 * q + 2 * kv + 3 * c.intermediate_size)


def report(built: BuiltEngine, rounds: int) -> dict[str, object]:
    dtype = built.kv.dtype
    before = ceilings(dtype, rounds)
    one, one_profile = decode_steps(built, 1, 8 * rounds)
    many, many_profile = decode_steps(built, BATCH, 4 * rounds)
    prompts, prompt_profile = prefills(built, rounds)
    after = ceilings(dtype, rounds)
    bandwidth, multiply = (max(pair) for pair in zip(before, after, strict=True))

    layers, head = weights(built), built.config.vocab_size * built.config.hidden_size
    result: dict[str, object] = {
        "benchmark": "engine",
        "dtype": str(dtype).removeprefix("torch."),
        "notes": built.notes,
        "read_gbps": round(bandwidth / 1e9, 2),
        "matmul_gflops": round(multiply / 1e9, 1),
    }
    for name, batch, seconds in (("decode1", 1, one), ("decode32", BATCH, many)):
        read = (layers + head) * dtype.itemsize + batch * CONTEXT * built.layout.token_bytes
        memory, arithmetic = read / bandwidth, 2 * batch * (layers + head) / multiply
        step = statistics.median(seconds)
        result |= {
            f"{name}_ms": round(step * 1e3, 2),
            f"{name}_floor_ms": round(max(memory, arithmetic) * 1e3, 2),
            f"{name}_over_floor": round(step / max(memory, arithmetic), 3),
            f"{name}_over_memory": round(step / memory, 3),
        }
    c = built.config
    attention = 2 * c.num_layers * c.num_heads * c.head_size * PROMPT * PROMPT  # half of 2 products of 2 operations
    operations = 2 * (layers * PROMPT + head) + attention
    prompt_seconds = statistics.median(prompts)
    return result | {
        "prefill_ms": round(prompt_seconds * 1e3, 1),
        "prefill_tokens_s": round(PROMPT / prompt_seconds),
        "prefill_fraction_of_matmul": round(operations / prompt_seconds / multiply, 3),
        "profile": {"decode1": one_profile, "decode32": many_profile, "prefill": prompt_profile},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5 if os.environ.get("QUICK") else 15)
    args = parser.parse_args()
    folder: Path = asyncio.run(resolve_model(args.model, progress=print))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    options = EngineOptions(
        folder, args.dtype, "cpu", kv_cache_bytes=512 << 20, max_model_len=2048, max_num_batched_tokens=8192
    )
    built = build_engine(options)
    built.kv.data.zero_()  # a page's first write costs more than all later ones
    print(json.dumps(report(built, args.rounds)))


if __name__ == "__main__":
    main()
