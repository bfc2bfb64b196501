"""The router's settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from pdserve.core.slo import SloTargets
from pdserve.policy.disaggregation import NoWorker, Protect, Rules
from pdserve.policy.draining import Leave
from pdserve.policy.fleet import Target
from pdserve.rpc.settings import CallingSettings, Endpoint, FleetSettings


class RouterSettings(FleetSettings, CallingSettings):
    """What a router needs to know: which workers, which models, and its own limits."""

    worker: list[Endpoint] = Field(
        default_factory=list, description="host:port of a worker; a name that stands for several is asked again"
    )
    model: list[str] = Field(default_factory=list, description="served model: a folder, a hub id, or NAME=folder-or-id")
    revision: str | None = Field(None, description="branch, tag or commit of hub ids, for all models alike")
    max_queue: int = Field(1024, ge=1, description="requests that may wait for a worker, per model")
    max_request_seconds: float = Field(600.0, gt=0, description="limit for a request that comes without a deadline")
    unread_seconds: float = Field(
        60.0, gt=0, description="how long a client may leave unread what it was sent; then its request ends"
    )
    max_replays: int = Field(5, ge=0, description="tries in a row that may fail without producing a token")
    max_worker_deaths: int = Field(
        5,
        ge=1,
        description="workers that may be lost under one request before it is stopped: it may be what kills them",
    )
    lease_seconds: float = Field(5.0, gt=0, description="silence after which a worker counts as gone")
    resolve_seconds: float = Field(5.0, gt=0, description="how often names of workers are resolved again")
    startup_seconds: float = Field(
        15.0, ge=0, description="how long an endpoint that never answered is taken for a worker that still starts"
    )

    no_worker: Literal["wait", "local", "fail"] = Field(
        "wait",
        description="while no worker of a role is up: wait, let decode workers compute prompts (local), or fail",
    )
    no_worker_seconds: float = Field(30.0, ge=0, description="how long a request waits for a worker to come up")
    protect: Literal["protect-itl", "protect-ttft"] = Field(
        "protect-itl",
        description="which stated target goes first where not both can be kept: with protect-itl prompts wait before"
        " decode workers get more answers than they have time for",
    )
    local_prefill: bool = Field(
        True, description="let decode workers compute prompts where that is predicted to delay everybody less"
    )

    hand_off: Literal["needed", "all", "off"] = Field(
        "needed",
        description="which running sequences a decode worker that drains hands to another one, with their KV: those"
        " that might not be through within its drain-seconds, all, or none",
    )

    api_keys_file: Path | None = Field(
        None,
        description="YAML file with the digests of API keys and what each may do, read again when it changes; unset:"
        " whoever reaches the router may use it",
    )
    tenant_max_requests: int | None = Field(
        None, ge=1, description="requests of one tenant (x-tenant-id) that may wait or run at a time; unset: any number"
    )
    tenant_tokens_per_minute: int | None = Field(
        None, ge=1, description="tokens of one tenant a minute, prompts and answers together; unset: any number"
    )
    max_priority: int = Field(
        0,
        description="a request's priority counts at most so much; at 0 a client may go behind others, not before them",
    )
    early_rejection: Literal["stated", "off"] = Field(
        "stated",
        description="refuse at once what is predicted to miss its deadline, or a target that the request states or that"
        " is set here; off: let it wait",
    )

    slo_ttft_ms: float = Field(500.0, gt=0, description="target for the time to first token, in milliseconds")
    slo_itl_ms: float = Field(50.0, gt=0, description="target for the gaps between an answer's tokens, in milliseconds")
    slo_itl_percentile: float = Field(
        99.0, gt=0, le=100, description="percentile of an answer's own gaps that slo-itl-ms is for"
    )

    @cached_property
    def rules(self) -> Rules:
        """What decisions go by."""
        no_worker = NoWorker(self.no_worker)
        return Rules(
            Protect(self.protect),
            self.local_prefill,
            no_worker,
            self.no_worker_seconds,
            self.max_priority,
            Leave(self.hand_off),
        )

    @cached_property
    def slo(self) -> SloTargets:
        """What a request is promised that names no targets of its own."""
        return SloTargets(self.slo_ttft_ms / 1e3, self.slo_itl_ms / 1e3, self.slo_itl_percentile)

    @cached_property
    def stated(self) -> frozenset[Target]:
        """Which of those somebody set, so that they are for every request as if it had named them."""
        settings = {Target.TTFT: "slo_ttft_ms", Target.ITL: "slo_itl_ms"}
        return frozenset(target for target, setting in settings.items() if setting in self.model_fields_set)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, without what was derived from the values as they were."""
        copy = super().model_copy(update=update, deep=deep)
        for name in copy.__dict__.keys() - type(self).model_fields.keys():
            del copy.__dict__[name]
        return copy

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        # A folder's name may have a "=" in it.
        names = [text if Path(text).expanduser().is_dir() else text.partition("=")[0] for text in self.model]
        if self.revision and self.model and all(Path(name).expanduser().is_dir() for name in self.model):
            yield f"revision {self.revision} is for hub ids, and each model is a folder"
        for option, said in (("worker", self.worker), ("model", names)):
            yield from (f"{option} {text} is given {count} times" for text, count in Counter(said).items() if count > 1)
