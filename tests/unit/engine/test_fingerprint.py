"""Models that compute other KV have other fingerprints, however little they differ."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pdserve.engine.fingerprint import model_fingerprint
from tests.tiny_models import make_tiny_model


def test_any_one_tensor_makes_another_model(tmp_path: Path) -> None:
    """A fine-tune may have changed no more than that, and its KV must not be taken for the base model's."""
    folder = make_tiny_model(tmp_path, "llama")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    seen = {model_fingerprint(folder)}
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + torch.randn_like(tensor) * 1e-3}, path, metadata={"format": "pt"})
        seen.add(model_fingerprint(folder))
    assert len(seen) == len(tensors) + 1


def test_the_same_weights_elsewhere_are_the_same_model(tmp_path: Path) -> None:
    first, second = make_tiny_model(tmp_path / "a", "llama"), make_tiny_model(tmp_path / "b", "llama")
    assert model_fingerprint(first) == model_fingerprint(second)
