"""What a worker's front and its engine process tell each other, as msgpack over socket pairs.

There are two pairs. The engine pair carries requests down and one StepDone a step up; the engine loop reads it
between steps. The link pair carries KV link control; a thread of the engine process reads it at once, so that a
frame never waits for a step.
"""

from __future__ import annotations

import msgspec

from pdserve.core.layout import KVLayout
from pdserve.core.sequence import SequenceSpec
from pdserve.engine.outputs import ChunkDone, Ended, Load, PromptDone, TokenOut
from pdserve.engine.outputs import TokenLogprobs as TokenLogprobs
from pdserve.transfer.messages import ControlMessage, TransferReport

# Front to engine.


class EngineSettings(msgspec.Struct, frozen=True, tag=True):
    """The first message: what the engine process needs to build its engine."""

    role: str  # "prefill" or "decode"
    model: str  # folder, hub id or the demo model's name
    dtype: str
    device: str
    threads: int
    cores: tuple[int, ...]
    block_size: int
    kv_cache_bytes: int  # 0: from memory_share
    memory_share: float
    max_model_len: int  # 0: the model's own
    max_num_seqs: int
    max_num_batched_tokens: int
    lookahead_tokens: int
    attention_backend: str
    kv_transport: str
    kv_host: str  # where data halves of links listen
    frame_bytes: int
    ring_bytes: int
    frame_timeout: float
    target_bytes: int = 256 << 10
    kv_transfer_dtype: str = "auto"
    kv_checksum: bool = False
    enable_prefix_caching: bool = True
    log_level: str = "info"
    step_log: str = ""  # file for a StepLog, written at the end; "": none
    revision: str = ""  # of a hub id; "": the newest


class StartPrefill(msgspec.Struct, frozen=True, tag=True):
    """Compute a prompt and its first token; push the KV to `peer` (a worker id), if there is one."""

    ticket: str
    attempt: int
    spec: SequenceSpec
    peer: str | None
    peer_holds: int = 0  # leading tokens that the peer probably has: what is missing here may be pulled


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Reserve pages for a sequence whose KV comes from `peer`, or, without one, compute it here."""

    ticket: str
    attempt: int
    spec: SequenceSpec
    peer: str | None


class Rearm(msgspec.Struct, frozen=True, tag=True):
    """Fence a ticket's attempt and await the KV of `spec` from `peer` in a new one, into the same pages.

    Answered by Rearmed or AlreadyReady; by Ended where the ticket cannot go on.
    """

    ticket: str
    attempt: int
    spec: SequenceSpec
    peer: str


class HandOff(msgspec.Struct, frozen=True, tag=True):
    """Move a running sequence to the decode worker `peer`, where it is reserved as `new_ticket`: its first `tokens`
    tokens' KV goes as `attempt`, the rest as the next one.

    Answered by Detached, then Ended (HANDED_OFF); or by HandOffFailed.
    """

    ticket: str
    new_ticket: str
    attempt: int
    peer: str
    tokens: int


class CallOff(msgspec.Struct, frozen=True, tag=True):
    """Stop handing a sequence off, and let it go on here; nothing where it is over, or another hand-off is under way.

    `reason` is told as HandOffFailed; empty: nothing is told.
    """

    ticket: str
    new_ticket: str
    reason: str = ""


class CancelTicket(msgspec.Struct, frozen=True, tag=True):
    ticket: str


class LoadBlocks(msgspec.Struct, frozen=True, tag=True):
    """Put blocks from the prefix cache into pages, as cached blocks. `payload` holds them one after the other."""

    hashes: list[bytes]
    payload: bytes


class ExportBlocks(msgspec.Struct, frozen=True, tag=True):
    """Read blocks out for the prefix cache; answered by BlocksExported with those that are still here."""

    hashes: list[bytes]


class CheckIntegrity(msgspec.Struct, frozen=True, tag=True):
    """Check the block pool's books now; answered by IntegrityReport."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Is anybody there? The engine answers Pong between two steps."""


ToEngine = (
    EngineSettings
    | Ping
    | StartPrefill
    | Reserve
    | Rearm
    | HandOff
    | CallOff
    | CancelTicket
    | LoadBlocks
    | ExportBlocks
    | CheckIntegrity
    | Shutdown
)

