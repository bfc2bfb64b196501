"""The router against workers that do on command what real ones do by chance: refuse, preempt, die, end at once."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from pdserve.client import Client, Finish, FinishReason, Output, PromptInfo, RequestState, Retry, Session
from pdserve.core.errors import InvalidRequest, NoCapacity, Unavailable, UnknownModel
from pdserve.core.hashing import block_hashes, root_hash
from pdserve.core.slo import Outcome, SloTargets, Verdict
from pdserve.router.meter import Ended, Meter
from pdserve.rpc.errors import DeadlineExceeded, RpcError
from pdserve.telemetry.tracing import MAX_TRACEPARENT, setup_tracing, span, traceparent_of
from pdserve.v1 import inference_pb2
from tests.integration.router_suite import PATIENCE, Suite, pair, suite, tokenizer_only
from tests.integration.scripted_worker import LAYOUT, ScriptedWorker, Wire
from tests.tiny_models import write_tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_only(tmp_path_factory.mktemp("model") / "tiny")


async def test_a_pair_answers_with_every_value_resolved(folder: Path) -> None:
    prefill, decode = pair()
    async with suite(folder, prefill, decode) as made:
        events = [event async for event in made.client.generate("hi", request_id="mine")]
    info, finish = events[0], events[-1]
    assert isinstance(info, PromptInfo)
    assert (info.request_id, info.model, info.prompt_tokens, info.params.max_tokens) == ("mine", "tiny", 2, 254)
    outputs = [event for event in events if isinstance(event, Output)]
    assert "".join(output.text for output in outputs) == "hello"
    assert [token for output in outputs for token in output.token_ids] == [*b"hello", 258]
    indices = [output.index for output in outputs]
    assert indices == sorted(indices) and indices[0] == 0
    assert isinstance(finish, Finish)
    assert finish.reason is FinishReason.STOP and finish.stop_token_id == 258
    usage = finish.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.replays, usage.kv_transfer_bytes) == (2, 6, 0, 100)
    assert (usage.prefill_worker, usage.decode_worker) == ("p0", "d0")
    assert prefill.tickets == decode.tickets and len(prefill.tickets[0]) == 32
    assert prefill.links == ["d0"]
    assert prefill.seen[0].time_remaining is not None and prefill.seen[0].params.seed == info.params.seed
    assert prefill.seen[0].itl_target is None  # nobody asked


async def test_workers_are_told_the_target_that_somebody_asked_for(folder: Path) -> None:
    """Not one that only measures."""
    prefill, decode = pair()
    async with suite(folder, prefill, decode) as made:
        await made.client.complete("hi", slo_itl_ms=80.0)
        await made.client.complete("hi", slo_ttft_ms=8000.0)
    assert [spec.itl_target for spec in prefill.seen] == [0.08, None]


async def test_a_colocated_suite_prefills_locally(folder: Path) -> None:
    decode = ScriptedWorker("d0", "decode", Wire())
    async with suite(folder, decode) as made:
        done = await made.client.complete("hi", max_tokens=3)
    assert done.text == "hel" and done.finish.reason is FinishReason.LENGTH
    assert done.finish.usage.prefill_worker == done.finish.usage.decode_worker == "d0"


async def test_one_token_needs_no_decode_worker(folder: Path) -> None:
    prefill, decode = pair()
    async with suite(folder, prefill, decode) as made:
        done = await made.client.complete("hi", max_tokens=1)
    assert done.text == "h" and done.finish.usage.decode_worker == "" and decode.seen == []


async def test_a_first_token_that_ends_the_answer_frees_the_decode_worker(folder: Path) -> None:
    wire = Wire()
    prefill = ScriptedWorker("p0", "prefill", wire, answer=b"")
    decode = ScriptedWorker("d0", "decode", wire)
    async with suite(folder, prefill, decode) as made:
        done = await made.client.complete("hi")
        assert done.text == "" and done.finish.stop_token_id == 258 and done.finish.usage.completion_tokens == 1
        async with asyncio.timeout(PATIENCE):
            await decode.idle.wait()
    assert decode.cancelled == decode.tickets


async def test_a_stop_string_ends_the_answer_wherever_it_is_cut(folder: Path) -> None:
    prefill, decode = pair(answer=b"hello world")
    prefill.answer = b"hello world"
    async with suite(folder, prefill, decode) as made:
        done = await made.client.complete("hi", stop="o w")
        first = await made.client.complete("hi", stop=["h"])
    assert done.text == "hell" and done.finish.stop_string == "o w" and done.finish.usage.completion_tokens == 7
    assert first.text == "" and first.finish.usage.completion_tokens == 1


@pytest.mark.parametrize("which", ["prefill", "decode"])
async def test_a_refusal_waits_for_the_next_report_and_tries_again(folder: Path, which: str) -> None:
    prefill, decode = pair()
    (prefill if which == "prefill" else decode).script.extend(["refuse", "refuse"])
    async with suite(folder, prefill, decode) as made:
        done = await made.client.complete("hi")
        assert done.text == "hello"
        async with asyncio.timeout(PATIENCE):
            await decode.idle.wait()
    assert len(set(decode.tickets)) == len(decode.tickets)
    assert len(decode.tickets) == (1 if which == "prefill" else 3), "a reservation outlives a prefill worker's refusal"


async def test_preemption_is_replayed_with_what_was_shown(folder: Path) -> None:
    wire = Wire()
    prefill = ScriptedWorker("p0", "prefill", wire, answer=b"abcdefgh")
    decoders = [ScriptedWorker(f"d{i}", "decode", wire, answer=b"abcdefgh", script=("preempt:2",)) for i in range(2)]
    async with suite(folder, prefill, *decoders) as made:
        done = await made.client.complete("hi")
    assert done.text == "abcdefgh" and done.finish.usage.replays == 2
    assert [bytes(spec.token_ids) for spec in prefill.seen] == [b"hi", b"hiabc", b"hiabcdef"]
    assert all(spec.prompt_len == 2 for spec in prefill.seen)
    assert len(set(prefill.tickets)) == 3


@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_a_worker_that_dies_costs_a_gap_and_no_token(folder: Path, victim: str) -> None:
    wire = Wire()
    workers = [ScriptedWorker(name, role, wire) for name, role in
               (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode"))]  # fmt: skip
    next(worker for worker in workers if worker.worker_id == victim).script.append("die")
    async with suite(folder, *workers) as made:
        started = time.monotonic()
        done = await made.client.complete("hi")
        assert time.monotonic() - started < 1.0
        assert done.text == "hello" and done.finish.usage.replays == (victim == "d0"), "the other is a rearm"
        await made.until(lambda: sum(worker.connected for worker in made.fleet.workers) == 3)
    tickets = {ticket for worker in workers if worker.role == "decode" for ticket in worker.tickets}
    assert len(tickets) == (1 if victim == "p0" else 2)


async def test_a_request_waits_for_a_prefill_worker_to_come_back_and_says_so(folder: Path) -> None:
    prefill, decode = pair()
    async with suite(folder, prefill, decode) as made:
        await prefill.die()
        await made.until(lambda: sum(worker.connected for worker in made.fleet.workers) == 1)
        with pytest.raises(NoCapacity, match="all prefill workers are down") as caught:
            await made.client.complete("hi", timeout=0.5)
        assert caught.value.retry_after is not None and caught.value.retry_after > 0
        waiting = asyncio.create_task(made.client.complete("hi", timeout=PATIENCE))
        port = int(prefill.endpoint.rpartition(":")[2])
        async with ScriptedWorker("p0", "prefill", prefill.wire, port=port):
            assert (await waiting).text == "hello"
    assert len(decode.seen) == 1


async def test_a_silent_worker_loses_its_lease(folder: Path) -> None:
    decode = ScriptedWorker("d0", "decode", Wire())
    async with suite(folder, decode, lease_seconds=0.5) as made:
        decode.silent = True
        await made.until(lambda: not any(worker.connected for worker in made.fleet.workers))
        decode.silent = False
        await made.until(lambda: all(worker.connected for worker in made.fleet.workers))


async def test_tries_that_get_nowhere_are_bounded(folder: Path) -> None:
    decode = ScriptedWorker("d0", "decode", Wire(), script=("transfer_failed",) * 9)
    async with suite(folder, decode, max_replays=2) as made:
        with pytest.raises(Unavailable, match="3 tries in a row failed"):
            await made.client.complete("hi")
        [model] = (await made.client.stats()).models
    assert len(decode.seen) == 3 and model.replays == 2, "the third failure was continued nowhere"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_that_workers_die_of_is_stopped(folder: Path, role: str) -> None:
    """Though each of them got further with it: else it would go through the whole fleet."""
    wire = Wire()
    workers = [ScriptedWorker(f"{role}-{number}", role, wire, script=("die",)) for number in range(4)]
    others = [] if role == "decode" else [ScriptedWorker("d0", "decode", wire)]
    async with suite(folder, *workers, *others, max_worker_deaths=3, max_replays=9) as made:
        with pytest.raises(RpcError, match="workers were lost 3 times while they had this request") as caught:
            await made.client.complete("hi", timeout=PATIENCE)
        assert caught.value.code is grpc.StatusCode.INTERNAL
        await made.until(lambda: sum(worker.connected for worker in made.fleet.workers) == 1 + len(others))
        assert (await made.client.stats()).models[0].failed == 1


async def test_a_full_fleet_queues_and_a_full_queue_refuses(folder: Path) -> None:
    step = asyncio.Event()
    decode = ScriptedWorker("d0", "decode", Wire(), total_blocks=4, max_model_len=40, step=step)
    async with suite(folder, decode, max_queue=1) as made:
        first = made.client.generate("x" * 30, timeout=PATIENCE)
        async with aclosing(first):
            async for event in first:
                if isinstance(event, Output):
                    break
            second = asyncio.create_task(made.client.complete("y" * 39, timeout=PATIENCE))
            await made.until(lambda: made.service.waiting("tiny") == 1)
            with pytest.raises(NoCapacity, match="1 requests wait"):
                await made.client.complete("z", timeout=PATIENCE)
            step.set()
            assert (await second).text == "h"


async def test_a_client_that_comes_back_when_it_was_told_to_is_answered(folder: Path) -> None:
    """The refusal of a full queue names a time; by then the others are done."""
    step = asyncio.Event()
    decode = ScriptedWorker("d0", "decode", Wire(), total_blocks=4, max_model_len=40, step=step)
    told: list[Retry] = []

    def refused(retry: Retry) -> None:
        told.append(retry)
        step.set()

    async with (
        suite(folder, decode, max_queue=1) as made,
        Client(made.endpoint, on_retry=refused) as patient,
        made.client.generate("x" * 30, timeout=PATIENCE) as first,
    ):
        while not isinstance(await anext(first), Output):
            pass
        second = asyncio.create_task(made.client.complete("y" * 39, timeout=PATIENCE))
        await made.until(lambda: made.service.waiting("tiny") == 1)
        done = await patient.complete("z", max_tokens=3)
        await second
    assert done.text == "hel" and len(told) == 1
    assert isinstance(told[0].error, NoCapacity) and told[0].delay == told[0].error.retry_after


async def test_a_cancelled_request_is_freed_everywhere(folder: Path) -> None:
    prefill, decode = pair(step=asyncio.Event())
    async with suite(folder, prefill, decode) as made:
        stream = made.client.generate("hi")
        async with aclosing(stream):
            async for event in stream:
                if isinstance(event, Output):
                    break
        async with asyncio.timeout(PATIENCE):
            await decode.idle.wait()
    assert decode.cancelled == decode.tickets


async def test_who_leaves_with_the_finish_has_cancelled_nothing(folder: Path) -> None:
    """The cancel comes as soon as the finish is there, often before its write is known to have ended."""
    exporter = InMemorySpanExporter()
    stop = setup_tracing("test", None, exporter)
    try:
        prefill, decode = pair()
        async with suite(folder, prefill, decode) as made:
            ends = heard_by(made)
            for number in range(50):
                async with made.client.generate("hi", max_tokens=3, request_id=f"left-{number}") as events:
                    async for event in events:
                        if isinstance(event, Finish):
                            break
            await made.service.drain()
            assert [end.outcome for end in ends] == [Outcome.ANSWERED] * 50
            assert {request.state for request in await made.client.traces(50)} == {RequestState.DONE}
    finally:
        stop()
    requests = [span for span in exporter.get_finished_spans() if span.name == "text_completion"]
    assert len(requests) == 50 and not any("error.type" in (span.attributes or {}) for span in requests)


async def test_a_deadline_in_the_middle_is_typed_and_frees(folder: Path) -> None:
    prefill, decode = pair(step=asyncio.Event())
    async with suite(folder, prefill, decode) as made:
        with pytest.raises(DeadlineExceeded):
            await made.client.complete("hi", timeout=0.3)
        async with asyncio.timeout(PATIENCE):
            await decode.idle.wait()


def heard_by(made: Suite) -> list[Ended]:
    """Ends of requests, as they are measured from now on."""
    ends: list[Ended] = []

    class Heard(Meter):
        def ended(self, ended: Ended) -> None:
            ends.append(ended)

    made.service._meters = (*made.service._meters, Heard())
    return ends


async def test_a_stall_that_a_client_gives_up_on_is_missed(folder: Path) -> None:
    """One token, then a wedged decode worker: there is not one closed gap."""
    prefill, decode = pair(script=("stall",))
    async with suite(folder, prefill, decode, slo=SloTargets(PATIENCE, 0.1, 99.0)) as made:
        ends = heard_by(made)
        asking = made.client.generate("hi")
        async with aclosing(asking):
            assert isinstance(await anext(asking), PromptInfo) and isinstance(await anext(asking), Output)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await anext(asking)
        async with asyncio.timeout(PATIENCE):
            await decode.idle.wait()
        [end] = ends
        [model] = (await made.client.stats()).models
    assert (end.outcome, end.verdict, end.gaps_seconds) == (Outcome.CANCELLED, Verdict.MISSED_ITL, 0.0)
    assert (model.cancelled, model.failed) == (1, 0)


async def test_the_routers_own_limit_is_no_cancel(folder: Path) -> None:
    prefill, decode = pair(script=("stall",))
    slo = SloTargets(PATIENCE, 0.1, 99.0)
    async with suite(folder, prefill, decode, slo=slo, max_request_seconds=0.4) as made:
        ends = heard_by(made)
        with pytest.raises(DeadlineExceeded, match=r"longer than 0\.4 s"):
            await made.client.complete("hi")
        [end] = ends
        [model] = (await made.client.stats()).models
    assert (end.outcome, end.code, end.verdict) == (Outcome.EXPIRED, "DEADLINE_EXCEEDED", Verdict.MISSED_ITL)
    assert (model.cancelled, model.failed, model.good) == (0, 1, 0)


async def test_a_wait_for_a_client_that_does_not_read_is_no_stall(folder: Path) -> None:
    """As the router's run sees it: a send that does not return, and a limit that ends the request meanwhile. The client
    is told when it reads again."""
    prefill, decode = pair()
    slo, client = SloTargets(PATIENCE, 0.1, 99.0), Unread()
    async with suite(folder, prefill, decode, slo=slo, max_request_seconds=0.4) as made:
        ends = heard_by(made)
        call = asyncio.create_task(made.service.Generate(inference_pb2.GenerateRequest(text="hi"), client))  # type: ignore[arg-type]
        async with asyncio.timeout(PATIENCE):
            await client.stands.wait()
            await made.service._idle.wait()
        [end] = ends
        assert not call.done()
        client.reads.set()
        with pytest.raises(RpcError):
            await call
    assert (end.outcome, end.verdict) == (Outcome.EXPIRED, None) and end.ttft is not None


class Unread:
    """A context whose client reads PromptInfo and stands, until `reads` is set."""

    def __init__(self) -> None:
        self.stands, self.reads = asyncio.Event(), asyncio.Event()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> float | None:
        return None

    async def write(self, response: inference_pb2.GenerateResponse) -> None:
        if not response.HasField("prompt"):
            self.stands.set()
            await self.reads.wait()

    async def abort_with_status(self, status: grpc.Status) -> None:
        raise RpcError(status.code, "aborted")


async def test_what_a_chat_template_quotes_reaches_nobody_but_the_client(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_tiny_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('not for ' + messages[0].content) }}")
    exporter = InMemorySpanExporter()
    stop = setup_tracing("test", None, exporter)
    try:
        with capture_logs() as logged:
            async with suite(folder, ScriptedWorker("d0", "decode", Wire())) as made:
                with pytest.raises(InvalidRequest, match="not for a secret") as caught:
                    await made.client.complete([{"role": "user", "content": "a secret"}])
                [summary] = await made.client.traces()
    finally:
        stop()
    assert caught.value.field == "chat.messages"
    said = "chat.messages: the model's chat template refuses them (TemplateError)"
    assert [line["error"] for line in logged if line["event"] == "request_failed"] == [said] == [summary.error]
    spans = [span.to_json() for span in exporter.get_finished_spans()]
    assert any(said in span for span in spans) and not any("secret" in span for span in spans)
    assert "secret" not in repr(logged)


async def test_a_slow_client_gets_many_tokens_in_few_messages_and_holds_nobody_up(folder: Path) -> None:
    answer = bytes(range(97, 123)) * 200
    decode = ScriptedWorker("d0", "decode", Wire(), answer=answer, max_model_len=6000, total_blocks=1000)
    async with suite(folder, decode) as made:
        slow = made.client.generate("hi")
        async with aclosing(slow):
            await anext(slow)
            quick = await made.client.complete("hi", max_tokens=5)
            assert quick.text == "abcde"
            outputs = [event async for event in slow if isinstance(event, Output)]
    assert "".join(output.text for output in outputs) == answer.decode()
    assert [output.index for output in outputs] == sorted(output.index for output in outputs)


async def test_bad_requests_are_refused_before_any_worker_hears_of_them(folder: Path) -> None:
    prefill, decode = pair()
    async with suite(folder, prefill, decode) as made:
        with pytest.raises(InvalidRequest) as caught:
            await made.client.complete("hi", max_tokens=255)
        assert caught.value.field == "stopping.max_tokens"
        assert "255" in str(caught.value) and "256" in str(caught.value)
        with pytest.raises(UnknownModel):
            await made.client.complete("hi", model="other")
        with pytest.raises(InvalidRequest) as caught:
            await made.client.complete("x" * 250, max_tokens=2, top_p=0.0)
        assert caught.value.field == "sampling.top_p"
    assert prefill.seen == decode.seen == []


async def test_a_prompt_that_no_worker_can_hold_is_refused_at_once(folder: Path) -> None:
    decode = ScriptedWorker("d0", "decode", Wire(), total_blocks=2, max_model_len=256)
    async with suite(folder, decode) as made:
        with pytest.raises(InvalidRequest, match="room for 32"):
            await made.client.complete("x" * 50, timeout=PATIENCE)


async def test_a_decode_worker_that_holds_the_prompt_prefills_itself(folder: Path) -> None:
    prefill, decode = pair()
    prompt = list(b"x" * 40)
    decode.stored = block_hashes(root_hash(LAYOUT), prompt, LAYOUT.block_size)
    async with suite(folder, prefill, decode) as made:
        await made.until(lambda: any(map(made.fleet.known_blocks, made.fleet.workers)))
        done = await made.client.complete(prompt)
        assert done.text == "hello" and done.finish.usage.prefill_worker == "d0"
        other = await made.client.complete(prompt, cache_salt="another tenant")
        assert other.finish.usage.prefill_worker == "p0"


async def test_a_prefill_worker_hears_what_the_decode_worker_holds(folder: Path) -> None:
    """So that it may pull the beginning of a conversation instead of computing it."""
    prefill, decode = pair()
    prompt = list(b"x" * 40 + b"y" * 60)
    decode.stored = block_hashes(root_hash(LAYOUT), prompt[:40], LAYOUT.block_size)
    async with suite(folder, prefill, decode) as made:
        await made.until(lambda: any(map(made.fleet.known_blocks, made.fleet.workers)))
        await made.client.complete(prompt)
        await made.client.complete(list(b"z" * 40))
    assert prefill.told_held == [32, 0]


async def test_equal_workers_take_turns(folder: Path) -> None:
    wire = Wire()
    workers = [ScriptedWorker(f"d{i}", "decode", wire) for i in range(3)]
    async with suite(folder, *workers) as made:
        for _ in range(6):
            await made.client.complete("hi", max_tokens=2)
    assert [len(worker.seen) for worker in workers] == [2, 2, 2]


async def test_models_and_fleet_are_told(folder: Path) -> None:
    prefill, decode = pair()
    async with suite(folder, prefill, decode) as made:
        assert [(m.name, m.max_model_len, m.vocab_size) for m in await made.client.models()] == [("tiny", 256, 320)]
        fleet = await made.client.fleet()
    told = sorted((worker.worker_id, worker.role, worker.connected) for worker in fleet)
    assert told == [("d0", "decode", True), ("p0", "prefill", True)]


async def test_stages_are_told_and_one_trace_spans_it_all(folder: Path) -> None:
    exporter = InMemorySpanExporter()
    stop = setup_tracing("test", None, exporter)
    try:
        prefill, decode = pair()
        async with suite(folder, prefill, decode) as made:
            with span("client") as root:
                done = await made.client.complete("hi")
            parent = traceparent_of(root)
    finally:
        stop()
    spans = exporter.get_finished_spans()
    assert {f"{s.context.trace_id:032x}" for s in spans} == {parent.split("-")[1]}
    assert {"pdserve.queue", "pdserve.prefill", "pdserve.decode", "text_completion"} <= {s.name for s in spans}
    assert prefill.seen[0].traceparent.split("-")[1] == parent.split("-")[1]
    assert decode.seen[0].traceparent == prefill.seen[0].traceparent != parent
    stages = done.finish.usage.stages
    assert stages.queue_ms > 0 and stages.reserve_ms + stages.prefill_ms > 0 and stages.decode_wait_ms >= 0


async def test_a_traceparent_goes_to_workers_unless_it_is_too_long(folder: Path) -> None:
    """Over a call of its own and over a shared stream; nobody traces here, so it is passed on as it is."""
    prefill, decode = pair()
    async with suite(folder, prefill, decode) as made, Session(made.endpoint) as session:
        for length in (MAX_TRACEPARENT, MAX_TRACEPARENT + 1):
            traceparent = "x" * length
            await made.client.complete("hi", traceparent=traceparent)
            assert [event async for event in session.generate("hi", traceparent=traceparent)]
        assert [event async for event in session.generate("hi", traceparent="x" * 1_000_000)]
    for worker in (prefill, decode):
        assert [len(spec.traceparent) for spec in worker.seen] == [256, 256, 0, 0, 0]


async def test_an_endpoint_that_never_answers_is_waited_for_and_then_given_up(folder: Path) -> None:
    decode = ScriptedWorker("d0", "decode", Wire())
    async with suite(folder, decode, startup_seconds=0.8) as made:
        made.fleet.follow("127.0.0.1:1")
        with pytest.raises(NoCapacity, match=r"127\.0\.0\.1:1 not heard from yet"):
            await made.client.complete("hi", timeout=0.3)
        assert (await made.client.complete("hi", timeout=PATIENCE)).text == "hello"


async def test_a_draining_worker_gets_nothing_new_and_finishes_what_it_has(folder: Path) -> None:
    wire, step = Wire(), asyncio.Event()
    first = ScriptedWorker("d0", "decode", wire, step=step)
    async with suite(folder, first, ScriptedWorker("d1", "decode", wire)) as made:
        running = asyncio.create_task(made.client.complete("hi"))
        await made.until(lambda: first.seen)
        first.draining = True
        first.tell()
        await made.until(lambda: any(worker.draining for worker in made.fleet.workers))
        for _ in range(3):
            assert (await made.client.complete("hi")).finish.usage.decode_worker == "d1"
        step.set()
        assert (await running).text == "hello"
    assert len(first.seen) == 1


# A prefill half that fails, and a reservation that stands.
