"""Merging into a GGUF file: the same file, with the blocks of the changed weights quantised anew.

Types and sizes stay the same; the header and all other tensors are copied bit for bit. The package
gguf quantises to Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and MXFP4. Files in K or IQ types are refused,
because only llama.cpp's programs quantise to these.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from peftkit.adapter import Adapter
from peftkit.base.gguf_file import Blocks, blocks_of, parsed_once, quantized, source_of
from peftkit.base.load import load_base
from peftkit.base.locate import gguf_of, locate
from peftkit.base.new_tokens import own_of
from peftkit.base.rope import rope_notice
from peftkit.base.skeleton import skeleton
from peftkit.errors import MergeError, OutputError, first_few
from peftkit.events import Listener, Notice, Saved, Stage, Table
from peftkit.files import disk
from peftkit.formats.open_adapter import open_adapter
from peftkit.formats.peft.load import AdapterFile
from peftkit.kernels.gguf_blocks import unpack_gguf
from peftkit.merging.advice import advice, grid_of
from peftkit.merging.fold import Tally, check_all, precision_note
from peftkit.merging.verify import Merged, agreement, facts_of, logits_on, reference_of

_INSTEAD = (
    "Serve base and adapter as two files: peftkit export ADAPTER --to gguf. Or merge into a folder "
    "of 16-bit weights, and let llama.cpp's converter and llama-quantize make the file."
)
MIN_SURVIVED = 0.5
"""Smallest share of the update that a merge without `force` must keep."""
LOUD = 1.0
"""Rounding noise, relative to the update, above which the file must be evaluated."""
_WITH_TOKENS = (
    "Merge into a folder, with --base naming the original of the file, and let llama.cpp's "
    "convert_hf_to_gguf.py make a GGUF file of it."
)


def merge_into_gguf(
    file: AdapterFile,
    out: str | Path,
    *,
    base: str | None,
    verify: bool,
    prompts: Sequence[str],
    force: bool,
    overwrite: bool,
    on_event: Listener,
) -> Merged:
    """Write a copy of the base's GGUF file with the adapter merged in; see `merge`."""
    name, revision = file.base_or(base)
    location, out = locate(name, revision), Path(out).expanduser()
    if not location.gguf or location.convert_to is not None:
        if source := gguf_of(name):
            raise MergeError(
                f"cannot merge into {out}",
                found=f"The base {name} is a copy in 16 bits of a GGUF file.",
                fix=f"Merge into that file: --base {quote(str(source))}",
            )
        raise MergeError(
            f"cannot merge into {out}",
            found=f"The base {name} is not a GGUF file.",
            fix="Merge into a folder; llama.cpp's convert_hf_to_gguf.py makes a GGUF file of it.",
        )
    _check_free(out, location.gguf_path, overwrite)
    own = own_of(file.folder, name, revision)
    if own.tokens:
        lacking = first_few(own.tokens, 5, ", ")
        missing = f"The file's tokenizer lacks tokens of the adapter: {lacking}."
        raise MergeError(f"cannot merge into {out}", found=missing, fix=_WITH_TOKENS)
    if text := advice(file, name, grid_of(name)):
        on_event(Notice(text))
    settings: dict[str, Any] = {"quantize": "none", "dtype": "fp32", "device": "cpu"}
    opened = open_adapter(file.folder, base, **settings, force=force, on_event=on_event)
    check_all(opened.adapter)
    reference = reference_of(opened, prompts) if verify else None
    scaling = file.provenance.loading.get("rope_scaling")
    tally = Tally(instead=_INSTEAD)
    with _replacing(out, location.gguf_path.stat().st_size) as written:
        on_event(Stage(f"Writing {out}"))
        shutil.copyfile(location.gguf_path, written)
        with parsed_once(location):
            model = skeleton(name, revision=revision, purpose=opened.task.purpose)
            blocks = blocks_of(source_of(location.gguf_path, model), model)
            write_changes(opened.adapter, blocks, written, tally)
        tally.check()
        if tally.survived < MIN_SURVIVED and not force:
            raise MergeError(
                f"the merged file {out} would lose its training",
                found=f"{max(tally.survived, 0):.0%} of the update survives rounding to the types "
                "of the base's file.",
                fix=f"{_INSTEAD} To write the file all the same, add --force.",
            )
        effect = agreed = None
        if reference is not None:
            on_event(Stage("Comparing the merged file with base and adapter"))
            effect = agreement(reference.adapted, reference.bare)
            purpose = replace(opened.task.purpose, rope_scaling=scaling)
            merged = load_base(str(written), **settings, purpose=purpose)
            agreed = agreement(logits_on(merged, prompts), reference.adapted)
            del merged
    kind = str(file.provenance.loading.get("quantize", "none"))
    result = Merged(out, name, tally, effect, agreed, "" if kind == "none" else kind)
    on_event(Table("The merged file", ("", ""), tuple(facts_of(result).items())))
    on_event(Notice(_rounding_note(tally)))
    if result.other_precision:
        on_event(Notice(precision_note(kind)))
    if scaling:
        on_event(Notice(rope_notice(scaling)))
    style = file.provenance.prompt_style
    is_other = style is not None and (style.chat_template or style.kind != "chat" or style.system)
    if is_other or own.template or own.eos:
        on_event(
            Notice(
                "The file keeps its base's chat template and end token; the adapter was trained "
                "with other prompts (prompt_style in its peftkit.json, or its tokenizer)."
            )
        )
    on_event(Saved("merged file", out))
    return result


