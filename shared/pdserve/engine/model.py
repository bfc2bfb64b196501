"""The decoder-only transformer of every supported family, driven by its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pdserve.core.layout import KVLayout
from pdserve.engine.attention import AttentionBackend, AttentionMetadata
from pdserve.engine.config import ModelConfig
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.linear import Matrices, TorchMatrices
from pdserve.engine.pointwise import Pointwise, Rotation, TorchPointwise
from pdserve.engine.rope import rope_table


@dataclass(slots=True)
class Layer:
    """One layer's weights. q, k and v are one matrix, as are gate and up: fewer and larger operations."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class CausalLM:
    """Weights and forward pass. Weights are uninitialised until `weights.load_weights` has filled them.

    Batches are flat: the tokens of all sequences of a step, one sequence after another, prefill chunks and decodes
    mixed as they come. Nothing in here waits for the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int | None = None,
        pointwise: Pointwise | None = None,
    ) -> None:
        """`max_model_len` (default: the model's own) is how many positions the rope table covers; `pointwise` (default:
        torch's) computes what stands between the matrix products."""
        self.config = config
        self.backend = backend
        self.pointwise: Pointwise = pointwise or TorchPointwise()
        self.matrices: Matrices = TorchMatrices()
        self.dtype = dtype
        self.device = torch.device(device)
        self.max_model_len = max_model_len or config.max_position_embeddings
        self._rope = rope_table(config.rope, config.head_size, self.max_model_len, self.device)
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        self.layers = [self._empty_layer() for _ in range(config.num_layers)]
        self.norm = self._empty(config.hidden_size)
        tied = config.tie_word_embeddings
        self.lm_head = self.embedding if tied else self._empty(config.vocab_size, config.hidden_size)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _empty_layer(self) -> Layer:
        c = self.config
        q_rows, qkv_rows = c.num_heads * c.head_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_size
        return Layer(
            input_norm=self._empty(c.hidden_size),
            qkv=self._empty(qkv_rows, c.hidden_size),
            qkv_bias=self._empty(qkv_rows) if c.qkv_bias else None,
            q_norm=self._empty(c.head_size) if c.qk_norm else None,
            k_norm=self._empty(c.head_size) if c.qk_norm else None,
            o=self._empty(c.hidden_size, q_rows),
            o_bias=self._empty(c.hidden_size) if c.o_bias else None,
            post_norm=self._empty(c.hidden_size),
            gate_up=self._empty(2 * c.intermediate_size, c.hidden_size),
            gate_up_bias=self._empty(2 * c.intermediate_size) if c.mlp_bias else None,
            down=self._empty(c.hidden_size, c.intermediate_size),
            down_bias=self._empty(c.hidden_size) if c.mlp_bias else None,
        )

    def pack(self, matrices: Matrices) -> None:
        """Put the matrices in the order that this CPU multiplies in, for good.

        An output matrix that is also the embedding is there twice from then on, unless `matrices` give its rows.
        """
        self.matrices, tied, pack = matrices, self.lm_head is self.embedding, matrices.pack
        self.lm_head = pack(self.lm_head)
        if tied and matrices.gives_rows:
            self.embedding = self.lm_head
        for layer in self.layers:
            layer.qkv, layer.o = pack(layer.qkv), pack(layer.o)
            layer.gate_up, layer.down = pack(layer.gate_up), pack(layer.down)

    def layout(self, block_size: int, fingerprint: bytes) -> KVLayout:
        """What this model's KV pages look like."""
        c, dtype = self.config, str(self.dtype).removeprefix("torch.")
        return KVLayout(block_size, c.num_layers, c.num_kv_heads, c.head_size, dtype, fingerprint)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: KVCache,
        attn: AttentionMetadata,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, hidden] of int64 token_ids and positions [T], after the last norm.

        Each layer stores the batch's K and V at attn.slots, then calls `on_layer` with its index (from then on they
        may be read: on a CPU at once, on a GPU in stream order), then attends and runs its MLP.
        """
        eps, ops, product = self.config.rms_norm_eps, self.pointwise, self.matrices.product
        rotation = ops.rotation(positions, self._rope)
        embed = self.matrices.rows if self.embedding is self.lm_head else F.embedding
        hidden = embed(token_ids, self.embedding)
        x = ops.add_norm(hidden, None, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            q, k, v = self._project(layer, x, rotation)
            ops.store(kv, index, attn.slots, k, v)
            if on_layer is not None:
                on_layer(index)
            heads = self.backend.forward(index, q, k, v, kv, attn, self.config.windows[index])
            x = ops.add_norm(hidden, product(heads, layer.o, layer.o_bias), layer.post_norm, eps)
            gated = ops.gate(product(x, layer.gate_up, layer.gate_up_bias))
            following = self.layers[index + 1].input_norm if index + 1 < len(self.layers) else self.norm
            x = ops.add_norm(hidden, product(gated, layer.down, layer.down_bias), following, eps)
        return x

    def _project(
        self, layer: Layer, x: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, heads, size], k and v [T, KV heads, size] of x [T, hidden], q and k normalised and rotated."""
        c = self.config
        qkv = self.matrices.product(x, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, c.head_size)
        qk, v = qkv.split_with_sizes((c.num_heads + c.num_kv_heads, c.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split_with_sizes((c.num_heads, c.num_kv_heads), dim=1)
            qk = torch.cat((_norm(q, layer.q_norm, c.rms_norm_eps), _norm(k, layer.k_norm, c.rms_norm_eps)), dim=1)
        q, k = self.pointwise.rotate(qk, rotation).split_with_sizes((c.num_heads, c.num_kv_heads), dim=1)
        return q, k, v

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [R, vocabulary] of hidden states [R, hidden]."""
        return self.matrices.product(hidden, self.lm_head).float()


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)
