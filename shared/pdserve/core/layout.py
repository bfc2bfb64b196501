"""What KV pages look like, and the arithmetic that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.errors import LayoutMismatch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TRANSFER_DTYPES = ("", "int8", "fp8")


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and kind of KV pages. A token's KV in one layer is K then V, each [num_kv_heads, head_size] of `dtype`.

    `transfer_dtype` is how it travels between workers: "" as it is, "int8" or "fp8" with scales.
    """

    block_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    model_fingerprint: bytes
    transfer_dtype: str = ""

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token in one layer, K and V."""
        return 2 * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self.layer_token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.block_size * self.token_bytes

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def require_same(self, other: KVLayout) -> None:
        """Raise LayoutMismatch, with both layouts in its message, unless pages can be copied as they are."""
        if self != other:
            raise LayoutMismatch(f"KV layouts differ: {self.describe()} here, {other.describe()} there")

    def describe(self) -> str:
        """One line for logs and errors."""
        return (
            f"{self.num_layers} layers x {self.num_kv_heads} KV heads x {self.head_size}, {self.dtype}, "
            f"blocks of {self.block_size} tokens, model {self.model_fingerprint.hex()}, "
            f"travelling as {self.transfer_dtype or 'it is'}"
        )
