"""What a config.json may say, and what is refused with which words."""

from __future__ import annotations

import json

import pytest

from pdserve.core.errors import ModelError
from pdserve.engine.config import ModelConfig, RopeConfig

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


def config(**changes):
    return ModelConfig.parse({**BASE, **changes})


def test_defaults_are_those_of_transformers():
    c = config()
    assert (c.architecture, c.head_size, c.num_kv_heads, c.rms_norm_eps, c.dtype) == ("llama", 16, 2, 1e-6, "float32")
    assert c.rope == RopeConfig(original_max_positions=512)
    assert c.windows == (None, None, None)
    assert not (c.qkv_bias or c.o_bias or c.mlp_bias or c.qk_norm or c.tie_word_embeddings)


def test_families_differ_where_they_do():
    assert config(architectures=["Qwen2ForCausalLM"]).qkv_bias
    assert not config(architectures=["Qwen2ForCausalLM"], attention_bias=True).o_bias
    qwen3 = config(architectures=["Qwen3ForCausalLM"])
    assert qwen3.qk_norm and qwen3.head_size == 128 and not qwen3.qkv_bias
    assert config(architectures=None, model_type="mistral").architecture == "mistral"
    assert config(attention_bias=True).o_bias


def test_old_and_new_rope_spellings_are_one():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = config(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old.rope == new.rope == RopeConfig("llama3", 5e5, 8.0, 64)


def test_windows_are_per_layer():
    window = {"sliding_window": 8}
    assert config(architectures=["MistralForCausalLM"], **window).windows == (8, 8, 8)
    assert config(**window).windows == (None, None, None)
    qwen = {"architectures": ["Qwen2ForCausalLM"], **window}
    assert config(**qwen).windows == (None, None, None)
    assert config(**qwen, use_sliding_window=True, max_window_layers=2).windows == (None, None, 8)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert config(**qwen, use_sliding_window=True, layer_types=kinds).windows == (8, None, 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "'GemmaForCausalLM' is not supported; supported are LlamaForCausalLM",
        ),
        ({"architectures": [], "model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads"),
        ({"head_dim": 15}, "even head size"),
        ({"hidden_size": "many"}, "many"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path, changes, words):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **changes}))
    with pytest.raises(ModelError, match=words) as caught:
        ModelConfig.load(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"), [(None, "cannot read"), ("{", "not JSON"), ("[]", "no JSON object"), ("{}", "not supported")]
)
def test_unreadable_files_are_named(tmp_path, text, words):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=words):
        ModelConfig.load(tmp_path)


def test_a_missing_value_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in BASE.items() if k != "vocab_size"}))
    with pytest.raises(ModelError, match="lacks 'vocab_size'"):
        ModelConfig.load(tmp_path)
