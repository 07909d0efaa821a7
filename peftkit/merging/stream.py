"""Merging over a base's files: no model is built, and a tensor or two are in memory at a time.

Shapes: a weight on disk is (out, in); that of a Conv1D is (in, out).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from peftkit.base.load import local_folder
from peftkit.errors import AdapterError, BaseError
from peftkit.events import Listener, Progress
from peftkit.files.safetensors_header import DTYPE_NAMES, Entry
from peftkit.formats.peft.folder import AdapterFile, named_tensors
from peftkit.formats.shards import Shards, copy_companions, find_shards, rewrite_shards
from peftkit.kernels.host_memory import keep_freed_memory
from peftkit.merging.fold import Tally, TensorFold, shared_parameters
from peftkit.methods.bitfit import BitFit
from peftkit.methods.table import method_from_peft
from peftkit.model.places import is_conv1d, is_linear, linear_shape

FLOATS = {
    DTYPE_NAMES[dtype]: dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}

Plan = tuple[Shards, dict[str, Callable[[Tensor], Tensor]]]


def base_of(file: AdapterFile, base: str | None) -> tuple[str, str | None]:
    """Return name and revision of an adapter's base, or of the one given instead.

    Raises:
        AdapterError: The adapter does not name one.
    """
    name = base or file.provenance.base
    if not name:
        raise AdapterError(
            f"{file.folder} does not say which base it belongs to",
            fix="Name the base it was trained on with --base MODEL.",
        )
    return name, None if base else file.provenance.revision


def files_of(base: str, revision: str | None) -> Shards | None:
    """Return the base's weight files if all of them are on this machine.

    Raises:
        BaseError: There is no such base, or its files are damaged.
    """
    folder = local_folder(base, revision)
    if folder is None:
        return None
    try:
        return find_shards(folder)
    except BaseError:
        if Path(base).expanduser().exists():
            raise
        return None  # a download that was not finished; loading goes on with it


def usual_dtype(shards: Shards | None) -> torch.dtype:
    """Return the float dtype of most of the weights."""
    sizes: Counter[str] = Counter()
    for entry in shards.entries.values() if shards else ():
        sizes[entry.dtype] += entry.end - entry.start
    return next((FLOATS[d] for d, _ in sizes.most_common() if d in FLOATS), torch.float32)


def plan_stream(
    file: AdapterFile,
    shards: Shards,
    model: nn.Module,
    dtype: torch.dtype | None,
    tally: Tally,
) -> Plan | None:
    """Return the base's files and the change of each tensor; None if tensors do not match modules.

    Args:
        file: The adapter.
        shards: The base's weights.
        model: The base without weights: which module is what.
        dtype: In which the weights will be stored; None: each in its own.
        tally: Updated while the tensors are merged.

    Raises:
        AdapterError: A tensor of the adapter is misshapen.
    """
    entries, modules = shards.entries, dict(model.named_modules())
    shared = shared_parameters(model)
    method, changes = method_from_peft(file.fields), {}
    if method.shared_names or method.train_fully or method.token_rows or isinstance(method, BitFit):
        return None  # a layer is not made from its own tensors alone, or is no linear one
    for path, state in _states(file, model).items():
        name = on_disk(f"{path}.weight", entries)
        module = modules[path]
        weight = getattr(module, "weight", None)
        if name is None or weight is None or id(weight) in shared or not is_linear(module):
            return None
        entry = entries[name]
        if entry.dtype not in FLOATS or entry.shape != tuple(weight.shape):
            return None
        if getattr(module, "bias", None) is not None and method.changes_bias:
            return None
        fold = TensorFold(method, path, state, linear_shape(module)[::-1])
        transposed = is_conv1d(module)
        changes[name] = _change(fold, transposed, dtype or FLOATS[entry.dtype], tally)
    return shards, changes


def _states(file: AdapterFile, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the adapter's tensors by the path of their module; "" where there is none."""
    states: dict[str, dict[str, Tensor]] = {}
    modules = dict(model.named_modules())
    for name, tensor in named_tensors(file.folder).items():
        path = name
        while path and path not in modules:
            path = path.rpartition(".")[0]
        states.setdefault(path, {})[name.removeprefix(path + ".")] = tensor
    return states


def on_disk(name: str, entries: Mapping[str, Entry]) -> str | None:
    """Return the name that a parameter of the model has in the files.

    A base saved without its head lacks the name of the part that holds the layers ("transformer.").
    """
    root, _, rest = name.partition(".")
    if name in entries:
        return name
    if rest in entries and not any(other.startswith(f"{root}.") for other in entries):
        return rest
    return None


def _change(
    fold: TensorFold, transposed: bool, stored: torch.dtype, tally: Tally
) -> Callable[[Tensor], Tensor]:
    """Return the function that merges a tensor on disk; Conv1D keeps its weight transposed."""

    def change(weight: Tensor) -> Tensor:
        before = (weight.t() if transposed else weight).float()
        exact = fold(before)
        kept = exact.to(stored)
        tally.add(before, exact, kept)
        return kept.t() if transposed else kept

    return change


def write_streamed(
    shards: Shards,
    changes: dict[str, Callable[[Tensor], Tensor]],
    folder: Path,
    dtype: torch.dtype | None,
    on_event: Listener,
) -> None:
    """Write the merged model's folder, one tensor at a time."""
    keep_freed_memory()
    rewrite_shards(
        shards,
        folder,
        changes,
        dtype=dtype,
        on_shard=lambda name, done, total: on_event(Progress(f"Writing {name}", done, total)),
    )
    copy_companions(shards.folder, folder, dtype=dtype)
