"""What a router's settings say of themselves."""

from __future__ import annotations

from pdserve.policy.disaggregation import Protect
from pdserve.policy.fleet import Target
from pdserve.router.config import RouterSettings


def test_a_copy_derives_from_its_own_values() -> None:
    settings = RouterSettings.load(["--slo-itl-ms", "50"])
    assert (settings.slo.itl, settings.rules.protect, settings.stated) == (0.05, Protect.ITL, frozenset({Target.ITL}))
    changed = settings.model_copy(update={"slo_itl_ms": 7.0, "slo_ttft_ms": 100.0, "protect": Protect.TTFT})
    assert (changed.slo.itl, changed.rules.protect, changed.stated) == (
        0.007,
        Protect.TTFT,
        frozenset(Target) - {Target.DEADLINE},
    )
    assert settings.slo.itl == 0.05 and settings.slo is settings.slo
