"""Cost models give the numbers of their sources."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from pdserve.simulator.cache_study import hit_rate, prefill_seconds
from pdserve.simulator.costs import MOONCAKE, CostModel, Fitted, Hardware, ModelShape, Roofline, Table
from pdserve.simulator.workload import Arrival

TRACES = os.environ.get("PDSERVE_TEST_TRACES", "")
PERF_MODEL = Path(TRACES) / "splitwise" / "perf_model.csv"
A100 = Hardware(312e12, 2.039e12)
LLAMA70B = ModelShape(70e9, 80, 8192, 1024)
# Splitwise, Llama2-70B on 8 H100: a few of its points (tokens, seconds).
SPLITWISE = Table(((128, 0.03), (512, 0.06), (2048, 0.2)), ((1, 0.02), (16, 0.024), (64, 0.04)))
MODELS: list[CostModel] = [MOONCAKE, Roofline(A100, LLAMA70B), Fitted((18.0, 0.1, 7e-6), (20.0, 6e-4, 0.04))]


def test_fitted_is_the_formula() -> None:
    """Constant, tokens and squares for prompts; constant, context and batch for answers; one constant for both."""
    cost = Fitted((10.0, 0.1, 1e-4), (20.0, 1e-3, 0.5))
    assert cost.step([(0, 100)], 0, 0) == pytest.approx((10 + 10 + 1) / 1e3)
    assert cost.step((), 4, 1000) == pytest.approx((20 + 1 + 2) / 1e3)
    assert cost.step([(0, 100)], 4, 1000) == pytest.approx((10 + 10 + 1 + 1 + 2) / 1e3)
    assert cost.step((), 0, 0) == 0


def test_large_batches_have_coefficients_of_their_own() -> None:
    """From the threshold on the other line holds."""
    cost = Fitted((0, 0, 0), (20.0, 0, 0.1), (7.0, 0, 0.2), threshold=95)
    assert cost.step((), 94, 0) == pytest.approx(0.0294)
    assert cost.step((), 95, 0) == pytest.approx(0.026)


def test_no_step_is_faster_than_a_pass_over_the_weights() -> None:
    """A line through long prompts may go below 0 at short ones; time never does."""
    assert MOONCAKE.step([(0, 1)], 0, 0) == pytest.approx(0.0263)
    assert MOONCAKE.step([(8000, 1)], 3, 100) >= MOONCAKE.step((), 3, 100)


@pytest.mark.parametrize("cost", [MOONCAKE, Fitted((0.0, 0.1, 7e-6), (20.0, 6e-4, 0.04))])
def test_chunks_of_a_prompt_cost_what_it_costs(cost: Fitted) -> None:
    """But for the constant, which each step has: chunking moves work, and makes none."""
    constant = cost.prefill[0] / 1e3
    whole = cost.step([(0, 8192)], 0, 0) - constant
    parts = sum(cost.step([(start, 2048)], 0, 0) - constant for start in range(0, 8192, 2048))
    assert parts == pytest.approx(whole)


@pytest.mark.parametrize("cost", [*MODELS, SPLITWISE])
def test_decoding_is_affine_in_the_context(cost: CostModel) -> None:
    """What the simulation's runs of steps rest on."""
    a, b, c = (cost.step((), 8, context) for context in (0, 5000, 10000))
    assert b - a == pytest.approx(c - b)


@pytest.mark.parametrize(
    "tokens, seconds", [(8192, 0.96), (16384, 2.07), (32768, 4.44), (65536, 10.56), (131072, 27.5)]
)
def test_mooncake_prefill(tokens: int, seconds: float) -> None:
    """Its figure 14, five lengths, to within 1.5%."""
    assert MOONCAKE.step([(0, tokens)], 0, 0) == pytest.approx(seconds, rel=0.015)


def test_roofline_of_a_known_machine() -> None:
    """A prompt is bound by computing, a single answer by reading the weights: 140 GB at 2 TB/s are 69 ms."""
    cost = Roofline(Hardware(312e12, 2.039e12, 1.0, 1.0, 0.0), LLAMA70B)
    assert cost.step([(0, 1000)], 0, 0) == pytest.approx((2 * 70e9 * 1000 + 4 * 8192 * 80 * 500500) / 312e12)
    assert cost.step((), 1, 0) == pytest.approx(140e9 / 2.039e12)
    assert LLAMA70B.kv_token_bytes == 327_680


