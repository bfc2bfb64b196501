"""Take the README's pictures of the page: a real suite, the demo model, a real browser.

usage: python -m scripts.screenshot

Writes docs/images/page-light.png and page-dark.png. Needs Debian's chromium and chromium-driver.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import tempfile
from pathlib import Path
from typing import Any

from pdserve.engine.fetch import resolve_model
from pdserve.launch import ModelPart
from pdserve.testing import Cluster
from tests.e2e.browser import ENTER, Browser, chromium

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
MODEL = "smollm2-135m-instruct"
WIDTH, HEIGHT, SCALE = 1440, 1180, 1.25
ASKED = "Tell me about the ocean."
# Asked by others beforehand, so that there is something to compare with.
OTHERS = ("What is the capital of France?", "Why is the sky blue? Answer in two sentences.", "Name three rivers.")
DONE = "document.querySelector('.answer[data-end]') && document.querySelector('.row[data-span=\"pdserve.decode\"]')"
PATIENCE = 300.0  # seconds


async def take(browser: Browser, theme: str) -> None:
    """Save what the window shows, in this theme."""
    await browser.prefer(theme)
    shot = await browser.command("Page.captureScreenshot")
    (IMAGES / f"page-{theme}.png").write_bytes(base64.b64decode(shot["data"]))


async def main() -> int:
    part = ModelPart(resolve_model(MODEL), MODEL, prefill=1, decode=2)
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as logs:
        options: dict[str, Any] = {"prefix_caches": 1, "gateways": 1, "kv_cache_memory": 1 << 28, "max_model_len": 2048}
        async with chromium() as browser, Cluster([part], log_folder=Path(logs), **options) as cluster:
            metrics = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": SCALE, "mobile": False}
            await browser.command("Emulation.setDeviceMetricsOverride", **metrics)
            await browser.open(cluster.http)
            for question in OTHERS:
                await cluster.client.complete([{"role": "user", "content": question}], max_tokens=32)
            await browser.until("document.querySelector('#model').value")
            await browser.run(
                "document.querySelector('#max_tokens').value = 64; document.querySelector('#seed').value = 7"
            )
            await browser.type("#prompt", ASKED, ENTER)
            await browser.until(DONE, PATIENCE)
            await browser.until("document.querySelectorAll('#recent-rows tr').length === 4")
            await browser.until("document.querySelector('#figure-requests b').textContent === '0'")
            for theme in ("light", "dark"):
                await take(browser, theme)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
