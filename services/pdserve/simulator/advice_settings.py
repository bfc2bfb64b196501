"""What an advice is about, from flags and single values: everything of a plan but what is varied or arrives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.core.errors import ConfigError
from pdserve.simulator import flags
from pdserve.simulator.flags import Flags
from pdserve.simulator.ground import Ground

# Of a fleet: what is tried out, names workers of one fleet only, or is left as the router has it.
_VARIED = ("prefill", "decode", "colocated", "max_num_batched_tokens", "speeds", "outages", "fetch")


def advice_ground(said: Flags, changes: Mapping[str, Any], defaults: Mapping[str, Any]) -> Ground:
    """`changes` are over `said`, and both over `defaults`, all as in `SimulationSettings.load`. Requests ask for the
    targets. Raises ConfigError, a line a problem."""
    content: dict[str, Any] = {"fleet": {}}
    flags.put(content, defaults)
    flags.apply(said, content)
    flags.put(content, changes)
    fleet, slo = content["fleet"], content.setdefault("slo", {})
    if isinstance(fleet, dict) and (varied := [key for key in _VARIED if key in fleet]):
        named = ", ".join(f"fleet.{key}" for key in varied)
        raise ConfigError(
            f"{named}: not for an advice, which compares fleets that differ in it; --workers says how large"
        )
    if isinstance(slo, dict) and slo.setdefault("stated", True) is not True:
        raise ConfigError("slo.stated: an advice is for requests that ask for their targets; leave it out")
    return Ground.checked(content, "this is nothing to advise on")
