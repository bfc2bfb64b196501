"""Fields that clients know and this gateway does not serve yet, and the values of each that ask for nothing.

Such a value (and null) is taken; any other is refused by name, because an answer that quietly lacks what was asked for
is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Neutral = Mapping[str, tuple[Any, ...]]

GENERATE: Neutral = {
    "n": (1,),
    "best_of": (1,),
    "store": (False,),
    "request_id": (),  # the header x-request-id is the way
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "response_format": ({"type": "text"},),
    "echo": (False,),
}
CHAT: Neutral = {
    **GENERATE,
    "return_token_ids": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "include_reasoning": (),
}
COMPLETION: Neutral = {**GENERATE, "suffix": ("",), "add_special_tokens": (True,), "prompt_embeds": ()}
TOKENIZE: Neutral = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "tools": ([],),
}
# A message that an answer brought may be sent back as it is: clients leave what is empty in it.
MESSAGE: Neutral = {
    "name": (),
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "reasoning": (),
    "reasoning_content": (),
}
STREAM_OPTIONS: Neutral = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value asks for nothing. True is not 1 here."""
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
    )
