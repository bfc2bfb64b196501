"""The data half's seam: what Gloo is held to, and when NCCL is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from pdserve.core.errors import ConfigError
from pdserve.transfer.connect import connector, require, transports_on, warm_up
from pdserve.transfer.gloo import GlooTransport
from pdserve.transfer.nccl import ENVIRONMENT, _Guard, explain, require_nccl
from pdserve.transfer.transport import LinkLost, PeerGone

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
    with pytest.raises(LinkLost) as caught:
        receiver.recv(torch.zeros(4)).wait()
    assert not isinstance(caught.value, PeerGone)  # it may still be there, and send


def test_closing_one_end_wakes_the_other(pair: list[GlooTransport]) -> None:
    """A receive fails at once, long before its deadline, when the sender closes."""
    sender, receiver = pair
    under_way = receiver.recv(torch.zeros(4))
    sender.close()
    with pytest.raises(PeerGone, match=r"(closed|reset) by peer"):
        under_way.wait()


def test_a_receive_after_the_peer_closed_says_so_too(pair: list[GlooTransport]) -> None:
    sender, receiver = pair
    sender.close()
    with pytest.raises(PeerGone):
        receiver.recv(torch.zeros(4)).wait()


def test_transports_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name of what is wrong, before any link is made."""
    with pytest.raises(ConfigError, match="rdma"):
        connector("rdma", "cpu", "", "")
    for kind in ("nccl", "cuda-ipc"):
        with pytest.raises(ConfigError, match="CUDA device"):
            connector(kind, "cpu", "", "")
        with pytest.raises(ConfigError, match="CUDA device"):
            require(kind, "cpu")
    for kind in ("auto", "gloo"):
        require(kind, "cpu")
    assert transports_on(torch.device("cpu")) == ["gloo"]
    assert transports_on(torch.device("cuda:1")) == ["cuda-ipc", "nccl", "gloo"]


def test_nccl_is_refused_where_a_failed_link_could_take_the_process_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable that ProcessGroupNCCL has to find is asked for by name."""
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in ENVIRONMENT.items():
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            require_nccl("cuda:0")
        monkeypatch.setenv(name, value)
    require_nccl("cuda:0")


class Group:
    """A process group that can only be aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Semaphore(0)

    def abort(self) -> None:
        self.aborted.release()
        raise RuntimeError("it had failed already")


def test_a_guard_aborts_the_group_when_a_deadline_passes() -> None:
    """Once, and every later operation is told why; deadlines that were called off or moved do nothing."""
    group = Group()
    guard = _Guard(group)
    assert guard.arm(0.0001) in ("", "a frame was not through after 0.0001 s")
    assert group.aborted.acquire(timeout=5)
    guard.join()
    assert guard.arm(60) == guard.disarm() == guard.fired == "a frame was not through after 0.0001 s"
    guard.fire("closed")
    assert guard.fired.startswith("a frame") and not group.aborted.acquire(blocking=False)


def test_a_guard_aborts_the_group_when_told_to() -> None:
    group = Group()
    guard = _Guard(group)
    assert guard.arm(60) == guard.disarm() == ""
    guard.fire("the link was closed")
    guard.join()
    assert group.aborted.acquire(blocking=False) and guard.fired == "the link was closed"


def test_nccls_words_are_told_in_one_line() -> None:
    error = RuntimeError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:77, remote process exited or there was a "
        "network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error.\n"
        "Last error:\nsocketProgress: Connection closed by remote peer\nException raised from create at x.cpp:1\nframe"
    )
    assert explain(error) == (
        "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5; "
        "ncclRemoteError: A call failed possibly due to a network error.; "
        "socketProgress: Connection closed by remote peer"
    )
