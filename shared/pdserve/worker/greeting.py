"""What two workers make of each other's hellos: whether they may link, and over what."""

from __future__ import annotations

import grpc

from pdserve.rpc.convert_link import Hello
from pdserve.rpc.errors import RpcError
from pdserve.rpc.versions import agree
from pdserve.transfer.path import gpu_of


def check_hello(ours: Hello, theirs: Hello) -> None:
    """Raise RpcError where no protocol is common, LayoutMismatch (with both layouts) where KV pages differ."""
    agree(theirs.protocol_min, theirs.protocol_max)
    ours.layout.require_same(theirs.layout)
    if theirs.worker_id == ours.worker_id:
        raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, f"two workers have the id {ours.worker_id}")


def choose_transport(ours: Hello, theirs: Hello) -> tuple[str, str]:
    """The transport for a link and why, from both settings and devices. Raises RpcError where they contradict, or
    where what is set cannot work."""
    wishes = {ours.transport, theirs.transport} - {"auto", ""}
    if len(wishes) > 1:
        raise _refused(f"KV transports contradict: {ours.transport} here, {theirs.transport} there")
    devices = f"{ours.device} on {ours.node} and {theirs.device} on {theirs.node}"
    both_gpus = ours.device.startswith("cuda") and theirs.device.startswith("cuda")
    near = ours.node == theirs.node
    uuids = gpu_of(ours.device), gpu_of(theirs.device)
    one_gpu = both_gpus and (uuids[0] == uuids[1] if all(uuids) else near and ours.device == theirs.device)
    works = {"cuda-ipc": one_gpu and near, "nccl": both_gpus and not one_gpu, "gloo": True}
    if wishes:
        wish = wishes.pop()
        if not works.get(wish, False):
            needs = {"cuda-ipc": "two workers on one GPU of one node", "nccl": "two GPUs"}.get(wish, "another version")
            raise _refused(f"{wish} needs {needs}, these are {devices}")
        return wish, "set"
    chosen = next(kind for kind, fits in works.items() if fits)
    if one_gpu and not near:
        devices += ": one GPU under two node names, which cuda-ipc does not bridge"
    return chosen, f"auto: {devices}"


def _refused(message: str) -> RpcError:
    return RpcError(grpc.StatusCode.FAILED_PRECONDITION, message)
