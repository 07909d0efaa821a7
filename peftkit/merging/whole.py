"""Merging a model in memory, and saving it as transformers does."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from peftkit.errors import MergeError, RunError
from peftkit.events import Listener, Notice, Stage
from peftkit.files import disk
from peftkit.formats.open_adapter import Opened
from peftkit.merging.fold import Tally, merge_dequantized, merge_into
from peftkit.methods.protocol import Method


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
