"""The parts of a plan that say what there is: workers, what arrives, what is promised. Each key with what it means."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from pdserve.core.fabric import parse_bandwidth
from pdserve.rpc.settings_sources import nearest
from pdserve.simulator.workload import Arrival, Kind, Lengths, Synthetic, read_trace, repeat, scale


class Part(BaseModel):
    """A part of a plan: what it does not know is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """A check for texts that must be one of `names`; its ValueError says which is meant."""

    def check(name: str) -> str:
        if name in names:
            return name
        close = nearest(name, names)
        meant = f"; did you mean {close}?" if close else ""
        raise ValueError(f"{name!r} is none of {', '.join(sorted(names))}{meant}")

    return check


def listed(names: Collection[str]) -> Any:
    """What `one_of` is in a JSON schema."""
    return Field(json_schema_extra={"enum": [*sorted(names)]})


def _bandwidth(text: str) -> str:
    parse_bandwidth(text)
    return text


class OutagePart(Part):
    """A worker that dies, and comes back empty."""

    worker: str = Field(description='as "decode-0"')
    at: float = Field(ge=0, description="seconds from the beginning")
    seconds: float = Field(gt=0, description="until it is back")


class FleetPart(Part):
    """How many workers, and what each has."""

    prefill: int = Field(0, ge=0, description="prefill workers: prefill-0 and so on")
    decode: int = Field(0, ge=0, description="decode workers: decode-0 and so on")
    colocated: int = Field(0, ge=0, description="workers that do both, instead of the others: decode-0 and so on")
    block_size: int = Field(16, ge=1, description="tokens in a KV block; must divide the workload's")
    kv_tokens: int = Field(500_000, ge=1, description="tokens that one worker has KV memory for")
    max_num_seqs: int = Field(256, ge=1, description="sequences that one worker has at once")
    max_num_batched_tokens: int = Field(2048, ge=1, description="tokens in a step, so of a prompt's chunk")
    lookahead_tokens: int = Field(128, ge=0, description="tokens of an answer that pages are reserved for ahead")
    whole_prompts: bool = Field(False, description="no chunked prefill: prompts stop decoding meanwhile")
    link: Annotated[str, AfterValidator(_bandwidth)] = Field(
        "200Gbit/s", description="what one worker's network carries each way"
    )
    link_latency_ms: float = Field(1.0, ge=0, description="what a hand-off takes at least")
    speeds: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="worker: times as fast as the cost model says"
    )
    fetch: Literal["none", "pair", "fleet"] | None = Field(
        None, description="whose KV of a prompt is taken where that is faster: the decode worker's (pair), or anybody's"
    )
    outages: list[OutagePart] = Field(default_factory=list, description="workers that die and come back")


class KindPart(Part):
    """Turns that are unlike the others."""

    share: float = Field(gt=0, lt=1, description="of all turns")
    prompt: float = Field(gt=0, description="mean new tokens of a turn")
    prompt_cv: float = Field(0.0, ge=0, description="coefficient of variation; 0: always the mean")
    output: float = Field(gt=0, description="mean tokens of an answer")
    output_cv: float = Field(0.0, ge=0, description="as prompt_cv")


class SyntheticPart(Part):
    """Conversations from a seed; lengths are log-normal."""

    requests: int = Field(1000, ge=1, description="of all conversations together")
    rate: float = Field(gt=0, description="conversations that begin each second")
    prompt: float = Field(gt=0, description="mean new tokens of a turn")
    prompt_cv: float = Field(0.0, ge=0, description="coefficient of variation; 0: always the mean")
    output: float = Field(gt=0, description="mean tokens of an answer")
    output_cv: float = Field(0.0, ge=0, description="as prompt_cv")
    burstiness: float = Field(1.0, gt=0, description="coefficient of variation of the gaps (Gamma); 1: Poisson")
    turns: int = Field(1, ge=1, description="requests of a conversation; each repeats what came before")
    think: float = Field(10.0, gt=0, description="mean seconds before the next turn, once the answer is read")
    system: int = Field(0, ge=0, description="tokens that all prompts begin with")
    others: list[KindPart] = Field(default_factory=list, description="shares of the turns with lengths of their own")

    @model_validator(mode="after")
    def _shares(self) -> SyntheticPart:
        if sum(kind.share for kind in self.others) > 1 - 1e-9:
            raise ValueError("others: their shares must leave some for prompt and output")
        return self

    def stream(self, block_size: int, rate: float) -> Synthetic:
        """The stream, `rate` times as fast."""
        return Synthetic(
            rate=self.rate * rate,
            prompt=Lengths(self.prompt, self.prompt_cv),
            output=Lengths(self.output, self.output_cv),
            burstiness=self.burstiness,
            turns=self.turns,
            think=self.think,
            system=self.system,
            block_tokens=block_size,
            others=tuple(
                Kind(kind.share, Lengths(kind.prompt, kind.prompt_cv), Lengths(kind.output, kind.output_cv))
                for kind in self.others
            ),
        )


class WorkloadPart(Part):
    """What arrives: a trace or a synthetic stream."""

    trace: Path | None = Field(None, description="Mooncake's JSONL, or the CSV of Azure or vidur")
    synthetic: SyntheticPart | None = None
    rate: float = Field(1.0, gt=0, description="times as fast")
    copies: int = Field(1, ge=1, description="so many side by side, with nothing in common")
    limit: int | None = Field(None, ge=1, description="only so many of its requests")
    start: float = Field(0.0, ge=0, description="seconds until the first one")
    tenant: str = Field("", description="whose they are; tenants of one priority share what there is")
    priority: int = Field(0, description="more goes first")

    @model_validator(mode="after")
    def _one(self) -> WorkloadPart:
        if (self.trace is None) == (self.synthetic is None):
            raise ValueError("a workload is either a trace or synthetic")
        return self

    def arrivals(self, block_size: int, seed: int) -> list[Arrival]:
        """The requests, in order of arrival. Raises ConfigError for a trace that cannot be read."""
        if self.trace is not None:
            made = scale(read_trace(self.trace), self.rate, self.limit)
        else:
            assert self.synthetic is not None
            count = min(self.synthetic.requests, self.limit or self.synthetic.requests)
            made = self.synthetic.stream(block_size, self.rate).arrivals(count, seed)
        return [
            replace(arrival, at=arrival.at + self.start, tenant=self.tenant, priority=self.priority)
            for arrival in repeat(made, self.copies)
        ]


class SloPart(Part):
    """What is promised to each request."""

    ttft_ms: float = Field(default=500.0, gt=0, description="to the first token")
    itl_ms: float = Field(default=50.0, gt=0, description="between two tokens")
    itl_percentile: float = Field(default=99.0, gt=0, le=100, description="of a request's own gaps that keep it")
    stated: bool = Field(
        default=False, description="requests ask for this, so the router goes by it; else it is only measured"
    )
