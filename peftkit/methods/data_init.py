"""What an adapter begins with where its layers alone do not say: EVA and LoftQ of LoRA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from peftkit.methods.eva import eva_starts, with_ranks
from peftkit.methods.loftq import loftq_starts
from peftkit.methods.lora import LoRA
from peftkit.methods.protocol import Method, Start


class Task(Protocol):
    """What is needed of a task: its batches, and how the model runs on them."""

    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]: ...

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor: ...


def starts_for(
    method: Method,
    model: nn.Module,
    *,
    data: Callable[[], tuple[Task, Sequence[Any]]],
    original: Callable[[], nn.Module],
    saved: Callable[[], Method] | None = None,
    seed: int = 0,
) -> tuple[Method, dict[str, Start] | None]:
    """Return a method, its ranks settled, and what `attach` is to begin with; None: it needs none.

    Args:
        model: The bare base.
        data: Makes the task on it, and its training rows.
        original: Loads the base unquantised.
        saved: Reads the method of an adapter that was begun before and will be loaded: its ranks
            are taken, and no start is made. All three are called only if they are needed.
        seed: Of the order in which rows are looked at.

    Raises:
        PeftkitError: The targets or the data do not suit the method.
    """
    if not isinstance(method, LoRA) or not method.started_by:
        return method, None
    if method.init == "loftq":
        return method, None if saved else loftq_starts(model, method, original())
    if saved:
        begun, sites = saved(), method.linear_sites(model)
        if not isinstance(begun, LoRA):  # another run's, as fit will say
            return method, None
        return with_ranks(method, sites, {s.path: begun.scale_of(s)[0] for s in sites}), None
    task, rows = data()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    batches = (_without_padding(task.collate([rows[index]])) for index in order)
    return eva_starts(model, method, batches, forward=task.loss_sum)


def _without_padding(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch of one row without what rounds its length."""
    mask = batch.get("attention_mask")
    if mask is None:
        return dict(batch)
    length = int(mask.sum())
    return {name: x[:, :length] if x.shape == mask.shape else x for name, x in batch.items()}
