"""Dividing a machine among workers: literals in, literals out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.core.errors import ConfigError
from pdserve.launch import Machine, ModelPart, ServicePlan, SuitePlan, WorkerOptions, plan_suite
from pdserve.launch.plan import GIB, divide_cores

TWO_CORES = Machine((0, 1), 16 * GIB)
MODEL = Path("/models/m")


def plan(
    machine: Machine = TWO_CORES, prefix_caches: int = 0, options: WorkerOptions | None = None, **counts: int
) -> SuitePlan:
    return plan_suite(
        [ModelPart(MODEL, "m", **counts)], machine, options or WorkerOptions(), prefix_caches=prefix_caches
    )


def flag(service: ServicePlan, name: str) -> str | None:
    words = dict(zip(service.arguments[::2], service.arguments[1::2], strict=True))
    return words.get(f"--{name}")


def test_one_prefill_and_one_decode_get_a_core_each() -> None:
    prefill, decode = plan(prefill=1, decode=1).workers
    assert (prefill.module, prefill.name) == ("prefill", "prefill-0")
    assert (decode.module, decode.name) == ("decode", "decode-0")
    assert [flag(worker, "cores") for worker in (prefill, decode)] == ["0", "1"]
    assert [flag(worker, "threads") for worker in (prefill, decode)] == ["1", "1"]
    assert flag(prefill, "kv-cache-memory") == flag(decode, "kv-cache-memory")


def test_a_colocated_worker_is_a_decode_worker_with_the_whole_machine() -> None:
    (worker,) = plan(colocated=1).workers
    assert (worker.module, flag(worker, "cores"), flag(worker, "threads")) == ("decode", "0,1", "2")


@pytest.mark.parametrize(
    ("modules", "cores", "expected"),
    [
        (["prefill", "decode"], 5, [(0, 1, 2), (3, 4)]),
        (["decode", "prefill"], 5, [(0, 1), (2, 3, 4)]),
        (["prefill", "prefill", "decode", "decode"], 7, [(0, 1), (2, 3), (4, 5), (6,)]),
        (["prefill", "decode", "decode"], 2, [(0,), (1,), (0,)]),
    ],
)
def test_cores_go_round_and_the_rest_to_prefill(
    modules: list[str], cores: int, expected: list[tuple[int, ...]]
) -> None:
    assert divide_cores(modules, range(cores)) == expected


def test_more_threads_than_a_share_gives_up_pinning() -> None:
    """Two threads pinned to one core would only take turns."""
    prefill, _ = plan(prefill=1, decode=1, options=WorkerOptions(threads=2)).workers
    assert (flag(prefill, "threads"), flag(prefill, "cores")) == ("2", None)


def test_prefix_caches_are_dealt_out_in_turn() -> None:
    suite = plan(prefill=2, decode=1, prefix_caches=2)
    assert [cache.name for cache in suite.caches] == ["prefix-cache-0", "prefix-cache-1"]
    assert [worker.cache for worker in suite.workers] == [0, 1, 0]
    assert [worker.cache for worker in plan(prefill=1, decode=1).workers] == [None, None]


def test_gateways_follow_their_port_and_listen_where_the_router_does() -> None:
    part = ModelPart(MODEL, "m", colocated=1)
    suite = plan_suite([part], TWO_CORES, gateways=2, host="10.0.0.1", port=7, http_port=8000)
    assert [(one.module, one.name) for one in suite.gateways] == [("gateway", "gateway-0"), ("gateway", "gateway-1")]
    assert [flag(one, "port") for one in suite.gateways] == ["8000", "8001"]
    assert {flag(one, "host") for one in suite.gateways} == {"10.0.0.1"}
    assert [flag(one, "port") for one in plan_suite([part], TWO_CORES, gateways=2).gateways] == ["0", "0"]
    assert plan_suite([part], TWO_CORES).gateways == ()
    with pytest.raises(ConfigError, match="gateways must be 0 or more"):
        plan_suite([part], TWO_CORES, gateways=-1)


def test_kv_memory_is_a_share_of_what_the_weights_leave() -> None:
    machine = Machine((0, 1), 3 * GIB)
    part = ModelPart(MODEL, "m", prefill=1, decode=1, weight_bytes=GIB)
    suite = plan_suite([part], machine)
    memory = [int(flag(worker, "kv-cache-memory") or 0) for worker in suite.workers]
    assert memory[0] == memory[1] and 0 < sum(memory) <= GIB


def test_gpus_are_taken_in_turn_and_shared_by_share() -> None:
    machine = Machine((0, 1), 16 * GIB, (0, 1))
    workers = plan(machine, prefill=1, decode=2).workers
    assert [flag(worker, "device") for worker in workers] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [flag(worker, "gpu-memory-utilization") for worker in workers] == ["0.45", "0.9", "0.45"]
    assert flag(workers[0], "kv-cache-memory") is None


def test_several_models_side_by_side() -> None:
    parts = [ModelPart(Path("/a"), "one", prefill=1, decode=1), ModelPart(Path("/b"), "two", colocated=1)]
    suite = plan_suite(parts, TWO_CORES)
    assert [flag(worker, "served-model-name") for worker in suite.workers] == ["one", "one", "two"]
    assert len({worker.name for worker in suite.workers}) == 3
    assert suite.router.arguments[:4] == ("--model", "one=/a", "--model", "two=/b")


def test_flags_of_one_worker() -> None:
    overrides = {"decode-0": {"kv-cache-memory": 4096}}
    suite = plan_suite([ModelPart(MODEL, "m", 1, 1)], TWO_CORES, per_worker=overrides)
    assert [flag(worker, "kv-cache-memory") == "4096" for worker in suite.workers] == [False, True]


def test_flags_of_router_and_gateway() -> None:
    overrides = {"router": {"max-queue": 1}, "gateway-0": {"max-prompts": 2}}
    suite = plan_suite([ModelPart(MODEL, "m", 1, 1)], TWO_CORES, gateways=1, per_worker=overrides)
    assert suite.router.arguments[-2:] == ("--max-queue", "1")
    assert flag(suite.gateways[0], "max-prompts") == "2"
    with pytest.raises(ConfigError, match="gateway-0"):
        plan_suite([ModelPart(MODEL, "m", 1, 1)], TWO_CORES, per_worker={"gateway-0": {}})


def test_flags_of_a_prefix_cache() -> None:
    suite = plan_suite(
        [ModelPart(MODEL, "m", 1, 1)], TWO_CORES, prefix_caches=2, per_worker={"prefix-cache-1": {"capacity": 4096}}
    )
    assert [flag(cache, "capacity") == "4096" for cache in suite.caches] == [False, True]
    with pytest.raises(ConfigError, match="prefix-cache-0"):
        plan_suite([ModelPart(MODEL, "m", 1, 1)], TWO_CORES, per_worker={"prefix-cache-0": {}})


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({}, "no workers"),
        ({"prefill": 1}, "at least one decode"),
        ({"decode": 1}, "say colocated"),
        ({"decode": 1, "prefill": 1, "colocated": 1}, "prefill for themselves"),
        ({"decode": -1}, "0 or more"),
    ],
)
def test_counts_that_contradict_each_other(counts: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_suite([ModelPart(MODEL, "m", **counts)], TWO_CORES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda"}, "no NVIDIA GPU"),
        ({"threads": 3}, "3 threads"),
        ({"kv_cache_memory": 9 * GIB}, "do not fit"),
    ],
)
def test_settings_that_this_machine_cannot_have(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(prefill=1, decode=1, options=WorkerOptions(**options))


def test_flags_for_a_worker_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="decode-7"):
        plan_suite([ModelPart(MODEL, "m", 1, 1)], TWO_CORES, per_worker={"decode-7": {}})


def test_model_names_must_differ() -> None:
    with pytest.raises(ConfigError, match="differ"):
        plan_suite([ModelPart(MODEL, "m", 1, 1), ModelPart(MODEL, "m", 1, 1)], TWO_CORES)


@pytest.mark.parametrize(
    ("base", "expected"), [(None, [None] * 4), (0, ["0"] * 4), (9464, ["9464", "9465", "9466", "9467"])]
)
def test_metrics_take_ports_in_a_row_the_router_first(base: int | None, expected: list[str | None]) -> None:
    part = ModelPart(MODEL, "m", prefill=1, decode=1)
    suite = plan_suite([part], TWO_CORES, prefix_caches=1, metrics_port=base)
    assert [flag(service, "metrics-port") for service in (suite.router, *suite.workers, *suite.caches)] == expected


def test_metrics_ports_must_exist() -> None:
    with pytest.raises(ConfigError, match="do not fit between port 65534 and 65535"):
        plan_suite([ModelPart(MODEL, "m", 1, 1)], TWO_CORES, metrics_port=65534)


def test_yes_and_no_are_words_of_their_own() -> None:
    flags = {"router": {"local-prefill": False, "max-queue": 7}, "decode-0": {"kv-checksum": True}}
    suite = plan_suite([ModelPart(MODEL, "m", 1, 1)], TWO_CORES, per_worker=flags)
    assert "--no-local-prefill" in suite.router.arguments and "False" not in suite.router.arguments
    decode = next(plan for plan in suite.workers if plan.name == "decode-0")
    assert "--kv-checksum" in decode.arguments and "True" not in decode.arguments
    workers = plan(prefill=1, decode=1, options=WorkerOptions(enable_prefix_caching=False)).workers
    assert all("--no-enable-prefix-caching" in worker.arguments for worker in workers)
