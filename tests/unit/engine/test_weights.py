"""Loading: what is wrong with a folder is said with file and tensor; and the fingerprint that tells folders apart."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.core.errors import ModelError
from pdserve.engine.attention import HeadShape, select_backend
from pdserve.engine.config import ModelConfig
from pdserve.engine.fingerprint import model_fingerprint
from pdserve.engine.model import CausalLM
from pdserve.engine.weights import load_weights
from tests.tiny_models import make_tiny_model

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return make_tiny_model(base / "single"), make_tiny_model(base / "sharded", max_shard_size="100KB")


@pytest.fixture
def single(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "single")


@pytest.fixture
def sharded(made, tmp_path):
    return shutil.copytree(made[1], tmp_path / "sharded")


def load(folder, dtype=torch.float32, progress=None):
    config = ModelConfig.load(folder)
    shape = HeadShape(config.num_heads, config.num_kv_heads, config.head_size)
    backend, _ = select_backend("torch", "cpu", dtype, 16, shape)
    model = CausalLM(config, backend, dtype, "cpu")
    load_weights(model, folder, progress)
    return model


def change(folder, **tensors):
    """Rewrite the weights with some tensors replaced, or removed where None. Dots are written as double underscores."""
    weights = load_file(folder / SINGLE)
    weights |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, folder / SINGLE)


def test_shards_hold_the_same_model_and_progress_is_told(single, sharded):
    seen = []
    one, many = load(single, progress=lambda done, total: seen.append((done, total))), load(sharded)
    assert torch.equal(one.layers[1].qkv, many.layers[1].qkv)
    assert torch.equal(one.lm_head, many.lm_head)
    assert seen == [(done, 21) for done in range(1, 22)]


def test_weights_are_converted(single):
    model = load(single, torch.bfloat16)
    stored = load_file(single / SINGLE)["model.embed_tokens.weight"]
    assert torch.equal(model.embedding, stored.bfloat16())


def test_a_missing_tensor_is_named(single):
    change(single, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelError, match=r"no file holds model\.layers\.1\.mlp\.up_proj\.weight$"):
        load(single)


def test_a_wrong_shape_is_named_with_its_file(single):
    change(single, model__layers__0__self_attn__k_proj__weight=torch.zeros(16, 64))
    with pytest.raises(ModelError, match=r"model\.safetensors: model\.layers\.0.*\[16, 64\], expected \[32, 64\]"):
        load(single)


def test_a_tensor_without_a_place_is_refused_and_rope_frequencies_are_not(single):
    change(single, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    load(single)
    change(single, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    with pytest.raises(ModelError, match=r"q_proj\.bias has no place"):
        load(single)


def test_tied_models_may_repeat_their_embedding(single):
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    model = load(single)
    assert model.lm_head is model.embedding


@pytest.mark.parametrize("size", [4, 100, 200_000])
def test_a_truncated_file_is_named(single, size):
    content = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(content[:size])
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors"):
        load(single)


def test_a_missing_shard_is_named(sharded):
    name = sorted(path.name for path in sharded.glob("*.safetensors"))[1]
    (sharded / name).unlink()
    with pytest.raises(ModelError, match=f"names {name}, which is not there"):
        load(sharded)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../model.safetensors"}}'])
def test_a_bad_index_is_named(sharded, text):
    (sharded / INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"index\.json"):
        load(sharded)


def test_a_folder_without_weights_says_so(single):
    (single / SINGLE).unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load(single)


def test_the_fingerprint_covers_config_and_weights_only(single, sharded):
    """Other weights, another config or other shards are another model; who wrote the config and how is not."""
    before = model_fingerprint(single)
    assert len(before) == 16 and before == model_fingerprint(single) != model_fingerprint(sharded)
    config = json.loads((single / "config.json").read_text())
    shuffled = dict(reversed({**config, "dtype": "bfloat16", "transformers_version": "1"}.items()))
    (single / "config.json").write_text(json.dumps(shuffled, indent=1))
    (single / "tokenizer.json").unlink()
    assert model_fingerprint(single) == before
    change(single, model__norm__weight=torch.zeros(64))
    assert model_fingerprint(single) != before
    (single / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert model_fingerprint(single) != before


def test_the_fingerprint_refuses_what_is_no_model(single):
    (single / SINGLE).write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="not a safetensors file"):
        model_fingerprint(single)
