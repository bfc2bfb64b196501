"""Small, seeded, random models with a tokenizer and a chat template: complete folders that pdserve can serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 320  # 256 bytes, then the special tokens, then ids that decode to "<extra_N>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 258  # <|im_end|>
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 257,
    "eos_token_id": EOS_ID,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}


def make_tiny_model(
    folder: Path, family: str = "llama", *, seed: int = 0, dtype: str = "float32", **options: Any
) -> Path:
    """Write a two-layer model of `family` (llama, mistral, qwen2, qwen3) into `folder` and return it.

    `options` go into transformers' config (hidden_size, rope_parameters, sliding_window, ...). Weights are random but
    wide enough that greedy answers vary; `max_shard_size` splits them over several files.
    """
    import transformers  # seconds to import; most tests that use this module's constants don't need it

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    max_shard_size = options.pop("max_shard_size", "5GB")
    settings = {**_SHAPE, **options}
    if family == "mistral":
        settings.setdefault("sliding_window", None)
    config = getattr(transformers, f"{names[family]}Config")(**settings)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{names[family]}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.2 if "embed" in name else 0.12)
            else:  # norms and biases: away from their neutral start, so that a forgotten one shows
                parameter.add_(torch.randn_like(parameter) * 0.1)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tiny_tokenizer(folder)
    return folder


def write_tiny_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges (id = byte), its special tokens, and a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = _byte_characters()
    assert sorted(by_byte) == alphabet
    vocabulary = {character: index for index, character in enumerate(by_byte)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([f"<extra_{index}>" for index in range(VOCAB_SIZE - tokenizer.get_vocab_size())])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE, byte 0 first (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]
