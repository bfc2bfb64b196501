"""The process behind `resolve_model`: `python -m pdserve.launch.fetch_child NAME [REVISION]` writes JSON lines.

{"progress": stage}, then {"folder": path} or {"error": message}. Nothing imports this module.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TextIO


def main(name: str, revision: str | None, out: TextIO) -> int:
    def tell(**message: str) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        from pdserve.engine.fetch import resolve_model
    except ModuleNotFoundError as error:  # the base install has no torch: say what to do instead of a traceback
        tell(error=f"fetching models needs the worker extra (pip install 'pdserve[worker]'): {error}")
        return 1
    from pdserve.core.errors import PdserveError

    try:
        folder = resolve_model(name, revision, progress=lambda stage: tell(progress=stage))
    except PdserveError as error:
        tell(error=str(error))
        return 1
    tell(folder=str(folder.resolve()))
    return 0


if __name__ == "__main__":
    # Messages keep the real stdout to themselves: libraries that print would break the lines.
    with os.fdopen(os.dup(1), "w") as messages:
        os.dup2(2, 1)
        sys.exit(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None, messages))
