"""Streaming parser of untrusted multipart/form-data (RFC 7578), which writes the file to disk.

It supports one file and a few short fields only, which saves a dependency.
"""

from __future__ import annotations

from collections.abc import Callable
from email.message import Message
from email.parser import HeaderParser
from typing import BinaryIO

from peftkit.errors import PeftkitError

MAX_HEAD, MAX_FIELD, MAX_PARTS, MAX_NAME = 8192, 4096, 16, 255
"""Limits: bytes of the headers of a part, bytes of a field, parts, characters of a file name."""
FILE = "file"
"""Name of the part with the file."""
MAX_OVERHEAD = MAX_PARTS * (MAX_HEAD + MAX_FIELD)
"""Bytes of a form around its file."""


class FormError(PeftkitError):
    """The bytes are not a form, or exceed a limit.

    Args:
        part: Name of the part that has the error.
        is_too_long: Whether a limit is exceeded.
    """

    def __init__(
        self, problem: str, *, found: str = "", part: str | None = None, is_too_long: bool = False
    ) -> None:
        super().__init__(problem, found=found)
        self.part, self.is_too_long = part, is_too_long


class Form:
    """Parses a form incrementally, and writes its file.

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
            raise FormError(
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
            FormError: The bytes are not a form, or exceed a limit.
        """
        self._left += data
        while not self._is_over and (self._take_head() if self._in_head else self._take_part()):
            self._in_head = not self._in_head
        if self._is_over:
            self._left.clear()

    def close(self) -> None:
        """Check that the form is complete.

        Raises:
            FormError: It is truncated, or has no file.
        """
        if not self._is_over:
            raise FormError("the upload was cut short.")
        if self.filename is None:
            raise FormError("the upload has no file.", part=FILE)

    def _take_head(self) -> bool:
        """Parse the headers of a part; return False if more bytes are needed."""
        self._is_over = self._left.startswith(b"--")
        at = self._left.find(b"\r\n\r\n")
        if not self._is_over and (at > MAX_HEAD or (at < 0 and len(self._left) > MAX_HEAD)):
            raise FormError("the upload has a part whose headers are too long.")
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
            raise FormError(f"the upload has a part without a name, or over {MAX_PARTS} parts.")
        if name in self.fields or (name == FILE and self.filename is not None):
            raise FormError("the upload has two parts with the same name.", part=name[:80])
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
            raise FormError("the upload is too long.", found=reason, part=part, is_too_long=True)
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
