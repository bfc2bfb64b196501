"""A pdserve router as a target, over its gRPC API."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from pdserve.bench.record import Record, Told
from pdserve.bench.target import Asking, Facts
from pdserve.client import NO_RETRIES, Client, Finish, FleetWorker, GenerateOptions, Output
from pdserve.core.errors import ConfigError, Unavailable


class RouterTarget:
    """Never retries: each refusal is a figure."""

    def __init__(self, endpoint: str, asking: Asking) -> None:
        self._client = Client(endpoint, retry=NO_RETRIES)
        self._options = GenerateOptions(model=asking.model, temperature=0.0, ignore_eos=True, cache_salt=asking.salt)
        if asking.slo_ms is not None:
            self._options["slo_ttft_ms"], self._options["slo_itl_ms"] = asking.slo_ms

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def facts(self) -> Facts:
        models = {model.name: model for model in await self._client.models()}
        name = self._options["model"] or (next(iter(models)) if len(models) == 1 else "")
        if not models:
            raise Unavailable("this router serves no model")
        if name not in models:
            raise ConfigError(f"--model must be one of {', '.join(sorted(models))}")
        workers = [worker for worker in await self._client.fleet() if worker.connected and worker.model == name]
        gpus = {gpu for worker in workers if (gpu := _gpu(worker))}
        self._options["model"] = name
        return Facts(name, models[name].max_model_len, models[name].vocab_size, len(gpus) or None)

    async def ask(self, prompt: Sequence[int], record: Record) -> None:
        options = GenerateOptions(**self._options)
        options["max_tokens"] = record.arrival.output
        options["tenant"], options["priority"] = record.arrival.tenant, record.arrival.priority or None
        async with self._client.generate(prompt, **options) as events:
            record.sending()
            async for event in events:
                if isinstance(event, Output):
                    record.take(len(event.tokens), event.token_ids)
                elif isinstance(event, Finish):
                    usage = event.usage
                    record.told = Told(
                        usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.stages, usage.replays
                    )


def _gpu(worker: FleetWorker) -> str:
    """Which GPU it runs on, empty for none: by its UUID, since two workers may have one GPU under two numbers."""
    number, _, uuid = worker.device.partition(" ")
    return (uuid or f"{worker.node}/{number}") if number.startswith("cuda") else ""
