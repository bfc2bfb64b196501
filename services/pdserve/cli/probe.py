"""`pdserve probe`: can a network carry the KV, by arithmetic or by measuring a fleet? And how fast are its workers?"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pdserve.cli import probe_links, probe_speed
from pdserve.cli.console import fetch_progress, run, show_table
from pdserve.core.errors import ConfigError, ModelError
from pdserve.core.fabric import (
    KvShape,
    headroom,
    needed_bandwidth,
    parse_bandwidth,
    say_bytes,
    say_rate,
    say_seconds,
    transfer_seconds,
    verdict,
)
from pdserve.core.layout import DTYPE_BYTES

app = typer.Typer(no_args_is_help=True, help="Can the network carry the KV? How fast are the workers?")
app.command("links")(probe_links.links)
app.command("speed")(probe_speed.speed)

# NVLink of a GPU of 2022, and what network cards have.
DEFAULT_BANDWIDTHS = ("900GB/s", "400Gbit/s", "200Gbit/s", "100Gbit/s", "25Gbit/s")
BLOCK_SIZE = 16  # tokens in a KV block, as workers have it unless told otherwise
# What is said about the bits. The model's own may not be what its workers keep.
BITS_FROM = {
    "told": "",
    "assumed": ", assumed",
    "model": ", its own; --bits 32 where workers run float32",
}
HUB_TIMEOUT = 5.0  # seconds until the hub has answered at all
COLUMNS = ("over", "that is", "one prompt", "as int8, fp8", "carries the rate")


def _check_bandwidths(texts: list[str]) -> list[str]:
    for text in texts:
        try:
            parse_bandwidth(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return texts


@app.command("kv")
def kv(
    model: Annotated[
        str | None, typer.Option(help="Folder, hub id or smollm2-135m-instruct; only its config.json is read.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Instead of a model: its layers.")] = None,
    kv_width: Annotated[int | None, typer.Option(min=1, help="Instead of a model: KV heads times head size.")] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Bits of a number, as workers keep it: 32 where they run float32 (--dtype, or a CPU without "
            "bfloat16). Default: the model's own, or 16.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in a prompt.")] = 4000,
    rate: Annotated[float, typer.Option(min=0, help="Prompts a second.")] = 1.0,
    bandwidth: Annotated[
        list[str],
        typer.Option(
            callback=_check_bandwidths,
            help=f"As 900GB/s or 200Gbit/s. Repeat for more; default: {', '.join(DEFAULT_BANDWIDTHS)}.",
        ),
    ] = [],  # noqa: B006  nobody changes it
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Compute how much KV a prompt has, what bandwidth a rate of prompts needs, and how long one takes over a network.

    Kilo is 1000, as networks count. Times are those of the bytes alone: no latency, and nothing else on the network.
    Ends with 1 where a --bandwidth does not carry the rate.
    """
    reports: list[dict[str, Any]] = []

    async def main() -> None:
        shape = await _shape(model, layers, kv_width, bits)
        report = kv_report(shape, tokens, rate, bandwidth or DEFAULT_BANDWIDTHS)
        reports.append({**report, "bits_from": "told" if bits else "assumed" if model is None else "model"})

    run(main())
    for report in reports:
        if as_json:
            typer.echo(json.dumps(report))
        else:
            _show(report)
        if bandwidth and any((link["headroom"] or 1) < 1 for link in report["bandwidths"]):
            raise typer.Exit(1)


def kv_report(shape: KvShape, tokens: int, rate: float, bandwidths: Sequence[str]) -> dict[str, Any]:
    """What `probe kv` says, in bytes, bytes a second and seconds. "narrow" is as int8 or fp8 with its scales;
    "headroom" is how many times over the rate is carried, None where the rate is 0."""
    size, narrow = tokens * shape.token_bytes, tokens * shape.narrow_token_bytes(BLOCK_SIZE)
    needed = needed_bandwidth(size, rate)
    links = [
        {
            "name": name,
            "bytes_per_second": speed,
            "prompt_seconds": transfer_seconds(size, speed),
            "narrow_prompt_seconds": transfer_seconds(narrow, speed),
            "headroom": headroom(speed, needed) if needed else None,
            "verdict": verdict(speed, needed, "this rate", carrier=name),
        }
        for name, speed in ((name, parse_bandwidth(name)) for name in bandwidths)
    ]
    return {
        **dataclasses.asdict(shape),
        "tokens": tokens,
        "rate": rate,
        "token_bytes": shape.token_bytes,
        "prompt_bytes": size,
        "needed_bytes_per_second": needed,
        "narrow_token_bytes": narrow / tokens,
        "narrow_prompt_bytes": narrow,
        "narrow_saves": 1 - narrow / size,
        "bandwidths": links,
    }


