"""The gateway's page in a real browser, against real services: what it shows is what they say and do.

The model recites (see reciter), so that answers are known, and long enough to be stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdserve.gateway.app import create_app
from pdserve.gateway.config import GatewaySettings
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.gateway.routers import Routers
from pdserve.gateway.server import HttpServer
from pdserve.testing import Cluster
from tests.e2e.browser import ENTER, ESCAPE, TAB, Browser, chromium
from tests.e2e.reciter import make_reciter
from tests.integration import raw_http

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

RECITED = "<script>x\n"
CONTEXT = 8192
ENDED = "document.querySelector('.answer[data-end]')?.dataset.end"
# What is said of a bar and does not end where the waterfall does.
BEYOND = """
const right = (element) => element.getBoundingClientRect().right;
const said = [...document.querySelectorAll(".said")];
return said.filter((words) => right(words) > right(words.closest(".waterfall"))).map((words) => words.textContent);
"""
CONTROLS = ("button", "textbox", "combobox", "radio", "spinbutton", "link")

Page = tuple[Cluster, Browser]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reciter(tmp_path_factory.mktemp("model"), RECITED, max_position_embeddings=CONTEXT)


@asynccontextmanager
async def open_page(model: Path, logs: Path) -> AsyncIterator[Page]:
    """A suite with a gateway, and a browser. Prompts go over the links, for the page to show."""
    parts: dict[str, Any] = {"prefill": 1, "decode": 2, "prefix_caches": 1, "gateways": 1}
    parts["per_worker"] = {"router": {"local-prefill": False}}
    async with chromium() as browser, Cluster(model, dtype="float32", log_folder=logs, **parts) as cluster:
        yield cluster, browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    async with open_page(model, tmp_path_factory.mktemp("logs")) as page:
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def page(suite: Page) -> AsyncIterator[Page]:
    """The page just loaded, in a suite that holds no block before and after."""
    cluster, browser = suite
    await load(browser, cluster.http)
    yield suite
    await cluster.assert_all_free()


async def load(browser: Browser, url: str) -> None:
    """Open the page as somebody new does, and wait until it can be used."""
    await browser.open(url)
    await browser.run("localStorage.clear()")
    await browser.open(url)
    await browser.complaints()  # those of the page before
    await browser.until("document.getElementById('model').value")


async def ask(browser: Browser, prompt: str, max_tokens: int) -> None:
    await browser.run("document.getElementById('max_tokens').value = arguments[0]", max_tokens)
    await browser.type("#prompt", prompt, ENTER)


async def test_an_answer_arrives_piece_by_piece_and_is_the_api_s_own(page: Page) -> None:
    """What the page shows is what /v1/chat/completions says, in many pieces, and none of it becomes HTML."""
    cluster, browser = page
    await ask(browser, "Recite <b>this</b>.", 40)
    assert await browser.until(ENDED) == "length"
    body = {"messages": [{"role": "user", "content": "Recite <b>this</b>."}], "max_tokens": 40}
    answer = (await raw_http.ask(f"{cluster.http}/v1/chat/completions", body)).json
    assert await browser.text(".answer .text") == answer["choices"][0]["message"]["content"] == RECITED * 4
    assert await browser.text(".asked") == "Recite <b>this</b>."
    assert await browser.run("return document.querySelectorAll('.token').length") > 10
    assert await browser.run("return document.querySelectorAll('main script, .asked b').length") == 0
    facts = await browser.text(".facts")
    assert "40 tokens" in facts and "reached max tokens" in facts
    assert await browser.complaints() == []


async def test_a_text_goes_on_after_its_prompt(page: Page) -> None:
    """Text mode shows the prompt and what /v1/completions adds; a stop string from the settings ends it."""
    _, browser = page
    await browser.click("[name=kind][value=text] + span")
    await browser.run("document.getElementById('settings').open = true")
    await browser.type("#stop", "pt>x")
    await ask(browser, "<", 40)
    assert await browser.until(ENDED) == "stop"
    assert await browser.text(".answer .text") == "<scri"
    assert await browser.complaints() == []


async def test_the_waterfall_names_who_did_what(page: Page) -> None:
    """Its rows are spans of this very request, each by its real worker; the KV bytes are those that usage counts."""
    cluster, browser = page
    await ask(browser, "Who are you? " * 20, 24)
    await browser.until(ENDED)
    await browser.until("document.querySelector('.row[data-span=\"pdserve.decode\"][data-who^=decode]')")
    await browser.until("document.querySelector('.row[data-span=\"pdserve.transfer\"][data-who=prefill-0]')")
    await browser.until("document.querySelector('.row[data-who=gateway]')")
    spans = "return [...document.querySelectorAll('.row')].map(row => [row.dataset.who, row.dataset.span])"
    rows = {tuple(row) for row in await browser.run(spans)}
    request = await browser.run("return document.querySelector('.answer').dataset.request")
    summary = (await cluster.client.trace(request)).request
    decoder = summary.workers[-1]
    assert {who for who, _ in rows} <= {"gateway", "router", "prefix-cache-0", *cluster.workers}
    assert {("prefill-0", "pdserve.prefill"), (decoder, "pdserve.reserve"), (decoder, "pdserve.decode")} <= rows
    assert ("router", "pdserve.queue") in rows
    moved = summary.usage.kv_transfer_bytes
    assert moved > 0
    await browser.until(f"document.querySelector('.route').textContent.includes('prefill-0 → {decoder}')")
    assert f"{moved / 1e3:.0f} kB of KV" in await browser.text(".route")
    assert request in await browser.until("document.getElementById('recent-rows').textContent")
    await browser.click("[name=zoom][value=start] + span")
    await browser.until("document.querySelector('.mark').style.getPropertyValue('--at') > 0.73")  # of the width


@pytest.mark.parametrize("way", ["button", "Escape"])
async def test_stopping_frees_the_blocks(page: Page, way: str) -> None:
    """It ends the request on its workers, and what was said until then stays."""
    cluster, browser = page
    await ask(browser, "Recite.", CONTEXT - 500)
    await browser.until("document.querySelector('.answer:not([data-end]) .token')")
    await (browser.click("#send") if way == "button" else browser.type("body", ESCAPE))
    assert await browser.until(ENDED) == "cancelled"
    assert (await browser.text(".answer .text")).startswith("<")
    await cluster.assert_all_free()
    request = await browser.run("return document.querySelector('.answer').dataset.request")
    assert (await cluster.client.trace(request)).request.state == "cancelled"
    assert await browser.text("#send") == "Send"


async def test_a_refusal_is_said_where_the_answer_would_be(page: Page) -> None:
    """In the API's own words; the next prompt works."""
    _, browser = page
    await ask(browser, "Recite.", CONTEXT * 2)
    assert await browser.until(ENDED) == "failed"
    assert "max_tokens" in await browser.text(".failed")
    await browser.click("#clear")
    await ask(browser, "Recite.", 10)
    assert await browser.until(ENDED) == "length"


