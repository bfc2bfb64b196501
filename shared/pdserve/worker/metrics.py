"""A worker's metrics: the engine's latest reports as they are, and a histogram of the transfers that it told of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pdserve.engine.outputs import Load
from pdserve.telemetry.metrics import CollectorRegistry, Metric, counter, gauge, histogram
from pdserve.transfer.messages import TransferReport
from pdserve.worker.messages import StepDone

# Seconds: from a short prompt over shared memory to a long one over a slow network.
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def idle_load(total_blocks: int) -> Load:
    """The load of an engine before its first step."""
    return Load(
        free_blocks=total_blocks,
        cached_blocks=0,
        owned_blocks=0,
        reserved_blocks=0,
        running=0,
        waiting=0,
        pending_prefill_tokens=0,
        steps=0,
        preemptions=0,
        kv_bytes_sent=0,
        kv_bytes_received=0,
    )


class WorkerMetrics:
    """What one worker exports. `load` and `report` are replaced as they come; each scrape shows the newest ones.

    The sums of the two histograms are the seconds that KV was on its way, and those of them that computing did not
    hide; the engine's own totals of both are not exported beside them.
    """

    def __init__(self, worker_id: str, role: str, model: str) -> None:
        self.registry = CollectorRegistry()
        self.load: Load | None = None
        self.report = TransferReport()
        self._identity = (worker_id, role, model)
        self._seconds = histogram(
            self.registry,
            "kv_transfer_seconds",
            "From a hand-off's first frame until all of its KV had landed; as the sender sees it.",
            BUCKETS,
        )
        self._exposed = histogram(
            self.registry,
            "kv_transfer_exposed_seconds",
            "The part of kv_transfer_seconds after the whole prompt was computed.",
            BUCKETS,
        )
        self._queued = histogram(
            self.registry,
            "prefill_queue_seconds",
            "From a prompt's admission here to its first chunk.",
            BUCKETS,
        )
        self._prefill = histogram(
            self.registry,
            "request_prefill_time_seconds",
            "From a prompt's first chunk to its first token.",
            BUCKETS,
        )
        self.registry.register(self)

    def take(self, step: StepDone) -> None:
        """Take in what a step came to."""
        self.load = step.load
        for prompt in step.prompts:
            self._queued.observe(prompt.queued)
            self._prefill.observe(prompt.compute)

    def observe_transfer(self, seconds: float, exposed: float) -> None:
        """A hand-off was committed."""
        self._seconds.observe(seconds)
        self._exposed.observe(exposed)

    def describe(self) -> Iterator[Metric]:
        """All that there will ever be, so that the registry can tell a name that is taken."""
        yield from (self._info(), *_of_report(TransferReport()), *_of_load(idle_load(1)))

    def collect(self) -> Iterator[Metric]:
        yield self._info()
        yield from _of_report(self.report)
        if self.load is not None:
            yield from _of_load(self.load)

    def _info(self) -> Metric:
        return gauge("worker_info", "Who this is; always 1.", {self._identity: 1}, ["worker_id", "role", "model_name"])


def _of_report(report: TransferReport) -> Iterator[Metric]:
    def both(sent: int, received: int) -> dict[tuple[str, ...], float]:
        return {("sent",): sent, ("received",): received}

    links = report.links
    direction = ["direction"]
    moved = both(report.bytes_sent, report.bytes_received)
    yield counter("kv_transfer_bytes_total", "KV bytes over links, sent and received.", moved, direction)
    frames = both(report.frames_sent, report.frames_received)
    yield counter("kv_transfer_frames_total", "Frames over links, sent and received.", frames, direction)
    yield counter("kv_transfers_total", "Transfers that this worker sent and the peer committed.", report.transfers)
    aborts: dict[tuple[str, ...], float] = {("send",): report.send_aborts, ("receive",): report.receive_aborts}
    yield counter("kv_transfer_aborts_total", "Attempts that ended without a commit.", aborts, ["side"])
    yield counter("kv_stale_frames_total", "Frames received for nobody, and dropped.", report.stale_frames)
    yield counter(
        "kv_produced_bytes_total", "KV that was there to be sent, as it weighs on the wire.", report.bytes_produced
    )
    yield counter("kv_rearms_total", "New attempts at reservations that stood.", report.rearms)
    yield counter("kv_pulled_tokens_total", "Prompt tokens pulled from decode workers.", report.pulled_tokens)
    yield counter("kv_pulls_given_up_total", "Pulls that failed or took too long.", report.pulls_given_up)
    yield counter(
        "kv_hand_offs_total", "Running sequences that another decode worker took over at a drain.", report.handed_off
    )
    yield counter("kv_hand_off_bytes_total", "KV bytes of these.", report.handed_off_bytes)

    bound = report.error_bound
    yield gauge("kv_transfer_error_bound", "Largest error of a number that travelled as int8 or fp8; 0: none.", bound)

    kinds: dict[tuple[str, ...], float] = {**Counter((link.transport, link.path) for link in links)}
    yield gauge("kv_links", "KV links that are up.", kinds, ["transport", "path"])
    degraded = sum(bool(link.degraded) for link in links)
    yield gauge("kv_links_degraded", "Links on a slower path than expected (sockets instead of RDMA).", degraded)
    yield counter("kv_links_lost_total", "Links that failed, rather than were closed.", report.links_lost)
    in_flight = sum(link.bytes_in_flight for link in links)
    yield gauge("kv_link_in_flight_bytes", "Announced to peers, and not landed yet.", in_flight)
    frames_in_flight = sum(link.frames_in_flight for link in links)
    yield gauge("kv_link_in_flight_frames", "Frames announced to peers, and not landed yet.", frames_in_flight)
    credit = sum(link.credit for link in links)
    yield gauge("kv_link_credit_bytes", "May be announced before peers return credit.", credit)
    rates: dict[tuple[str, ...], float] = {
        (link.peer, link.path): link.bytes_per_second for link in links if link.bytes_per_second
    }
    yield gauge("kv_link_bytes_per_second", "Bandwidth of each link, as measured.", rates, ["peer", "path"])
    capacity = sum(rates.values())
    yield gauge("kv_link_capacity_bytes_per_second", "Sum of kv_link_bytes_per_second; 0: not measured.", capacity)
    abandoned = report.threads_abandoned
    yield gauge("kv_threads_abandoned", "Link threads that hang in a transport, and were given up.", abandoned)


def _of_load(load: Load) -> Iterator[Metric]:
    blocks: dict[tuple[str, ...], float] = {
        ("free",): load.free_blocks,
        ("cached",): load.cached_blocks,
        ("owned",): load.owned_blocks,
        ("reserved",): load.reserved_blocks,
    }
    yield gauge("blocks", "KV blocks by state; they add up to all there are.", blocks, ["state"])
    in_use = load.owned_blocks + load.reserved_blocks
    total = in_use + load.free_blocks + load.cached_blocks
    yield gauge("kv_cache_usage_perc", "Share of the KV blocks that are owned or reserved, 0 to 1.", in_use / total)
    yield gauge("num_requests_running", "Sequences in the engine's batch.", load.running)
    yield gauge("num_requests_waiting", "Sequences that hold blocks and are not in the batch.", load.waiting)
    yield gauge("pending_prefill_tokens", "Prompt tokens that wait to be computed.", load.pending_prefill_tokens)
    yield counter("preemptions_total", "Sequences that lost their blocks to others.", load.preemptions)
    yield counter("engine_steps_total", "Steps of the engine.", load.steps)
    yield counter("engine_busy_seconds_total", "Seconds that the engine spent in steps.", load.busy_seconds)
    yield counter(
        "engine_tokens_total", "Tokens that went through the model, of prompts and answers.", load.computed_tokens
    )
    yield counter("engine_sampled_tokens_total", "Tokens that the engine sampled.", load.sampled_tokens)
    yield counter("prefix_cache_queries_total", "Prompt tokens looked up in this worker's cache.", load.prefix_queries)
    yield counter("prefix_cache_hits_total", "Prompt tokens that were found there.", load.prefix_hits)
    yield gauge("prefill_tokens_per_second", "Prompt tokens computed a second; 0: not measured.", load.prefill_rate)