# Engine to front.


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How far starting has come, for progress bars: a stage and its share done."""

    stage: str
    done: float


class EngineStarted(msgspec.Struct, frozen=True, tag=True):
    layout: KVLayout
    max_model_len: int
    vocab_size: int
    total_blocks: int
    watermark_blocks: int
    device: str
    transports: list[str]
    versions: dict[str, str]
    notes: dict[str, str]  # what was chosen and why, for the log
    load: Load  # idle, but for what it found out of its speed


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or cannot go on; the process ends after it."""

    kind: str
    message: str


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """What one engine step, and what was handled since the last one, came to. Order in each list is order in time."""

    number: int
    load: Load
    tokens: list[TokenOut] = []
    ends: list[Ended] = []
    prompts: list[PromptDone] = []
    chunks: list[ChunkDone] = []
    stored: list[bytes] = []
    removed: list[bytes] = []
    seconds: float = 0.0  # of computing
    prompts_taken: int = 0  # StartPrefill messages that were handled since the engine started; `load` knows them


class ReservedPages(msgspec.Struct, frozen=True, tag=True):
    ticket: str
    attempt: int
    tokens_held: int


class AttemptFailed(msgspec.Struct, frozen=True, tag=True):
    """An attempt's KV will not come; the reservation stands."""

    ticket: str
    attempt: int
    reason: str


class Rearmed(msgspec.Struct, frozen=True, tag=True):
    ticket: str
    attempt: int
    tokens_held: int


class AlreadyReady(msgspec.Struct, frozen=True, tag=True):
    """`attempt`, an older one, had completed before it could be fenced."""

    ticket: str
    attempt: int
    first_token: int


class TicketReady(msgspec.Struct, frozen=True, tag=True):
    ticket: str
    attempt: int
    kv_bytes: int


class KvCommitted(msgspec.Struct, frozen=True, tag=True):
    """Prefill side: the decode worker took over. Times as in transfer's SendCommitted."""

    ticket: str
    kv_bytes: int
    seconds: float = 0.0
    exposed: float = 0.0
    at: float = 0.0


class Detached(msgspec.Struct, frozen=True, tag=True):
    """A sequence that is handed off made its last token here; it has `tokens` of them."""

    ticket: str
    new_ticket: str
    tokens: int


class HandOffFailed(msgspec.Struct, frozen=True, tag=True):
    """A sequence stays, and goes on here."""

    ticket: str
    new_ticket: str
    reason: str


class BlocksExported(msgspec.Struct, frozen=True, tag=True):
    hashes: list[bytes]
    payload: bytes


class IntegrityReport(msgspec.Struct, frozen=True, tag=True):
    """`problem` is empty when the books add up."""

    problem: str
    load: Load


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Answers Ping."""


FromEngine = (
    Progress
    | Pong
    | EngineStarted
    | EngineFailed
    | StepDone
    | ReservedPages
    | AttemptFailed
    | Rearmed
    | AlreadyReady
    | TicketReady
    | KvCommitted
    | Detached
    | HandOffFailed
    | BlocksExported
    | IntegrityReport
)

TicketMessage = (
    ReservedPages | AttemptFailed | Rearmed | AlreadyReady | TicketReady | KvCommitted | Detached | HandOffFailed
)
"""What a front hands on to its role's service, beside steps."""

# The link pair, both ways.


class LinkOpened(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: the control half to `peer` is up; make the data half over `transport`."""

    peer: str
    epoch: int
    initiator: bool
    transport: str


class LinkControl(msgspec.Struct, frozen=True, tag=True):
    """Either way: one control message of the link to `peer`."""

    peer: str
    epoch: int
    message: ControlMessage


class LinkEstablished(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: the data half is up and warm."""

    peer: str
    epoch: int


class LinkProbe(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: measure an established link; sizes are capped by what it takes."""

    peer: str
    epoch: int
    frame_bytes: list[int]
    bytes_per_size: int


class LinkProbed(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: (frame bytes, bytes a second) for each size, and seconds from a small frame to its credit."""

    peer: str
    epoch: int
    round_trip: float
    samples: list[tuple[int, float]]


class LinkStats(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: the state of all links, when it changed, at most a few times a second."""

    report: TransferReport


class LinkClosed(msgspec.Struct, frozen=True, tag=True):
    """Either way: this half is gone; the other one must go too."""

    peer: str
    epoch: int
    reason: str


LinkMessage = LinkOpened | LinkControl | LinkEstablished | LinkProbe | LinkProbed | LinkStats | LinkClosed
