"""The door: what a tenant may have, and whether a request would come too late. Who is refused here has cost nothing."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import structlog

from pdserve.core.errors import TenantLimited, TooLate
from pdserve.core.slo import percentile
from pdserve.policy.admission import Admission, admit
from pdserve.policy.fleet import PlacementRequest, Target
from pdserve.policy.forecast import Ahead
from pdserve.policy.limits import Allowance, Limit, Limits, Refusal
from pdserve.policy.margin import Margins
from pdserve.policy.routing import Decision, Kind
from pdserve.router.config import RouterSettings
from pdserve.router.fleet import Fleet
from pdserve.router.measure import Measure
from pdserve.router.models import ServedModel
from pdserve.router.validate import ResolvedRequest
from pdserve.router.waiting import Wishes
from pdserve.v1 import inference_pb2

log = structlog.get_logger(__name__)

LEAST_GAPS = 8  # of an answer that says something about a percentile of its gaps
AheadOf = Callable[[ServedModel, Wishes, int], Ahead]
"""What waits for a model and goes before a new request with such wishes and such a priority."""
ExpectedOf = Callable[[ServedModel], int]
"""Tokens that an answer probably has; 0: not known yet."""


class Door:
    """One router's. Each router counts for itself: with several, tenants and keys have their limits at each of them."""

    def __init__(self, settings: RouterSettings, fleet: Fleet, ahead: AheadOf, expected: ExpectedOf) -> None:
        self.settings, self.fleet, self.ahead, self.expected = settings, fleet, ahead, expected
        self._each_tenant = Allowance(settings.tenant_max_requests, settings.tenant_tokens_per_minute)
        self._tenants, self._keys = Limits(), Limits()
        self.margins: defaultdict[str, Margins] = defaultdict(Margins)  # by model

    @contextmanager
    def entered(self, wishes: Wishes, measure: Measure) -> Iterator[Visit]:
        """A request's scope, from its arrival to its end. Raises TenantLimited."""
        began = _now()
        visit = Visit(self, wishes, measure, began)
        entered: list[Charged] = []
        try:
            for account in self._accounts(wishes):
                visit.check(account.limits.enter(account.name, account.allowance, began))
                entered.append(account)
            visit.accounts = tuple(entered)
            yield visit
        finally:
            now = _now()
            visit.learn_gap()
            for account in entered:
                account.limits.settle(account.name, account.allowance, visit.taken, visit.used, now)
                account.limits.leave(account.name, now - began if measure.workers else None)

    def _accounts(self, wishes: Wishes) -> Iterator[Charged]:
        """Whom a request is charged to: its tenant, which may have several keys, and its key."""
        yield Charged(self._tenants, wishes.tenant, self._each_tenant)
        if wishes.key is not None:
            yield Charged(self._keys, wishes.key.name, wishes.key.allowance)


@dataclass(frozen=True, slots=True)
class Charged:
    """An account, and what it may have as long as this request lasts."""

    limits: Limits
    name: str
    allowance: Allowance


