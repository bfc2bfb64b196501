"""compose.yaml, the Dockerfile and the pins agree with the code: what they name exists; ports, times and rights fit."""

from __future__ import annotations

import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from pdserve.gateway.config import DEFAULT_PORT, GatewaySettings
from pdserve.prefix_cache.config import PrefixCacheSettings
from pdserve.router.config import RouterSettings
from pdserve.rpc.settings import ServiceSettings
from pdserve.worker.config import WorkerSettings
from pdserve.worker.engine_client import SHUTDOWN_GRACE

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, type[ServiceSettings]] = {
    "pdserve.router": RouterSettings,
    "pdserve.gateway": GatewaySettings,
    "pdserve.prefix_cache": PrefixCacheSettings,
    "pdserve.prefill": WorkerSettings,
    "pdserve.decode": WorkerSettings,
}
GRPC_SERVICES = {
    "pdserve.router": "pdserve.v1.InferenceService",
    "pdserve.prefix_cache": "pdserve.v1.PrefixCacheService",
    "pdserve.prefill": "pdserve.v1.PrefillService",
    "pdserve.decode": "pdserve.v1.DecodeService",
}
METRICS_PORT = 9100


def interpolated(content: Any) -> Any:
    """As Compose makes it where no variable is set: of strings, after the YAML was read."""
    if isinstance(content, dict):
        return {key: interpolated(value) for key, value in content.items()}
    if isinstance(content, list):
        return [interpolated(value) for value in content]
    if isinstance(content, str):
        return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", content).replace("$$", "$")
    return content


@cache
def services() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = interpolated(yaml.safe_load((ROOT / "compose.yaml").read_text()))["services"]
    return content


def own_services() -> dict[str, tuple[str, list[str]]]:
    """Module and flags of each service that runs one of ours."""
    found = {}
    for name, service in services().items():
        words = shlex.split(service["command"]) if isinstance(service.get("command"), str) else []
        if words[:2] == ["python", "-m"]:
            found[name] = (words[2], words[3:])
    return found


