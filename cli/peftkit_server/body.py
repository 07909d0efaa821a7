"""Bodies of requests, up to a limit: bytes, and forms with a file."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import BinaryIO

from starlette.requests import ClientDisconnect, Request

from peftkit.files.disk import free_bytes, is_disk_full
from peftkit_server.refusals import RequestError

MAX_HEAD, MAX_FIELD, MAX_PARTS, MAX_NAME = 8192, 4096, 16, 255
"""Limits: bytes of the headers of a part, bytes of a field, parts, characters of a file name."""
FILE = "file"
"""Name of the part with the file."""
MAX_OVERHEAD = MAX_PARTS * (MAX_HEAD + MAX_FIELD)
"""Bytes of a form around its file."""


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
        RequestError: As `Form`, `on_file` and `reserve`; or the client disconnected.
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
    return form


class Form:
    """Streaming parser of untrusted multipart/form-data (RFC 7578), which writes the file to disk.

    It supports one file and a few short fields only, which saves a dependency.

    Args:
        content_type: The Content-Type header of the request.
        file: Receives the bytes of the file.
        max_bytes: Maximum size of the file.
        on_file: Called with the fields so far before the file is written.

    Attributes:
        fields: The other parts, by name.
        filename: File name from the client; never used as a path.
        num_bytes: Bytes of the file so far.
    """

    def __init__(
        self,
        content_type: str,
        file: BinaryIO,
        max_bytes: int,
        on_file: Callable[[dict[str, str]], None] = lambda fields: None,
    ) -> None:
        self.fields: dict[str, str] = {}
        self._on_file = on_file
        self.filename: str | None = None
        self.num_bytes = 0
        self._file, self._max_bytes = file, max_bytes
        head = Message()
        head["content-type"] = content_type[:MAX_HEAD]
        boundary = head.get_boundary()
        if head.get_content_type() != "multipart/form-data" or not boundary:
            raise RequestError(
                "an upload must be multipart/form-data with a boundary.",
                found=f"Content-Type: {content_type[:80] or 'none'}",
            )
        self._mark = b"\r\n--" + boundary.encode("ascii", "replace")[:200]
        self._left = bytearray(b"\r\n")  # the first boundary then matches the mark, too
        self._in_head, self._is_over = False, False
        self._name, self._value, self._num_parts = "", bytearray(), 0

    def feed(self, data: bytes) -> None:
        """Parse the next bytes; bytes after the form are discarded.

        Raises:
            RequestError: The bytes are not a form, or exceed a limit.
        """
        self._left += data
        while not self._is_over and (self._take_head() if self._in_head else self._take_part()):
            self._in_head = not self._in_head
        if self._is_over:
            self._left.clear()

    def close(self) -> None:
        """Check that the form is complete.

        Raises:
            RequestError: It is truncated, or has no file.
        """
        if not self._is_over:
            raise RequestError("the upload was cut short.")
        if self.filename is None:
            raise RequestError("the upload has no file.", param=FILE)

    def _take_head(self) -> bool:
        """Parse the headers of a part; return False if more bytes are needed."""
        self._is_over = self._left.startswith(b"--")
        at = self._left.find(b"\r\n\r\n")
        if not self._is_over and (at > MAX_HEAD or (at < 0 and len(self._left) > MAX_HEAD)):
            raise RequestError("the upload has a part whose headers are too long.")
        if self._is_over or at < 0:
            return False
        text = self._left[:at].decode("utf-8", "replace").lstrip("\r\n")
        del self._left[: at + 4]
        try:
            headers = HeaderParser().parsestr(text)
            name = headers.get_param("name", header="content-disposition")
            filename = headers.get_filename("")
        except (LookupError, ValueError):  # an unknown charset, for example
            name = None
        self._num_parts += 1
        if not isinstance(name, str) or self._num_parts > MAX_PARTS:
            raise RequestError(f"the upload has a part without a name, or over {MAX_PARTS} parts.")
        if name in self.fields or (name == FILE and self.filename is not None):
            raise RequestError("the upload has two parts with the same name.", param=name[:80])
        self._name, self._value = name[:MAX_NAME], bytearray()
        if name == FILE:
            self._on_file(self.fields)
            self.filename = _plain(filename)[:MAX_NAME] or "upload"
        return True

    def _take_part(self) -> bool:
        """Read a part (or the preamble); return False if more bytes are needed."""
        left, mark, is_file = self._left, self._mark, self._name == FILE
        at = left.find(mark)
        end = at if at >= 0 else max(0, len(left) - len(mark) + 1)
        if is_file:
            self._file.write(left[:end])
            self.num_bytes += end
        else:
            self._value += left[:end]
        size = self.num_bytes if is_file else len(self._value)
        limit = self._max_bytes if is_file else MAX_FIELD
        if size > limit:
            reason, part = f"The limit of this part is {limit:,} bytes.", self._name[:80] or None
            raise RequestError("the upload is too long.", found=reason, status=413, param=part)
        if at < 0:
            del left[:end]
            return False
        del left[: end + len(mark)]
        if self._name and not is_file:
            self.fields[self._name] = _plain(self._value.decode("utf-8", "replace"))
        return True


def _plain(text: str) -> str:
    """Replace unpaired surrogates, which cannot be encoded as UTF-8."""
    return text.encode("utf-8", "replace").decode()


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
