"""Where --plot draws, checked before anything is measured or simulated, rather than after."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pdserve.core.errors import ConfigError


def check_plot(path: Path) -> None:
    """Raise ConfigError for a file that nothing can be drawn into, and where matplotlib is missing."""
    if path.suffix not in (".png", ".html"):
        raise ConfigError(f"--plot draws FILE.png or FILE.html, not {path.name}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'pdserve[plot]'")
