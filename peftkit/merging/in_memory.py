"""Merging in memory, where a base has no files to merge over: its weights are quantised, its config
changes too, or its files' names are not those of the modules.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from peftkit.errors import MergeError, RunError
from peftkit.events import Listener, Notice, Stage
from peftkit.execution.environment import free_now
from peftkit.files import disk
from peftkit.files.tensors import non_finite
from peftkit.formats.open_adapter import Opened
from peftkit.merging.fold import Tally, merge_dequantized, merge_into
from peftkit.merging.over_files import FLOATS, Shards


def open_whole(
    load: Callable[..., Opened], files: Shards | None, from_quantized: bool, into_codes: bool
) -> tuple[Opened, torch.dtype]:
    """Load base and adapter to merge; return them, and the dtype of most of the base's weights.

    Args:
        load: Makes them. files: The base's, if they are on this machine.
        from_quantized: Into the base as it was loaded for training.
        into_codes: Into the dequantised weights of a quantised base: so, or because its files are.

    Raises:
        MergeError: The base is quantised, and that was not asked for; or the reverse.
    """
    # quantised weights as they were trained over; others in float32, to round only once
    how = {} if from_quantized else {"quantize": "none", "dtype": "fp32", "device": "cpu"}
    opened = load(**how)
    _check_kind(opened, into_codes)
    usual = opened.base.model.dtype if from_quantized else _usual_dtype(files)
    if not free_now(opened.base.device).on_gpu:
        opened.base.model.float()  # also what comes out of quantised weights
    return opened, usual


def _usual_dtype(shards: Shards | None) -> torch.dtype:
    sizes: Counter[str] = Counter()
    for entry in shards.entries.values() if shards else ():
        sizes[entry.dtype] += entry.end - entry.start
    return next((FLOATS[d] for d, _ in sizes.most_common() if d in FLOATS), torch.float32)


def _check_kind(opened: Opened, from_quantized: bool) -> None:
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


def write_in_memory(
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
    if bad := non_finite(model.state_dict()):
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
