"""Merging an adapter into a base that is a GGUF file, which gives another such file.

Only the adapted tensors change: each is dequantised, merged in float32 as in any merge, and packed
again in its own type, with noise by which small updates are not rounded away, or in one asked for.
All else is copied to the byte; one tensor is in memory at a time. llama.cpp's names, and its order
of rows, are those of the export of adapters. What is proved: each tensor is what it should be, but
for the rounding of its type; the file's weights are those of the base, where these are on this
machine; and the file that was written, read again, is the base's in all other bytes.

Shapes: a weight is (out, in), a stack of experts (E, out, in), a bias (out,).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import torch
from torch import Tensor

from peftkit.base.rope import rope_told
from peftkit.base.skeleton import skeleton
from peftkit.errors import MergeError, OutputError, RunError
from peftkit.events import Listener, Notice, Progress, Saved, Stage, Table, ignore
from peftkit.files import disk
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.gguf.header import GGUFHeader, read_header
from peftkit.formats.gguf.names import require_gguf, rotary_rows
from peftkit.formats.gguf.rewrite import Layout, laid_out, rewritten
from peftkit.formats.gguf.tensors import all_kinds, dithered, is_rounded, pack, read_bytes, unpack
from peftkit.formats.model_files import model_files
from peftkit.formats.open_adapter import task_of
from peftkit.formats.peft.folder import read_adapter
from peftkit.kernels.device import keep_freed_memory
from peftkit.merging.fold import Tally
from peftkit.merging.gguf_changes import Change, Originals, find_changes, type_named, types_of
from peftkit.merging.write import check_original, files_of

KEPT = 0.5
"""Share of the update that must be left when the merged weights are stored."""
CLEAR = 0.9
"""Share below which the user is told how to keep more."""


@dataclass(frozen=True, slots=True)
class MergedGGUF:
    """The result of a merge into a GGUF file.

    Attributes:
        path: The new file. into: The base that it was merged into.
        tally: How much the weights changed, and what was lost when they were stored.
        types: How many tensors were stored in which of ggml's types.
        compared: Largest difference of a tensor from the base's own weight, relative to that, which
            is what quantising did; None where the base's weights are not on this machine.
    """

    path: Path
    into: Path
    tally: Tally
    types: Mapping[str, int]
    compared: float | None


def merge_into_gguf(
    adapter: str | Path,
    into: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    dtype: str | None = None,
    force: bool = False,
    overwrite: bool = False,
    on_event: Listener = ignore,
) -> MergedGGUF:
    """Merge an adapter folder into a GGUF file of its base; write a new one.

    Args:
        adapter: A folder made by peftkit or by PEFT.
        into: The base as one GGUF file, in any quantisation.
        out: The new file; it appears when all of it is written and checked.
        base: The base as transformers knows it, if elsewhere than recorded. Its config is read,
            and its weights are compared with the file's if they are on this machine.
        dtype: Type in which the merged tensors are stored, as "q8_0", "fp16" or "bf16"; None: each
            in its own. Needed where that is one that the package gguf does not pack (K-quants).
        force: Accept a file whose weights are not the base's, or in which the update is lost.
        overwrite: Replace a file that is there.

    Raises:
        AdapterError: No adapter there, or it does not fit the file: every tensor is listed.
        BaseError: The base's config is not found, or its architecture is not supported.
        MergeError: It cannot be merged as asked, or most of the update is lost in rounding.
        OutputError: The file is taken or cannot be written.
        RunError: The disk is full, or what was written is not what was computed.
    """
    into, out = Path(into).expanduser(), Path(out).expanduser()
    require_gguf()
    asked = None if dtype is None else type_named(dtype)
    file = read_adapter(adapter_folder(adapter))
    check_original(file.method, from_quantized=False)
    _check_free(out, into, overwrite)
    name, revision = file.base_or(base)
    model = skeleton(name, revision=revision, purpose=task_of(file).purpose)
    with disk.open_regular(into) as source:
        header = read_header(into, source, of="model", kinds=all_kinds())
        shards = files_of(name, revision)
        originals = Originals(name, model_files(shards, model) if shards else None, force)
        changes = find_changes(file, name, model, into, header)
        types = types_of(changes, into, header, asked)
        layout = laid_out(into, header, types)
        if scaling := file.provenance.loading.get("rope_scaling"):
            on_event(Notice(rope_told(scaling)))
        if not shards:
            on_event(Notice(_UNCOMPARED.format(name, into.name)))
        merge = _Merge(into, source, header, layout, types, originals)
        disk.writable_folder(out.parent)
        keep_freed_memory()
        on_event(Stage(f"Merging into {into.name}"))

        def packed(tensor: str) -> Tensor:
            return merge.packed(tensor, changes[tensor])

        def on_bytes(done: int, total: int) -> None:
            on_event(Progress(f"Writing {out.name}", done, total, "B"))

        with rewritten(into, source, header, layout, changes, packed, out, on_bytes):
            on_event(Stage("Comparing what was written"))
            _check_kept(merge.tally, merge.stored, force)
    merged = MergedGGUF(out, into, merge.tally, merge.stored, originals.largest)
    _tell(merged, on_event)
    return merged


class _Merge:
    """Makes the bytes of the changed tensors, and counts what that did to the weights."""

    def __init__(
        self,
        path: Path,
        source: BinaryIO,
        header: GGUFHeader,
        layout: Layout,
        types: Mapping[str, str],
        originals: Originals,
    ) -> None:
        self.path, self.source, self.header, self.layout = path, source, header, layout
        self.types, self.originals, self.kinds = types, originals, all_kinds()
        self.tally, self.stored = Tally(), Counter[str]()

    @torch.no_grad()
    def packed(self, name: str, change: Change) -> Tensor:
        """Return the bytes of a merged tensor.

        Raises:
            MergeError: It overflows; or the file's weights are not the base's.
            RunError: What comes out of the bytes is something else than was put in.
        """
        weight, module = change.weight, change.module
        entries = [self.header.tensors[each] for each in weight.names]
        raw = [read_bytes(self.path, self.source, entry) for entry in entries]
        parts = [unpack(data, entry) for data, entry in zip(raw, entries, strict=True)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        before = rotary_rows(whole, weight.heads, back=True)
        if change.part == 0:
            self.originals.compare(module, change.parameter, before)
        exact = rotary_rows(module.merged_weight(before, change.parameter), weight.heads)
        if len(parts) > 1:
            exact = exact.split([part.shape[-2] for part in parts], dim=-2)[change.part]
        own, kind, old = self.kinds[entries[change.part].kind], self.types[name], parts[change.part]
        given = dithered(exact, kind, crc32(name.encode())) if own[0] == kind else exact
        data = pack(given, kind)
        if own[0] == kind:  # blocks that do not change keep their bytes
            same = (exact == old).view(-1, own[1]).all(1)
            data.view(-1, own[2])[same] = raw[change.part].view(-1, own[2])[same]
        stored = unpack(data, self.layout[name])
        if not torch.equal(exact, old):
            self.tally.add(old, exact, stored)
            self.stored[kind] += 1
        if not is_rounded(given, stored, kind):
            raise RunError(
                f"cannot write {name} as {kind}",
                found="What the package gguf has packed is not what it was given.",
                fix="pip install -U gguf",
            )
        return data


def _check_free(out: Path, into: Path, overwrite: bool) -> None:
    asked = f"cannot write the merged model to {out}"
    if out.exists() and into.exists() and out.samefile(into):
        raise OutputError(asked, found="it is the base itself", fix="Choose another file.")
    if out.is_dir():
        raise OutputError(asked, found="it is a folder", fix="Name a file: MERGED.gguf")
    if out.exists() and not overwrite:
        raise OutputError(asked, found="it exists", fix="Choose a new file, or add --overwrite.")


def _check_kept(tally: Tally, types: Mapping[str, int], force: bool) -> None:
    """Refuse a merge of which little is left in coarse types.

    Raises:
        MergeError: The update is zero, or most of it is lost in rounding.
    """
    tally.check()
    if tally.kept < KEPT and not force:
        raise MergeError(
            f"{1 - tally.kept:.0%} of the update would be lost",
            found=f"it is too small for the steps of {', '.join(types)}",
            fix="Store the merged tensors in a finer type, by which the file grows: --dtype fp32. "
            "Or write it all the same with --force.",
        )


_UNCOMPARED = (
    "The weights of {} are not on this machine: that {} holds the same model is seen by the names "
    "and shapes of its tensors alone."
)


def _tell(merged: MergedGGUF, on_event: Listener) -> None:
    tally = merged.tally
    compared = "no: its weights are not here"
    if merged.compared is not None:
        compared = f"the same, up to {merged.compared:.2%} (quantising)"
    facts = {
        "base": merged.into.name,
        "weights compared with the base": compared,
        "tensors changed": ", ".join(f"{n:,} in {kind}" for kind, n in merged.types.items()),
        "size of the update": f"{tally.relative_update:.3g} of these weights' own",
        "left of the update": f"{tally.kept:.1%}",
        "noise of rounding": f"{tally.relative_rounding:.3g} of the update",
        "copied unchanged": "all else, compared byte by byte",
    }
    on_event(Table("The merged model", ("", ""), tuple(facts.items())))
    if tally.kept < CLEAR:
        on_event(
            Notice(
                f"{1 - tally.kept:.0%} of the update was lost in rounding; --dtype fp32 keeps it."
            )
        )
    on_event(Saved("merged model", merged.path))
