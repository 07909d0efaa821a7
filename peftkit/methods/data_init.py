"""Initial values of LoRA that need more than its layer: LoftQ's, EVA's, a resumed run's ranks.

LoftQ (Li et al., 2023, arXiv:2310.08659): B A is initialised with the quantisation error. s B A is
the best matrix of rank r for W - Q, where W is the original weight, Q the quantised one and s the
scaling; the model begins nearer to the unquantised one than its base is. The paper goes on from
there, quantising W - s B A and so forth, T times. Here T is 1, always: after more the base would
not be the one that its name and its fingerprint say, and the adapter would fit no other.

Shapes: r rank; out, in features of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.errors import TargetError
from peftkit.kernels import svd
from peftkit.methods.eva import eva_starts, with_ranks
from peftkit.methods.lora import LoRA
from peftkit.methods.protocol import InitValues, Method
from peftkit.quant.layers import weight_of
from peftkit.train.task import Task
from peftkit.train.world import World


@torch.no_grad()
def loftq_starts(model: nn.Module, method: LoRA, original: nn.Module) -> dict[str, InitValues]:
    """Return initial values for a LoRA with init "loftq", from the unquantised model.

    Args:
        model: The bare, quantised base.
        method: Says which layers and ranks.
        original: The same model before quantising, on any device; only read.

    Returns:
        The initial values for `attach(model, method, starts=starts)`.

    Raises:
        TargetError: A target is no linear layer, is not in this model, or is not quantised.
    """
    starts: dict[str, InitValues] = {}
    for site in method.linear_sites(model):
        quantized = weight_of(model.get_submodule(site.path)).float()
        weight = weight_of(original.get_submodule(site.path))
        lost = weight.to(quantized.device, torch.float32) - quantized  # (out, in)
        if not lost.any():
            raise TargetError(
                f"init 'loftq' needs a quantisation error in {site.path}",
                found="the weight equals the original",
                fix="Quantise the base (base.quantize), or leave this layer out of the targets.",
            )
        rank, scaling = method.scale_of(site)
        # of a fused layer each role has a pair of its own
        parts = [lost[rows.to(lost.device)] for rows in site.rows.values()] if site.rows else [lost]
        best = [svd.of_matrix(part, rank) for part in parts]
        root = math.sqrt(scaling)
        starts[site.path] = (
            torch.cat([part.a for part in best]) / root,
            torch.cat([part.b for part in best]) / root,
        )
    return starts


def init_from_rows(
    model: nn.Module, method: LoRA, task: Task, rows: Sequence[Any], *, seed: int = 0
) -> tuple[LoRA, dict[str, InitValues]]:
    """Return the method with EVA's ranks, and the initial values for `attach(starts=...)`.

    Args:
        model: The bare base. task: On it.
        seed: Of the order in which rows are read, one at a time.

    Raises:
        TargetError, DataError: As `eva_starts`.
    """
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    batches = (_without_padding(task.collate([rows[int(index)]])) for index in order)
    return eva_starts(model, method, batches, forward=task.loss_sum)


def as_on_main(
    model: nn.Module, asked: LoRA, method: LoRA, starts: dict[str, InitValues], ranks: World
) -> tuple[LoRA, dict[str, InitValues]]:
    """Return the ranks and initial values of the main process, whatever this one found.

    The processes read the same rows, but sums on different GPUs need not be the same to the bit,
    and ranks that differ would be parameters of other shapes.

    Args:
        asked: The method before `init_from_rows`, which gave method and starts.
    """
    if ranks.world_size == 1:
        return method, starts
    sites = asked.linear_sites(model)
    own = torch.tensor([method.scale_of(site)[0] for site in sites])
    given = dict(zip((site.path for site in sites), ranks.from_main(own).tolist(), strict=True))
    agreed: dict[str, InitValues] = {}
    for site in sites:
        a, rest = starts[site.path]
        shape = (given[site.path] * (len(site.rows) if site.rows else 1), a.shape[1])
        agreed[site.path] = ranks.from_main(a if a.shape == shape else a.new_zeros(shape)), rest
    unchanged = given == {site.path: asked.scale_of(site)[0] for site in sites}
    return asked if unchanged else with_ranks(asked, sites, given), agreed


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
