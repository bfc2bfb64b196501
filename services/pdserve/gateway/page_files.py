"""The page at the gateway's root: plain files beside this module, served from memory.

The page may load from its own origin and nothing else, run no inline script, and make no HTML from strings: the browser
holds it to that (Content-Security-Policy with Trusted Types).
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

from pdserve.gateway.errors import ApiError

INDEX = "index.html"
TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors", "trusted-types")),
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # kept, but asked for each time: a new version is seen at once
}


class PageFiles:
    """Every file of the page, read once."""

    def __init__(self) -> None:
        folder = files("pdserve.gateway").joinpath("page")
        self._files = {file.name: _Asset(file) for file in folder.iterdir()}

    async def index(self, request: Request) -> Response:
        return self._files[INDEX].answer(request)

    async def file(self, request: Request) -> Response:
        """404 for what is not there; the page itself is only at the root, since its links begin there."""
        name = request.path_params["file"]
        if name not in self._files or name == INDEX:
            raise ApiError(404, "the page has no such file", code="not_found")
        return self._files[name].answer(request)


class _Asset:
    def __init__(self, file: Traversable) -> None:
        self._content = file.read_bytes()
        self._type = TYPES["." + file.name.rpartition(".")[2]]
        self._headers = {**HEADERS, "etag": f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'}

    def answer(self, request: Request) -> Response:
        """The file, or 304 where the browser has it."""
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers, media_type=self._type)
