"""The two ways to write a merged model: over its base's files, or out of memory.

Over the files no model is built, and a tensor or two are in memory at a time.
Shapes: a weight on disk is (out, in); that of a Conv1D is (in, out).
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from peftkit.base.load import local_folder
from peftkit.errors import BaseError, MergeError, OutputError, RunError, first_few
from peftkit.events import Listener, Notice, Progress, Stage
from peftkit.files import disk
from peftkit.files.folders import new_folder
from peftkit.files.safetensors_header import DTYPE_NAMES
from peftkit.formats.model_files import model_files
from peftkit.formats.open_adapter import Opened
from peftkit.formats.peft.folder import AdapterFile, named_tensors
from peftkit.formats.shards import Shards, copy_companions, find_shards, rewrite_shards
from peftkit.kernels.device import keep_freed_memory
from peftkit.merging.fold import (
    Tally,
    TensorFold,
    merge_dequantized,
    merge_into,
    shared_parameters,
)
from peftkit.methods.own_parameters import BitFit
from peftkit.methods.protocol import Method
from peftkit.methods.table import method_from_peft
from peftkit.model.places import is_conv1d, is_linear, linear_shape

FLOATS = {
    DTYPE_NAMES[dtype]: dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}

Plan = tuple[Shards, dict[str, Callable[[Tensor], Tensor]]]


@contextmanager
def new_model_folder(out: Path, overwrite: bool, sources: Sequence[Path]) -> Iterator[Path]:
    """Yield an empty folder whose files become those of `out` when the block ends well.

    Raises:
        OutputError: `out` is not empty, is what is read from, or cannot be written.
    """
    asked = f"cannot write the merged model to {out}"
    if any(out.resolve() == source.resolve() for source in sources if str(source) not in ("", ".")):
        raise OutputError(
            asked, found="it is one of the source folders", fix="Choose another folder."
        )
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        names = first_few(sorted(path.name for path in out.iterdir()), 5, ", ")
        raise OutputError(asked, found=f"it holds {names}", fix="Choose a new or an empty folder.")
    with new_folder(out, last="config.json", replaced=_is_weight) as folder:
        yield folder


def _is_weight(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json", ".bin"))


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
    files, modules = model_files(shards, model), dict(model.named_modules())
    shared = shared_parameters(model)
    method, changes = method_from_peft(file.fields), {}
    if method.shared_names or method.train_fully or method.token_rows or isinstance(method, BitFit):
        return None  # a layer is not made from its own tensors alone, or is no linear one
    for path, state in _states(file, model).items():
        name, module = f"{path}.weight", modules[path]
        weight = getattr(module, "weight", None)
        if name not in files.where or weight is None or id(weight) in shared:
            return None
        if not is_linear(module):
            return None
        entry = files.entry(name)
        if entry.dtype not in FLOATS or entry.shape != tuple(weight.shape):
            return None
        if getattr(module, "bias", None) is not None and method.changes_bias:
            return None
        fold = TensorFold(method, path, state, linear_shape(module)[::-1])
        stored = dtype or FLOATS[entry.dtype]
        changes[files.where[name][1]] = _change(fold, is_conv1d(module), stored, tally)
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


def check_kind(opened: Opened, from_quantized: bool) -> None:
    """Refuse quantised weights unless asked for, and the reverse.

    Raises:
        MergeError: Says how the base is stored.
    """
    kind = opened.base.audit.quantized_as
    if (kind != "none") == from_quantized:
        return
    if from_quantized:
        raise MergeError(
            "there are no quantised weights to merge into",
            found=f"the adapter was trained over {opened.base.name} in 16 or 32 bits",
            fix="Merge without --from-quantized.",
        )
    raise MergeError(
        f"the base {opened.base.name} has no 16-bit weights to merge into",
        found=f"its weights are stored in {kind}",
        fix="Name its original with --base MODEL. Or merge with --from-quantized: the model then "
        "takes 16 bits for each weight or more, and keeps the rounding of the quantised ones.",
    )


def check_original(method: Method, from_quantized: bool) -> None:
    """Refuse to merge into the original weights what makes up for their loss in quantising.

    Raises:
        MergeError: The method compensates for a quantisation error that is not there.
    """
    if method.fresh_changes and not method.unmergeable and not from_quantized:
        raise MergeError(
            "this adapter cannot be merged into the original weights of its base",
            found=f"Before any training {method.fresh_changes}, and they were not quantised.",
            fix="Merge with --from-quantized, into the weights that it was trained over.",
        )


def write_whole(
    opened: Opened, folder: Path, dtype: torch.dtype, tally: Tally, on_event: Listener
) -> None:
    """Merge in memory and save as transformers does, every float tensor in `dtype`.

    Raises:
        MergeError: The method has no merged form, or a weight is shared.
        RunError: A weight does not fit the dtype, or the disk is full.
    """
    on_event(Stage("Merging the whole model in memory"))
    kind = opened.base.audit.quantized_as
    if kind == "none":
        model: Any = merge_into(opened.adapter, tally=tally, dtype=dtype).to(dtype)
    else:
        on_event(Notice(cost_of(kind)))
        model = merge_dequantized(opened.adapter, dtype, tally=tally)
    if bad := disk.non_finite(model.state_dict()):
        raise RunError(
            f"cannot write {len(bad)} weights in {dtype}",
            found=f"they hold NaN, Infinity, or numbers too large for it, as {bad[0]}",
            fix="Write bf16 or fp32.",
        )
    parameters = model.parameters()
    disk.check_space(folder, sum(p.numel() * p.element_size() for p in parameters))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
            model.save_pretrained(folder, max_shard_size="5GB")
        opened.base.processor.save_pretrained(folder)
    except (OSError, SafetensorError) as problem:
        free = disk.free_bytes(folder)
        found = f"{problem}\n{free:,} bytes are free on the disk."
        raise RunError(f"cannot write {folder}", found=found) from problem
    for path in folder.iterdir():  # the library writes them for their owner alone
        path.chmod((folder / "config.json").stat().st_mode)


def cost_of(kind: str) -> str:
    """Return a note for the user on what merging into quantised weights costs."""
    return (
        f"Merged into the {kind} weights of the base, dequantised: that is what the adapter was "
        "trained over. The model takes 16 bits for each weight or more, and keeps their rounding."
    )
