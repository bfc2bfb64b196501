"""The engine process of a worker: one loop that owns the engine, and a thread that hands link control to the links.

The loop waits on the engine socket and on a pipe that link threads write to; between two looks it runs one step. It
knows no asyncio and no grpc. It ends with its front: the end of the engine socket ends the process.
"""

from __future__ import annotations

import argparse
import os
import platform
import selectors
import socket
import sys
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path

import torch

from pdserve.core.errors import ConfigError, PdserveError
from pdserve.core.process import die_with_parent
from pdserve.engine.build import BuiltEngine, EngineOptions, build_engine
from pdserve.engine.fetch import resolve_model
from pdserve.telemetry.logs import setup_logs
from pdserve.transfer.connect import transports_on
from pdserve.transfer.messages import TransferEvent
from pdserve.worker.channel import Channel
from pdserve.worker.engine_links import EngineLinks
from pdserve.worker.engine_turn import EngineTurn
from pdserve.worker.messages import (
    EngineFailed,
    EngineSettings,
    EngineStarted,
    FromEngine,
    KvCommitted,
    LinkMessage,
    Progress,
    TicketMessage,
    ToEngine,
)
from pdserve.worker.step_log import StepLog, TransferRecord

LONGEST_WAIT = 60.0  # seconds; select overflows on what a client may take for a deadline
SEND_BUFFER_BYTES = 4 << 20  # the front may lag some steps behind before a step has to wait for it


class EngineLoop:
    """Messages in, steps, messages out."""

    def __init__(
        self, settings: EngineSettings, channel: Channel[ToEngine, FromEngine], links: Channel[LinkMessage, LinkMessage]
    ) -> None:
        self._channel = channel
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        built = build_engine(_options(settings), self._on_layer, lambda *at: channel.send(Progress(*at)))
        self._engine = built.engine
        self._links = EngineLinks(settings, built, links, self._notify, self._wake)
        hub = self._links.hub
        self._turn = EngineTurn(
            built.engine, built.kv, hub, hub.stats, channel.send, built.config.vocab_size, self._log_ticket
        )
        self._step_log_path = settings.step_log
        self._step_log = StepLog() if settings.step_log else None
        if self._step_log is not None:
            self._engine.on_forward = self._step_log.forward_done
        # Co-located workers are decode workers; what a prefill worker never does it need not know.
        built.engine.warm_up(answers=settings.role == "decode")
        channel.send(_started(built))

    def run(self) -> None:
        """Serve until told to shut down, or until the front is gone."""
        turn = self._turn
        self._links.start()
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            # What came together with the settings is in the channel's buffer, where select does not see it.
            ready: Set[object] = {self._channel} if self._channel.buffered() else frozenset()
            while turn.running:
                ready = ready or {key.fileobj for key, _ in selector.select(self._patience())}
                self._take_in(ready)
                ready = frozenset()
                if self._engine.has_work:
                    self._step()
                turn.tell()
                self._links.tell(turn.handoff.report)
        self._links.hub.shutdown()
        if self._step_log is not None:
            self._step_log.write(Path(self._step_log_path))

    def _step(self) -> None:
        if self._step_log is None:
            self._engine.step()
            return
        tickets = [sequence.id for sequence in self._engine.scheduler.running]
        began = time.monotonic_ns()
        self._engine.step()
        self._step_log.step(began, time.monotonic_ns(), tickets)

    def _take_in(self, ready: Set[object]) -> None:
        turn = self._turn
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        self._links.raise_failure()
        turn.take_events()
        more = self._channel in ready
        while more and turn.running:
            message = self._channel.receive()
            if message is None:
                turn.running = False
            else:
                turn.handle(message)
                more = self._channel.buffered()
        turn.end_late()

    def _log_ticket(self, message: TicketMessage) -> None:
        if self._step_log is not None and isinstance(message, KvCommitted):
            record = TransferRecord(message.ticket, message.kv_bytes, message.seconds, message.exposed)
            self._step_log.transfers.append(record)

    def _patience(self) -> float | None:
        """How long the loop may wait for something to happen, in seconds; None: for ever."""
        if self._engine.has_work or self._turn.events:
            return 0.0
        due = [at for at in (self._turn.due, self._links.due) if at is not None]
        return min(LONGEST_WAIT, max(0.0, min(due) - time.monotonic())) if due else None

    def _on_layer(self, progress: Sequence[tuple[str, int]], layer: int) -> None:
        self._links.hub.advance(progress, layer)

    def _notify(self, event: TransferEvent) -> None:
        """Called from link threads."""
        self._turn.events.append(event)
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._wake_write, b"\0")


def _options(settings: EngineSettings) -> EngineOptions:
    return EngineOptions(
        model=resolve_model(settings.model, settings.revision or None),
        dtype=settings.dtype,
        device=settings.device,
        block_size=settings.block_size,
        kv_cache_bytes=settings.kv_cache_bytes,
        memory_share=settings.memory_share,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        lookahead_tokens=settings.lookahead_tokens,
        attention_backend=settings.attention_backend,
        prefix_caching=settings.enable_prefix_caching,
        transfer_dtype=settings.kv_transfer_dtype,
    )


def _started(built: BuiltEngine) -> EngineStarted:
    cuda = built.device.type == "cuda"
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if cuda:
        versions["cuda"] = torch.version.cuda or ""
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        versions["nccl"] = ".".join(map(str, nccl))
    return EngineStarted(
        layout=built.layout,
        max_model_len=built.max_model_len,
        vocab_size=built.config.vocab_size,
        total_blocks=built.kv.num_blocks,
        watermark_blocks=built.engine.scheduler.config.watermark_blocks,
        device=_device_name(built.device),
        transports=transports_on(built.device),
        versions=versions,
        notes=built.notes,
        load=built.engine.load(),
    )


def _device_name(device: torch.device) -> str:
    """ "cpu", or "cuda:0 (its UUID)": two workers may see different GPUs under one number."""
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_properties(device).uuid})"


def serve(channel: Channel[ToEngine, FromEngine], links: Channel[LinkMessage, LinkMessage]) -> int:
    """Take the settings, build, run. The exit status: 0 after a shutdown, 1 after a failure that the front was told."""
    settings = channel.receive()
    if settings is None:
        return 0
    if not isinstance(settings, EngineSettings):
        raise ConfigError("the first message to an engine process is its settings")
    setup_logs(settings.role, settings.log_level)
    if settings.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, settings.cores)
    torch.set_num_threads(settings.threads or max(1, len(settings.cores)))
    try:
        EngineLoop(settings, channel, links).run()
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the front is gone, and so is everybody who could be told
    except PdserveError as error:
        channel.send(EngineFailed(type(error).__name__, str(error)))
        return 1
    except Exception as error:
        channel.send(EngineFailed(type(error).__name__, str(error)))
        raise
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-fd", type=int, required=True)
    parser.add_argument("--link-fd", type=int, required=True)
    args = parser.parse_args()
    die_with_parent()
    pairs = [socket.socket(fileno=fd) for fd in (args.engine_fd, args.link_fd)]
    for pair in pairs:
        pair.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return serve(Channel(pairs[0], ToEngine), Channel(pairs[1], LinkMessage))  # type: ignore[arg-type]


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is said and written; torch's destructors would take half a second of a busy core
