"""The public API's messages to this client's types and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.client.events import Event, Finish, FinishReason, Output, PromptInfo, Stages, Token, Usage
from pdserve.client.options import GenerateOptions, Prompt, check_names
from pdserve.rpc.convert import sampling_from_proto
from pdserve.v1 import inference_pb2


def request_to_proto(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """A request with all that is set. Raises TypeError for an unknown option, or a prompt that mixes kinds."""
    check_names(options)
    stop = options.get("stop", ())
    request = inference_pb2.GenerateRequest(
        model=options.get("model", ""),
        sampling=inference_pb2.SamplingOptions(
            temperature=options.get("temperature"),
            top_k=options.get("top_k"),
            top_p=options.get("top_p"),
            min_p=options.get("min_p"),
            presence_penalty=options.get("presence_penalty"),
            frequency_penalty=options.get("frequency_penalty"),
            repetition_penalty=options.get("repetition_penalty"),
            logit_bias=options.get("logit_bias"),
            seed=options.get("seed"),
        ),
        stopping=inference_pb2.StoppingOptions(
            max_tokens=options.get("max_tokens"),
            min_tokens=options.get("min_tokens"),
            stop=[stop] if isinstance(stop, str) else stop,
            stop_token_ids=options.get("stop_token_ids"),
            ignore_eos=options.get("ignore_eos"),
        ),
        response=inference_pb2.ResponseOptions(
            logprobs=options.get("logprobs"),
            skip_special_tokens=options.get("skip_special_tokens"),
            token_bytes=options.get("token_bytes"),
        ),
        request_id=options.get("request_id", ""),
        priority=options.get("priority"),
        slo=inference_pb2.SloTargets(ttft_ms=options.get("slo_ttft_ms"), itl_ms=options.get("slo_itl_ms")),
        session_id=options.get("session_id", ""),
        cache_salt=options.get("cache_salt", ""),
    )
    _set_prompt(request, prompt)
    return request


def event_from_proto(response: inference_pb2.GenerateResponse) -> Event | None:
    """None for an event that only a newer client knows."""
    kind = response.WhichOneof("event")
    if kind == "output":
        output = response.output
        return Output(output.index, tuple(_token(token) for token in output.tokens), output.text)
    if kind == "prompt":
        info = response.prompt
        params = sampling_from_proto(info.sampling, info.stopping, None)
        return PromptInfo(info.request_id, info.model, info.prompt_tokens, params, tuple(info.stopping.stop))
    return _finish(response.finish) if kind == "finish" else None


def messages_to_proto(messages: Sequence[Mapping[str, str]]) -> inference_pb2.Chat:
    return inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**message) for message in messages])


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and all(isinstance(part, Mapping) for part in prompt):
        request.chat.CopyFrom(messages_to_proto(prompt))  # type: ignore[arg-type]
    elif all(isinstance(part, int) for part in prompt):
        request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=prompt))  # type: ignore[arg-type]
    else:
        raise TypeError("a prompt is text, token ids, or messages with role and content")


def _token(token: inference_pb2.Token) -> Token:
    data = token.token_bytes
    return Token(
        id=token.id,
        logprob=token.logprob if token.HasField("logprob") else None,
        top=tuple((other.token_id, other.logprob) for other in token.top_logprobs),
        token_bytes=data,
        top_bytes=tuple(other.token_bytes for other in token.top_logprobs) if data else (),
    )


def usage_from_proto(usage: inference_pb2.Usage) -> Usage:
    stages = usage.stages
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        kv_transfer_bytes=usage.kv_transfer_bytes,
        blocks_reused=usage.blocks_reused,
        stages=Stages(
            queue_ms=stages.queue_ms,
            reserve_ms=stages.reserve_ms,
            prefill_ms=stages.prefill_ms,
            transfer_exposed_ms=stages.transfer_exposed_ms,
            decode_wait_ms=stages.decode_wait_ms,
            first_step_ms=stages.first_step_ms,
        ),
        replays=usage.replays,
        prefill_worker=usage.prefill_worker,
        decode_worker=usage.decode_worker,
    )


def reason_from_proto(reason: inference_pb2.FinishReason.ValueType) -> FinishReason:
    return FinishReason.STOP if reason == inference_pb2.FINISH_REASON_STOP else FinishReason.LENGTH


def _finish(finish: inference_pb2.Finish) -> Finish:
    return Finish(
        reason=reason_from_proto(finish.reason),
        usage=usage_from_proto(finish.usage),
        stop_string=finish.stop_string if finish.HasField("stop_string") else None,
        stop_token_id=finish.stop_token_id if finish.HasField("stop_token_id") else None,
    )
