"""The merge over a base's files: no model is built, and a tensor or two are in memory.

Shapes: a weight on disk is (out, in); that of a Conv1D is (in, out).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from peftkit.events import Listener, Progress
from peftkit.formats.peft import AdapterFile, named_tensors
from peftkit.formats.shards import Shards, copy_companions, find_shards, rewrite_shards
from peftkit.merging.fold import Tally, TensorFold
from peftkit.methods.table import method_from_peft
from peftkit.tensor_header import DTYPE_NAMES, Entry

FLOATS = {
    DTYPE_NAMES[dtype]: dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}

Plan = tuple[Shards, dict[str, Callable[[Tensor], Tensor]]]


def plan_stream(
    file: AdapterFile, base: Path, dtype: torch.dtype | None, tally: Tally
) -> Plan | None:
    """Return the base's files and what becomes of which tensor; None where that is not one to one.

    Raises:
        AdapterError: A tensor of the adapter is misshapen.
        MergeError: The method has no merged form.
    """
    shards = find_shards(base) if base.is_dir() else None
    if shards is None:
        return None
    entries = shards.entries
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named_tensors(file.folder, nn.Module()).items():
        path = name
        while path and _on_disk(path, entries) is None:
            path = path.rpartition(".")[0]
        states.setdefault(path, {})[name.removeprefix(path + ".")] = tensor
    changes = {}
    for path, state in states.items():
        name = _on_disk(path, entries) or ""
        if not path or len(entries[name].shape) != 2 or entries[name].dtype not in FLOATS:
            return None
        stored = dtype or FLOATS[entries[name].dtype]
        changes[name] = _change(file, path, state, entries[name].shape, stored, tally)
    return shards, changes


def _on_disk(path: str, entries: dict[str, Entry]) -> str | None:
    """Return the name in the files of a module's weight.

    A base saved without its head lacks the name of the part that holds the layers ("transformer.").
    """
    root, _, rest = path.partition(".")
    if f"{path}.weight" in entries:
        return f"{path}.weight"
    if f"{rest}.weight" in entries and not any(name.startswith(f"{root}.") for name in entries):
        return f"{rest}.weight"
    return None


def _change(
    file: AdapterFile,
    path: str,
    state: dict[str, Tensor],
    shape: tuple[int, ...],
    stored: torch.dtype,
    tally: Tally,
) -> Callable[[Tensor], Tensor]:
    """Return what makes the merged tensor of one on disk; Conv1D keeps its weight transposed."""
    transposed = bool(file.fields.get("fan_in_fan_out"))
    fold = TensorFold(
        method_from_peft(file.fields),
        path,
        state,
        (shape[1], shape[0]) if transposed else (shape[0], shape[1]),
    )

    def change(weight: Tensor) -> Tensor:
        before = (weight.t() if transposed else weight).float()
        exact = fold(before)
        tally.add(before, exact, exact.to(stored))
        return exact.t() if transposed else exact

    return change


def write_streamed(
    shards: Shards,
    changes: dict[str, Callable[[Tensor], Tensor]],
    folder: Path,
    dtype: torch.dtype | None,
    on_event: Listener,
) -> None:
    rewrite_shards(
        shards,
        folder,
        changes,
        dtype=dtype,
        on_shard=lambda name, done, total: on_event(Progress(f"Writing {name}", done, total)),
    )
    copy_companions(shards.folder, folder, dtype=dtype)
