"""What a model folder's config.json says, as one checked value. What pdserve cannot compute exactly is refused here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.core.errors import ModelError
from pdserve.core.layout import DTYPE_BYTES

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and scaling. Fields beyond `kind` and `theta` count only for the kinds that use them."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that decides the shape and the arithmetic of a decoder-only model.

    `windows` has one entry a layer: how many tokens, itself included, a token attends to; None: all before it.
    `dtype` is the dtype the weights are stored in, by name ("bfloat16"), and a default for computing.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    dtype: str

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Read `folder`/config.json. Raises ModelError, naming the file and the reason, for what cannot be served."""
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ModelError(f"{path} is not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ModelError(f"{path} holds no JSON object")
        try:
            return cls.parse(raw)
        except KeyError as error:
            raise ModelError(f"{path} lacks {error.args[0]!r}") from error
        except (ModelError, TypeError, ValueError) as error:
            raise ModelError(f"{path}: {error}") from error

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """The same from the parsed JSON. Raises ModelError, or KeyError for a value that must be there."""
        family = _family(raw)
        _refuse_unsupported(raw)
        num_heads = int(raw["num_attention_heads"])
        hidden_size = int(raw["hidden_size"])
        # Qwen3's config class has a default of its own, so files may leave it out.
        default_head_size = 128 if family == "qwen3" else hidden_size // num_heads
        attention_bias = family in ("llama", "qwen3") and bool(raw.get("attention_bias", False))
        config = cls(
            architecture=family,
            hidden_size=hidden_size,
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_size=int(raw.get("head_dim") or default_head_size),
            intermediate_size=int(raw["intermediate_size"]),
            vocab_size=int(raw["vocab_size"]),
            max_position_embeddings=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            rope=_rope(raw),
            windows=_windows(raw, family),
            dtype=_dtype(raw),
        )
        config._check()
        return config

    def _check(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be 1 or more, is {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_size % 2:
            raise ModelError(f"rotary embedding needs an even head size, not {self.head_size}")


def _family(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    supported = ", ".join(_FAMILIES)
    if names:
        if names[0] in _FAMILIES:
            return _FAMILIES[names[0]]
        raise ModelError(f"architecture {names[0]!r} is not supported; supported are {supported}")
    if raw.get("model_type") in _FAMILIES.values():
        return str(raw["model_type"])
    raise ModelError(f"model_type {raw.get('model_type')!r} is not supported; supported are {supported}")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise ModelError(f"quantized weights (quantization_config: {method}) are not supported")
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"hidden_act {activation!r} is not supported, only 'silu'")


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelError(f"dtype {name!r} is not supported; supported are {', '.join(DTYPE_BYTES)}")
    return name


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """From transformers 5's `rope_parameters`, or from `rope_theta` and `rope_scaling` of before."""
    given = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in _ROPE_KINDS:
        raise ModelError(f"rope type {kind!r} is not supported; supported are {', '.join(_ROPE_KINDS)}")
    if nested := [key for key, value in given.items() if isinstance(value, dict)]:
        raise ModelError(f"rope parameters per layer type ({', '.join(nested)}) are not supported")
    if (partial := given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))) not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial} is not supported")
    if kind != "default" and "factor" not in given:
        raise ModelError(f"rope type {kind!r} needs a 'factor'")
    known = {name: given[name] for name in RopeConfig.__dataclass_fields__ if given.get(name) is not None}
    original = given.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    known |= {
        "kind": kind,
        "theta": float(given.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        "original_max_positions": int(original or raw["max_position_embeddings"]),
    }
    return RopeConfig(**known)


def _windows(raw: Mapping[str, Any], family: str) -> tuple[int | None, ...]:
    count = int(raw["num_hidden_layers"])
    window = raw.get("sliding_window")
    if family == "mistral" and window:
        return (int(window),) * count
    if family not in ("qwen2", "qwen3") or not window or not raw.get("use_sliding_window", False):
        return (None,) * count
    full = int(raw.get("max_window_layers", 28))
    kinds = raw.get("layer_types") or ["full_attention"] * min(full, count) + ["sliding_attention"] * (count - full)
    if len(kinds) != count:
        raise ModelError(f"layer_types names {len(kinds)} layers of {count}")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
