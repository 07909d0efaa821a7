"""Who may ask, and whose things a request may see."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from peftkit.serve.answers import refusal
from peftkit.serve.requests import RequestError

OWNER = "owner"
"""Name of the owner in a request's state: see `owner_of`."""


def owner_of(key: str) -> str:
    """Return the name under which a key's files, jobs and models are kept; not the key itself."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Gate:
    """Passes requests with one of the keys; without keys, requests from this machine.

    Without a key, `Host` and `Origin` must name this machine: otherwise a web page in a browser
    here could send requests, too. What passes has its owner in its state, "" without keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and scope["path"] != "/health":
            owner = self._owner(Headers(scope=scope))
            if isinstance(owner, RequestError):
                await refusal(owner)(scope, receive, send)
                return
            scope.setdefault("state", {})[OWNER] = owner
        await self._app(scope, receive, send)

    def _owner(self, headers: Headers) -> str | RequestError:
        """Return whose request it is, or why it is refused."""
        if self._keys:
            given = _key(headers)
            # all are compared: the time tells nothing
            equal = [hmac.compare_digest(given.encode(), key.encode()) for key in self._keys]
            if any(equal):
                return owner_of(given)
            return RequestError(
                "the key is wrong." if given else "a key is needed.",
                fix="Send the header `Authorization: Bearer KEY`, or `X-API-Key: KEY`.",
                status=401,
                code="invalid_api_key",
            )
        origin = headers.get("origin")
        urls = [f"//{headers.get('host', '')}", *([origin] if origin is not None else [])]
        if all(is_loopback(_host(url)) for url in urls):
            return ""
        return RequestError(
            "without a key, only programs on this machine may ask.",
            found=f"Host: {headers.get('host')}; Origin: {origin or 'none'}",
            fix="Start the server with --api-key.",
            status=403,
        )


def _key(headers: Headers) -> str:
    """Return the key of a request, as OpenAI's or Tinker's clients send it."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and given.strip():
        return given.strip()
    return headers.get("x-api-key", "").strip()


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
