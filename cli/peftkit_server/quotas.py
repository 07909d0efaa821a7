"""Quotas of API keys: no key can use up what the keys share.

`Intake` handles every route, so a new route has these limits without further code.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peftkit_server.access import OWNER
from peftkit_server.limits import Limits
from peftkit_server.refusals import RequestError, refusal
from peftkit_server.store import Store

T = TypeVar("T")

FILE, MODEL, WEIGHTS, SAMPLER = "file", "model", "tinker.weights", "tinker.sampler"
"""Kinds of the store's documents; files and models have their sizes."""
RECORDS = ("job", "tinker.session", "tinker.model", SAMPLER)
"""Kinds that `key_records` counts."""


class Intake:
    """Middleware that bounds the open requests of an owner and the time for a body to arrive."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits, self._open = app, limits, Counter[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        owner = scope.get("state", {}).get(OWNER)
        if scope["type"] != "http" or owner is None:
            await self._app(scope, receive, send)
            return
        if self._open[owner] >= self._limits.key_requests:
            error = quota_error(
                f"this key has {self._open[owner]:,} open requests", "key_requests", 429
            )
            await refusal(error)(scope, receive, send)
            return
        self._open[owner] += 1
        try:
            await self._app(scope, self._timed(receive), send)
        finally:
            self._open[owner] -= 1
            self._open += Counter()  # drops owners without requests

    def _timed(self, receive: Receive) -> Receive:
        """Return `receive` with a deadline for the body."""
        limits, loop = self._limits, asyncio.get_running_loop()
        began, num_bytes, has_ended = loop.time(), 0, False

        async def timed() -> Message:
            nonlocal num_bytes, has_ended
            if has_ended:
                return await receive()
            until = began + limits.body_seconds + num_bytes / limits.body_rate
            try:
                message = await asyncio.wait_for(receive(), max(0.0, until - loop.time()))
            except TimeoutError:
                raise RequestError(
                    "the request's body did not arrive in time.",
                    found=f"{num_bytes:,} bytes arrived in {loop.time() - began:.0f} seconds.",
                    fix="Send the request again, over a faster connection.",
                    status=408,
                ) from None
            num_bytes += len(message.get("body", b""))
            has_ended = not message.get("more_body", False)
            return message

        return timed


@dataclass(eq=False, slots=True)
class Upload:
    """A reservation of an owner: a file that arrives, and its bytes."""

    owner: str
    size: int


class Quotas:
    """What one owner may store.

    Args:
        sweep: Removes what has expired; called before each check.
    """

    def __init__(self, limits: Limits, store: Store, sweep: Callable[[], None]) -> None:
        self.limits, self._store, self._sweep = limits, store, sweep
        self._uploads: list[Upload] = []

    def check_bytes(self, owner: str, size: int = 0) -> None:
        """Raise unless an owner may store `size` bytes in addition to its arriving uploads.

        Raises:
            RequestError: 507: the owner stores too much.
        """
        self._sweep()
        used = self._store.total(FILE, owner, "bytes") + self._store.total(MODEL, owner, "size")
        used += sum(upload.size for upload in [*self._uploads] if upload.owner == owner)
        if used + size >= self.limits.key_bytes:
            fix = "Delete files (DELETE /v1/files/ID) or models (DELETE /v1/models/NAME) first."
            raise quota_error(f"this key stores {used:,} bytes", "key_bytes", 507, fix)

    def reserve_file(self, owner: str, size: int) -> Upload:
        """Reserve a file of an owner, with the bytes that it declares.

        Raises:
            RequestError: 507: the owner has too many files, or as `check_bytes`.
        """
        with self._store.lock:
            number = self._store.count((FILE,), owner)
            number += sum(upload.owner == owner for upload in self._uploads)
            if number >= self.limits.key_files:
                fix = "Delete a file first: DELETE /v1/files/ID."
                raise quota_error(f"there are {number:,} files already", "key_files", 507, fix)
            self.check_bytes(owner, size)
            upload = Upload(owner, size)
            self._uploads.append(upload)
        return upload

    def grow(self, upload: Upload, size: int) -> None:
        """Extend a reservation to the bytes that arrived; errors as `check_bytes`."""
        if size > upload.size:
            with self._store.lock:
                self.check_bytes(upload.owner, size - upload.size)
                upload.size = size

    def settle(self, upload: Upload, put: Callable[[], T]) -> T:
        """Store a reserved file by `put`; it is counted once at any time."""
        with self._store.lock:
            stored = put()
            self._uploads.remove(upload)
        return stored

    def release(self, upload: Upload) -> None:
        """End a reservation, unless it is settled."""
        with self._store.lock:
            if upload in self._uploads:
                self._uploads.remove(upload)

    def check_model(self, owner: str, num_pending: int = 0) -> None:
        """Raise unless an owner may save another model.

        Args:
            num_pending: Models that the owner's jobs will save.

        Raises:
            RequestError: 507: the owner has too many models, or as `check_bytes`.
        """
        self._sweep()
        number = self._store.count((MODEL,), owner)
        if number + num_pending >= self.limits.key_models:
            jobs = f" and {num_pending:,} jobs" if num_pending else ""
            fix = "Delete a model first: DELETE /v1/models/NAME."
            raise quota_error(f"this key has {number:,} saved models{jobs}", "key_models", 507, fix)
        self.check_bytes(owner)

    def check_record(self, owner: str) -> None:
        """Make room for another job, session, model or sampler: drop the oldest samplers.

        Raises:
            RequestError: 429: the owner has too many others.
        """
        limit = self.limits.key_records
        if self._store.count(RECORDS, owner) < limit:
            return
        self._store.delete_oldest(SAMPLER, owner, 1 + limit // 10)
        if (number := self._store.count(RECORDS, owner)) >= limit:
            fix = "Use another key, or ask the operator to raise the limit."
            text = f"this key has {number:,} jobs, sessions and models"
            raise quota_error(text, "key_records", 429, fix)


def quota_error(
    problem: str, name: str, status: int, fix: str = "Try again when others have ended."
) -> RequestError:
    """Return the error for an exceeded limit; the operator changes it with --limit."""
    return RequestError(
        f"{problem}.", found=f"The server's limit is {name}.", fix=fix, status=status, code=name
    )
