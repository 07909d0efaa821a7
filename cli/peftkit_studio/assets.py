"""The page's files, and headers and checks that keep other web pages out."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

import starlette.datastructures
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peftkit_server.access import is_loopback
from peftkit_server.refusals import RequestError, refusal

MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Scripts and requests of this origin only; `trusted-types 'none'` makes innerHTML raise."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class SameOrigin:
    """Middleware that refuses requests of other origins, and adds HEADERS to every response.

    `Origin`, if sent, must match `Host`. If the server listens on a loopback address, `Host` must
    be one too: another name could point here by DNS rebinding.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._is_local = app, is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                pairs = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] += [pair for pair in pairs if pair[0] not in present]
            await send(message)

        if scope["type"] == "http" and not self._is_allowed(scope):
            error = RequestError("the request comes from another origin.", status=403)
            await refusal(error)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _is_allowed(self, scope: Scope) -> bool:
        headers = starlette.datastructures.Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname or ""
            is_same = origin is None or urlsplit(origin).netloc == host
        except ValueError:
            return False
        return is_same and (not self._is_local or is_loopback(name))


def _assets() -> dict[str, tuple[bytes, str, str]]:
    """Return the content, media type and ETag of each file of the page."""
    found = {}
    for file in files("peftkit_studio").joinpath("static").iterdir():
        if media_type := MEDIA_TYPES.get(Path(file.name).suffix):
            content = file.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found[file.name] = (content, f"{media_type}; charset=utf-8", etag)
    return found


ASSETS = _assets()
SCRIPTS = ", ".join(f"</static/{n}>; rel=modulepreload" for n in ASSETS if n.endswith(".js"))
"""The header Link of the page: its scripts load together, not one level of imports at a time."""


async def asset(request: Request) -> Response:
    """Return a file of the page by its name in the package."""
    name = request.path_params.get("name", "")
    found = ASSETS.get(name or "index.html")
    if found is None:
        return Response("There is no such file.", 404)
    content, media_type, etag = found
    headers = {"etag": etag} if name else {"etag": etag, "link": SCRIPTS}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)
