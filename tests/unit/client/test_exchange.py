"""One request over its tries: what is sent, what is shown, what another try would ask for."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.client import Finish, GenerateOptions, Output, PromptInfo
from pdserve.client.exchange import Exchange
from pdserve.core.sampling import SamplingParams
from pdserve.rpc.convert import sampling_to_proto
from pdserve.rpc.errors import RpcError
from pdserve.v1.inference_pb2 import Finish as FinishProto
from pdserve.v1.inference_pb2 import (
    GenerateRequest,
    GenerateResponse,
    ResponseOptions,
    SamplingOptions,
    SloTargets,
    StoppingOptions,
)
from pdserve.v1.inference_pb2 import Output as OutputProto
from pdserve.v1.inference_pb2 import PromptInfo as PromptInfoProto
from pdserve.v1.inference_pb2 import Token as TokenProto


def prompt_info(**fields: Any) -> GenerateResponse:
    sampling, stopping = sampling_to_proto(SamplingParams(seed=77, max_tokens=9, logit_bias={5: 1.0}))
    stopping.stop.append("end")
    info = PromptInfoProto(request_id="r", model="tiny", prompt_tokens=2, sampling=sampling, stopping=stopping)
    return GenerateResponse(prompt=info)


def test_prompts_of_each_kind() -> None:
    assert Exchange("hi", {}).request.text == "hi"
    assert list(Exchange([1, 2], {}).request.token_ids.ids) == [1, 2]
    assert Exchange([], {}).request.WhichOneof("prompt") == "token_ids"
    [message] = Exchange([{"role": "user", "content": "hi"}], {}).request.chat.messages
    assert (message.role, message.content) == ("user", "hi")
    with pytest.raises(TypeError, match="a prompt is text, token ids, or messages"):
        Exchange([1, "x"], {})  # type: ignore[arg-type]


def test_what_is_not_said_is_not_sent() -> None:
    """So that the model's defaults hold."""
    unset = {"temperature": None, "max_tokens": None, "logit_bias": None, "logprobs": None, "priority": None}
    bare = GenerateRequest(
        text="hi", sampling=SamplingOptions(), stopping=StoppingOptions(), response=ResponseOptions(), slo=SloTargets()
    )
    assert Exchange("hi", {}).request == bare
    assert Exchange("hi", GenerateOptions(**unset)).request == bare  # type: ignore[typeddict-item]


def test_every_option_reaches_the_request_or_the_call() -> None:
    """An option that was forgotten in between would be ignored in silence."""
    options = GenerateOptions(
        model="tiny", temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, presence_penalty=0.5, frequency_penalty=0.25,
        repetition_penalty=1.5, logit_bias={5: 1.0}, seed=1, max_tokens=4, min_tokens=2, stop="x", stop_token_ids=[7],
        ignore_eos=True, logprobs=2, skip_special_tokens=False, request_id="me", priority=-1, slo_ttft_ms=100.0,
        slo_itl_ms=20.0, session_id="s", cache_salt="c", token_bytes=True, timeout=3.0, traceparent="00-a-b-01",
        tenant="t", api_key="k",
    )  # fmt: skip
    assert options.keys() == GenerateOptions.__annotations__.keys()
    whole = Exchange("hi", options)
    assert whole.timeout == 3.0 and whole.metadata == (
        ("traceparent", "00-a-b-01"),
        ("x-tenant-id", "t"),
        ("authorization", "Bearer k"),
    )
    for name in options.keys() - {"timeout", "traceparent", "tenant", "api_key"}:
        without = Exchange("hi", {key: value for key, value in options.items() if key != name})  # type: ignore[arg-type]
        assert without.request != whole.request, name


def test_an_unknown_option_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="no option 'max_token'; did you mean 'max_tokens'"):
        Exchange("hi", {"max_token": 3})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match=r"no option 'zzz'$"):
        Exchange("hi", {"zzz": 3})  # type: ignore[typeddict-unknown-key]


def test_another_try_asks_for_what_the_first_one_was_told() -> None:
    """Above all for the seed: PromptInfo was shown, and must stay true."""
    exchange = Exchange("hi", {"max_tokens": 9})
    info = exchange.take(prompt_info())
    assert isinstance(info, PromptInfo) and exchange.repeatable
    request = exchange.request
    assert (request.text, request.request_id, request.model) == ("hi", "r", "tiny")
    assert (request.sampling.seed, dict(request.sampling.logit_bias)) == (77, {5: 1.0})
    assert (request.stopping.max_tokens, list(request.stopping.stop)) == (9, ["end"])
    assert exchange.take(prompt_info()) is None


def output(index: int, tokens: str, text: str | None = None) -> GenerateResponse:
    ids = [TokenProto(id=ord(character)) for character in tokens]
    return GenerateResponse(output=OutputProto(index=index, tokens=ids, text=tokens if text is None else text))


def test_another_try_goes_on_behind_the_tokens_that_were_shown() -> None:
    exchange = Exchange("hi", {})
    exchange.take(prompt_info())
    assert exchange.begun and exchange.shown == 0
    exchange.take(output(0, "he"))
    exchange.take(output(2, "l"))
    assert bytes(exchange.request.resume.ids) == b"hel" and exchange.shown == 3 and exchange.repeatable
    assert exchange.take(prompt_info()) is None
    with pytest.raises(RpcError, match="token 0 came where token 3 was due"):
        exchange.take(output(0, "h"))


def test_there_is_no_other_try_where_it_would_show() -> None:
    """Text that no token stands for comes last; a try behind these tokens would bring it again."""
    exchange = Exchange("hi", {})
    exchange.take(output(0, "x", ""))
    assert exchange.take(output(1, "", "x")) == Output(1, (), "x")
    assert not exchange.repeatable
    exchange = Exchange("hi", {})
    exchange.take(GenerateResponse(finish=FinishProto()))
    assert not exchange.repeatable


def test_a_stream_is_complete_with_its_finish() -> None:
    exchange = Exchange("hi", {})
    exchange.take(prompt_info())
    with pytest.raises(RpcError, match="without a finish"):
        exchange.end()
    assert isinstance(exchange.take(GenerateResponse(finish=FinishProto())), Finish)
    exchange.end()


def test_an_event_of_a_newer_server_is_passed_over() -> None:
    exchange = Exchange("hi", {})
    assert exchange.take(GenerateResponse()) is None and exchange.repeatable
