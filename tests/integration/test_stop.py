"""A suite that stops in order has nothing to complain about."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from pdserve.launch import ModelPart
from tests.integration.suites import serve
from tests.tiny_models import make_tiny_model


def complaints(logs: Path) -> Iterator[dict[str, object]]:
    """Every warning and error that a service logged, and each line that is no log record at all."""
    for path in sorted(logs.glob("*.log")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["level"] not in ("debug", "info"):
                yield {"log": path.name, **record}


async def test_a_stop_in_order_logs_no_warning(tmp_path: Path) -> None:
    """One worker leaves first, while the others serve on; then all are told at once."""
    model = make_tiny_model(tmp_path / "tiny", "llama")
    logs = tmp_path / "logs"
    async with serve(logs, ModelPart(model, "tiny", prefill=1, decode=2), prefix_caches=1) as suite:
        await suite.client.complete("hello", max_tokens=3, ignore_eos=True)
        leaving = suite.workers["decode-1"]
        leaving.expected_to_end = True
        os.kill(leaving.pid, signal.SIGTERM)
        assert await leaving.exited == 0
        assert len((await suite.client.complete("hello", max_tokens=3, ignore_eos=True)).tokens) == 3
    assert list(complaints(logs)) == []
    assert '"worker_left"' in (logs / "router.log").read_text()
