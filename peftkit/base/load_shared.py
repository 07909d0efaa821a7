"""A base that several processes open together, each to keep a part of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from peftkit.base.class_head import head_of_classes
from peftkit.base.mapped import packed_skeleton
from peftkit.base.spill import Spill
from peftkit.base.storage_format import LoadedModel
from peftkit.base.store import StoreKey, folder_of, keep, open_stored
from peftkit.errors import BaseError
from peftkit.events import Listener, Notice
from peftkit.files import disk
from peftkit.files.safetensors_header import DTYPES


class Sharing(Protocol):
    """The processes that open a base together; each is going to keep a part of it."""

    @property
    def is_first_here(self) -> bool:
        """Whether it is the first of its machine, or of those that see its cache."""

    def wait(self) -> None:
        """Wait until every process has come here."""


def load_shared(
    wanted: StoreKey,
    rebuild: Callable[[Spill | None], LoadedModel],
    sharing: Sharing,
    on_event: Listener,
) -> LoadedModel:
    """Open a base on several processes; what each holds of it are pages of the same files.

    What the base's own files hold as it is computed with is mapped from them. Else the first
    process makes it, weight by weight, and the cache keeps it; then all map that.

    Raises:
        BaseError: It cannot be made.
        OutputError, RunError: The cache cannot be written, or the disk is full.
    """
    if wanted.form.quantize == "none" and _is_in_files(wanted):
        return rebuild(None)
    folder = folder_of(wanted.source, wanted.form, wanted.purpose)
    if sharing.is_first_here:
        try:
            open_stored(folder, wanted)
        except BaseError:
            with Spill(folder.parent) as spill:
                keep(folder, rebuild(spill), wanted)
            on_event(Notice(f"The base is kept in {folder}, from where all processes map it."))
    sharing.wait()
    return open_stored(folder, wanted, is_known=True)


def _is_in_files(wanted: StoreKey) -> bool:
    """Tell whether the files hold all but a head in the shapes and dtypes that they are to have.

    So that transformers has nothing to make of them: what it loads are pages of these files.
    """
    held: Counter[tuple[tuple[int, ...], Any]] = Counter()
    for path in wanted.source.glob("*.safetensors"):
        with disk.open_tensors(path, error=BaseError) as file:
            entries = file.header.tensors.values()
            held.update((entry.shape, DTYPES[entry.dtype][1]) for entry in entries)
    model = packed_skeleton(wanted.config, wanted.purpose, wanted.form)
    head = head_of_classes(model) if wanted.purpose.head is not None else ()
    kept = [p for name, p in model.named_parameters() if not (head and name.startswith(head))]
    return not Counter((tuple(p.shape), p.dtype) for p in kept) - held