@dataclass(slots=True)
class Visit:
    """One request that has entered. `taken` tokens are charged to its accounts, for a prompt of `prompt_tokens`.
    `arrived` is in the loop's time."""

    door: Door
    wishes: Wishes
    measure: Measure
    arrived: float
    accounts: tuple[Charged, ...] = ()
    taken: int = 0
    prompt_tokens: int = 0
    _admission: Admission | None = None  # what was predicted, where it is compared with what comes
    _margins: Margins = field(default_factory=Margins)
    _waited: float = 0.0  # seconds from its arrival to the prediction

    @property
    def used(self) -> int:
        """Tokens that were spent on it by now: none before it was placed."""
        return self.prompt_tokens + self.measure.timeline.tokens if self.measure.workers else 0

    async def admit(self, resolved: ResolvedRequest, deadline: float) -> None:
        """Let it in to be placed, or not; `deadline` is in the loop's time. Raises TenantLimited and TooLate. An answer
        that was begun elsewhere goes on: somebody reads it. It is paid for at its end."""
        if resolved.resumed:
            self.prompt_tokens = len(resolved.given)
            return
        self._spend(resolved)
        if self.door.settings.early_rejection == "stated":
            await self._foresee(resolved, deadline)

    def check(self, refusal: Refusal | None) -> None:
        """Raises TenantLimited for a refusal."""
        if refusal is not None:
            self._tell(refusal.limit, refusal.reason, refusal.retry_after)
            raise TenantLimited(refusal.reason, refusal.retry_after)

    def _spend(self, resolved: ResolvedRequest) -> None:
        """Take the prompt's tokens, and as many as its answer probably has."""
        most, prompt = resolved.remaining, len(resolved.given)
        tokens = prompt + min(most, self.door.expected(resolved.model) or most)
        now, charged = _now(), list[Charged]()
        for account in self.accounts:
            refusal = account.limits.spend(account.name, account.allowance, tokens, now)
            if refusal is not None:
                for other in charged:
                    other.limits.settle(other.name, other.allowance, tokens, 0, now)
                self.check(refusal)
            charged.append(account)
        self.taken, self.prompt_tokens = tokens, prompt

    async def _foresee(self, resolved: ResolvedRequest, deadline: float) -> None:
        fleet, model, spec = self.door.fleet, resolved.model, resolved.spec
        ahead = self.door.ahead(model, self.wishes, spec.priority)
        if not self.wishes.stated and not ahead.count:
            return  # workers' own queues are short, so there is nothing that its deadline could be too early for
        request = PlacementRequest(
            tokens=len(resolved.given),
            remaining=resolved.remaining,
            expected=self.door.expected(model),
            targets=self.wishes.targets,
            stated=self.wishes.stated,
            waited=(now := _now()) - self.arrived,
            draw=round(1e9 * self.arrived),
            now=now,
        )
        admission = self._ask(resolved, request, ahead, deadline)
        if not admission.admitted:  # then what is cached decides, and is worth hashing the prompt for
            hashes = await fleet.hash_prompt(model, resolved.given, spec.cache_salt)
            admission = self._ask(resolved, replace(request, held=fleet.held(model, hashes)), ahead, deadline)
        if admission.missed is not None:
            self.measure.decisions.note(Decision(Kind.REJECT, admission.reason), request, time.time_ns())
            self._tell(admission.missed, admission.reason, admission.retry_after)
            raise TooLate(admission.reason, admission.retry_after)
        if spec.priority >= 0:  # one that goes behind others waits for those who come later, too
            self._admission, self._margins = admission, self.door.margins[model.name]
            self._waited = request.waited
            self.measure.on_first_token = self._learn_ttft

    def _learn_ttft(self, seconds: float) -> None:
        """Its first token came so many seconds after its arrival. Only of those who stated a target is it seen to that
        nobody keeps them waiting."""
        if self._admission is not None and Target.TTFT in self.wishes.stated:
            self._admission.observe(self._margins, seconds - self._waited)

    def learn_gap(self) -> None:
        """It is over: its gaps say how good the prediction was."""
        gaps, targets = self.measure.timeline.gaps, self.wishes.targets
        if self._admission is not None and Target.ITL in self.wishes.stated and len(gaps) >= LEAST_GAPS:
            self._admission.observe_gap(self._margins, percentile(gaps, targets.itl_percentile), targets.itl)

    def _ask(self, resolved: ResolvedRequest, request: PlacementRequest, ahead: Ahead, deadline: float) -> Admission:
        view, rules = self.door.fleet.view(resolved.model), self.door.settings.rules
        margins = self.door.margins[resolved.model.name]
        return admit(view, request, ahead, rules, time_left=deadline - _now(), margins=margins)

    def _tell(self, why: Limit | Target, reason: str, retry_after: float) -> None:
        self.measure.turned_away(why)
        log.info(
            "turned_away", why=why.value, reason=reason, retry_after=round(retry_after, 3), tenant=self.wishes.tenant
        )


def stated_targets(slo: inference_pb2.SloTargets, settings: RouterSettings) -> frozenset[Target]:
    """The targets that the request names, or that somebody set for the router. What is left only measures."""
    stated = settings.stated
    if slo.HasField("ttft_ms"):
        stated |= {Target.TTFT}
    if slo.HasField("itl_ms"):
        stated |= {Target.ITL}
    return stated


def _now() -> float:
    return asyncio.get_running_loop().time()
