"""Tokenize and Detokenize: a model's tokenizer for clients. No worker is asked; the limits are those of a request."""

from __future__ import annotations

from pdserve.core.errors import InvalidRequest
from pdserve.router.models import ModelFacts, ServedModel
from pdserve.router.validate import encode_chat
from pdserve.v1 import inference_pb2


async def tokenize(
    request: inference_pb2.TokenizeRequest, model: ServedModel, facts: ModelFacts
) -> inference_pb2.TokenizeResponse:
    """The prompt's token ids. Raises InvalidRequest, naming the field."""
    chosen = request.add_special_tokens if request.HasField("add_special_tokens") else None
    kind = request.WhichOneof("prompt")
    if kind == "text":
        model.codec.require_plausible(len(request.text), facts.max_model_len, "text")
        ids = await model.codec.encode(request.text, add_special_tokens=chosen is not False)
    elif kind == "chat":
        ids = await encode_chat(request.chat, model, facts, add_special_tokens=chosen is True)
    else:
        raise InvalidRequest("prompt", "one of text and chat must be set")
    pieces = [model.codec.token_bytes[token] for token in ids] if request.token_bytes else []
    return inference_pb2.TokenizeResponse(
        ids=ids, count=len(ids), max_model_len=facts.max_model_len, token_bytes=pieces
    )


async def detokenize(
    request: inference_pb2.DetokenizeRequest, model: ServedModel, facts: ModelFacts
) -> inference_pb2.DetokenizeResponse:
    """The text of token ids. Raises InvalidRequest for one outside of the vocabulary, and for too many."""
    if len(request.ids) > facts.max_model_len:
        raise InvalidRequest("ids", f"{len(request.ids)} tokens, but max_model_len is {facts.max_model_len}")
    outside = next((token for token in request.ids if token >= facts.vocab_size), None)
    if outside is not None:
        raise InvalidRequest("ids", f"token id {outside} is outside the vocabulary of {facts.vocab_size}")
    text = await model.codec.decode(list(request.ids), skip_special_tokens=request.skip_special_tokens)
    return inference_pb2.DetokenizeResponse(text=text)
