"""Initial values that need more than the layer itself: EVA's from rows, and a resumed run's ranks.

LoftQ's, from the unquantised weights, are made by `loftq_starts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.methods.eva import eva_starts, with_ranks
from peftkit.methods.lora import LoRA
from peftkit.methods.protocol import Method, Start
from peftkit.train.task import Task


def init_from_rows(
    model: nn.Module, method: LoRA, task: Task, rows: Sequence[Any], *, seed: int = 0
) -> tuple[LoRA, dict[str, Start]]:
    """Return the method with EVA's ranks, and the initial values for `attach(starts=...)`.

    Args:
        model: The bare base. task: On it.
        seed: Of the order in which rows are read, one at a time.

    Raises:
        TargetError, DataError: As `eva_starts`.
    """
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    batches = (_without_padding(task.collate([rows[index]])) for index in order)
    return eva_starts(model, method, batches, forward=task.loss_sum)


def with_saved_ranks(model: nn.Module, method: LoRA, saved: Method) -> LoRA:
    """Return the method with the ranks of an adapter that was saved and will be loaded."""
    if method.init != "eva" or not isinstance(saved, LoRA):  # another run's, as fit will say
        return method
    sites = method.linear_sites(model)
    return with_ranks(method, sites, {site.path: saved.scale_of(site)[0] for site in sites})


def _without_padding(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch of one row without what rounds its length."""
    mask = batch.get("attention_mask")
    if mask is None:
        return dict(batch)
    length = int(mask.sum())
    return {name: x[:, :length] if x.shape == mask.shape else x for name, x in batch.items()}