def test_operators_of_a_roofline_come_one_after_the_other() -> None:
    """A chunk hides the reading of weights, and neither that of the answers' KV nor that of its own prompt's: a long
    prompt in small chunks reads the same again and again."""
    cost = Roofline(Hardware(312e12, 2.039e12, 1.0, 1.0, 0.0), LLAMA70B)
    kv = LLAMA70B.kv_token_bytes / 2.039e12
    chunk, answers = [(0, 1000)], cost.step((), 16, 64_000) - cost.step((), 16, 0)
    assert answers == pytest.approx(64_000 * kv)
    assert cost.step(chunk, 16, 64_000) - cost.step(chunk, 16, 0) == pytest.approx(answers)
    assert cost.step([(30_000, 8)], 16, 0) - cost.step([(0, 8)], 16, 0) == pytest.approx(30_000 * kv, rel=1e-3)
    whole, pieces = cost.step([(0, 32_768)], 0, 0), [(start, 64) for start in range(0, 32_768, 64)]
    assert sum(cost.step([piece], 0, 0) for piece in pieces) > 2 * whole


def test_table_is_piecewise_linear() -> None:
    """At points, between them, and on the line through the last two of each end; a mixed step is that of all its
    tokens, and a tenth more."""
    assert SPLITWISE.step([(0, 512)], 0, 0) == pytest.approx(0.06)
    assert SPLITWISE.step([(0, 1280)], 0, 0) == pytest.approx(0.13)
    assert SPLITWISE.step([(0, 64)], 0, 0) == pytest.approx(0.025)
    assert SPLITWISE.step([(0, 3584)], 0, 0) == pytest.approx(0.34)
    assert SPLITWISE.step([(0, 504)], 8, 9999) == pytest.approx(0.066)
    assert SPLITWISE.step((), 16, 9999) == pytest.approx(0.024)
    assert Table(((100, 1), (200, 9)), ((1, 1), (2, 1))).step([(0, 1)], 0, 0) == 0


PERF_COLUMNS = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel"
# Two of Splitwise's combinations, with single measurements that are far off.
PERF_ROWS = """
llama2-70b,h100-80gb,128,1,128,58,30,8
llama2-70b,h100-80gb,128,1,128,59,31,8
llama2-70b,h100-80gb,128,1,128,900,900,8
llama2-70b,h100-80gb,512,1,128,54,30,8
llama2-70b,h100-80gb,512,2,128,77,30.5,8
llama2-70b,h100-80gb,512,64,128,2936,50,8
llama2-70b,h100-80gb,1024,1,128,79,30,8
llama2-70b,h100-80gb,512,1,128,111,40,2
llama2-70b,a100-80gb,512,1,128,93,45,8
"""


def test_splitwise_table(tmp_path: Path) -> None:
    """Medians by tokens of prompt and by answers, in seconds; of the wanted model, hardware and devices alone."""
    path = tmp_path / "perf_model.csv"
    path.write_text(PERF_COLUMNS + PERF_ROWS)
    table = Table.splitwise(path, "llama2-70b", "h100-80gb")
    # 512 x 2 and 1024 x 1 are as many tokens.
    assert table.prompt == ((128, 0.059), (512, 0.054), (1024, 0.078), (32768, 2.936))
    assert table.token == ((1, 0.030), (2, 0.0305), (64, 0.05))
    with pytest.raises(ConfigError, match="has not llama2-70b on 4 h100-80gb; it has llama2-70b on 2 h100-80gb, "):
        Table.splitwise(path, "llama2-70b", "h100-80gb", 4)
    path.write_text("model,hardware\nllama2-70b,h100-80gb\n")
    with pytest.raises(ConfigError, match="no table of Splitwise's"):
        Table.splitwise(path, "llama2-70b", "h100-80gb")
    with pytest.raises(ConfigError, match="cannot read"):
        Table.splitwise(tmp_path / "none.csv", "llama2-70b", "h100-80gb")


