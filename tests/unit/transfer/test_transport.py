"""The data half's seam: what Gloo is held to, and when NCCL is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from pdserve.core.errors import ConfigError
from pdserve.transfer.connect import connector, warm_up
from pdserve.transfer.gloo import GlooTransport
from pdserve.transfer.nccl import require_nccl
from pdserve.transfer.transport import LinkLost

TIMEOUT = timedelta(seconds=0.3)


@pytest.fixture
def pair() -> Iterator[list[GlooTransport]]:
    """A sending and a receiving end, warm."""
    store, made = HashStore(), dict[int, GlooTransport]()

    def make(rank: int) -> None:
        made[rank] = GlooTransport(store, rank, TIMEOUT, "127.0.0.1", "")
        warm_up(made[rank], sends=rank == 0)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield [made[0], made[1]]
    for transport in made.values():
        transport.close()


def test_operations_match_in_the_order_of_posting(pair: list[GlooTransport]) -> None:
    """One after the other, what is sent first is received first."""
    sender, receiver = pair
    for value in range(3):
        got = torch.zeros(10)
        under_way = sender.send(torch.full((10,), float(value)))
        receiver.recv(got).wait()
        under_way.wait()
        assert (got == value).all()


def test_nccls_rules_are_kept(pair: list[GlooTransport]) -> None:
    """One outstanding operation, contiguous tensors."""
    sender, receiver = pair
    with pytest.raises(ValueError, match="contiguous"):
        sender.send(torch.zeros(4, 4).t())
    tensor, got = torch.ones(4), torch.zeros(4)
    under_way = sender.send(tensor)
    with pytest.raises(ValueError, match="outstanding"):
        sender.send(tensor)
    receiver.recv(got).wait()
    under_way.wait()
    assert (got == 1).all()


def test_a_receive_ends_at_its_deadline(pair: list[GlooTransport]) -> None:
    """Nothing is waited for longer than the timeout; the pair is lost then."""
    _, receiver = pair
    with pytest.raises(LinkLost):
        receiver.recv(torch.zeros(4)).wait()


def test_closing_one_end_wakes_the_other(pair: list[GlooTransport]) -> None:
    """A receive fails at once, long before its deadline, when the sender closes."""
    sender, receiver = pair
    under_way = receiver.recv(torch.zeros(4))
    sender.close()
    with pytest.raises(LinkLost, match=r"(closed|reset) by peer"):
        under_way.wait()


def test_transports_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name of what is wrong, before any link is made."""
    with pytest.raises(ConfigError, match="rdma"):
        connector("rdma", "cpu", "", "")
    with pytest.raises(ConfigError, match="CUDA device"):
        connector("nccl", "cpu", "", "")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    with pytest.raises(ConfigError, match="TORCH_NCCL_ASYNC_ERROR_HANDLING=0"):
        require_nccl("cuda:0")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    with pytest.raises(ConfigError, match="TORCH_NCCL_ENABLE_MONITORING=0"):
        require_nccl("cuda:0")
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "0")
    require_nccl("cuda:0")
