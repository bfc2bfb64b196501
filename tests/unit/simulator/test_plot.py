"""Plots are files that show the simulation, need nothing else, and are the same for the same input."""

from __future__ import annotations

import re
import struct
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.app import app
from pdserve.core.errors import ConfigError
from pdserve.simulator.canvas import DPI, SIZE
from pdserve.simulator.drawing import Distribution, Drawing
from pdserve.simulator.plot import write
from tests.unit.simulator.small_fleet import TARGETS, small_drawing

ROOT = Path(__file__).parents[3]
ARGUMENTS = ["simulate", "--prefill", "1", "--decode", "1", "--prompt-tokens", "50", "--output-tokens", "3",
             "--rate", "5", "--requests", "4"]  # fmt: skip
PANELS = (
    "Time to first token",
    "Gaps between tokens",
    "Busy share of the time",
    "Requests in flight",
    "Kept both targets",
)


@pytest.fixture(scope="module")
def drawing() -> Drawing:
    return small_drawing()


class Page(HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def test_png(drawing: Drawing, tmp_path: Path) -> None:
    """A picture of the size that is meant; the same twice."""
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    write(first, drawing)
    write(second, drawing)
    data = first.read_bytes()
    assert data.startswith(b"\x89PNG\r\n") and struct.unpack(">II", data[16:24]) == tuple(DPI * side for side in SIZE)
    assert data == second.read_bytes()


def test_html_stands_alone(drawing: Drawing, tmp_path: Path) -> None:
    """The panels and both tables in one file, which fetches nothing and runs nothing; the same twice."""
    first, second = tmp_path / "a.html", tmp_path / "b.html"
    write(first, drawing)
    write(second, drawing)
    text = first.read_text()
    page = Page(text)
    assert text == second.read_text()
    assert page.tags.count("svg") == 1 and page.tags.count("table") == 2
    assert not {"script", "link", "img", "iframe"} & set(page.tags) and "@import" not in text and "url(http" not in text
    assert all(link.startswith("#") for link in page.links)
    assert all(any(panel in word for word in page.words) for panel in PANELS)
    assert {"100.0 ms", "busy", "p99  150 ms", "100.0% of requests"} <= set(page.words)


def test_a_title_is_text(drawing: Drawing, tmp_path: Path) -> None:
    """A trace's name comes from outside."""
    drawing = Drawing("<script>$\\frac$</script>", *(getattr(drawing, name) for name in Drawing.__slots__[1:]))
    for name in ("a.html", "a.png"):
        write(tmp_path / name, drawing)
    page = Page((tmp_path / "a.html").read_text())
    assert "script" not in page.tags and "<script>$\\frac$</script>" in page.words


def test_latencies_that_range_far_get_a_logarithmic_axis(drawing: Drawing, tmp_path: Path) -> None:
    """And a run without any is drawn nevertheless."""
    wide = Distribution.of([(0.01, 90), (30.0, 10)], TARGETS.ttft)
    for name, values in (("wide.html", wide), ("empty.html", Distribution.of([], TARGETS.ttft))):
        report, targets, _, *rest = (getattr(drawing, name) for name in Drawing.__slots__[1:])
        write(tmp_path / name, Drawing("t", report, targets, values, *rest))
    words = Page((tmp_path / "wide.html").read_text()).words
    assert {"10 ms", "100 ms", "1 s", "10 s", "p99  30 s"} <= set(words)


def test_what_cannot_be_written(drawing: Drawing, tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        write(tmp_path / "a.png", drawing)


@pytest.mark.parametrize("name", ["a.png", "a.html"])
def test_the_command_draws(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*ARGUMENTS, "--plot", str(tmp_path / name)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.parametrize(("name", "said"), [("a.pdf", "FILE.png or FILE.html"), ("no/a.png", "there is no folder")])
def test_a_plot_that_cannot_be_is_told_before_the_simulation(name: str, said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*ARGUMENTS, "--plot", str(tmp_path / name)])
    assert result.exit_code == 2 and said in result.stderr


def test_only_plots_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it all but --plot works, and that names the extra; no other file than those that draw imports it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "pdserve.simulator.plot")
    assert CliRunner().invoke(app, ARGUMENTS).exit_code == 0
    result = CliRunner().invoke(app, [*ARGUMENTS, "--plot", str(tmp_path / "a.png")])
    assert result.exit_code == 2 and "pip install 'pdserve[plot]'" in result.stderr
    files = [*(ROOT / "services").rglob("*.py"), *(ROOT / "shared").rglob("*.py")]
    users = [file for file in files if re.search(r"^\s*(import|from) matplotlib", file.read_text(), re.MULTILINE)]
    drawing = {"bench/plot.py", "simulator/canvas.py", "simulator/plot.py"}
    assert {str(file.relative_to(ROOT / "services" / "pdserve")) for file in users} == drawing
