"""Block identity: a chain of BLAKE2b-128 hashes over a prompt's full blocks.

hash(i) = BLAKE2b-128(hash(i - 1), tokens of block i); hash(-1) covers everything else that decides what the KV of a
token is. Equal in every process and on every machine, so that routers, workers and caches can compare hashes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from pdserve.core.layout import KVLayout

HASH_BYTES = 16


def root_hash(layout: KVLayout, salt: str = "") -> bytes:
    """The hash before the first block. Tensor-parallel size is left out on purpose: it does not change the KV."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"pdserve-kv-root")
    travels = (layout.transfer_dtype.encode(),) if layout.transfer_dtype else ()
    for part in (layout.model_fingerprint, layout.dtype.encode(), salt.encode(), *travels):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    digest.update(struct.pack("<I", layout.block_size))
    return digest.digest()


def extend_hashes(hashes: list[bytes], root: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append to `hashes`, in place, the hash of each full block of `tokens` that it lacks."""
    previous = hashes[-1] if hashes else root
    for block in range(len(hashes), len(tokens) // block_size):
        ids = tokens[block * block_size : (block + 1) * block_size]
        previous = blake2b(previous + struct.pack(f"<{block_size}I", *ids), digest_size=HASH_BYTES).digest()
        hashes.append(previous)


def block_hashes(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """The hashes of all full blocks of `tokens`, first block first."""
    hashes: list[bytes] = []
    extend_hashes(hashes, root, tokens, block_size)
    return hashes
