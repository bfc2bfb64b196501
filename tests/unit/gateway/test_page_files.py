"""The page's files: all there, served as what they are, and under a policy that lets them do nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from pdserve.gateway.page_files import INDEX, PageFiles

FOLDER = files("pdserve.gateway").joinpath("page")
NAMES = sorted(file.name for file in FOLDER.iterdir())
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@pytest.fixture(scope="module")
def browser() -> Iterator[TestClient]:
    page = PageFiles()
    with TestClient(Starlette(routes=[Route("/", page.index), Route("/page/{file}", page.file)])) as client:
        yield client


def read(name: str) -> str:
    return FOLDER.joinpath(name).read_text()


@pytest.mark.parametrize("name", [name for name in NAMES if name != INDEX])
def test_every_file_is_served_as_what_it_is(browser: TestClient, name: str) -> None:
    answer = browser.get(f"/page/{name}")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(TYPES["." + name.split(".")[1]])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.text == read(name)


def test_what_has_not_changed_is_not_sent_again(browser: TestClient) -> None:
    first = browser.get("/")
    again = browser.get("/", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert browser.get("/", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", [INDEX, "none.js", "..%2Fconsole.py", "%2e%2e"])
def test_nothing_else_is_served(name: str) -> None:
    page = PageFiles()
    app = Starlette(routes=[Route("/page/{file}", page.file)])
    answer = TestClient(app, raise_server_exceptions=False).get(f"/page/{name}")
    assert answer.status_code != 200


def test_all_that_files_name_is_there_and_ours() -> None:
    """Links, scripts and imports lead to files of the page; no file names another origin."""
    named = set(re.findall(r'(?:href|src)="page/([^"]+)"', read(INDEX)))
    for name in NAMES:
        text = read(name)
        named |= set(re.findall(r'from "\./([^"]+)"', text))
        assert not [url for url in re.findall(r"https?://[^\s\"'`)]+", text) if "www.w3.org" not in url], name
    assert named | {INDEX} == set(NAMES)


def test_no_file_makes_html_of_text() -> None:
    """The browser would refuse it; so nobody tries."""
    for name in NAMES:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", read(name)), name


def test_the_policy_lets_the_page_load_its_own_files_only(browser: TestClient) -> None:
    policy = browser.get("/").headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert {rules[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
