"""Batches with targets that a loss ignores, as recorded passes have them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NUM_IGNORED = 3


def with_ignored_targets(task: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch with further targets, which `Task.ignored_targets` describes."""
    fills = vars(type(task))["ignored_targets"]
    return {
        name: tensor
        if name not in fills
        else torch.cat([tensor, tensor.new_full((NUM_IGNORED, *tensor.shape[1:]), fills[name])])
        for name, tensor in batch.items()
    }
