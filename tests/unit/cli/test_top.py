"""What `pdserve top` shows, from values alone."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from pdserve.cli.dashboard import WIDE, dashboard, kv_bar, pool_title, state
from pdserve.cli.view import View, WorkerRates, waiting, worker_rates
from pdserve.client import FleetLink, FleetWorker, LatencyStats, ModelStats, Stats

LINK = FleetLink("decode-0", "gloo", "loopback", "", 5_000_000, 0, 2.5e9, 3_000_000, 3, 0, 0.00012)
PREFILL = FleetWorker(
    endpoint="127.0.0.1:7001",
    connected=True,
    worker_id="prefill-0",
    incarnation="p",
    role="prefill",
    model="tiny",
    draining=False,
    total_blocks=1000,
    free_blocks=500,
    cached_blocks=250,
    owned_blocks=200,
    reserved_blocks=50,
    running=2,
    waiting=1,
    preemptions=0,
    kv_bytes_sent=5_000_000,
    kv_bytes_received=0,
    outstanding_tokens=0,
    prefill_tokens_per_second=1000.0,
    pending_prefill_tokens=500,
    max_num_seqs=256,
    busy_seconds=10.0,
    computed_tokens=4000,
    links=(LINK,),
)
DECODE = dataclasses.replace(
    PREFILL, worker_id="decode-0", incarnation="d", role="decode", links=(), sampled_tokens=100, preemptions=7
)
CACHE = dataclasses.replace(PREFILL, worker_id="cache-0", incarnation="c", role="prefix_cache", model="", links=())
MODEL = ModelStats(
    model="tiny",
    running=3,
    waiting=1,
    completed=10,
    good=8,
    failed=1,
    cancelled=1,
    ttft=LatencyStats(10, 90.0, 80.0, 120.0, 310.2, 400.0),
    itl=LatencyStats(500, 21.0, 20.0, 30.0, 40.0, 50.0),
    queue=LatencyStats(),
    requests_per_second=0.2,
    output_tokens_per_second=8.5,
    prompt_tokens_per_second=43.0,
    goodput=0.16,
    cache_hit_rate=0.63,
    replays=0,
)
STATS = Stats("router-1", 60.0, (MODEL,), 500.0, 50.0, 99.0)


def rendered(view: View, width: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None)
    console.print(dashboard(view, width, ascii_only=True))
    return out.getvalue()


def test_rates_are_told_from_two_looks_at_the_same_processes() -> None:
    later = dataclasses.replace(
        PREFILL,
        busy_seconds=11.0,
        computed_tokens=4500,
        prefix_queries=200,
        prefix_hits=150,
        links=(dataclasses.replace(LINK, bytes_sent=9_000_000),),
    )
    decode = dataclasses.replace(DECODE, sampled_tokens=180)
    restarted = dataclasses.replace(CACHE, incarnation="c2")
    rates = worker_rates([PREFILL, DECODE, CACHE], [later, decode, restarted], seconds=2.0)
    assert rates == {
        "prefill-0": WorkerRates(busy=0.5, tokens=250.0, links={"decode-0": 2e6}, hits=0.75),
        "decode-0": WorkerRates(busy=0.0, tokens=40.0, links={}, hits=None),
    }


def test_a_link_that_was_made_again_counts_from_zero() -> None:
    again = dataclasses.replace(PREFILL, links=(dataclasses.replace(LINK, bytes_sent=1_000_000),))
    assert worker_rates([PREFILL], [again], seconds=1.0)["prefill-0"].links == {"decode-0": 0.0}


def test_a_worker_that_is_away_has_no_rates() -> None:
    gone = dataclasses.replace(PREFILL, connected=False)
    assert worker_rates([PREFILL], [gone], 1.0) == worker_rates([gone], [PREFILL], 1.0) == {}


def test_the_first_look_has_no_rates_and_the_second_has() -> None:
    first = View.after(None, "host:1", 100.0, (PREFILL,), STATS)
    assert first.rates == {}
    assert View.after(first, "host:1", 101.0, (PREFILL,), STATS).rates.keys() == {"prefill-0"}
    assert View.after(first, "host:1", 100.0, (PREFILL,), STATS).rates == {}, "a clock that stood still"


def test_blocks_fill_the_bar_by_state() -> None:
    def drawn(worker: FleetWorker) -> str:
        return kv_bar(worker, 20, ascii_only=True).plain

    assert drawn(PREFILL) == "####%+++++.........."
    little = dataclasses.replace(PREFILL, owned_blocks=1, reserved_blocks=1, cached_blocks=1, free_blocks=997)
    assert drawn(little) == "#%+" + "." * 17, "however little there is, it is seen"
    full = dataclasses.replace(PREFILL, owned_blocks=990, reserved_blocks=5, cached_blocks=5, free_blocks=0)
    assert drawn(full) == "#" * 20
    assert drawn(dataclasses.replace(PREFILL, total_blocks=0, owned_blocks=0, reserved_blocks=0, cached_blocks=0)) == (
        "." * 20
    )


def test_a_pool_in_one_line() -> None:
    rates = {"prefill-0": WorkerRates(0.5, 0.0, {}, None), "prefill-1": WorkerRates(1.0, 0.0, {}, None)}
    second = dataclasses.replace(PREFILL, worker_id="prefill-1")
    gone = dataclasses.replace(PREFILL, worker_id="prefill-2", connected=False)
    assert pool_title("prefill", [PREFILL, second, gone], rates) == (
        "2 of 3 up, 75% busy, 1000 tokens to compute (0.5 s), KV 25% used"
    )
    assert pool_title("decode", [DECODE], {}) == "1 of 1 up, 2 of 256 seats taken, KV 25% used"
    assert pool_title("decode", [dataclasses.replace(DECODE, connected=False)], {}) == ("0 of 1 up, 0 of 0 seats taken")


def test_states_are_told_apart() -> None:
    assert state(PREFILL)[0] == "up"
    assert state(dataclasses.replace(PREFILL, draining=True))[0] == "draining"
    assert state(dataclasses.replace(PREFILL, connected=False, draining=True))[0] == "lost"
    assert state(dataclasses.replace(PREFILL, connected=False, worker_id=""))[0] == "unreachable"


@pytest.mark.parametrize("width", [80, 110, 120, 130, 160])
def test_a_view_fits_and_has_all_there_is(width: int) -> None:
    unknown = dataclasses.replace(CACHE, role="", worker_id="", endpoint="10.0.0.9:7009", connected=False)
    first = View.after(None, "127.0.0.1:50051", 100.0, (PREFILL, DECODE, CACHE, unknown), STATS)
    text = rendered(View.after(first, first.target, 101.0, first.fleet, STATS), width)
    assert max(map(len, text.splitlines())) <= width
    for word in (
        *("127.0.0.1:50051", "router-1", "3 running, 1 of them waiting", "cache hits 63%", "goodput 0.2 (73%)"),
        *("310.2", "1 failed, 1 cancelled", "prefill-0 > decode-0", "gloo, loopback", "2.50 GB/s", "3.00 MB"),
        *("cache-0", "prefix-cache", "10.0.0.9:7009", "unreachable"),
    ):
        assert word in text, text
    [decode] = [line for line in text.splitlines() if line.startswith("decode-0")]
    if width >= WIDE:
        assert "preempted" in text and decode.split()[-4:] == ["250", "250", "500", "7"], "no column is cut off"
        prefill, _ = [line for line in text.splitlines() if line.startswith("prefill-0 ")]
        assert prefill.count(".") == decode.count(".") > 0, "bars of one length"
    else:
        assert "preempted" not in text and decode.split()[-1] == "25%"
    [queue] = [line for line in text.splitlines() if line.startswith("queue")]
    assert queue.split()[1:] == ["-"] * 5 + ["0"], "nothing measured is no zero"
    [first] = [line for line in text.splitlines() if line.startswith("first token")]
    assert first.split()[2:] == ["80.0", "120.0", "310.2", "400.0", "500", "90.0", "10"]


def test_a_rate_below_one_in_ten_seconds_is_shown() -> None:
    quiet = dataclasses.replace(MODEL, requests_per_second=1 / 60, goodput=1 / 60)
    view = View.after(None, "h:1", 1.0, (PREFILL,), dataclasses.replace(STATS, models=(quiet,)))
    assert "0.02 requests/s, goodput 0.02" in rendered(view, 120)


def test_a_router_that_does_not_answer_leaves_its_last_view() -> None:
    view = waiting(View.after(None, "host:1", 100.0, (PREFILL,), STATS), "connection refused")
    text = rendered(view, 120)
    assert "no answer: connection refused" in text and "prefill-0" in text


def test_names_are_no_markup() -> None:
    odd = dataclasses.replace(PREFILL, worker_id="[red]p[/red]")
    assert "[red]p[/red]" in rendered(View.after(None, "h:1", 1.0, (odd,), STATS), 160)
