"""A request at the door: everything that is wrong with it is found here, before anything is spent on it."""

from __future__ import annotations

import secrets
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import SequenceSpec
from pdserve.router.models import ModelFacts, ServedModel
from pdserve.v1 import inference_pb2

MAX_REQUEST_ID = 128
MAX_REQUEST_BYTES = 16 << 20  # of a whole message; gRPC's own limit is above, and names no field
MAX_MODEL_NAME = 256
MAX_SALT = 256
MAX_ROLE = 64
MAX_STOPS = 16
NO_PRIORITY = 2**31 - 1  # none is above it
MAX_STOP_LENGTH = 256


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request with no value unset, but for `spec`'s deadline and traceparent: each dispatch sets those."""

    model: ServedModel
    facts: ModelFacts
    spec: SequenceSpec
    stops: tuple[str, ...]
    skip_special_tokens: bool
    operation: str
    token_bytes: bool = False
    resumed: tuple[int, ...] = ()  # the answer so far, which the client has already

    @property
    def given(self) -> tuple[int, ...]:
        """The prompt and the answer so far."""
        return self.spec.token_ids + self.resumed

    @property
    def remaining(self) -> int:
        """Tokens that the answer may still have."""
        return self.spec.params.max_tokens - len(self.resumed)


async def resolve(
    request: inference_pb2.GenerateRequest,
    model: ServedModel,
    facts: ModelFacts,
    request_id: str = "",
    max_priority: int = NO_PRIORITY,
) -> ResolvedRequest:
    """Check and complete `request`; `request_id` is used where it has none, and a priority above `max_priority` counts
    as that. Raises InvalidRequest, naming the field."""
    name = resolve_request_id(request.request_id or request_id)
    if (size := request.ByteSize()) > MAX_REQUEST_BYTES:
        message = f"the message has {size} bytes, at most {MAX_REQUEST_BYTES} are taken"
        raise InvalidRequest(request.WhichOneof("prompt") or "request", message)
    for path, value, most in (
        ("cache_salt", request.cache_salt, MAX_SALT),
        ("session_id", request.session_id, MAX_SALT),
    ):
        if len(value) > most:
            raise InvalidRequest(path, f"at most {most} characters, got {len(value)}")
    stops = _check_stops(request.stopping.stop)
    explicit = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else None
    # Before tokenizing, with the largest max_tokens that could be: everything but the lengths is final.
    params = _sampling(request, model.defaults, facts.max_model_len if explicit is None else explicit)
    params.check(facts.vocab_size)
    tokens, field = await _prompt(request, model, facts)
    room = facts.max_model_len - len(tokens)
    if room < 1:
        raise InvalidRequest(
            field, f"{len(tokens)} tokens leave no room for an answer: max_model_len is {facts.max_model_len}"
        )
    if explicit is not None and explicit > room:
        raise InvalidRequest(
            "stopping.max_tokens",
            f"a prompt of {len(tokens)} tokens and max_tokens {explicit} make {len(tokens) + explicit}, "
            f"but max_model_len is {facts.max_model_len}",
        )
    if explicit is None:
        params = replace(params, max_tokens=room)
        params.check(facts.vocab_size)
    resumed = _resumed(request, params, facts)
    spec = SequenceSpec(
        request_id=name,
        token_ids=tuple(tokens),
        prompt_len=len(tokens),
        params=params,
        eos_token_ids=tuple(token for token in model.eos_token_ids if token < facts.vocab_size),
        priority=min(request.priority, max_priority),
        cache_salt=request.cache_salt,
    )
    response = request.response
    skip = response.skip_special_tokens if response.HasField("skip_special_tokens") else True
    operation = "chat" if field.startswith("chat") else "text_completion"
    return ResolvedRequest(model, facts, spec, stops, skip, operation, response.token_bytes, resumed)


def resolve_request_id(request_id: str) -> str:
    """The caller's id, checked, or a new one."""
    if not request_id:
        return f"req-{secrets.token_hex(12)}"
    if len(request_id) > MAX_REQUEST_ID:
        raise InvalidRequest("request_id", f"at most {MAX_REQUEST_ID} characters, got {len(request_id)}")
    if not (request_id.isascii() and request_id.isprintable()):
        raise InvalidRequest("request_id", "must be printable ASCII")
    return request_id


def _check_stops(stops: Iterable[str]) -> tuple[str, ...]:
    found = tuple(stops)
    if len(found) > MAX_STOPS:
        raise InvalidRequest("stopping.stop", f"at most {MAX_STOPS} strings, got {len(found)}")
    for stop in found:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequest(
                "stopping.stop", f"a string must have 1 to {MAX_STOP_LENGTH} characters, got {len(stop)}"
            )
    return found


