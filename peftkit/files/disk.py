"""Files: checked when read, written atomically.

Reading: regular files only, strict JSON, safetensors headers checked before their payload.
Writing: a temporary file in the same folder, fsync, rename, fsync of the folder; so a crash, a full
disk or a signal leaves the old file or the new one. No pickle, in either direction.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from peftkit.errors import AdapterError, OutputError, PeftkitError, RunError, first_few
from peftkit.files.safetensors_header import (
    DTYPE_NAMES,
    DTYPES,
    MAX_HEADER_BYTES,
    Header,
    TensorSpec,
    header_bytes,
    read_header,
)
from peftkit.files.strict_json import parse_json, shown

ErrorType = type[PeftkitError]
MAX_JSON_BYTES = 1 << 20


def open_regular(path: Path, *, error: ErrorType = AdapterError) -> BinaryIO:
    """Open a regular file, or a symlink to one, for reading; anything else raises `error`."""
    asked = f"cannot read {path}"
    try:
        mode = os.stat(path).st_mode  # before open: opening a fifo would wait for a writer
        # SIM115: the caller closes it
        file = open(path, "rb") if stat.S_ISREG(mode) else None  # noqa: SIM115
    except FileNotFoundError:
        broken = os.path.islink(path)
        found = "It is a symbolic link to nothing." if broken else "There is no such file."
        raise error(asked, found=found) from None
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the name
        raise error(asked, found=str(problem)) from None
    if file is None:
        kind = "a folder" if stat.S_ISDIR(mode) else "a fifo, socket or device"
        raise error(asked, found=f"It is {kind}.", fix="Give a regular file.")
    return file


def sha256_of(path: Path) -> str:
    """Return the hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_json(
    path: Path, *, max_bytes: int = MAX_JSON_BYTES, error: ErrorType = AdapterError
) -> dict[str, Any]:
    """Read a JSON object, strictly (see `parse_json`); anything that is not one raises `error`."""
    with open_regular(path, error=error) as file:
        data = file.read(max_bytes + 1)
    asked = f"cannot read {path} as JSON"
    if len(data) > max_bytes:
        raise error(asked, found=f"It is larger than {max_bytes:,} bytes.")
    return parse_json(data, asked, error=error)


class TensorFile:
    """An open safetensors file, its header checked; reads one tensor at a time, as a copy."""

    def __init__(self, path: Path, file: BinaryIO, header: Header, error: ErrorType) -> None:
        self.path, self.header = path, header
        self._file, self._error = file, error

    def raw(self, name: str) -> Tensor:
        """Return a tensor's bytes: uint8 of shape (num_bytes,)."""
        entry = self.header.tensors[name]
        data = torch.empty(entry.end - entry.start, dtype=torch.uint8)
        self._file.seek(self.header.payload + entry.start)
        # not mmap: a file cut short meanwhile would be a SIGBUS instead of an error
        if self._file.readinto(data.numpy().data) != data.numel():  # type: ignore[attr-defined]
            raise self._error(f"cannot read {self.path}", found="It shrank while it was read.")
        return data

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in its own dtype and shape."""
        entry = self.header.tensors[name]
        dtype = DTYPES[entry.dtype][1]
        if dtype is None:
            raise self._error(
                f"cannot use tensor {shown(name)} of {self.path}",
                found=f"Its dtype {entry.dtype} has no torch counterpart.",
            )
        return self.raw(name).view(dtype).reshape(entry.shape)


@contextlib.contextmanager
def open_tensors(
    path: Path, *, max_header_bytes: int = MAX_HEADER_BYTES, error: ErrorType = AdapterError
) -> Iterator[TensorFile]:
    """Open a safetensors file after checking its whole header; anything wrong raises `error`."""
    with open_regular(path, error=error) as file:
        header = read_header(path, file, max_bytes=max_header_bytes, error=error)
        yield TensorFile(path, file, header, error)


def read_tensors(
    path: Path, *, max_header_bytes: int = MAX_HEADER_BYTES, error: ErrorType = AdapterError
) -> dict[str, Tensor]:
    """Return every tensor of a safetensors file, on the CPU, each with memory of its own."""
    with open_tensors(path, max_header_bytes=max_header_bytes, error=error) as file:
        return {name: file.tensor(name) for name in file.header.tensors}


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that hold NaN or Infinity."""
    return [name for name, tensor in tensors.items() if not is_finite(tensor)]