def test_splitwise_own_reading_of_its_table(tmp_path: Path) -> None:
    """Its simulator takes decode times by tokens of prompt, and looks them up by answers, so that 64 of them take as
    long as 128 tokens do, or so."""
    path = tmp_path / "perf_model.csv"
    path.write_text(PERF_COLUMNS + PERF_ROWS)
    table = Table.splitwise(path, "llama2-70b", "h100-80gb", by_tokens=True)
    assert table.token == ((128, 0.031), (512, 0.03), (1024, 0.03025), (32768, 0.05))
    assert table.step((), 64, 10**6) == pytest.approx(0.031 + 64 / 384 * 0.001)
    plain = Table.splitwise(path, "llama2-70b", "h100-80gb")
    assert plain.step((), 64, 10**6) == 0.05 and plain.prompt == table.prompt


@pytest.mark.skipif(not TRACES, reason="PDSERVE_TEST_TRACES names no folder with traces")
@pytest.mark.parametrize(
    ("model", "devices"), [("llama2-70b", 2), ("llama2-70b", 4), ("llama2-70b", 8), ("bloom-176b", 8)]
)
def test_splitwise_capped_h100_is_derived_from_the_uncapped(model: str, devices: int) -> None:
    """Prompts take 1.3 times as long under the cap, answers as long; and an A100 is slower at both."""
    capped, full, old = (
        Table.splitwise(PERF_MODEL, model, hardware, devices)
        for hardware in ("h100-80gb-pcap", "h100-80gb", "a100-80gb")
    )
    for tokens in (100, 512, 700, 2048, 8192, 40000):
        assert capped.step([(0, tokens)], 0, 0) == pytest.approx(1.3 * full.step([(0, tokens)], 0, 0))
    assert capped.token == full.token
    assert old.step([(0, 2048)], 0, 0) > full.step([(0, 2048)], 0, 0) and old.step((), 32, 0) > full.step((), 32, 0)


@pytest.mark.skipif(not TRACES, reason="PDSERVE_TEST_TRACES names no folder with traces")
def test_splitwise_measurements() -> None:
    """Llama2-70B on 8 H100: medians of its rows, in ms."""
    table = Table.splitwise(PERF_MODEL, "llama2-70b", "h100-80gb")
    assert 1e3 * table.step([(0, 2048)], 0, 0) == pytest.approx(134.4, abs=0.1)
    assert 1e3 * table.step((), 64, 0) == pytest.approx(50.2, abs=0.1)


def test_distserve_profile(tmp_path: Path) -> None:
    """The repository's file is read as it is; a model that is not in it is named."""
    path = tmp_path / "profile.json"
    entry = {
        "prefill": [1, 2, 3],
        "decoding_smallbs": [4, 5, 6],
        "decoding_largebs": [7, 8, 9],
        "decoding_large_small_bs_threshold": 95,
    }
    path.write_text(json.dumps({"opt": {"2": entry}}))
    assert Fitted.distserve(path, "opt", 2) == Fitted((1, 2, 3), (4, 5, 6), (7, 8, 9), 95)
    with pytest.raises(ConfigError, match="other"):
        Fitted.distserve(path, "other")


def test_hit_rate_of_a_small_cache() -> None:
    """Least recently used, ends of prompts first: what was evicted is missed, what stayed is hit."""
    trace = [Arrival(0, 16 * len(ids), 1, ids, 16) for ids in ((1, 2), (1, 3), (1, 2), (1, 3))]
    assert hit_rate(trace, 3 * 16, 16) == pytest.approx((0 + 1 + 2 + 2) / 8)
    assert hit_rate(trace, 2 * 16, 16) == pytest.approx((0 + 1 + 1 + 1) / 8)
    assert hit_rate(trace, 16, 16) == pytest.approx((0 + 1 + 1 + 1) / 8)


def test_prefill_seconds_with_and_without_a_cache() -> None:
    """A cached beginning costs neither its tokens nor its square; the last token is always computed."""
    trace = [Arrival(0, 32, 1, (1, 2), 16), Arrival(0, 32, 1, (1, 2), 16)]
    assert prefill_seconds(trace, 1.0, 0.5, 0.25, cached=False) == pytest.approx(1 + 16 + 256)
    assert prefill_seconds(trace, 1.0, 0.5, 0.25, cached=True) == pytest.approx(
        ((1 + 16 + 256) + (1 + 0.5 + 0.25 * (32**2 - 31**2))) / 2
    )
