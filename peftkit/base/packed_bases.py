"""A base as asked for: opened from the cache that keeps it packed, or built and kept there.

`peftkit base pack` puts one there; `load_base` does so too where it is large, and where several
processes open it together.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from peftkit.base.build import build, convert
from peftkit.base.config import BaseConfig
from peftkit.base.locate import locate
from peftkit.base.pretrained import files_of, oom_as_error, reachable
from peftkit.base.purpose import CAUSAL_LM, head_of_classes
from peftkit.base.request import (
    DTYPES,
    BaseRequest,
    LoadedModel,
    StorageFormat,
    fast_dtype,
    request_of,
)
from peftkit.base.skeleton import packed_skeleton
from peftkit.base.store import MANIFEST, folder_of, keep, num_bytes, open_stored, store_folder
from peftkit.config.schema import from_dict
from peftkit.errors import BaseError, OutputError, PeftkitError
from peftkit.events import Listener, Notice, Stage, ignore
from peftkit.execution.environment import default_device
from peftkit.files import disk
from peftkit.files.disk import alone
from peftkit.files.tensors import DTYPES as FILE_DTYPES
from peftkit.files.tensors import open_tensors

LEFT_FREE = 10_000_000_000
"""Bytes of a disk that no packed base is written into without being asked for."""
WORTH_KEEPING = 500_000_000
"""Bytes of a packed base from which on it is kept without being asked: seconds of packing."""


def open_or_build(
    wanted: BaseRequest, *, store: str, sharing: Sharing | None, on_event: Listener
) -> LoadedModel:
    """Open the packed base that the cache keeps, or build it out of its files.

    Args:
        store: "auto", or "off": neither open it there nor keep it.
        sharing: Processes that open it together.
    """
    folder = folder_of(wanted, shared=sharing is not None) if store == "auto" else None
    if folder is None:
        return build(wanted, on_event=on_event)
    if sharing is not None:
        return load_shared(folder, wanted, sharing, on_event)
    return opened_or_kept(folder, wanted, on_event)


def opened_or_kept(folder: Path, wanted: BaseRequest, on_event: Listener) -> LoadedModel:
    """Open a base that is kept packed; else build it, and keep it if it is large."""
    was_kept = (folder / MANIFEST).is_file()
    if was_kept:
        try:
            return open_stored(folder, wanted)
        except BaseError as error:
            on_event(Notice(f"The base is packed again. {error.asked} {error.found}"))
    size = num_bytes(packed_skeleton(wanted.config, wanted.purpose, wanted.form))
    if size < WORTH_KEEPING and not was_kept:
        return build(wanted, on_event=on_event)
    try:
        sizes, is_tight = room_for(size)
    except PeftkitError as error:  # a run goes on without
        on_event(Notice(f"The packed base is not kept. {error.asked} {error.found}"))
        return build(wanted, on_event=on_event)
    if is_tight:
        fix = f"peftkit base pack {wanted.location.name} keeps it all the same."
        on_event(Notice(f"The packed base is not kept. {sizes} {fix}"))
        return build(wanted, on_event=on_event)
    with being_packed(folder, on_event) as has_waited:
        if has_waited:
            with contextlib.suppress(BaseError):
                return open_stored(folder, wanted)
        built = build(wanted, on_event=on_event)
        try:
            keep(folder, built, wanted)
            on_event(Notice(f"The packed base is kept in {folder}. {sizes}"))
        except PeftkitError as error:
            on_event(Notice(f"The packed base is not kept. {error.asked} {error.found}"))
    return built


@contextmanager
def being_packed(folder: Path, on_event: Listener) -> Iterator[bool]:
    """Be the only process that packs a base into its folder; say whether another did just before.

    Args:
        folder: In a folder that is there.
    """
    waited = []

    def wait() -> None:
        waited.append(True)
        on_event(Notice("Another process is packing this base; this one waits for it."))

    with alone(folder, wait):
        yield bool(waited) and (folder / MANIFEST).is_file()


def room_for(size: int) -> tuple[str, bool]:
    """Return a sentence on what is needed and free, and whether little would be left of it.

    Raises:
        OutputError: The cache cannot be written. RunError: The disk has less.
    """
    folder = disk.writable_folder(store_folder())
    disk.check_space(folder, size)
    free = disk.free_bytes(folder)
    sizes = f"It takes {size / 1e9:.1f} GB of {free / 1e9:.1f} GB that are free in {folder}."
    return sizes, free - size < LEFT_FREE


def pack_base(
    model: str,
    *,
    quantize: str = "nf4",
    dtype: str = "auto",
    revision: str | None = None,
    on_event: Listener = ignore,
) -> Path:
    """Pack a base of any size into the cache, from where `load_base` opens it.

    Raises:
        BaseError: It cannot be packed, or does not fit into memory.
        OutputError, RunError: The cache cannot be written, or the disk has too little room.
    """
    from_dict(
        BaseConfig, {"model": model, "quantize": quantize, "dtype": dtype}, "peftkit base pack"
    )
    place = default_device()
    form = StorageFormat(quantize, True, DTYPES.get(dtype) or fast_dtype(place), place)
    location = reachable(convert(locate(model, revision), on_event))
    wanted = request_of(location, CAUSAL_LM, form)
    folder = folder_of(wanted)
    if folder is None:
        raise BaseError(
            f"{location.name} cannot be kept packed.",
            found="It is packed by bitsandbytes already, or quantize is none.",
            fix="Give a model that is not, and --quantize nf4, fp4 or int8.",
        )
    sizes, _ = room_for(num_bytes(packed_skeleton(wanted.config, CAUSAL_LM, form)))
    on_event(Notice(sizes))
    on_event(Stage(f"Packing the base {location.name}"))
    with being_packed(folder, on_event) as is_there:
        if not is_there:
            with oom_as_error(location.name):
                built = build(wanted, on_event=on_event)
            keep(folder, built, wanted)
    return folder


class Sharing(Protocol):
    """The processes that open a base together; each is going to keep a part of it."""

    @property
    def is_first_here(self) -> bool:
        """Whether it is the first of its machine, or of those that see its cache."""

    def wait(self) -> None:
        """Wait until every process has come here."""


def load_shared(
    folder: Path, wanted: BaseRequest, sharing: Sharing, on_event: Listener
) -> LoadedModel:
    """Open a base on several processes; what each holds of it are pages of the same files.

    What the base's own files hold as it is computed with is mapped from them. Else the first
    process makes it, weight by weight, and the cache keeps it; then all map that.

    Raises:
        BaseError: It cannot be made.
        OutputError, RunError: The cache cannot be written, or the disk is full.
    """
    if wanted.form.quantize == "none" and _is_in_files(wanted):
        return build(wanted, on_event=on_event)
    if sharing.is_first_here:
        try:
            open_stored(folder, wanted)
        except BaseError:
            with Spill(folder.parent) as spill:
                keep(folder, build(wanted, put=spill.moved, on_event=on_event), wanted)
            on_event(Notice(f"The base is kept in {folder}, from where all processes map it."))
    sharing.wait()
    return open_stored(folder, wanted, is_known=True)


def _is_in_files(wanted: BaseRequest) -> bool:
    """Tell whether the files hold all but a head in the shapes and dtypes that they are to have.

    So that transformers has nothing to make of them: what it loads are pages of these files.
    """
    held: Counter[tuple[tuple[int, ...], Any]] = Counter()
    source = files_of(wanted.location)
    for path in source.glob("*.safetensors") if source else ():
        with open_tensors(path, error=BaseError) as file:
            entries = file.header.tensors.values()
            known = FILE_DTYPES
            held.update((entry.shape, known[entry.dtype][1]) for entry in entries)
    model = packed_skeleton(wanted.config, wanted.purpose, wanted.form)
    head = head_of_classes(model) if wanted.purpose.head is not None else ()
    kept = [p for name, p in model.named_parameters() if not (head and name.startswith(head))]
    return not Counter((tuple(p.shape), p.dtype) for p in kept) - held


class Spill:
    """Tensors on the disk instead of in memory, until a base larger than that is written down.

    They are pages of a file without a name, which live on when the context ends.

    Args:
        folder: On a disk with room for them all; it is made if need be.
    """

    def __init__(self, folder: Path) -> None:
        disk.writable_folder(folder)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._folder, self._end = folder, 0

    def __enter__(self) -> Spill:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same values, whose memory is the file's pages.

        Raises:
            OutputError: The disk is full.
        """
        if not tensor.numel():
            return tensor
        there = tensor.detach().cpu().contiguous()
        start, size = self._end, there.nbytes
        try:
            # not written by way of the pages: of a full disk these would only tell by a signal
            values: Any = there.view(-1).view(torch.uint8).numpy()
            left = memoryview(values)
            while left:
                left = left[os.pwrite(self._file.fileno(), left, start + size - len(left)) :]
        except OSError as error:
            raise OutputError(f"cannot write into {self._folder}.", found=str(error)) from error
        self._end = -(-(start + size) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(self._file.fileno(), size, offset=start)
        return torch.frombuffer(pages, dtype=there.dtype).view(there.shape)
