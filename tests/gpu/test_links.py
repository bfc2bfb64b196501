"""Links between two processes on real GPUs: over cuda-ipc where there is one, over NCCL where there are two.

The same list also runs over Gloo on the CPU, where it can, so that the harness does not rot where there is no GPU.
"""

from __future__ import annotations

import signal
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine.kv_cache import KVCache
from pdserve.transfer.hub import LinkHub, LinkSettings
from pdserve.transfer.messages import KvReady, SendCommitted
from pdserve.transfer.nccl import ENVIRONMENT
from tests.gpu.ends import BLOCKS, LAYOUT, hub_ends, random_kv, transport_ends

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def needs(gpus: int) -> list[Any]:
    reason = f"needs {gpus} CUDA GPU{'s' if gpus > 1 else ''}, here are {GPUS}"
    return [pytest.mark.gpu, pytest.mark.skipif(gpus > GPUS, reason=reason)]


ON_GPUS = [
    pytest.param("cuda-ipc", ("cuda:0", "cuda:0"), marks=needs(1), id="cuda-ipc"),
    pytest.param("nccl", ("cuda:0", "cuda:1"), marks=needs(2), id="nccl"),
]
ANYWHERE = [pytest.param("gloo", ("cpu", "cpu"), id="gloo"), *ON_GPUS]


@pytest.fixture(autouse=True)
def nccl_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine process is started with; the ends inherit it."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("kind", "devices"), ANYWHERE)
def test_kv_arrives_bit_for_bit(kind: str, devices: tuple[str, str]) -> None:
    """Through two hubs, while the layers that are sent are still being computed; of two tickets, in scattered pages."""
    places = {"a": (range(0, 200), range(300, 500)), "b": (range(900, 200, -7), range(0, 100))}
    places = {ticket: (list(sent)[:100], list(landed)[:100]) for ticket, (sent, landed) in places.items()}
    with hub_ends(kind, devices) as (prefill, decode):
        for seed, (ticket, (source, target)) in enumerate(places.items()):
            decode.call("grant", ticket, target)
            prefill.call("push", ticket, source, seed)
        ready = [decode.call("event") for _ in places]
        assert all(isinstance(event, KvReady) and event.first_token == 7 for event in ready), ready
        committed = [prefill.call("event") for _ in places]
        assert all(isinstance(event, SendCommitted) for event in committed), committed
        for seed, (_, target) in enumerate(places.values()):
            assert torch.equal(decode.call("pages", target), random_kv(len(target), seed))
        prefill.tell("close")
        decode.tell("close")
        prefill.answer()
        decode.answer()


@pytest.mark.parametrize(("kind", "devices"), ANYWHERE)
def test_the_death_of_the_peer_ends_a_receive_within_its_deadline(
    kind: str, devices: tuple[str, str], tmp_path: Path
) -> None:
    """And what computes goes on computing."""
    deadline = 2.0
    with transport_ends(kind, devices, str(tmp_path / "store"), deadline) as (sender, receiver):
        receiver.call("post")
        sender.signal(signal.SIGKILL)
        seconds, lost = receiver.call("wait")
        assert lost and seconds < deadline + 1.0
        assert receiver.call("close") < deadline + 1.0
        assert len(receiver.call("steps", 3)) == 3


@pytest.mark.parametrize(("kind", "devices"), ON_GPUS)
def test_a_stopped_peer_does_not_lengthen_the_steps(kind: str, devices: tuple[str, str], tmp_path: Path) -> None:
    """A receive stays posted for a peer that sends nothing, while the engine steps beside it."""
    with transport_ends(kind, devices, str(tmp_path / "store"), 60.0) as (sender, receiver):
        receiver.call("steps", 50)
        alone = receiver.call("steps", 300)
        sender.signal(signal.SIGSTOP)
        receiver.call("post")
        beside = receiver.call("steps", 300)
        assert statistics.median(beside) < 1.1 * statistics.median(alone)
        assert statistics.quantiles(beside, n=20)[-1] < 1.5 * statistics.quantiles(alone, n=20)[-1]


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs a CUDA GPU, here is none")
def test_the_layer_loop_does_not_wait_for_the_device() -> None:
    """Reporting every layer takes no time while the device is busy with the first one."""
    kv = KVCache(LAYOUT, BLOCKS, "cuda:0")
    hub = LinkHub(
        kv,
        LAYOUT,
        LinkSettings(frame_bytes=64 << 10, ring_bytes=1 << 20),
        send_control=lambda peer, epoch, message: None,
        established=lambda peer, epoch: None,
        closed=lambda peer, epoch, reason: None,
        notify=lambda event: None,
    )
    hub.start_send("t", 1, "d", range(64), 64)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)  # half a second, about
        for layer in range(LAYOUT.num_layers):
            hub.advance([("t", 64)], layer)
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    hub.stop_send("t")
    hub.shutdown()