def _rounding_note(tally: Tally) -> str:
    note = f"{min(max(tally.survived, 0), 1):.1%} of the update survives quantisation."
    if tally.survived < MIN_SURVIVED:
        return f"{note} The file answers like its base. {_INSTEAD}"
    if tally.relative_rounding > LOUD:
        noise = f"{tally.relative_rounding:.1f} times the update's size"
        return f"{note} The rounding noise is {noise}: compare peftkit eval of file and adapter."
    return note


def _check_free(out: Path, source: Path, overwrite: bool) -> None:
    is_source = out.exists() and out.samefile(source)
    if out.is_dir() or is_source or (out.exists() and not overwrite):
        state = "It is a folder." if out.is_dir() else "It exists."
        state = "It is the base itself, whose pages are in use." if is_source else state
        more = ", or add --overwrite" if out.is_file() and not is_source else ""
        raise OutputError(f"cannot write {out}", found=state, fix=f"Choose another file{more}.")


@contextmanager
def _replacing(out: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a temporary file next to `out`, which replaces `out` when the block succeeds."""
    folder = disk.writable_folder(out.absolute().parent)
    disk.check_space(folder, num_bytes)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{out.stem}-") as temporary:
        path = Path(temporary, out.name)
        yield path
        disk.fsync_file(path)
        os.replace(path, out)
        disk.fsync_dir(folder)


@torch.no_grad()
def write_changes(adapter: Adapter, blocks: Mapping[str, Blocks], path: Path, tally: Tally) -> None:
    """Write the blocks of all changed weights into a copy of the base's file.

    Args:
        blocks: Blocks of the base's file by weight name.

    Raises:
        MergeError: A weight is not in blocks, or in a type that the package gguf cannot write.
    """
    changes = [
        (f"{place}.{name}", module, name)
        for place, module in adapter.modules.items()
        for name in module.changed
    ]
    _check([full for full, *_ in changes], blocks)
    with open(path, "r+b") as out:
        for full, module, name in changes:
            weight, before = blocks[full], module.weights(module.base)[name].float()
            exact = module.merged_weight(before, name)
            pairs = zip(weight.parts_of(before), weight.parts_of(exact), strict=True)
            for (tensor, old), (_, new) in pairs:
                packed, unchanged = quantized(new, tensor), quantized(old, tensor)
                out.seek(int(tensor.data_offset))
                out.write(packed.numpy())  # type: ignore[arg-type]
                values = (
                    unpack_gguf(rows, weight.form.kind, new.shape, torch.float32)
                    for rows in (packed, unchanged)
                )
                tally.add(old, new, *values)


def _check(names: Sequence[str], blocks: Mapping[str, Blocks]) -> None:
    message = "cannot merge into the types of the base's file"
    if others := [name for name in names if name not in blocks]:
        reason = f"{others[0]} is not stored in supported blocks"
        raise MergeError(message, found=reason, fix=_INSTEAD)
    changed = [blocks[name] for name in names]
    if kinds := Counter(weight.form.kind for weight in changed if not weight.can_be_written):
        names = ", ".join(f"{number} in {kind.upper()}" for kind, number in kinds.items())
        raise MergeError(message, found=f"the package gguf cannot quantise: {names}", fix=_INSTEAD)
