"""The arithmetic of KV and networks reproduces the known examples."""

from __future__ import annotations

import math

import pytest

from pdserve.core.fabric import (
    KvShape,
    headroom,
    needed_bandwidth,
    parse_bandwidth,
    say_bytes,
    say_rate,
    say_seconds,
    transfer_seconds,
    verdict,
    wire_token_bytes,
)
from pdserve.core.layout import KVLayout
from pdserve.policy.transfer_plan import Wire


def test_an_80_layer_model_with_1024_wide_kv_has_1_3_gb_for_4000_tokens() -> None:
    shape = KvShape(layers=80, kv_width=1024, bits=16)
    assert shape.token_bytes == 327_680
    assert say_bytes(4000 * shape.token_bytes) == "1.31 GB"


def test_at_width_8192_a_token_has_2_6_mb_and_16000_have_42_gb() -> None:
    shape = KvShape(layers=80, kv_width=8192, bits=16)
    assert say_bytes(shape.token_bytes) == "2.62 MB"
    assert say_bytes(16_000 * shape.token_bytes) == "41.9 GB"


def test_20_requests_a_second_of_10_gb_need_200_gb_a_second() -> None:
    assert say_rate(needed_bandwidth(10e9, 20)) == "200 GB/s"


def test_1_5_gb_takes_2_ms_over_nvlink_and_60_ms_over_200_gbit() -> None:
    """1.67 ms, that is: 1.5 GB over 900 GB/s."""
    assert say_seconds(transfer_seconds(1.5e9, parse_bandwidth("900GB/s"))) == "1.67 ms"
    assert transfer_seconds(1.5e9, parse_bandwidth("200Gbit/s")) == pytest.approx(0.060)


@pytest.mark.parametrize(("bits", "dtype"), [(32, "float32"), (16, "bfloat16")])
def test_sizes_agree_with_what_workers_send(bits: int, dtype: str) -> None:
    """As it is, and one byte a number with its scales, over whole blocks."""
    shape = KvShape(layers=3, kv_width=4 * 64, bits=bits, head_size=64)
    plain, narrow = (KVLayout(16, 3, 4, 64, dtype, bytes(16), transfer) for transfer in ("", "int8"))
    assert shape.token_bytes == plain.token_bytes
    for layout, size in ((plain, shape.token_bytes), (narrow, shape.narrow_token_bytes(16))):
        assert size == wire_token_bytes(layout)
        assert 32 * size == layout.num_layers * Wire.of(layout).bytes(0, 32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("900GB/s", 900e9), ("200Gbit/s", 25e9), ("100Gbps", 12.5e9), ("25 Gb/s", 3.125e9), ("1GiB/s", 2.0**30),
        ("1.5 TB/s", 1.5e12), ("10MB/s", 1e7), ("8b/s", 1.0), ("2KB/s", 2000.0),
    ],
)  # fmt: skip
def test_bandwidths(text: str, expected: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "900", "900GB", "fast", "-1GB/s", "0GB/s", "1gbyte/s", "1 G B/s"])
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"900GB/s or 200Gbit/s"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("bandwidth", "needed", "expected"),
    [
        (37.4, 1.0, "This link carries X 37 times over."),
        (1.0, 2.14, "This link cannot carry X: short by a factor 2.1."),
        (1.0, 1.01, "This link cannot carry X: short by a factor 1.01."),
        (99.6, 1.0, "This link carries X 100 times over."),
        (4321.0, 1.0, "This link carries X 4,321 times over."),
        (1.0, 1.0, "This link carries X 1.00 times over."),
        (0.0, 1.0, "This link cannot carry X: it carries nothing."),
        (1.0, 0.0, "This link carries X: that is nothing."),
    ],
)
def test_a_verdict_says_it_with_its_headroom(bandwidth: float, needed: float, expected: str) -> None:
    assert verdict(bandwidth, needed, "X") == expected


def test_nothing_needed_is_carried_without_end() -> None:
    assert headroom(1.0, 0.0) == math.inf


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (say_bytes(12), "12 B"), (say_bytes(999.6), "1.00 kB"), (say_bytes(12_345_678), "12.3 MB"),
        (say_bytes(5e15), "5.00 PB"), (say_seconds(0.0), "0 ns"), (say_seconds(12.5e-6), "12.5 us"),
        (say_seconds(75), "75.0 s"), (say_rate(3.125e9), "3.12 GB/s"),
    ],
)  # fmt: skip
def test_three_digits_and_a_unit(text: str, expected: str) -> None:
    assert text == expected
