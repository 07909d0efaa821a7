"""Authentication, and the owner whose files, jobs and models a request may access."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from peftkit_server.refusals import RequestError, refusal

OWNER = "owner"
"""Key of the owner in a request's state: see `owner_of`."""


def owner_of(key: str) -> str:
    """Return the owner id of a key: a digest, under which its files, jobs and models are stored."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Gate:
    """Middleware that accepts requests with one of the keys; without keys, local requests.

    Without keys, `Host` and `Origin` must be loopback addresses; a web page in a local browser
    could send requests otherwise. An accepted request has its owner in its state; "" without keys.
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
        """Return the owner of a request, or why it is refused."""
        if self._keys:
            sent = _key(headers)
            # compares all keys, in constant time
            equal = [hmac.compare_digest(sent.encode(), key.encode()) for key in self._keys]
            if any(equal):
                return owner_of(sent)
            return RequestError(
                "the key is wrong." if sent else "the server requires a key.",
                fix="Send the header `Authorization: Bearer KEY`, or `X-API-Key: KEY`.",
                status=401,
                code="invalid_api_key",
            )
        origin = headers.get("origin")
        urls = [f"//{headers.get('host', '')}", *([origin] if origin is not None else [])]
        if all(is_loopback(_host(url)) for url in urls):
            return ""
        return RequestError(
            "without a key, the server accepts requests from this machine only.",
            found=f"Host: {headers.get('host')}; Origin: {origin or 'none'}",
            fix="Start the server with --api-key.",
            status=403,
        )


def _key(headers: Headers) -> str:
    """Return the key of a request, from the header of OpenAI's or Tinker's clients."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip()


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
