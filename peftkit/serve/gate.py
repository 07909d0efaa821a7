"""Who may ask: holders of the key; without a key, programs on this machine, and no web page."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from peftkit.serve.answers import refusal
from peftkit.serve.requests import RequestError

OPEN = ("/health",)
"""Paths that need no key."""


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Gate:
    """Lets through requests that carry the key, or, where there is none, that come from here.

    Without a key, names other than this machine's are refused in `Host` and `Origin`: a web page
    that is open in a browser here could otherwise send requests too.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            problem = self._problem(Headers(scope=scope))
            if problem is not None:
                await refusal(problem)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, headers: Headers) -> RequestError | None:
        if self._key is not None:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode(), self._key.encode())
            if scheme.lower() == "bearer" and right:
                return None
            return RequestError(
                "the key is wrong." if given else "a key is needed.",
                fix="Send the header `Authorization: Bearer KEY`.",
                status=401,
                code="invalid_api_key",
            )
        origin = headers.get("origin")
        asked = [f"//{headers.get('host', '')}", *([origin] if origin is not None else [])]
        if all(is_loopback(_host(url)) for url in asked):
            return None
        return RequestError(
            "without a key, only programs on this machine may ask.",
            found=f"Host: {headers.get('host')}; Origin: {origin or 'none'}",
            fix="Start the server with --api-key.",
            status=403,
        )


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
