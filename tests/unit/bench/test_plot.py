"""A measurement is drawn, alone and with the search that it belongs to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdserve.bench.figures import Figures, Means
from pdserve.bench.load import Load
from pdserve.bench.plan import Measured, Plan, Search
from pdserve.bench.plot import write
from pdserve.bench.rates import RateSearch
from pdserve.bench.strain import Strain
from pdserve.core.quantiles import Quantiles
from pdserve.core.slo import SloTargets
from tests.unit.bench.samples import record

LOAD = Load(requests=3, rate=2.0, mix=((1.0, 10, 2),))
PLAN = Plan(LOAD, SloTargets(1.0, 0.5, 99.0))


def measured(rate: float, seed: int) -> Measured:
    """One request that kept the targets, one that did not, one that failed."""
    records = [
        record((0.5, 1), (0.75, 1)),
        record((3.0, 1), (3.25, 2), at=1.0, number=1),
        record(at=2.0, number=2, error="UNAVAILABLE: gone", ended=2.5),
    ]
    figures = Figures.of(records, 4.0, PLAN.targets, Means())
    return Measured(LOAD.at_rate(rate), seed, records, Strain(Quantiles(), Quantiles(), 0.0, 4.0), figures, None)


@pytest.fixture
def search() -> Search:
    state = RateSearch(2.0, 0.1, 2)
    for rate, kept in ((2.0, True), (4.0, False)):
        state.take(rate, kept)
    return Search(0.3, 0.1, [measured(2.0, 0), measured(4.0, 1)], state, None)


def test_png(tmp_path: Path) -> None:
    write(tmp_path / "a.png", "tiny", PLAN, measured(2.0, 0))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_html_has_panels_and_tables(tmp_path: Path, search: Search) -> None:
    """The panel of rates is there where there was a search."""
    write(tmp_path / "one.html", "<tiny>", PLAN, measured(2.0, 0))
    write(tmp_path / "all.html", "<tiny>", PLAN, measured(2.0, 0), search)
    one, both = ((tmp_path / name).read_text() for name in ("one.html", "all.html"))
    for text in (one, both):
        assert "&lt;tiny&gt;" in text and "<tiny>" not in text and "33.3% kept both" in text
        assert all(panel in text for panel in ("Time to first token", "Gaps between tokens", "Each request"))
    assert len(re.findall("<table", one)) == 2 and len(re.findall("<table", both)) == 3
    assert "Kept both targets, by rate" in both and "by rate" not in one
