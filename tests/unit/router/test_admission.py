"""What the door makes of settings and requests, and of a refusal."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from pdserve.core.errors import InvalidRequest, TenantLimited
from pdserve.core.slo import Outcome, SloTargets, Verdict
from pdserve.policy.fleet import BOTH, FleetView, Target
from pdserve.policy.forecast import Ahead
from pdserve.policy.limits import Limit
from pdserve.router.admission import Door, stated_targets
from pdserve.router.config import RouterSettings
from pdserve.router.measure import Measure
from pdserve.router.meter import Ended, Meter
from pdserve.router.waiting import Wishes
from pdserve.rpc.tenant import ANONYMOUS, check_tenant
from pdserve.v1 import inference_pb2
from tests.unit.policy.test_admission import IDLE

TARGETS = SloTargets(0.5, 0.05, 99.0)


@pytest.mark.parametrize(
    "flags, asked, stated",
    [
        ([], {}, []),
        ([], {"ttft_ms": 300.0}, [Target.TTFT]),
        ([], {"itl_ms": 20.0}, [Target.ITL]),
        (["--slo-itl-percentile", "95"], {}, []),
        (["--slo-ttft-ms", "300"], {}, [Target.TTFT]),
        (["--slo-itl-ms", "50"], {}, [Target.ITL]),  # the default's value, but somebody meant it
        (["--slo-ttft-ms", "300"], {"itl_ms": 20.0}, [Target.TTFT, Target.ITL]),
    ],
)
def test_a_target_is_stated_where_somebody_named_it(
    flags: list[str], asked: dict[str, float], stated: list[Target]
) -> None:
    settings = RouterSettings.load(flags)
    assert stated_targets(inference_pb2.SloTargets(**asked), settings) == set(stated)


def test_a_variable_states_a_target_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_SLO_TTFT_MS", "300")
    assert stated_targets(inference_pb2.SloTargets(), RouterSettings.load([])) == {Target.TTFT}


@pytest.mark.parametrize("tenant", [ANONYMOUS, "a", "team 7/~", "x" * 128])
def test_a_tenant_is_printable_and_short(tenant: str) -> None:
    assert check_tenant(tenant) == tenant


@pytest.mark.parametrize(
    "tenant, said", [("x" * 129, "at most 128 characters, got 129"), ("é", "printable"), ("a\n", "printable")]
)
def test_what_cannot_be_a_tenant_is_told(tenant: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"x-tenant-id: .*{said}") as caught:
        check_tenant(tenant)
    assert caught.value.field == "x-tenant-id"


async def test_a_refused_request_says_nothing_of_how_long_requests_take() -> None:
    """However many are refused: the wait that a tenant is told is that of those that were placed."""
    settings = RouterSettings.load(["--tenant-max-requests", "1"])
    door = Door(settings, cast(Any, None), cast(Any, None), cast(Any, None))
    wishes = Wishes("a")
    for _ in range(20):
        with door.entered(wishes, Measure([], "chat")):
            pass
    with door.entered(wishes, Measure([], "chat")), pytest.raises(TenantLimited) as caught:
        door.entered(wishes, Measure([], "chat")).__enter__()
    assert caught.value.retry_after == 1.0, "none has ended yet"


class Heard(Meter):
    def __init__(self) -> None:
        self.why: list[tuple[str, Limit | Target]] = []
        self.ends: list[tuple[Outcome, Verdict | None]] = []

    def turned_away(self, model: str, why: Limit | Target) -> None:
        self.why.append((model, why))

    def ended(self, ended: Ended) -> None:
        self.ends.append((ended.outcome, ended.verdict))


@pytest.mark.parametrize(
    "why, end",
    [
        (Limit.REQUESTS, (Outcome.REFUSED, None)),
        (Limit.TOKENS, (Outcome.REFUSED, None)),
        (Target.TTFT, (Outcome.FAILED, Verdict.FAILED)),
        (Target.DEADLINE, (Outcome.FAILED, Verdict.FAILED)),
    ],
)
def test_a_tenant_s_limit_is_not_the_deployment_s_failure(
    why: Limit | Target, end: tuple[Outcome, Verdict | None]
) -> None:
    heard = Heard()
    measure = Measure([heard], "chat")
    measure.started("tiny", TARGETS)
    measure.turned_away(why)
    measure.failed(grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert heard.why == [("tiny", why)] and heard.ends == [end]


class Fleet:
    """One that is as it is."""

    def view(self, model: object) -> FleetView:
        return IDLE


@pytest.mark.parametrize(
    "stated, priority, learned",
    [
        (BOTH, 0, (True, True)),
        (frozenset({Target.TTFT}), 0, (True, False)),
        (frozenset({Target.ITL}), 0, (False, True)),
        (frozenset(), 0, (False, False)),
        (BOTH, -1, (False, False)),
    ],
)
async def test_the_door_learns_from_those_whose_targets_are_kept(
    stated: frozenset[Target], priority: int, learned: tuple[bool, bool]
) -> None:
    """A first token was predicted in half a second and came after 100, and the gaps were as long as that. Who goes
    behind others, or asked for nothing, was overtaken; it says nothing."""
    door = Door(RouterSettings(), cast(Any, Fleet()), lambda *_: Ahead(400, 160_000, 4), lambda model: 100)
    asked: Any = SimpleNamespace(
        model=SimpleNamespace(name="tiny"), given=(1,) * 100, remaining=50, resumed=(),
        spec=SimpleNamespace(priority=priority, cache_salt=""),
    )  # fmt: skip
    measure, wishes = Measure([], "chat"), Wishes("a", targets=SloTargets(1000.0, 50.0, 99.0), stated=stated)
    with door.entered(wishes, measure) as visit:
        await visit.admit(asked, asyncio.get_running_loop().time() + 1000.0)
        for number in range(1, 12):
            measure.timeline.token(measure.timeline.arrived + number * 100_000_000_000, number)
        measure.timeline.tell()
    margins = door.margins["tiny"]
    assert (margins.ttft.factor > 1.0, margins.gap.factor > 1.0) == learned
