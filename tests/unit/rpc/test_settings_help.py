"""`--help` of settings: no Python in it."""

from __future__ import annotations

import re

import pytest

from pdserve.cli.serve_settings import ServeSettings
from pdserve.gateway.config import GatewaySettings
from pdserve.prefix_cache.config import PrefixCacheSettings
from pdserve.router.config import RouterSettings
from pdserve.rpc.settings import Settings
from pdserve.rpc.settings_help import metavar
from pdserve.worker.config import WorkerSettings


@pytest.mark.parametrize(
    ("name", "kind", "word"),
    [
        ("drain_seconds", "float", "SECONDS"),
        ("slo_ttft_ms", "float", "MILLISECONDS"),
        ("port", "int", "PORT"),
        ("http_port", "int", "PORT"),
        ("worker", "list[str]", "HOST:PORT"),
        ("prefix_cache", "str", "HOST:PORT"),
        ("prefix_cache", "int", "N"),
        ("kv_cache_memory", "ByteSize", "SIZE"),
        ("log_dir", "Path", "FOLDER"),
        ("config", "Path", "PATH"),
        ("revision", "str", "TEXT"),
        ("decode", "list[int]", "N"),
        ("dtype", "{auto,float32}", "{auto,float32}"),
    ],
)
def test_a_value_is_called_what_it_is(name: str, kind: str, word: str) -> None:
    assert metavar(name, kind) == word


@pytest.mark.parametrize(
    "settings", [RouterSettings, WorkerSettings, PrefixCacheSettings, GatewaySettings, ServeSettings]
)
def test_help_names_no_types_and_no_empty_defaults(
    settings: type[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        settings.load(["--help"], program="it")
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert "--config PATH" in told
    assert not re.search(r"\b(str|int|float|ByteSize|Path|list)\b(?! of)", told.split("options:")[0])
    for noise in ("default: None", "default: []", "default: )", "default factory"):
        assert noise not in " ".join(told.split())
