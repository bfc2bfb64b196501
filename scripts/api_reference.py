"""Write docs/api.md, the API reference, from the protos and their comments. `--check` compares instead of writing.

What InferenceService can reach is the public API; the services and messages that only pdserve's own processes exchange
come after it, file by file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "docs" / "api.md"
PUBLIC = "InferenceService"
# Field numbers of descriptor.proto, which a comment's path is made of.
MESSAGE, ENUM, SERVICE, FIELD, MEMBER = 4, 5, 6, 2, 2

HEAD = f"""<!-- Generated from protos/ by `make proto`; do not edit. -->

# API reference

Package `pdserve.v1`. The public API is [{PUBLIC}](#{PUBLIC.lower()}), which every router serves, with the
messages that it takes and returns. [Inside a suite](#inside-a-suite) is what pdserve's own processes say to each other.

A field without `optional` that is not sent reads as zero, empty or absent; a field with it tells unset from zero.
"""
INSIDE = """## Inside a suite

These services change together with pdserve's version. Peers agree on a protocol version before they talk.
"""


Spot = tuple[int, ...]
Declared = ServiceDescriptorProto | DescriptorProto | EnumDescriptorProto


@dataclass(frozen=True, slots=True)
class Api:
    """All that the protos declare, in their order; names are unique in the package."""

    services: dict[str, ServiceDescriptorProto]
    messages: dict[str, DescriptorProto]
    enums: dict[str, EnumDescriptorProto]
    files: dict[str, list[str]]
    """File name to the names of what it declares."""
    comments: dict[str, dict[Spot, str]]
    """By declared name: its own comment at (), those of its parts at their path below it."""

    def comment(self, name: str, *spot: int) -> str:
        return self.comments[name].get(spot, "")


def descriptors() -> list[FileDescriptorProto]:
    """The protos, parsed, with their comments."""
    names = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "api.binpb"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={out}", *names], check=True)
        return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def read(files: Iterable[FileDescriptorProto]) -> Api:
    api = Api({}, {}, {}, {}, {})
    for file in files:
        notes = {
            tuple(place.path): _strip(place.leading_comments or place.trailing_comments)
            for place in file.source_code_info.location
        }
        declared: list[tuple[Declared, int, int]] = [
            *((service, SERVICE, index) for index, service in enumerate(file.service)),
            *((message, MESSAGE, index) for index, message in enumerate(file.message_type)),
            *((enum, ENUM, index) for index, enum in enumerate(file.enum_type)),
        ]
        for item, *path in declared:
            api.comments[item.name] = {spot[2:]: note for spot, note in notes.items() if [*spot[:2]] == path}
        api.services.update((service.name, service) for service in file.service)
        api.messages.update((message.name, message) for message in file.message_type)
        api.enums.update((enum.name, enum) for enum in file.enum_type)
        api.files[file.name] = [item.name for item, *_ in declared]
    return api


def _strip(comment: str) -> str:
    return "\n".join(line.removeprefix(" ").rstrip() for line in comment.splitlines()).strip()


def reachable(api: Api, service: str) -> list[str]:
    """Names of the messages and enums that the service's calls carry, each where it is met first."""
    found: dict[str, None] = {}

    def visit(name: str) -> None:
        if name in found or not (name in api.messages or name in api.enums):
            return
        found[name] = None
        if name in api.messages:
            for member in api.messages[name].field:
                entry = map_entry(api, name, member)
                for part in entry.field if entry else [member]:
                    visit(_short(part.type_name))

    for method in api.services[service].method:
        visit(_short(method.input_type))
        visit(_short(method.output_type))
    return list(found)


def map_entry(api: Api, message: str, field: FieldDescriptorProto) -> DescriptorProto | None:
    """The hidden message behind a map field."""
    nested = {entry.name: entry for entry in api.messages[message].nested_type if entry.options.map_entry}
    return nested.get(_short(field.type_name))


def render(api: Api) -> str:
    public = reachable(api, PUBLIC)
    sections = [HEAD, *render_service(api, PUBLIC), "## Messages\n"]
    for name in public:
        sections += render_type(api, name)
    sections.append(INSIDE)
    for file, names in sorted(api.files.items()):
        rest = [name for name in names if name != PUBLIC and name not in public]
        if rest:
            sections.append(f"### {file}\n")
        for name in rest:
            sections += render_service(api, name, "####") if name in api.services else render_type(api, name, "####")
    return "\n".join(sections)


def render_service(api: Api, name: str, level: str = "##") -> Iterator[str]:
    yield f"{level} {name}\n"
    yield f"{api.comment(name)}\n"
    for index, method in enumerate(api.services[name].method):
        yield f"{level}# {name}.{method.name}\n"
        yield f"{_signature(method)}\n"
        yield f"{api.comment(name, MEMBER, index)}\n"


def render_type(api: Api, name: str, level: str = "###") -> Iterator[str]:
    yield f"{level} {name}\n"
    if comment := api.comment(name):
        yield f"{comment}\n"
    rows = list(_field_rows(api, name) if name in api.messages else _value_rows(api, name))
    yield "\n".join([*rows, ""]) if len(rows) > 2 else "Has no fields.\n"


def _field_rows(api: Api, name: str) -> Iterator[str]:
    message = api.messages[name]
    yield "| field | type | |"
    yield "|---|---|---|"
    for index, member in enumerate(message.field):
        comment = _cell(api.comment(name, FIELD, index))
        if member.HasField("oneof_index") and not member.proto3_optional:
            oneof = message.oneof_decl[member.oneof_index].name
            comment = f"*One of `{oneof}`.* {comment}".rstrip()
        yield f"| `{member.name}` | {_type(api, name, member)} | {comment} |"


def _value_rows(api: Api, name: str) -> Iterator[str]:
    yield "| value | number | |"
    yield "|---|---|---|"
    for index, value in enumerate(api.enums[name].value):
        yield f"| `{value.name}` | {value.number} | {_cell(api.comment(name, MEMBER, index))} |"


def _signature(method: MethodDescriptorProto) -> str:
    takes = f"{'stream of ' * method.client_streaming}{_link(_short(method.input_type))}"
    gives = f"{'stream of ' * method.server_streaming}{_link(_short(method.output_type))}"
    return f"{takes} → {gives}"


def _type(api: Api, message: str, field: FieldDescriptorProto) -> str:
    entry = map_entry(api, message, field)
    if entry:
        key, value = (_scalar(part) for part in entry.field)
        return f"map of {key} to {value}"
    label = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else "optional " * field.proto3_optional
    return label + _scalar(field)


def _scalar(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(_short(field.type_name))
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _short(type_name: str) -> str:
    return type_name.rsplit(".", 1)[-1]


def _cell(comment: str) -> str:
    return " ".join(comment.split()).replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = render(read(descriptors()))
    if not check:
        TARGET.write_text(text)
    elif not TARGET.exists() or TARGET.read_text() != text:
        print(f"out of date, run `make proto`: {TARGET.relative_to(ROOT)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
