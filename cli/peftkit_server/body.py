"""Bodies of requests, up to a limit: bytes, and forms with a file."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from starlette.requests import ClientDisconnect, Request

from peftkit.files.disk import free_bytes, is_disk_full
from peftkit_server.multipart import MAX_OVERHEAD, Form, FormError
from peftkit_server.refusals import RequestError


async def bounded_body(request: Request, limit: int) -> bytes:
    """Return a request's body.

    Raises:
        RequestError: The body has more bytes than the limit, or the client disconnected.
    """
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise RequestError(
                    "the request is too long.", found=f"The limit is {limit:,} bytes.", status=413
                )
    except ClientDisconnect:
        raise RequestError("the client disconnected before the end of its request.") from None
    return bytes(body)


def declared_bytes(request: Request, limit: int) -> int:
    """Return the most bytes of the file in a form, by its Content-Length; 0: unknown.

    Raises:
        RequestError: 413: the file has more than `limit` bytes.
    """
    text = request.headers.get("content-length", "")
    size = int(text) if text.isascii() and text.isdigit() else 0
    if size > limit + MAX_OVERHEAD:
        raise RequestError(
            "the upload is too long.", found=f"The limit is {limit:,} bytes.", status=413
        )
    return min(size, limit)


async def uploaded_form(
    request: Request,
    file: BinaryIO,
    limit: int,
    *,
    on_file: Callable[[dict[str, str]], None] = lambda fields: None,
    reserve: Callable[[int], Awaitable[None]] | None = None,
) -> Form:
    """Write the file of a multipart form; return the form with its other fields.

    Args:
        on_file: As in `Form`.
        reserve: Called with the bytes so far.

    Raises:
        RequestError: It is not a form with a file, the file is longer than the limit, or the client
            disconnected; or as `on_file` and `reserve`.
    """
    try:
        form = Form(request.headers.get("content-type", ""), file, limit, on_file)
        async for chunk in request.stream():
            form.feed(chunk)
            if reserve is not None:
                await reserve(form.num_bytes)
        form.close()
    except ClientDisconnect:
        raise RequestError("the client disconnected during the upload.") from None
    except FormError as error:
        status = 413 if error.is_too_long else 400
        raise RequestError(
            error.problem, found=error.found, status=status, param=error.part
        ) from None
    return form


class DiskRoom:
    """Bytes on a disk that requests reserve before they send them."""

    def __init__(self) -> None:
        self._num_bytes, self._lock = 0, threading.Lock()

    @contextmanager
    def reserved(self, folder: Path, size: int) -> Iterator[None]:
        """Reserve bytes in a folder for a context.

        Raises:
            RequestError: 503: the disk has no room, now or during the context.
        """
        with self._lock:
            if free_bytes(folder) < self._num_bytes + size:
                raise _full_disk()
            self._num_bytes += size
        try:
            yield
        except Exception as problem:
            if is_disk_full(problem):
                raise _full_disk() from None
            raise
        finally:
            with self._lock:
                self._num_bytes -= size


def _full_disk() -> RequestError:
    return RequestError("the server's disk is full.", fix="Try again later.", status=503)
