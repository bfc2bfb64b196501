"""Chat templates: what they may do, and that a bad one is the caller's error, not a crash."""

from __future__ import annotations

import ctypes
import json
import random
import string
import traceback
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError, InvalidRequest, ModelError, UnknownModel
from pdserve.router.models import load_model, load_models, sampling_defaults
from pdserve.router.tokenization import CACHED_WORDS, LONG_TEXT, TextCodec
from tests.tiny_models import write_tiny_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path)
    return tmp_path


def with_template(folder: Path, template: str) -> TextCodec:
    (folder / "chat_template.jinja").write_text(template)
    return TextCodec.load(folder)


async def test_the_models_own_template_is_applied(folder: Path) -> None:
    text = await TextCodec.load(folder).render(MESSAGES)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_special_tokens_are_one_token_each(folder: Path) -> None:
    tokens = await TextCodec.load(folder).encode("<|im_start|>a", add_special_tokens=False)
    assert tokens == [257, 97]


@pytest.mark.parametrize(
    "template, expected",
    [
        ("  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\n", "hi\n"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ bos_token }}{{ strftime_now('%Y') | length }}", "<|im_start|>4"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
    ],
)
async def test_what_templates_use_is_there(folder: Path, template: str, expected: str) -> None:
    assert await with_template(folder, template).render(MESSAGES) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages[0].missing.field }}",
        "{{ 1 + 'a' }}",
        "{% for %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
async def test_a_bad_template_is_an_invalid_request(folder: Path, template: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await with_template(folder, template).render(MESSAGES)
    assert caught.value.field.startswith("chat")


async def test_what_a_template_says_of_its_input_is_for_the_client_alone(folder: Path) -> None:
    codec = with_template(folder, "{{ raise_exception(messages[0].role + ' must not say ' + messages[0].content) }}")
    messages = [{"role": "spy", "content": "a secret"}]
    with pytest.raises(InvalidRequest) as caught:
        await codec.render(messages)
    error = caught.value
    assert str(error) == "chat.messages: the model's chat template refuses them (TemplateError)"
    assert error.detail == "spy must not say a secret"
    assert "secret" not in "".join(traceback.format_exception(error))


async def test_a_model_without_template_refuses_chats_only(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    codec = TextCodec.load(folder)
    with pytest.raises(InvalidRequest, match="no chat template"):
        await codec.render(MESSAGES)
    assert await codec.encode("hi") == [104, 105]


async def test_a_template_may_be_in_the_config(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for template in ("T", [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}]):
        config["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        assert await TextCodec.load(folder).render(MESSAGES) == "T"


async def test_long_texts_are_the_same_off_the_loop(folder: Path) -> None:
    text = "ab" * LONG_TEXT
    assert await TextCodec.load(folder).encode(text) == list(text.encode())


def test_a_broken_tokenizer_names_its_file(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        TextCodec.load(folder)


@pytest.mark.parametrize(
    "generation, config, expected",
    [
        ({"eos_token_id": 7}, {}, (7,)),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, (7, 8)),
        ({}, {"eos_token_id": 9}, (9,)),
        ({}, {}, (258,)),
    ],
)
def test_eos_ids_are_a_number_or_a_list(
    folder: Path, generation: dict[str, object], config: dict[str, object], expected: tuple[int, ...]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model("m", folder).eos_token_ids == expected


def test_generation_defaults_count_only_where_the_model_samples() -> None:
    values = {"temperature": 0.5, "top_k": 20, "top_p": 0.25, "repetition_penalty": 1.5}
    assert sampling_defaults(values).temperature == 1.0
    defaults = sampling_defaults({**values, "do_sample": True})
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.repetition_penalty) == (0.5, 20, 0.25, 1.5)
    assert sampling_defaults({"do_sample": True, "top_k": None}).top_k == 0


def test_models_are_named_by_option_or_folder(folder: Path) -> None:
    models = load_models([str(folder), f"other={folder}"], Path)
    assert {model.name for model in models} == {folder.name, "other"}
    assert models.get("other").aliases >= {"other", str(folder)}
    with pytest.raises(UnknownModel, match="other"):
        models.get("nobody")
    with pytest.raises(UnknownModel):
        models.get("")
    with pytest.raises(ConfigError, match="two models"):
        load_models([str(folder), str(folder)], Path)


class MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def allocated() -> int:
    """Bytes that this process' C and Rust code has."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("not glibc, or an old one")
    mallinfo.restype = MallocInfo
    return int(mallinfo().uordblks)


def test_words_that_make_no_sense_do_not_fill_memory(folder: Path) -> None:
    """A tokenizer keeps the tokens of words that it has seen; here, of so many and no more."""
    codec, chance = TextCodec.load(folder), random.Random(1)

    def encode(count: int) -> None:
        for _ in range(count):
            codec.tokenizer.encode("".join(chance.choices(string.ascii_lowercase, k=200)))

    encode(CACHED_WORDS)
    before = allocated()
    encode(2000)
    assert allocated() - before < 1 << 20