async def test_the_browser_is_told_to_run_nothing_but_our_files(page: Page) -> None:
    """The policy is sent and in force: no inline script, no HTML from strings, no other origin."""
    cluster, browser = page
    for path in ("/", "/page/main.js", "/page/style.css", "/page/favicon.svg"):
        headers = (await raw_http.ask(cluster.http + path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
    inline = "const made = document.createElement('script'); made.append('window.ran = 1'); document.body.append(made);"
    assert await browser.run(f"try {{ {inline} }} catch {{}} return window.ran === undefined")
    place = "document.getElementById('said')"
    assert await browser.run(
        f"try {{ {place}.innerHTML = '<b>x</b>'; return 'made' }} catch (e) {{ return e.name }}"
    ) == ("TypeError")
    elsewhere = "return await fetch('http://127.0.0.1:1/').then(() => 'sent', () => 'refused')"
    assert await browser.run(elsewhere) == "refused"
    complaints = " ".join(await browser.complaints())
    assert "Content Security Policy" in complaints and "TrustedHTML" in complaints


async def test_it_fits_every_screen_in_both_themes(page: Page) -> None:
    """Nothing is wider than the screen, no bar's words than the waterfall, and every control has a name."""
    _, browser = page
    await browser.run("document.getElementById('settings').open = true")
    await ask(browser, "A long word: " + "x" * 300, 20)
    await browser.until(ENDED)
    await browser.until("document.querySelector('.row[data-kind=request] .said span')")
    grounds = set()
    for theme in ("light", "dark"):
        await browser.prefer(theme)
        grounds.add(await browser.run("return getComputedStyle(document.body).backgroundColor"))
        for width in (360, 768, 1440):
            await browser.resize(width, 900)
            assert await browser.run("return document.documentElement.scrollWidth") <= width, f"{theme} {width}"
            assert await browser.run(BEYOND) == [], f"{theme} {width}"
    assert len(grounds) == 2
    nodes = (await browser.command("Accessibility.getFullAXTree"))["nodes"]
    controls = [node for node in nodes if not node["ignored"] and node["role"]["value"] in CONTROLS]
    assert len(controls) > 15
    assert [node for node in controls if not node["name"]["value"]] == []


async def test_a_small_rate_is_not_none(page: Page) -> None:
    """One request in a minute is 0.02 a second and not 0.0."""
    _, browser = page
    shown = "const { rate } = await import('/page/format.js'); return [0, 1 / 60, 0.096, 0.4, 14.24, 1204].map(rate)"
    assert await browser.run(shown) == ["0", "0.02", "0.1", "0.4", "14.2", "1,204"]


async def test_the_keyboard_goes_straight_to_the_prompt(page: Page) -> None:
    """The first Tab offers it, Enter takes it."""
    _, browser = page
    await browser.type("body", TAB, ENTER)
    await browser.until("document.activeElement.id === 'prompt'")


async def test_a_killed_worker_shows_as_gone(model: Path, tmp_path: Path) -> None:
    """Its card says so, and the rest of the fleet goes on answering."""
    async with open_page(model, tmp_path) as (cluster, browser):
        await load(browser, cluster.http)
        for name in cluster.workers:
            await browser.until(f"document.querySelector('[data-worker=\"{name}\"]')")
        await browser.until("document.querySelectorAll('#link-rows tr').length === 2")
        await cluster.kill("decode-1")
        await browser.until("document.querySelector('[data-worker=decode-1]').dataset.state === 'gone'")
        await browser.until("document.getElementById('health').textContent.includes('gone')")
        await ask(browser, "Recite.", 10)
        assert await browser.until(ENDED) == "length"


async def test_it_says_what_to_do_when_nothing_answers() -> None:
    """A router that is not there, then a gateway that has gone: each is named, with the command that brings it back."""
    settings = GatewaySettings.load(["--port", "0", "--router", "127.0.0.1:9"])
    async with chromium() as browser:
        async with HttpServer(settings) as server, Routers(settings.router) as routers:
            serving = asyncio.create_task(server.serve(create_app(routers, settings, GatewayMetrics())))
            try:
                await browser.open(f"http://{server.endpoint}")
                await browser.until("document.getElementById('banner').textContent.includes('--router')")
                assert "does not answer" in await browser.text("#banner")
                assert await browser.text("#health") == "Router unreachable"
                assert await browser.run("return document.getElementById('send').disabled")
            finally:
                server.stop_requested.set()
                await serving
        await browser.until("document.getElementById('health').textContent === 'Gateway unreachable'")
        assert "pdserve serve" in await browser.text("#banner")