def _resumed(request: inference_pb2.GenerateRequest, params: SamplingParams, facts: ModelFacts) -> tuple[int, ...]:
    """The tokens that the client has of the answer, checked but for where the answer would have ended."""
    count = len(request.resume.ids)
    if not count:
        return ()
    if count > params.max_tokens:  # before anything walks over them
        raise InvalidRequest("resume.ids", f"{count} tokens, but max_tokens is {params.max_tokens}")
    outside = next((token for token in request.resume.ids if token >= facts.vocab_size), None)
    if outside is not None:
        raise InvalidRequest("resume.ids", f"token id {outside} is outside the vocabulary of {facts.vocab_size}")
    if params.temperature and not request.sampling.HasField("seed"):
        raise InvalidRequest("sampling.seed", "must be the one that PromptInfo told, where an answer is resumed")
    return tuple(request.resume.ids)


def _sampling(request: inference_pb2.GenerateRequest, defaults: SamplingParams, max_tokens: int) -> SamplingParams:
    """What the request sets over the model's defaults; the seed is drawn where it is unset."""
    sampling, stopping, response = request.sampling, request.stopping, request.response

    def pick(name: str) -> float:
        value: float = getattr(sampling if sampling.HasField(name) else defaults, name)  # type: ignore[arg-type]
        return value

    return SamplingParams(
        temperature=pick("temperature"),
        top_k=int(pick("top_k")),
        top_p=pick("top_p"),
        min_p=pick("min_p"),
        presence_penalty=pick("presence_penalty"),
        frequency_penalty=pick("frequency_penalty"),
        repetition_penalty=pick("repetition_penalty"),
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        max_tokens=max_tokens,
        min_tokens=stopping.min_tokens,
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        logprobs=response.logprobs if response.HasField("logprobs") else None,
    )


async def _prompt(
    request: inference_pb2.GenerateRequest, model: ServedModel, facts: ModelFacts
) -> tuple[list[int], str]:
    """The prompt's token ids, and the field that it came in."""
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        field = "token_ids.ids"
        count = len(request.token_ids.ids)
        if count >= facts.max_model_len:  # before anything walks over them
            message = f"{count} tokens leave no room for an answer: max_model_len is {facts.max_model_len}"
            raise InvalidRequest(field, message)
        tokens = list(request.token_ids.ids)
        if tokens and max(tokens) >= facts.vocab_size:
            outside = next(token for token in tokens if token >= facts.vocab_size)
            raise InvalidRequest(field, f"token id {outside} is outside the vocabulary of {facts.vocab_size}")
    elif kind == "text":
        field = "text"
        model.codec.require_plausible(len(request.text), facts.max_model_len, field)
        tokens = await model.codec.encode(request.text)
    elif kind == "chat":
        field = "chat.messages"
        tokens = await encode_chat(request.chat, model, facts)
    else:
        raise InvalidRequest("prompt", "one of text, token_ids and chat must be set")
    if not tokens:
        raise InvalidRequest(field, "must not be empty")
    if max(tokens) >= facts.vocab_size:
        raise InvalidRequest(field, f"the tokenizer knows token id {max(tokens)}, the model only {facts.vocab_size}")
    return tokens, field


async def encode_chat(
    chat: inference_pb2.Chat, model: ServedModel, facts: ModelFacts, *, add_special_tokens: bool = False
) -> list[int]:
    """Token ids of a conversation under the model's template. Raises InvalidRequest, naming the field."""
    if not chat.messages:
        raise InvalidRequest("chat.messages", "must not be empty")
    if len(chat.messages) >= facts.max_model_len:  # each takes a token at least
        message_count = f"{len(chat.messages)} messages, but max_model_len is {facts.max_model_len}"
        raise InvalidRequest("chat.messages", message_count)
    for index, message in enumerate(chat.messages):
        role = message.role
        if not 0 < len(role) <= MAX_ROLE or any(unicodedata.category(character) == "Cc" for character in role):
            raise InvalidRequest(f"chat.messages[{index}].role", f"must be a name such as 'user' of at most {MAX_ROLE}")
    length = sum(len(message.content) for message in chat.messages)
    model.codec.require_plausible(length, facts.max_model_len, "chat.messages")
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    text = await model.codec.render(messages)
    model.codec.require_plausible(len(text), facts.max_model_len, "chat.messages")
    return await model.codec.encode(text, add_special_tokens=add_special_tokens)
