"""The signals of cuda-ipc, over real Gloo pairs, with a stand-in for the memory of a GPU that two processes share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from pdserve.transfer.connect import warm_up
from pdserve.transfer.cuda_ipc import BLOCK, CudaIpcTransport
from pdserve.transfer.gloo import GlooTransport
from pdserve.transfer.transport import LinkLost, PeerGone

TIMEOUT = timedelta(seconds=0.3)
CPU = torch.device("cpu")


class Gpu:
    """Blocks of bytes by address, and where they are mapped. Whoever touches what is not there fails the test."""

    def __init__(self) -> None:
        self.blocks: dict[int, torch.Tensor] = {}
        self.mapped: dict[int, int] = {}
        self.next = 1


class Memory:
    """One process's view of it; DeviceMemory."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def allocate(self, size: int) -> int:
        self.gpu.next += 1
        self.gpu.blocks[self.gpu.next] = torch.zeros(size, dtype=torch.uint8)
        return self.gpu.next

    def free(self, address: int) -> None:
        assert address not in self.gpu.mapped.values(), "freed while the sender has it mapped"
        del self.gpu.blocks[address]

    def export(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def map(self, handle: bytes) -> int:
        self.gpu.next += 1
        self.gpu.mapped[self.gpu.next] = int.from_bytes(handle, "little")
        return self.gpu.next

    def unmap(self, address: int) -> None:
        del self.gpu.mapped[address]

    def write(self, address: int, tensor: torch.Tensor) -> None:
        self.gpu.blocks[self.gpu.mapped[address]][: tensor.nbytes] = tensor

    def read(self, tensor: torch.Tensor, address: int) -> None:
        tensor.copy_(self.gpu.blocks[address][: tensor.nbytes])


class Pair:
    """Both ends of a direction in this process, made and warmed up."""

    def __init__(self) -> None:
        self.gpu = Gpu()
        store = HashStore()

        def make(rank: int) -> CudaIpcTransport:
            signals = GlooTransport(store, rank, TIMEOUT, "127.0.0.1", "")
            transport = CudaIpcTransport(signals, Memory(self.gpu), CPU)
            warm_up(transport, sends=rank == 0)
            return transport

        with ThreadPoolExecutor(2) as pool:
            self.sender, self.receiver = pool.map(make, (0, 1))

    def move(self, frame: torch.Tensor) -> torch.Tensor:
        got = torch.zeros_like(frame)
        thread = threading.Thread(target=lambda: self.sender.send(frame).wait())
        thread.start()
        self.receiver.recv(got).wait()
        thread.join()
        return got

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for end in (made.sender, made.receiver):
        end._signals.close()


def frame(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def test_frames_arrive_as_they_were_and_nothing_is_left(pair: Pair) -> None:
    """Also one that the landing is too small for: there is a larger one then, and the small one goes."""
    for size in (1, 4096, 3 << 20, 4096, 5 << 20):
        assert torch.equal(pair.move(frame(size)), frame(size))
        assert len(pair.gpu.blocks) == len(pair.gpu.mapped) == 1
    assert sum(block.numel() for block in pair.gpu.blocks.values()) == 6 << 20 and (6 << 20) % BLOCK == 0
    pair.close()
    assert not pair.gpu.blocks and not pair.gpu.mapped and pair.receiver.quarantined == 0


def test_nccls_rules_are_kept(pair: Pair) -> None:
    """One outstanding operation, contiguous tensors."""
    with pytest.raises(ValueError, match="contiguous"):
        pair.sender.send(torch.zeros(4, 4).t())
    pair.sender.send(frame(8))
    with pytest.raises(ValueError, match="outstanding"):
        pair.sender.send(frame(8))
    pair.receiver.recv(frame(8))
    with pytest.raises(ValueError, match="outstanding"):
        pair.receiver.recv(frame(8))


def test_a_sender_that_stops_may_go_on_and_harms_nobody(pair: Pair) -> None:
    """The receive ends at its deadline. What the sender was allowed to write into stays until the process ends."""
    sending = pair.sender.send(frame(100))
    with pytest.raises(LinkLost) as caught:
        pair.receiver.recv(torch.zeros(100, dtype=torch.uint8)).wait()
    assert not isinstance(caught.value, PeerGone)
    pair.receiver.close()
    assert pair.receiver.quarantined == BLOCK and len(pair.gpu.blocks) == 1
    with pytest.raises(LinkLost):
        sending.wait()  # it had got its "ready", wrote, and finds nobody to tell
    (landing,) = pair.gpu.blocks.values()
    assert torch.equal(landing[:100], frame(100))
    pair.sender.close()
    assert not pair.gpu.mapped


def test_a_receiver_waits_for_the_sender_to_let_go(pair: Pair) -> None:
    """Whichever end closes first, memory is freed after it was unmapped."""
    closing = threading.Thread(target=pair.receiver.close)
    closing.start()
    pair.sender.close()
    closing.join()
    assert not pair.gpu.blocks and not pair.gpu.mapped and pair.receiver.quarantined == 0


def test_a_frame_nobody_waited_for_is_no_obstacle_to_closing(pair: Pair) -> None:
    """The receiver had posted a receive, and its thread ended before it waited for it."""
    pair.receiver.recv(torch.zeros(9, dtype=torch.uint8))
    pair.sender.send(frame(9)).wait()
    pair.close()
    assert not pair.gpu.blocks and pair.receiver.quarantined == 0


def test_a_dead_sender_ends_the_receive_at_once_and_leaves_nothing(pair: Pair) -> None:
    receiving = pair.receiver.recv(torch.zeros(9, dtype=torch.uint8))
    pair.gpu.mapped.clear()  # as the driver does for a process that is gone
    pair.sender._signals.close()
    with pytest.raises(PeerGone):
        receiving.wait()
    pair.receiver.close()
    assert not pair.gpu.blocks and pair.receiver.quarantined == 0


def test_a_dead_receiver_ends_the_send(pair: Pair) -> None:
    sending = pair.sender.send(frame(9))
    pair.receiver._signals.close()
    with pytest.raises(PeerGone):
        sending.wait()
    pair.sender.close()
    assert not pair.gpu.mapped


def test_ends_that_disagree_about_a_frame_lose_the_link(pair: Pair) -> None:
    """Nothing is written then."""
    sending = pair.sender.send(frame(10))
    receiving = pair.receiver.recv(torch.zeros(9, dtype=torch.uint8))
    with pytest.raises(LinkLost, match="10 bytes, but the peer receives 9"):
        sending.wait()
    pair.sender.close()
    with pytest.raises(PeerGone):
        receiving.wait()
