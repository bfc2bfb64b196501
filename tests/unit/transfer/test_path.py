"""Which path a pair takes, and when that is worse than it could be; a table of literals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path as File

import pytest

from pdserve.transfer.path import Facts, Path, describe_path, gpu_of, local_facts


@dataclass(frozen=True)
class Place:
    device: str
    node: str = "x"
    rdma_devices: tuple[str, ...] = ()


CPU, GPU, OTHER = Place("cpu"), Place("cuda:0 (aa)"), Place("cuda:1 (bb)")
FAR_CPU, FAR_GPU = Place("cpu", "y"), Place("cuda:0 (cc)", "y")
IB, FAR_IB = Place("cuda:0 (aa)", "x", ("mlx5_0",)), Place("cuda:0 (cc)", "y", ("mlx5_1", "mlx5_2"))
RDMA = "sockets between nodes that both have RDMA devices (mlx5_0; mlx5_1, mlx5_2): "
NO_ACCESS = "no peer access between cuda:0 (aa) and cuda:1 (bb)"


def env(**variables: str) -> Facts:
    return Facts(environment=variables)


def reach(way: str, **variables: str) -> Facts:
    return Facts(environment=variables, peers={"bb": way})


@pytest.mark.parametrize(
    ("kind", "ours", "theirs", "facts", "path"),
    [
        ("gloo", CPU, CPU, Facts(), Path("loopback")),
        ("gloo", CPU, FAR_CPU, Facts(), Path("sockets")),
        ("gloo", CPU, FAR_IB, Facts(), Path("sockets")),
        (
            "gloo",
            Place("cpu", "x", ("mlx5_0",)),
            Place("cpu", "y", ("mlx5_1", "mlx5_2")),
            Facts(),
            Path("sockets", RDMA + "gloo does not use them"),
        ),
        ("gloo", GPU, CPU, Facts(), Path("loopback")),
        ("gloo", GPU, OTHER, Facts(), Path("loopback", "gloo takes the KV of two GPUs through host memory")),
        ("cuda-ipc", GPU, GPU, Facts(), Path("same-gpu")),
        ("nccl", GPU, OTHER, Facts(), Path("p2p", expected=True)),
        ("nccl", GPU, OTHER, reach("p2p"), Path("p2p", expected=True)),
        ("nccl", GPU, OTHER, reach("nvlink"), Path("nvlink", expected=True)),
        ("nccl", GPU, OTHER, reach("none"), Path("shared-memory", NO_ACCESS, expected=True)),
        (
            "nccl",
            GPU,
            OTHER,
            reach("none", NCCL_SHM_DISABLE="1"),
            Path("sockets", f"{NO_ACCESS}, NCCL_SHM_DISABLE=1", expected=True),
        ),
        (
            "nccl",
            GPU,
            OTHER,
            reach("nvlink", NCCL_P2P_DISABLE="1"),
            Path("shared-memory", "NCCL_P2P_DISABLE=1", expected=True),
        ),
        (
            "nccl",
            GPU,
            OTHER,
            reach("nvlink", NCCL_P2P_LEVEL="loc"),
            Path("shared-memory", "NCCL_P2P_LEVEL=loc", expected=True),
        ),
        ("nccl", GPU, OTHER, reach("nvlink", NCCL_P2P_LEVEL="NVL"), Path("nvlink", expected=True)),
        ("nccl", IB, FAR_IB, Facts(), Path("infiniband", expected=True)),
        ("nccl", IB, FAR_GPU, Facts(), Path("sockets", expected=True)),
        ("nccl", GPU, FAR_GPU, env(NCCL_IB_DISABLE="1"), Path("sockets", expected=True)),
        (
            "nccl",
            IB,
            FAR_IB,
            env(NCCL_IB_DISABLE="1"),
            Path("sockets", RDMA + "NCCL_IB_DISABLE=1", expected=True),
        ),
        ("nccl", IB, FAR_IB, env(NCCL_NET="Socket"), Path("sockets", RDMA + "NCCL_NET=Socket", expected=True)),
        ("nccl", IB, FAR_IB, env(NCCL_NET="IB"), Path("infiniband", expected=True)),
    ],
)
def test_a_path_follows_from_transport_places_and_facts(
    kind: str, ours: Place, theirs: Place, facts: Facts, path: Path
) -> None:
    assert describe_path(kind, ours, theirs, facts) == path


def test_a_gpu_is_known_by_its_uuid() -> None:
    assert gpu_of("cuda:3 (d4f2-11)") == "d4f2-11"
    assert gpu_of("cuda:3") == gpu_of("cpu") == ""


def test_facts_are_what_the_machine_says(tmp_path: File) -> None:
    """RDMA devices by name, and those of NCCL's variables that decide about a path."""
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    facts = local_facts("cpu", tmp_path, {"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO", "HOME": "/"})
    assert facts == Facts(("mlx5_0", "mlx5_1"), {"NCCL_IB_DISABLE": "1"})
    assert local_facts("cpu", tmp_path / "missing", {}) == Facts()


def test_without_the_drivers_library_nothing_is_known_of_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert local_facts("cuda:0 (aa)").peers == {}
