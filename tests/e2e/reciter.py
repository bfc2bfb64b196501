"""A model that recites one text for ever: a test knows what an answer will be, and that it will not end early."""

from __future__ import annotations

from pathlib import Path

from tests.tiny_models import VOCAB_SIZE, make_tiny_model


def make_reciter(folder: Path, text: str, **options: object) -> Path:
    """Write a model that follows each character of `text` with the next one, and the last with the first.

    Each character may be there once, and all must be ASCII: one token each. Any other token is followed by itself.
    It is a Llama whose embedding is the unit matrix, whose layers add nothing, and whose head is a permutation.
    """
    import torch
    from safetensors.torch import load_file, save_file

    codes = list(text.encode("ascii"))
    assert len(set(codes)) == len(codes), "a character that is there twice has two successors"
    make_tiny_model(folder, "llama", hidden_size=VOCAB_SIZE, **options)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "norm" in name:
            tensor.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    successors = dict(zip(codes, codes[1:] + codes[:1], strict=True))
    head = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    for token in range(VOCAB_SIZE):
        head[successors.get(token, token), token] = 5.0
    weights["model.embed_tokens.weight"] = torch.eye(VOCAB_SIZE)
    weights["lm_head.weight"] = head
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
