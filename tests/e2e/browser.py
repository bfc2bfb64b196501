"""A headless Chromium for tests, driven by Selenium."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

ENTER, ESCAPE, TAB = Keys.ENTER, Keys.ESCAPE, Keys.TAB
PATIENCE = 60.0  # seconds
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# The page is served by us, and a container's root has no sandbox to give.
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--window-size=1440,1000",
    "--hide-scrollbars",
)
NO_MOTION = "--force-prefers-reduced-motion"  # what scrolls smoothly cannot be clicked meanwhile
# Runs in the page: hears of every change of the document until CONDITION holds. No polling.
_UNTIL = """
const [patience, done] = arguments;
const holds = () => (CONDITION);
const watcher = new MutationObserver(look);
const timer = setTimeout(() => end(null), patience);
function end(value) { clearTimeout(timer); watcher.disconnect(); done(value); }
function look() { const value = holds(); if (value) end(value); }
watcher.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
look();
"""


class Browser:
    """One page. Selenium blocks, so every call runs in a thread."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    async def open(self, url: str) -> None:
        await asyncio.to_thread(self._driver.get, url)

    async def run(self, script: str, *arguments: object) -> Any:
        """What a JavaScript function body returns."""
        return await asyncio.to_thread(self._driver.execute_script, script, *arguments)

    async def until(self, condition: str, patience: float = PATIENCE) -> Any:
        """Wait until a JavaScript expression is true, and return it. AssertionError after `patience` seconds."""
        script = _UNTIL.replace("CONDITION", condition)

        def wait() -> Any:
            self._driver.set_script_timeout(patience + 10)
            return self._driver.execute_async_script(script, patience * 1000)

        value = await asyncio.to_thread(wait)
        assert value, f"not in {patience} s: {condition}; the page says: {await self.text('main')}"
        return value

    async def text(self, selector: str) -> str:
        """The text of an element, as it is in the document."""
        return str(await self.run("return document.querySelector(arguments[0]).textContent", selector))

    async def type(self, selector: str, *keys: str) -> None:
        await self._on(selector, lambda element: element.send_keys(*keys))

    async def click(self, selector: str) -> None:
        await self._on(selector, lambda element: element.click())

    async def command(self, name: str, **parameters: object) -> Any:
        """A command of the DevTools protocol."""
        return await asyncio.to_thread(self._driver.execute_cdp_cmd, name, parameters)

    async def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.command("Emulation.setDeviceMetricsOverride", **metrics)

    async def prefer(self, theme: str) -> None:
        """ "light" or "dark", as the system's setting."""
        await self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    async def complaints(self) -> list[str]:
        """What the console has said above "info" since it was asked last."""
        entries = await asyncio.to_thread(self._driver.get_log, "browser")
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    async def _on(self, selector: str, act: Callable[[WebElement], None]) -> None:
        await asyncio.to_thread(lambda: act(self._driver.find_element("css selector", selector)))


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start one, and end it. Skips the test where there is none."""
    binary = next(filter(None, map(shutil.which, CHROMIUM)), None)
    driver_binary = shutil.which("chromedriver")
    if binary is None or driver_binary is None:
        pytest.skip("no Chromium with its driver here; on Debian: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, NO_MOTION):
        options.add_argument(flag)
    service = webdriver.ChromeService(driver_binary)
    driver = await asyncio.to_thread(lambda: webdriver.Chrome(options=options, service=service))
    try:
        yield Browser(driver)
    finally:
        await asyncio.to_thread(driver.quit)
