"""Files in object storage, through fsspec: copies of them in peftkit's cache, and uploads.

Credentials come from the environment only, as each package documents (AWS_*, GOOGLE_*, AZURE_*,
HF_TOKEN). A copy is complete or absent. Its name depends on the version that the store reports, so
a changed object is fetched again.
"""

from __future__ import annotations

import functools
import hashlib
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from peftkit.errors import ConfigError, DataError, DiskFullError, PeftkitError, RunError
from peftkit.files.disk import alone, cache_folder, is_disk_full, replacing

PACKAGES: Mapping[str, str] = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "hf": "huggingface_hub",
    "https": "aiohttp",
}
"""The schemes of URLs that are read, and the package that reads each."""
FOLDER = "remote"
CHUNK_BYTES = 1 << 20
STARTED = ".peftkit-upload"
"""Mark of an upload that has begun, with the content of its last mark."""
MAX_MARK_BYTES = 1 << 20
VERSIONS = (
    *("ETag", "etag", "generation", "version_id", "blob_id"),
    *("LastModified", "Last-Modified", "last_modified", "mtime"),
)
"""Entries of a store's listing that change with an object."""
_SECRET = re.compile(
    r"://[^/]*:[^/]*@|[?&][^=]*(signature|sig|token|key|credential|secret)[^=]*=", re.IGNORECASE
)
"""A user with a password, or parameters of a signed URL."""
T = TypeVar("T")
Kind = Callable[..., PeftkitError]
"""The class of the error for an object that does not exist."""


