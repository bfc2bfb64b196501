"""Models and workers, from the public API's messages."""

from __future__ import annotations

from pdserve.client.fleet import FleetLink, FleetWorker, Model
from pdserve.core.errors import InvalidRequest
from pdserve.core.fabric import wire_token_bytes
from pdserve.rpc.convert import layout_from_proto, speed_from_proto
from pdserve.v1 import inference_pb2, kv_pb2, worker_pb2


def models_from_proto(answer: inference_pb2.ListModelsResponse) -> list[Model]:
    return [Model(model.name, model.max_model_len, model.vocab_size) for model in answer.models]


def fleet_from_proto(answer: inference_pb2.GetFleetResponse) -> list[FleetWorker]:
    return [_worker(worker) for worker in answer.workers]


def _worker(worker: inference_pb2.FleetWorker) -> FleetWorker:
    snapshot, load = worker.snapshot, worker.load
    return FleetWorker(
        endpoint=worker.endpoint,
        connected=worker.connected,
        worker_id=snapshot.worker_id,
        incarnation=snapshot.incarnation,
        role=worker_pb2.Role.Name(snapshot.role).removeprefix("ROLE_").lower() if snapshot.role else "",
        model=snapshot.model,
        draining=snapshot.draining,
        total_blocks=snapshot.total_blocks,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        owned_blocks=load.owned_blocks,
        reserved_blocks=load.reserved_blocks,
        running=load.running,
        waiting=load.waiting,
        preemptions=load.preemptions,
        kv_bytes_sent=load.kv_bytes_sent,
        kv_bytes_received=load.kv_bytes_received,
        outstanding_tokens=worker.outstanding_tokens,
        own_endpoint=snapshot.endpoint,
        max_model_len=snapshot.max_model_len,
        vocab_size=snapshot.vocab_size,
        kv_token_bytes=_token_bytes(snapshot.layout),
        prefill_tokens_per_second=load.prefill_tokens_per_second,
        pending_prefill_tokens=load.pending_prefill_tokens,
        busy_seconds=load.busy_seconds,
        prefix_queries=load.prefix_queries,
        prefix_hits=load.prefix_hits,
        computed_tokens=load.computed_tokens,
        sampled_tokens=load.sampled_tokens,
        speed=speed_from_proto(load.speed),
        max_num_seqs=snapshot.max_num_seqs,
        node=snapshot.node,
        device=snapshot.device,
        links=tuple(_link(link) for link in worker.links.links),
    )


def _token_bytes(layout: kv_pb2.KvLayout) -> float:
    """0 for a worker without a layout, or with one that only a newer client knows."""
    try:
        return wire_token_bytes(layout_from_proto(layout))
    except InvalidRequest:
        return 0.0


def _link(link: worker_pb2.LinkState) -> FleetLink:
    return FleetLink(
        peer=link.peer,
        transport=link.transport,
        path=link.path,
        degraded=link.degraded,
        bytes_sent=link.bytes_sent,
        bytes_received=link.bytes_received,
        bytes_per_second=link.bytes_per_second,
        bytes_in_flight=link.bytes_in_flight,
        frames_in_flight=link.frames_in_flight,
        credit_bytes=link.credit_bytes,
        round_trip_seconds=link.round_trip_seconds,
    )
