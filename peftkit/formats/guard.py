"""Checks of untrusted adapter files, before any other code reads them.

Nothing is unpickled or imported. The checks recognise a file's kind, read its header in bounded
time and memory, and compare the names, dtypes and sizes of its tensors with the limits for
adapters.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from peftkit.errors import AdapterError, first_few
from peftkit.files import disk
from peftkit.files.strict_json import Json, shown
from peftkit.files.tensors import Entry, Header, TensorFile, non_finite, open_tensors

MAX_HEADER_BYTES = 8 << 20  # 60,000 tensors
MAX_TENSORS = 50_000
MAX_RANK = 4
MAX_PAYLOAD_BYTES = 16 << 30
DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,512}")

SAFETENSORS = "safetensors"
UNKNOWN = "a binary file of an unknown kind"
PICKLE = "a pickle"
TORCH_ARCHIVE = "a torch.save archive (a zip with a pickle in it)"
LFS_POINTER = "a git-lfs pointer"
WEB_PAGE = "a web page (HTML or XML)"
JSON_TEXT = "JSON text"

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"version https://git-lfs.github.com/spec/", LFS_POINTER),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"\x89HDF\r\n", "an HDF5 file"),
    (b"\x93NUMPY", "a numpy file"),
)


INSTEAD_OF_PICKLE = (
    "A pickle can run code when it is read, so it is not opened: use safetensors. This line, "
    "run in the folder, converts the tensors without running code:\n"
    'python -c "import torch; from safetensors.torch import save_file; '
    "save_file(torch.load('{}', weights_only=True), 'adapter_model.safetensors')\""
)
"""Advice for a pickle, by its name: a command that reads only its tensors."""
_FIXES = {
    PICKLE: INSTEAD_OF_PICKLE.format("adapter_model.bin"),
    TORCH_ARCHIVE: INSTEAD_OF_PICKLE.format("adapter_model.bin"),
    LFS_POINTER: "The file itself was not downloaded: run 'git lfs pull', or download it again.",
    WEB_PAGE: "It is the error page of a failed download: download it again (logged in?).",
}


def file_kind(path: Path) -> str:
    """Return a short description of a file's kind, by its first bytes."""
    with disk.open_regular(path) as file:
        head = file.read(4096)
        size = file.seek(0, 2)
    if not head:
        return "an empty file"
    # first: the length of a header can look like the start of another kind
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return SAFETENSORS
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return TORCH_ARCHIVE if name == "a zip archive" and b"data.pkl" in head else name
    if re.match(rb"\x80[\x02-\x05][^\x00]", head):
        return PICKLE
    if head[257:262] == b"ustar":
        return "a tar archive"
    return _text_kind(head)


def _text_kind(head: bytes) -> str:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if re.match(rb"<(!doctype|html|head|body|\?xml)", start, re.IGNORECASE):
        return WEB_PAGE
    if start[:1] in (b"{", b"[") and b"\0" not in head:
        return JSON_TEXT
    if re.fullmatch(rb"[\t\n\r -~]+", head):
        return f"text: {shown(start[:48].decode())}"
    return UNKNOWN


def check_safetensors(path: Path) -> Header:
    """Return the header of an adapter's tensor file; raises AdapterError if it is invalid."""
    with _checked(path) as file:
        return file.header


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return an adapter's tensors, on the CPU, checked, all of them finite.

    Raises:
        AdapterError: As `check_safetensors`, or tensors hold NaN or Infinity.
    """
    with _checked(path) as file:
        tensors = {name: file.tensor(name) for name in file.header.tensors}
    check_finite(tensors, path)
    return tensors


def check_finite(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise AdapterError, naming the file and a tensor, if a tensor holds NaN or Infinity."""
    if bad := non_finite(tensors):
        raise AdapterError(
            f"cannot use {path}",
            found=f"{len(bad)} of {len(tensors)} tensors hold NaN or Infinity, such as {bad[0]}.",
            fix="Its training diverged: use an earlier checkpoint.",
        )


def read_json(path: Path, *, max_bytes: int = disk.MAX_JSON_BYTES) -> Json:
    """Read an adapter's JSON file, strictly (`files.strict_json`); raises AdapterError."""
    kind = file_kind(path)
    if kind in _FIXES:
        raise AdapterError(f"cannot read {path} as JSON", found=f"It is {kind}.", fix=_FIXES[kind])
    return disk.read_json(path, max_bytes=max_bytes)


@contextlib.contextmanager
def _checked(path: Path) -> Iterator[TensorFile]:
    message = f"cannot read {path} as safetensors"
    kind = file_kind(path)
    if kind not in (SAFETENSORS, UNKNOWN):
        fix = _FIXES.get(kind, "Use an adapter saved as safetensors.")
        raise AdapterError(message, found=f"It is {kind}.", fix=fix)
    with open_tensors(path, max_header_bytes=MAX_HEADER_BYTES) as file:
        tensors = file.header.tensors
        if len(tensors) > MAX_TENSORS:
            raise AdapterError(
                message, found=f"{len(tensors):,} tensors; the limit is {MAX_TENSORS:,}"
            )
        if sum(entry.end - entry.start for entry in tensors.values()) > MAX_PAYLOAD_BYTES:
            raise AdapterError(message, found=f"more than {MAX_PAYLOAD_BYTES:,} bytes of tensors")
        bad = [problem for name, entry in tensors.items() if (problem := _problem(name, entry))]
        if bad or not tensors:
            raise AdapterError(
                message,
                found=first_few(bad, 5) or "no tensors",
                fix="This is not an adapter, or it is damaged: download or save it again.",
            )
        yield file


def _problem(name: str, entry: Entry) -> str:
    """Return what is wrong with a tensor of an adapter, or an empty string."""
    if not NAME.fullmatch(name):
        return f"the tensor name {shown(name)}"
    if entry.dtype not in DTYPES:
        return f"{name}: dtype {entry.dtype}; one of {', '.join(sorted(DTYPES))} is allowed"
    if not 1 <= len(entry.shape) <= MAX_RANK or 0 in entry.shape:
        return f"{name}: shape {entry.shape}"
    return ""