@functools.cache
def fetch(url: str, error: Kind = DataError) -> Path:
    """Return the copy of a file in the cache, downloading it if needed.

    A process fetches a URL once; the file may change for the next process.

    Raises:
        PeftkitError: Of the given class: there is no such file. RunError: The download failed.
    """
    fs, path = _open(url)
    message = f"cannot read {url}"
    info = _call(message, error, lambda: fs.info(path))
    if info.get("type") == "directory":
        raise error(f"{message}.", found="It is a folder.", fix="Name a file, or a pattern.")
    target = cache_folder() / FOLDER / _key(url, [info]) / posixpath.basename(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with alone(target):
        if not target.is_file():
            _download(fs, path, info, target, message, error)
    return target


@functools.cache
def fetch_folder(url: str, error: Kind = DataError) -> Path:
    """Return the copy of a folder in the cache, such as a base model; see `fetch`."""
    message = f"cannot read {url}"
    if url.startswith("https:"):
        raise error(f"{message}.", found="A folder cannot be listed over https.", fix=_FOLDERS)
    fs, path = _open(url)
    found = _call(message, error, lambda: fs.find(path, detail=True))
    if not found:
        raise error(f"{message}.", found="There is no such folder, or it is empty.")
    folder = cache_folder() / FOLDER / _key(url, [found[name] for name in sorted(found)])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        if not folder.is_dir():
            temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
            try:
                for name, info in found.items():
                    inside = posixpath.relpath(_without_scheme(name), _without_scheme(path))
                    if inside.startswith("..") or posixpath.isabs(inside):
                        raise error(f"{message}.", found=f"It holds {name!r}, outside the folder.")
                    target = temporary / inside
                    target.parent.mkdir(parents=True, exist_ok=True)
                    _download(fs, name, info, target, message, error)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return folder


def matching(pattern: str) -> list[str]:
    """Return the sorted URLs of files that match a pattern such as s3://bucket/rows/*.jsonl."""
    fs, path = _open(pattern)
    found = _call(f"cannot list {pattern}", DataError, lambda: sorted(fs.glob(path)))
    if not found:
        raise DataError(f"no file fits the pattern '{pattern}'.", found="The store has no match.")
    return [f"{pattern.partition('://')[0]}://{name}" for name in map(_without_scheme, found)]


def check_writable(url: str) -> None:
    """Check, before a run, that its upload can be written: write an empty object and delete it.

    Raises:
        ConfigError: The URL cannot be used. RunError: The store refuses it or is not reachable.
    """
    fs, path = _open(url)
    probe = posixpath.join(path, ".peftkit-probe")
    _call(f"cannot write to {url}", ConfigError, lambda: fs.pipe_file(probe, b""))
    _ignoring_errors(lambda: fs.rm_file(probe))


def check_vacant(
    url: str, names: Iterable[str], mark: str, is_same: Callable[[bytes], bool]
) -> None:
    """Check that an upload to a folder would replace nothing but an earlier one of the same run.

    Args:
        names: Names of the objects to write, without the mark.
        is_same: Whether the content of a mark, complete or started, is of the same run.

    Raises:
        ConfigError: The folder holds another upload, or objects of these names without a mark.
    """
    fs, folder = _open(url)

    def is_vacant() -> bool:
        for name in (mark, STARTED):
            if fs.exists(path := posixpath.join(folder, name)):
                return is_same(fs.cat_file(path, end=MAX_MARK_BYTES))
        return not any(fs.exists(posixpath.join(folder, name)) for name in names)

    if not _call(f"cannot read {url}", ConfigError, is_vacant):
        raise ConfigError(
            f"cannot upload to {url}.",
            found="It holds another run, or files of another origin.",
            fix="Choose another folder (train.upload), or delete that one.",
        )


def upload(
    files: Mapping[str, Path], url: str, last: tuple[str, bytes], is_same: Callable[[bytes], bool]
) -> None:
    """Upload files to a folder, and then an object that marks it as complete.

    An earlier mark is deleted first. If the upload fails, the files of this call are deleted as far
    as the connection allows, and there is no mark.

    Args:
        last: Name and content of the mark. is_same: See `check_vacant`.

    Raises:
        ConfigError: The folder holds another upload; it is unchanged.
        RunError: The upload failed.
    """
    check_vacant(url, files, last[0], is_same)
    fs, folder = _open(url)
    mark, started = (posixpath.join(folder, name) for name in (last[0], STARTED))

    def put() -> None:
        fs.pipe_file(started, last[1])
        if fs.exists(mark):
            fs.rm_file(mark)
        for name, path in files.items():
            target = posixpath.join(folder, name)
            fs.put_file(str(path), target)
            fs.invalidate_cache()
            size, stored = path.stat().st_size, fs.info(target)["size"]
            if stored != size:
                raise OSError(f"{name} has {stored:,} bytes there, not {size:,}.")
        fs.pipe_file(mark, last[1])
        _ignoring_errors(lambda: fs.rm_file(started))

    try:
        _call(f"cannot upload to {url}", RunError, put)
    except BaseException:
        for name in (STARTED, *files):
            target = posixpath.join(folder, name)
            if not _ignoring_errors(functools.partial(fs.rm_file, target)):
                break  # no connection
        raise


_FOLDERS = "Use s3://, gs://, az:// or hf://, or a .gguf file."


def _download(
    fs: Any, path: str, info: Mapping[str, Any], target: Path, message: str, error: Kind
) -> None:
    """Write an object to a file, complete or not at all."""
    size = info.get("size")
    source = _call(message, error, lambda: fs.open(path, "rb"))
    with source, replacing(target, size or 0) as file:
        while chunk := _call(message, error, lambda: source.read(CHUNK_BYTES)):
            file.write(chunk)
        if size is not None and file.tell() != size:
            raise RunError(
                message,
                found=f"The connection broke after {file.tell():,} of {size:,} bytes.",
                fix="Try again.",
            )


def _open(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Raises:
        ConfigError: The scheme is not supported, its package is missing, or the URL has a secret.
    """
    scheme = url.partition("://")[0]
    if scheme not in PACKAGES:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        raise ConfigError(f"cannot use {url}.", found=f"URLs begin with {known}.")
    if _SECRET.search(url):
        raise ConfigError(
            f"cannot use a URL of {scheme}:// with credentials.",
            found="Recipes are saved with the adapter, and shared.",
            fix="Set the credentials in the environment, and leave them out of the URL.",
        )
    import fsspec

    try:
        options = {"use_listings_cache": False} if scheme != "hf" else {}
        fs, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as problem:
        fix = f"Install it: pip install {PACKAGES[scheme]}"
        raise ConfigError(f"cannot use {url}.", found=str(problem), fix=fix) from None
    except Exception as problem:  # each store has its own classes
        raise ConfigError(f"cannot use {url}.", found=_reason(problem)) from problem
    return fs, str(path)


def _call(message: str, error: Kind, act: Callable[[], T]) -> T:
    """Call a function of a store, and translate its errors."""
    try:
        return act()
    except PeftkitError:
        raise
    except FileNotFoundError as problem:
        found = f"There is no such object, or bucket: {_reason(problem)}"
        raise error(f"{message}.", found=found) from problem
    except Exception as problem:  # botocore, aiohttp, google and azure share no base class
        if is_disk_full(problem):
            raise DiskFullError(message, found=str(problem), fix="Make room.") from problem
        raise RunError(
            message,
            found=_reason(problem),
            fix="Check the connection, and the credentials in the environment; then try again.",
        ) from problem


def _ignoring_errors(act: Callable[[], object]) -> bool:
    """Call a function of a store; return whether it succeeded."""
    try:
        act()
    except Exception:
        return False
    return True


def _reason(problem: BaseException) -> str:
    text = " ".join(str(problem).split())[:300]
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__


def _without_scheme(path: str) -> str:
    return path.partition("://")[2] or path


def _key(url: str, infos: list[Mapping[str, object]]) -> str:
    """Return the name of the copy of these objects; one of this process if they have no version."""
    versions = [[str(info[name]) for name in VERSIONS if info.get(name)] for info in infos]
    listing = [(str(info.get("name")), info.get("size")) for info in infos]
    if not all(versions):
        listing.append(("process", os.getpid()))
    text = repr((url.rstrip("/"), listing, versions))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
