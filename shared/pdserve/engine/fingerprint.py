"""Sixteen bytes that tell models apart: what workers compare before they exchange KV."""

from __future__ import annotations

import json
import struct
from hashlib import blake2b
from pathlib import Path

from pdserve.core.errors import ModelError
from pdserve.engine.weights import weight_files

_SAMPLES = 3  # of each tensor: its beginning, middle and end
_SAMPLE_BYTES = 256
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own bound
# What config.json says about the software that wrote it, or about how to compute, does not make another model.
_IGNORED = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")


def model_fingerprint(folder: Path) -> bytes:
    """BLAKE2b-128 over config.json and, of each safetensors file, header, size and three samples of every tensor.

    Takes milliseconds whatever the size. Fine-tunes may change a few tensors only, so each is sampled; a single altered
    weight may go unseen, which is not what this is for. The dtype that a worker computes in is not in it (the KV layout
    has that). Raises ModelError for a folder without config or weights.
    """
    digest = blake2b(digest_size=16, person=b"pdserve-model")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kept = {name: value for name, value in config.items() if name not in _IGNORED}
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"cannot read {folder / 'config.json'}: {error}") from error
    digest.update(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode())
    for path in weight_files(folder):
        try:
            for part in _parts(path):
                digest.update(struct.pack("<Q", len(part)) + part)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error}") from error
    return digest.digest()


def _parts(path: Path) -> list[bytes]:
    """Header, size and samples of one safetensors file; file names are left out."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError(f"{path} is not a safetensors file, or cut short")
        parts = [file.read(header_bytes), struct.pack("<Q", size)]
        for begin, end in _spans(path, parts[0]):
            for index in range(_SAMPLES):
                file.seek(8 + header_bytes + begin + max(0, end - begin - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                parts.append(file.read(min(_SAMPLE_BYTES, end - begin)))
    return parts


def _spans(path: Path, header: bytes) -> list[tuple[int, int]]:
    """Where each tensor begins and ends behind the header, in the order of the file."""
    try:
        entries = json.loads(header)
        return sorted(
            (begin, end) for begin, end in (e["data_offsets"] for n, e in entries.items() if n != "__metadata__")
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} is not a safetensors file: {error!r}") from error