def kv_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures that do not depend on a network, with what each is called."""
    saves, source = report["narrow_saves"], BITS_FROM[report["bits_from"]]
    less = f"{say_bytes(report['narrow_prompt_bytes'])} a prompt, {100 * saves:.0f}% less" if saves > 0 else "no less"
    return [
        ("KV", f"{report['layers']} layers, {report['kv_width']} wide, {report['bits']} bits a number{source}"),
        ("one token", say_bytes(report["token_bytes"])),
        (f"one prompt of {report['tokens']:,}", say_bytes(report["prompt_bytes"])),
        ("as int8 or fp8", less),
        (f"at {report['rate']:g} prompts/s", say_rate(report["needed_bytes_per_second"])),
    ]


def _show(report: dict[str, Any]) -> None:
    for name, figure in kv_lines(report):
        typer.echo(f"{name + ':':<24}{figure}")
    links = report["bandwidths"]
    rows = [
        (
            link["name"],
            say_rate(link["bytes_per_second"]),
            say_seconds(link["prompt_seconds"]),
            say_seconds(link["narrow_prompt_seconds"]),
            _times(link["headroom"]),
        )
        for link in links
    ]
    show_table("", COLUMNS, rows, numbers=range(1, len(COLUMNS)))
    slowest = min(links, key=lambda link: ((link["headroom"] or 1) < 1, link["bytes_per_second"]))
    if (slowest["headroom"] or 1) < 1:
        slowest = max(links, key=lambda link: float(link["bytes_per_second"]))
    typer.echo(slowest["verdict"])


def _times(times: float | None) -> str:
    if times is None:
        return "-"
    return f"{times:,.1f} times" if times >= 1 else f"short by {1 / times:,.1f}"


async def _shape(model: str | None, layers: int | None, kv_width: int | None, bits: int | None) -> KvShape:
    """Raises ConfigError for options that contradict each other, ModelError for a model that cannot be read."""
    if model is None:
        if layers is None or kv_width is None:
            raise ConfigError("give --model, or both --layers and --kv-width")
        return KvShape(layers, kv_width, bits or 16)
    if layers is not None or kv_width is not None:
        raise ConfigError("--model says what --layers and --kv-width would; give one or the other")
    from pdserve.engine.config import ModelConfig

    try:
        config = ModelConfig.load(await _config_folder(model))
    except ModelError as error:
        raise ModelError(f"{error}; --layers, --kv-width and --bits do without a model") from error
    width = config.num_kv_heads * config.head_size
    return KvShape(config.num_layers, width, bits or 8 * DTYPE_BYTES[config.dtype], config.head_size)


async def _config_folder(model: str) -> Path:
    """The folder with a model's config.json: a local one, or one in a cache. Of a hub model only that file is fetched;
    the demo model is made from one file, so it is fetched whole."""
    from pdserve.launch.models import local_folder, resolve_model

    if folder := local_folder(model):
        return folder
    with fetch_progress(model) as progress:
        if model.count("/") == 1 and model[0] not in "./~":
            return await asyncio.to_thread(_fetch_config, model)
        return await resolve_model(model, progress=progress)


def _fetch_config(name: str) -> Path:
    """The folder with a hub model's config.json, in the hub's own cache. Raises ModelError."""
    from huggingface_hub import get_session, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
            return Path(cached).parent
        try:  # once and briefly: the download itself tries for half a minute where there is no network
            get_session().head(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT)
        except Exception as error:  # of whichever HTTP library this release of the hub's client has
            raise ModelError(f"the hub, where {name!r} would be, cannot be reached: {error}") from error
        return Path(hf_hub_download(name, "config.json")).parent
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"cannot fetch config.json of {name!r} from the hub: {error}") from error