def is_finite(tensor: Tensor) -> bool:
    """True if every number is finite; needs little extra memory."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    small = tensor.dtype in (torch.float8_e5m2, torch.float8_e4m3fn)  # torch has no min of these
    for chunk in tensor.detach().reshape(-1).split(1 << 22):
        # NaN comes out of aminmax too; eight times as fast as isfinite().all()
        lowest, highest = torch.aminmax(chunk.float() if small else chunk)
        if not (lowest.isfinite() and highest.isfinite()):
            return False
    return True


def fsync_file(path: Path) -> None:
    """Flush a file that somebody else has written, so that it survives a crash."""
    with open(path, "rb+") as file:  # Windows flushes only what is open for writing
        os.fsync(file.fileno())


def fsync_dir(folder: Path) -> None:
    """Flush a folder, so that renames in it survive a crash."""
    if os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Return the free space of the file system that holds `folder`."""
    return shutil.disk_usage(folder).free


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise RunError where a disk has less free space than will be needed."""
    if num_bytes > (free := free_bytes(folder)):
        raise RunError(
            f"cannot write to {folder}",
            found=f"The disk is full: {num_bytes:,} bytes needed, {free:,} free.",
            fix="Make room, or choose another output folder.",
        )


def writable_folder(folder: Path) -> Path:
    """Create a folder if needed and check that it is writable; OutputError otherwise."""
    asked = f"cannot write into {folder}"
    fix = "Choose another output folder."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{secrets.token_hex(4)}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except (FileExistsError, NotADirectoryError):
        raise OutputError(asked, found="There is a file of that name.", fix=fix) from None
    except OSError as problem:
        raise OutputError(asked, found=str(problem), fix=fix) from None
    return folder


def check_folder(folder: Path) -> None:
    """Raise OutputError where a folder cannot be made or written to; creates nothing."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        kind = "not writable" if nearest.is_dir() else "a file"
        raise OutputError(
            f"cannot write into {folder}",
            found=f"{nearest} is {kind}.",
            fix="Choose another output folder.",
        )


@contextlib.contextmanager
def replacing(path: Path, num_bytes: int) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path`, complete and durable, when the block ends well.

    Raises OutputError where `path` cannot be written, RunError for a full or broken disk. On these
    and on any exception of the block, what was there stays and no partial file is left. A symbolic
    link at `path` is refused: following it would write elsewhere, replacing it would lose it.
    """
    asked = f"cannot write {path}"
    if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
        kind = "a symbolic link" if os.path.islink(path) else "not a regular file"
        raise OutputError(asked, found=f"It exists and is {kind}.", fix="Remove it first.")
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        # "x": never through a link that someone put there; permissions are left to the umask
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_dir(path.parent)
    except BaseException as problem:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(problem, OSError):
            raise _write_error(problem, asked, path.parent, num_bytes) from problem
        raise


def _write_error(problem: OSError, asked: str, folder: Path, num_bytes: int) -> PeftkitError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        found = f"The disk is full: {num_bytes:,} bytes needed, {free_bytes(folder):,} free."
        if problem.errno != errno.ENOSPC:
            found += f"\nThe system says: {problem.strerror} (a quota, or ulimit -f)."
        return RunError(asked, found=found, fix="Make room, or choose another output folder.")
    if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR):
        return OutputError(asked, found=str(problem), fix="Choose another output folder.")
    return RunError(asked, found=str(problem))


def write_bytes_atomic(data: bytes, path: Path) -> None:
    """Write a whole file, or leave what was there."""
    with replacing(path, len(data)) as file:
        file.write(data)


def write_text(text: str, path: Path) -> None:
    """Write a whole UTF-8 file, or leave what was there."""
    write_bytes_atomic(text.encode("utf-8"), path)


def write_json(value: Mapping[str, Any], path: Path) -> None:
    """Write an object as sorted, indented JSON; NaN and Infinity are a RunError."""
    try:
        text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
    except ValueError as problem:
        raise RunError(f"cannot write {path}", found=str(problem)) from None
    write_text(text + "\n", path)


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, byte for byte as the safetensors library would.

    Raises RunError for no tensors and for non-finite ones, naming them; else as `replacing`.
    """
    asked = f"cannot save {path}"
    if not tensors:
        raise RunError(asked, found="There are no tensors to save.")
    if bad := non_finite(tensors):
        raise RunError(
            asked,
            found=f"{len(bad)} of {len(tensors)} tensors hold NaN or Infinity: "
            f"{first_few(bad, 3, ', ')}",
            fix="The run diverged: lower the learning rate, or go back to an earlier checkpoint.",
        )
    specs = specs_of(tensors)
    write_tensor_stream(path, specs, (tensors[spec.name] for spec in specs), metadata)


def specs_of(tensors: Mapping[str, Tensor]) -> list[TensorSpec]:
    """Return how a safetensors file of these begins, in the order in which they are written."""
    specs = [TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
    return sorted(specs, key=lambda spec: spec.order)


def write_tensor_stream(
    path: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file whose tensors come one at a time, in the order of `specs`.

    A tensor may also come as its bytes (uint8). Nothing is checked for being finite.
    """
    header = header_bytes(specs, metadata)
    with replacing(path, len(header) + sum(spec.num_bytes for spec in specs)) as file:
        file.write(header)
        for spec, tensor in zip(specs, tensors, strict=True):
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            assert data.numel() == spec.num_bytes, spec
            file.write(data.numpy().data)