def settings_of(name: str, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """What the service makes of its flags and its environment; a SystemExit where it would refuse them."""
    module, flags = own_services()[name]
    with monkeypatch.context() as patch:
        for variable, value in services()[name]["environment"].items():
            patch.setenv(variable, str(value))
        return SETTINGS[module].load(flags)


def reached_by(name: str) -> set[str]:
    """The names that the service has on the suite's network."""
    networks = services()[name].get("networks", {})
    return {name, *(alias for network in networks.values() for alias in network["aliases"])}


def active(profile: str) -> set[str]:
    """The services that run with `profile`."""
    return {name for name, service in services().items() if profile in service.get("profiles", [profile])}


def test_the_parts_of_the_default_suite_and_what_the_profiles_change() -> None:
    assert "COMPOSE_PROFILES=cpu\n" in (ROOT / ".env").read_text()
    common = {"model", "prefix-cache", "router", "gateway"}
    assert active("cpu") == common | {"prefill", "decode"}
    assert active("gpu") == common | {"prefill-gpu", "decode-gpu"}
    assert services()["decode"]["deploy"]["replicas"] == 2
    assert active("observability") == common | {"otel-collector", "jaeger", "prometheus", "grafana"}


def test_what_services_mount_is_in_the_tree() -> None:
    for name, service in services().items():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert not source.startswith("./") or (ROOT / source).exists(), f"{name} mounts {source}"


def test_prometheus_and_the_collector_reach_whom_they_name() -> None:
    """Each name and port in their files is a service's."""
    prometheus = yaml.safe_load((ROOT / "docker" / "prometheus" / "prometheus.yml").read_text())
    own = set()
    for job in prometheus["scrape_configs"]:
        for lookup in job["dns_sd_configs"]:
            own |= set(lookup["names"])
            http = lookup["names"] == ["gateway"]  # whose metrics are at its HTTP port
            assert lookup["port"] == (DEFAULT_PORT if http else METRICS_PORT)
    for profile in ("cpu", "gpu"):
        reachable = {known for name in active(profile) for known in reached_by(name)}
        assert own <= reachable and len(own) == len(active(profile) - {"model"})
    collector = yaml.safe_load((ROOT / "docker" / "otel-collector" / "config.yaml").read_text())
    assert collector["exporters"]["otlp/jaeger"]["endpoint"].split(":")[0] in services()


def test_the_collector_uses_all_that_it_defines_and_nothing_else() -> None:
    """As it would say itself at its start. It listens where .env and the docs tell services to send."""
    text = (ROOT / "docker" / "otel-collector" / "config.yaml").read_text()
    collector = yaml.safe_load(text)
    pipelines = collector["service"]["pipelines"]
    for kind in ("receivers", "processors", "exporters"):
        used = {name for pipeline in pipelines.values() for name in pipeline[kind]}
        assert used == collector[kind].keys(), kind
    assert set(collector["service"]["extensions"]) == collector["extensions"].keys()
    for pipeline in pipelines.values():  # a limiter behind a batch limits nothing
        assert pipeline["processors"][0] == "memory_limiter"
    port = collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    for page in (".env", "README.md", "docs/containers.md", "docs/operations.md", "compose.yaml"):
        told = re.findall(r"otel-collector:(\d+)", (ROOT / page).read_text())
        assert set(told) <= {port}, page
    (path,) = [mount.split(":")[1] for mount in services()["otel-collector"]["volumes"]]
    assert services()["otel-collector"]["command"] == [f"--config={path}"]


def test_grafana_finds_its_sources_and_its_dashboards() -> None:
    """Each source is a service of the profile; the folder that is looked into is the one that is mounted."""
    grafana = ROOT / "docker" / "grafana"
    sources = yaml.safe_load((grafana / "provisioning" / "datasources" / "pdserve.yaml").read_text())["datasources"]
    urls = {source["uid"]: source["url"] for source in sources}
    assert urls.keys() == {"prometheus", "jaeger"}
    for name, url in urls.items():
        port = services()[name]["ports"][0].rpartition(":")[2]
        assert name in active("observability") and url == f"http://{name}:{port}"
    (provider,) = yaml.safe_load((grafana / "provisioning" / "dashboards" / "pdserve.yaml").read_text())["providers"]
    mounts = dict(mount.split(":")[:2] for mount in services()["grafana"]["volumes"])
    assert mounts["./docker/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./docker/grafana/provisioning"] == "/etc/grafana/provisioning"


@pytest.mark.parametrize("name", own_services())
def test_each_command_is_one_that_its_service_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags and environment are valid, all listen for the others, and the probe asks the port that is listened on."""
    module, _ = own_services()[name]
    settings, service = settings_of(name, monkeypatch), services()[name]
    assert settings.host == "0.0.0.0"
    words = shlex.split(service["healthcheck"]["test"])
    assert words[:3] == ["python", "-m", "pdserve.rpc.healthcheck"]
    if module == "pdserve.gateway":
        assert words[3:] == [f"http://127.0.0.1:{settings.port}/health"]
    else:
        assert words[3:] == [f"127.0.0.1:{settings.port}", "--service", GRPC_SERVICES[module]]
        assert settings.metrics_port == METRICS_PORT
    assert all(port.rpartition(":")[2] == str(settings.port) for port in service.get("ports", []))
    assert seconds(service["stop_grace_period"]) > settings.drain_seconds + SHUTDOWN_GRACE
    assert seconds(service["healthcheck"]["timeout"]) > 5  # of the probe itself, which can say more


def seconds(duration: str) -> int:
    assert duration.endswith("s")
    return int(duration.removesuffix("s"))


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_who_is_named_is_there(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoints lead to a service of the profile that listens there; dependencies run in every profile of theirs."""
    names = active(profile)
    loaded = {name: settings_of(name, monkeypatch) for name in names & own_services().keys()}
    listening = {f"{known}:{settings.port}" for name, settings in loaded.items() for known in reached_by(name)}
    router, gateway = loaded["router"], loaded["gateway"]
    assert isinstance(router, RouterSettings) and isinstance(gateway, GatewaySettings)
    assert set(router.worker) | set(gateway.router) <= listening
    workers = [settings for settings in loaded.values() if isinstance(settings, WorkerSettings)]
    assert len(workers) == 2 and {worker.prefix_cache for worker in workers} <= listening
    (model,) = router.model
    assert {f"{worker.model_name}={worker.model}" for worker in workers} == {model}
    for name in names:
        assert services()[name].get("depends_on", {}).keys() <= names
        for dependency, how in services()[name].get("depends_on", {}).items():
            one_shot = services()[dependency]["restart"] == "no"
            assert how["condition"] == ("service_completed_successfully" if one_shot else "service_healthy")


def test_least_rights_by_default() -> None:
    """Nobody outside of this machine gets in, and who breaks into a service has little there."""
    for name, service in services().items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        if not service["image"].startswith("pdserve:"):
            assert re.search(r":v?\d+\.\d+", service["image"]), f"{name}: the image is not pinned"
            continue
        assert service["read_only"] and service["init"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_gpu_workers_have_one_device_each_and_what_nccl_needs() -> None:
    devices = []
    for name in ("prefill-gpu", "decode-gpu"):
        service = services()[name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"] and len(device["device_ids"]) == 1
        devices += device["device_ids"]
        assert service["ipc"] and service["shm_size"] and service["ulimits"] == {"memlock": -1}
        assert {"NCCL_SOCKET_IFNAME", "NCCL_DEBUG"} <= service["environment"].keys()
    assert len(set(devices)) == 2


def test_the_dockerfile_has_what_compose_builds() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, flags=re.MULTILINE)
    arguments = set(re.findall(r"^ARG (\w+)=", text, flags=re.MULTILINE))
    targets = set()
    for service in services().values():
        if build := service.get("build"):
            assert (ROOT / build["dockerfile"]).is_file() and service["image"] == f"pdserve:{build['target']}"
            assert build["args"].keys() <= arguments
            targets.add(build["target"])
    assert targets == {"base", "cpu", "gpu"} <= set(stages)
    for target in ("runtime", "gpu"):  # base and cpu are made from the former
        stage = text.split(f" AS {target}\n")[1].split("\nFROM ")[0]
        users = re.findall(r"^USER (\S+)$", stage, flags=re.MULTILINE)
        assert users == ["10001:10001"] and "CMD [" in stage
    assert "FROM runtime AS base\n" in text and "FROM runtime AS cpu\n" in text


def test_the_pins_are_what_pyproject_asks_for() -> None:
    """Everything that is required is pinned, at a version that is allowed: `python -m scripts.lock` makes it so."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    base, worker = pins("base"), {**pins("base"), **pins("worker"), **pins("torch-cpu")}
    gpu = {**worker, **pins("torch-gpu"), **pins("flash-attn")}
    for required, pinned in ((project["dependencies"], base), (extras["worker"], worker), (extras["gpu"], gpu)):
        for requirement in map(Requirement, required):
            name = canonical(requirement.name)
            assert name in pinned, f"{requirement} is not pinned: run python -m scripts.lock"
            assert requirement.specifier.contains(pinned[name], prereleases=True), f"{requirement}, not {pinned[name]}"
    assert not base.keys() & {"torch", "numpy", "pip"}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "docker" / "requirements" / f"{name}.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonical(package): version for package, version in pairs}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
