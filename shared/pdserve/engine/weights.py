"""From a folder's safetensors into a model's fused weights. Files are mapped, tensors converted one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from pdserve.core.errors import ModelError
from pdserve.engine.model import CausalLM, Layer

Progress = Callable[[int, int], None]
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAPPED_BYTES = 64 << 20


def load_weights(model: CausalLM, folder: Path, progress: Progress | None = None) -> None:
    """Fill the model's weights, converting to its dtype and device. `progress` gets (tensors done, tensors in all).

    Raises ModelError, naming file and tensor, when a file is missing, cut short or corrupt, a tensor is missing or has
    another shape, or there is a tensor that the model has no place for (it would compute something else).
    """
    places = weight_places(model)
    missing = set(places)
    total, done = len(places), 0
    for path in weight_files(folder):
        for name, tensor in _tensors(path):
            if name not in places:
                _check_ignorable(model, path, name)
                continue
            if tensor.shape != places[name].shape:
                expected, found = list(places[name].shape), list(tensor.shape)
                raise ModelError(f"{path}: {name} has shape {found}, expected {expected}")
            places[name].copy_(tensor)
            missing.discard(name)
            done += 1
            if progress is not None:
                progress(done, total)
    if missing:
        first, *others = sorted(missing)
        raise ModelError(f"{folder}: no file holds {first}" + (f" and {len(others)} other tensors" if others else ""))


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a file by name, mapped. Raises ModelError where the file cannot be read.

    What was read of a mapping counts as this process's memory, and goes with its last tensor: so it is mapped anew now
    and then, or a process would have all weights twice at its peak.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
        while names:
            with safe_open(path, framework="pt") as file:
                read = 0
                while names and read < _MAPPED_BYTES:
                    name = names.pop(0)
                    tensor = file.get_tensor(name)
                    read += tensor.nbytes
                    yield name, tensor
                    del tensor
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, as its index names them. Raises ModelError for one that is not there."""
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _SINGLE).is_file():
            raise ModelError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")
        return [folder / _SINGLE]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (KeyError, ValueError, AttributeError, TypeError, OSError) as error:
        raise ModelError(f"{index} is not an index of safetensors files: {error!r}") from error
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelError(f"{index} names {name}, which is not there")
    return [folder / name for name in names]


def weight_places(model: CausalLM) -> dict[str, torch.Tensor]:
    """Where each tensor of a checkpoint goes, by its Hugging Face name: views into the model's fused weights."""
    places = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    if not model.config.tie_word_embeddings:
        places["lm_head.weight"] = model.lm_head
    for index, layer in enumerate(model.layers):
        for name, place in _layer_places(model, layer).items():
            if place is not None:
                places[f"model.layers.{index}.{name}"] = place
    return places


def _layer_places(model: CausalLM, layer: Layer) -> dict[str, torch.Tensor | None]:
    c = model.config
    kv_rows = c.num_kv_heads * c.head_size
    places: dict[str, torch.Tensor | None] = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_norm,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
        "self_attn.o_proj.weight": layer.o,
        "self_attn.o_proj.bias": layer.o_bias,
        "mlp.down_proj.weight": layer.down,
        "mlp.down_proj.bias": layer.down_bias,
    }
    for kind, qkv, gate_up in (("weight", layer.qkv, layer.gate_up), ("bias", layer.qkv_bias, layer.gate_up_bias)):
        if qkv is not None:
            parts = qkv.split_with_sizes((c.num_heads * c.head_size, kv_rows, kv_rows))
            places |= {f"self_attn.{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
        if gate_up is not None:
            places[f"mlp.gate_proj.{kind}"], places[f"mlp.up_proj.{kind}"] = gate_up.chunk(2)
    return places


def _check_ignorable(model: CausalLM, path: Path, name: str) -> None:
    """Old checkpoints store rope's frequencies; tied ones may repeat the embedding as lm_head."""
    if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and model.config.tie_word_embeddings):
        return
    raise ModelError(f"{path}: {name} has no place in a model of this configuration ({model.config.architecture})")
