"""Images, sounds and videos as rows name them, and where their bytes are read: bounded.

One is a path (beside the data file that names it), a data URL, encoded bytes, or {"bytes": ...,
"path": ...} as data sets have it. Nothing is ever fetched.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from peftkit.data.load import Record
from peftkit.errors import DataError
from peftkit.files.strict_json import shown

MAX_BYTES = 100 * 2**20
"""Of what is encoded."""
STAMP = ("path", "num_bytes", "changed")
STORED = {
    "kind": "string",
    "path": "large_string",
    "num_bytes": "int64",
    "changed": "int64",
    "data": "large_binary",
    "digest": "string",
    "which": "string",
}
"""How one lies in an Arrow file: the path of its own, with its size and time, or bytes."""
_URL = re.compile(r"(?i)[a-z][a-z0-9+.-]*://")
_DATA_URL = re.compile(r"(?i)data:[^,;]*(;[^,;]*)*;base64,")


@dataclass(frozen=True, slots=True)
class Limits:
    """How media are read for a model.

    Attributes:
        max_pixels: Of an image, or a frame; larger ones are scaled down. None: as they are.
        rate: Samples a second of a sound.
        max_seconds: Of a sound; longer ones are refused.
        video_frames: Of a video, evenly over its length.
    """

    max_pixels: int | None = None
    rate: int = 16_000
    max_seconds: float = 30.0
    video_frames: int = 16


class Media:
    """An image, a sound or a video as it is stored: a path, bytes (mapped, maybe), or a data URL.

    A class of these says all that is particular to its kind. Once decoded, its repr is a hash of
    its bytes: wherever it lies, the same one reads the same.

    Args:
        source: The row that names it. which: Which of the row's it is, for messages.
    """

    __slots__ = ("_digest", "data", "source", "which")
    kind: ClassVar[str]
    """What it is, in a word."""
    name: ClassVar[str]
    """What processors and chat templates call it: {"type": name}, name_token, name_token_id."""
    argument: ClassVar[str]
    """What a processor is given them as."""
    fields: ClassVar[tuple[str, ...]]
    """Fields of a row that hold some."""
    parts: ClassVar[tuple[str, ...]]
    """Types of the parts of a message that are one; also keys of such a part."""
    mark: ClassVar[str]
    """Stands for one in the texts of an example."""
    readers: ClassVar[tuple[str, ...]]
    """Attributes of a processor, one of which reads them."""
    packages: ClassVar[tuple[str, ...]]
    """What they are read by, as it is imported."""
    extra: ClassVar[str]
    """The extra of peftkit that brings these packages."""

    def __init__(
        self,
        data: Path | bytes | memoryview | str,
        source: str,
        which: str = "",
        digest: str = "",
    ) -> None:
        self.data, self.source, self._digest = data, source, digest
        self.which = which or f"the {self.kind}"

    def __repr__(self) -> str:
        return f"{self.kind} {self._digest or self.source}"

    @classmethod
    def require(cls) -> None:
        """See that some can be read.

        Raises:
            DataError: A package is not installed.
        """
        missing = [name for name in cls.packages if importlib.util.find_spec(name) is None]
        if missing:
            raise DataError(
                f"Cannot read {cls.kind}s.",
                found=f"They need {', '.join(missing)}, which is not installed.",
                fix=f'pip install "peftkit[{cls.extra}]"',
            )

    def read(self, limits: Limits) -> Any:
        """Return it as a processor takes it.

        Raises:
            DataError: It is not there, is too large, or does not decode; names it.
        """
        raise NotImplementedError

    @classmethod
    def size(cls, read: Any) -> object:
        """Return all of one that was read that decides what a processor writes for it."""
        raise NotImplementedError

    @classmethod
    def told(cls, read: Any, limits: Limits) -> str:
        """Return how large one is that was read, for people."""
        raise NotImplementedError

    @classmethod
    def given(cls, rows: Sequence[Sequence[Any]], limits: Limits) -> dict[str, Any]:
        """Return how a processor is given those of several texts: one after the other."""
        return {cls.argument: [one for row in rows for one in row]}

    @classmethod
    def blank(cls, limits: Limits) -> Any:
        """Return one that holds next to nothing, to ask a processor with."""
        raise NotImplementedError

    def stored(self) -> dict[str, Any]:
        """Return what an Arrow file keeps of it; see STORED."""
        known = {"kind": self.kind, "digest": self._digest, "which": self.which}
        if isinstance(self.data, Path):
            there = self.data.stat()
            stamp = (str(self.data.absolute()), there.st_size, there.st_mtime_ns)
            return known | dict(zip(STAMP, stamp, strict=True))
        return known | {"data": self.encoded()}

    @classmethod
    def opened(cls, scalar: Any, source: str) -> Any:
        """Return one that Arrow has; bytes stay where they are."""
        path = scalar["path"].as_py()
        data = memoryview(scalar["data"].as_buffer()) if path is None else Path(path)
        return cls(data, source, scalar["which"].as_py(), scalar["digest"].as_py())

    def encoded(self) -> bytes:
        """Return the encoded bytes.

        Raises:
            DataError: They are not there, are no file's, or too many.
        """
        if isinstance(self.data, Path):
            try:
                there = self.data.stat()
                if not self.data.is_file():  # such as a device without an end
                    raise self.error("It is no file.", f"Name the file of the {self.kind}.")
                if there.st_size > MAX_BYTES:
                    raise self._too_long(there.st_size)
                stored = self.data.read_bytes()
            except OSError as problem:
                raise self.error(str(problem), "Mend or remove it.") from None
        elif isinstance(self.data, str):
            if len(self.data) > MAX_BYTES * 4 // 3:
                raise self._too_long(len(self.data) * 3 // 4)
            try:
                stored = base64.b64decode(self.data.partition(",")[2], validate=True)
            except binascii.Error as problem:
                raise self.error(f"Its data URL: {problem}", "Encode it as base64.") from None
        else:
            stored = bytes(self.data)
        if len(stored) > MAX_BYTES:
            raise self._too_long(len(stored))
        self._digest = self._digest or hashlib.sha256(stored).hexdigest()[:32]
        return stored

    def _too_long(self, size: int) -> DataError:
        return self.error(f"It has {size:,} bytes, more than {MAX_BYTES:,}.", "Make it smaller.")

    def error(self, found: str, fix: str) -> DataError:
        """Return the error of one that cannot be used."""
        place = f"{self.data}: " if isinstance(self.data, Path) else ""
        return DataError(
            f"Cannot decode {self.which} of {self.source}.", found=f"{place}{found}", fix=fix
        )


MediaClass = type[Media]
AnyMedia = TypeVar("AnyMedia", bound=Media)


def is_as_stored(stamp: Mapping[str, Any]) -> bool:
    """Tell whether the file of a stored one, if it has one, is as it was."""
    if stamp["path"] is None:
        return True
    try:
        there = Path(stamp["path"]).stat()
    except OSError:
        return False
    return (there.st_size, there.st_mtime_ns) == (stamp["num_bytes"], stamp["changed"])


def media_of(
    cls: type[AnyMedia], value: object, record: Record, where: str, which: str = ""
) -> AnyMedia | None:
    """Return what a field holds as an image, a sound or a video; None where that is none.

    Raises:
        DataError: It is the address of one elsewhere.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | Path):
        return cls(value, record.source, which)
    if not isinstance(value, str) or not value:
        return None
    if _DATA_URL.match(value[:256]):
        return cls(value, record.source, which)
    if _URL.match(value):
        raise DataError(
            f"Cannot use {which} of {record.source}.",
            found=f"It is an address, {shown(value)}, and nothing is fetched.",
            fix="Download it, and name the file.",
        )
    path = Path(value).expanduser()
    beside = Path(where).expanduser().parent
    return cls(path if path.is_absolute() else beside / path, record.source, which)
