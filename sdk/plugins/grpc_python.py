"""A protoc plugin that is grpcio-tools' own protoc: buf cannot run its Python generators by themselves."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf.compiler.plugin_pb2 import CodeGeneratorRequest, CodeGeneratorResponse
from google.protobuf.descriptor_pb2 import FileDescriptorSet


def main() -> None:
    request = CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
    answer = CodeGeneratorResponse(supported_features=CodeGeneratorResponse.FEATURE_PROTO3_OPTIONAL)
    with tempfile.TemporaryDirectory() as folder:
        protos, out = Path(folder, "protos.binpb"), Path(folder, "out")
        out.mkdir()
        protos.write_bytes(FileDescriptorSet(file=request.proto_file).SerializeToString())
        outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
        command = [sys.executable, "-m", "grpc_tools.protoc", f"--descriptor_set_in={protos}", *outputs]
        subprocess.run([*command, *request.file_to_generate], check=True, stdout=sys.stderr)
        for path in sorted(out.rglob("*.py*")):
            answer.file.add(name=str(path.relative_to(out)), content=path.read_text())
        for package in {str(Path(name).parent) for name in request.file_to_generate}:
            answer.file.add(name=f"{package}/__init__.py", content="")
    sys.stdout.buffer.write(answer.SerializeToString())


if __name__ == "__main__":
    main()
