"""Settings of a service: command line over environment (``PDSERVE_``) over YAML file over default.

A setting that silently does nothing is worse than a service that does not start. So an unknown option, key or variable
is an error that names the nearest setting there is, and so are settings that contradict each other. All that is wrong
is told at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliSuppress, PydanticBaseSettingsSource, SettingsConfigDict

from pdserve.core.errors import ConfigError
from pdserve.rpc.endpoint import ANY_ADDRESS, parse_endpoint
from pdserve.rpc.settings_report import Report, explain
from pdserve.rpc.settings_sources import gather
from pdserve.rpc.tls import ServerTls, Tls


def _check_endpoint(text: str) -> str:
    try:
        parse_endpoint(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return text


def _check_url(text: str) -> str:
    if "://" not in text:
        return _check_endpoint(text)
    if not text.startswith(("http://", "https://")):
        raise ValueError("must be host:port, http://host:port or https://host:port")
    return text


Endpoint = Annotated[str, AfterValidator(_check_endpoint)]
"""``host:port``, IPv6 hosts in brackets."""
OtlpEndpoint = Annotated[str, AfterValidator(_check_url)]
"""``host:port`` or ``http://host:port`` without TLS, ``https://host:port`` with it."""


class Settings(BaseSettings):
    """What every command with settings has. Subclasses add fields; a field's description is its ``--help`` text.

    An object made directly (``RouterSettings(port=1)``) takes nothing from environment or files; `load` does.
    """

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    config: Path | None = Field(None, description="YAML file with settings, keys as the options here")
    check_config: Literal["table", "json", "schema"] | None = Field(
        None,
        description="only check the settings and print those in force, as table or json; "
        "schema prints a JSON schema for the YAML file",
    )

    @classmethod
    def load(cls, argv: Sequence[str] | None = None, *, program: str | None = None) -> Self:
        """Settings from `argv` (None: this process's), environment and file.

        Prints what is wrong and exits with 2; exits with 0 after ``--help`` and ``--check-config``.
        """
        arguments = list(sys.argv[1:] if argv is None else argv)
        given = gather(cls, arguments, os.environ, program or _program())
        if not given.readable:
            _refuse(given.problems)
        if given.values.get("check_config") == "schema":
            _end(Report.schema(cls))
        try:
            settings = cls(**given.values)
        except ValidationError as error:
            _refuse([*given.problems, *explain(error, given)])
        if given.problems:
            _refuse(given.problems)
        if settings.check_config:
            report = Report.of(settings, given)
            _end(report.json() if settings.check_config == "json" else report.table())
        return settings

    def contradictions(self) -> Iterator[str]:
        """A sentence for each pair of settings that cannot both be meant; it names both.

        Subclasses add theirs after those of their parent. The fields by themselves are valid here.
        """
        yield from ()

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        found = list(self.contradictions())
        if found:
            raise ValueError("\n".join(found))
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # `gather` has the others, with the place of each value


class ServiceSettings(Settings):
    """What every service has."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="port to listen on; 0: any free one")
    advertise_host: str | None = Field(
        None, description="name that others reach this service by; default: the host, or this machine's name"
    )
    launcher_fd: CliSuppress[int | None] = Field(
        None, description="socket to the process that started this one (see launcher.py)"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port for Prometheus metrics at --host; 0: any free one; unset: none"
    )
    otlp_endpoint: OtlpEndpoint | None = Field(None, description="OTLP gRPC endpoint for traces and metrics")
    trace_ring: int = Field(
        512, ge=0, description="how many requests' traces to keep in memory, for `pdserve trace`; 0: none"
    )
    max_connections: int = Field(
        16_384, ge=1, description="connections at a time; what comes beyond is closed, or told 503 over HTTP"
    )
    idle_seconds: float = Field(
        600.0, ge=1, le=86_400, description="how long a connection may be without a request before it is closed"
    )
    drain_seconds: float = Field(30.0, ge=0, description="how long running work may take once told to stop")
    tls_cert_file: Path | None = Field(
        None, description="certificate of this service, and its chain, in PEM; with it, it listens with TLS alone"
    )
    tls_key_file: Path | None = Field(None, description="private key of the certificate, in PEM")
    tls_client_ca_file: Path | None = Field(
        None, description="authorities, in PEM; only callers with a certificate of theirs are let in (mutual TLS)"
    )

    @property
    def server_tls(self) -> ServerTls | None:
        """What it listens with; None: no TLS."""
        if self.tls_cert_file is None or self.tls_key_file is None:
            return None
        return ServerTls(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from tls_contradictions(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)
        if self.advertise_host in ANY_ADDRESS:
            yield f"advertise-host {self.advertise_host!r} is no address that others can connect to"
        if self.port and self.port == self.metrics_port:
            yield f"port and metrics-port are both {self.port}"


class CallingSettings(ServiceSettings):
    """What those services have that call others."""

    tls_ca_file: Path | None = Field(
        None,
        description="authorities, in PEM, of the services that this one calls; with it, it calls them with TLS, and"
        " shows them its own certificate where it has one",
    )

    @property
    def caller_tls(self) -> Tls | None:
        """What it calls with; None: no TLS."""
        return Tls(self.tls_ca_file, self.tls_cert_file, self.tls_key_file) if self.tls_ca_file else None


class FleetSettings(ServiceSettings):
    """What those services have that call one another: all but the gateway, which is a client."""

    internal_secret_file: Path | None = Field(
        None,
        description="file with the secret that the services of a fleet show one another; workers and prefix caches"
        " refuse whoever does not show it; unset: they answer anybody",
    )


def tls_contradictions(cert: Path | None, key: Path | None, client_ca: Path | None) -> Iterator[str]:
    """What a server cannot have of these without the others."""
    if (cert is None) != (key is None):
        said, missing = ("tls-key-file", "tls-cert-file") if cert is None else ("tls-cert-file", "tls-key-file")
        yield f"{said} is set, and {missing} is not: they go together"
    if client_ca is not None and cert is None:
        yield "tls-client-ca-file asks callers for certificates, and there is no TLS without tls-cert-file"


def _program() -> str:
    """How this process was started, for ``--help``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name


def _refuse(problems: Sequence[str]) -> NoReturn:
    for problem in problems:
        sys.stderr.write(f"error: {problem}\n")
    raise SystemExit(2)


def _end(text: str) -> NoReturn:
    sys.stdout.write(text + "\n")
    raise SystemExit(0)
