"""Initial values of LoRA from data or from other weights: EVA, LoftQ, the ranks of a resumed run.

EVA (Paischer et al., 2024, arXiv:2410.07170): rows of A are the first principal components of the
layer's inputs on the training data, B is zero, and ranks go to the layers whose next component
explains the largest share of their input's variance. A layer's scaling does not change with its
rank. Unlike the paper, every targeted layer keeps a rank of at least one.

LoftQ (Li et al., 2023, arXiv:2310.08659): B A is initialised from the quantisation error. s B A is
the best rank-r matrix for W - Q, where W is the original weight, Q the quantised one and s the
scaling: the model starts closer to the unquantised one. The paper then quantises W - s B A and
repeats this T times. Here T is always 1: otherwise the base would not match its name and
fingerprint, and the adapter would not work on any other base.

Shapes: r rank; out, in features of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from peftkit.base.load import Base, load_base
from peftkit.errors import DataError, TargetError
from peftkit.events import Listener
from peftkit.execution.world import World
from peftkit.formats.peft.load import read_adapter
from peftkit.kernels import svd
from peftkit.kernels.svd import Directions
from peftkit.methods.base import InitValues, Method
from peftkit.methods.lora import LoRA
from peftkit.model.modes import evaluating
from peftkit.model.places import linear_shape
from peftkit.model.targets import Site
from peftkit.quant.weights import weight_of
from peftkit.settings import BaseConfig, DataConfig
from peftkit.tasks.base import Task
from peftkit.tasks.config import TaskConfig


def initial_values(
    method: Method,
    base: Base,
    settings: TaskConfig,
    base_config: BaseConfig,
    data: DataConfig,
    *,
    seed: int,
    checkpoint: Path | None,
    on_event: Listener,
) -> tuple[Method, dict[str, InitValues] | None]:
    """Return the method with its ranks, and the initial values that depend on data or weights.

    Args:
        base: The bare base.
        settings: The task, whose rows EVA reads.
        base_config: The recipe's base section, from which LoftQ loads the unquantised weights.
        seed: Seed of the order of rows.
        checkpoint: Folder of a resumed run: its ranks are used, and no values are computed.

    Raises:
        PeftkitError: The weights or rows cannot be read, or do not suffice.
    """
    assert isinstance(method, LoRA)
    if checkpoint is not None:
        return with_saved_ranks(base.model, method, read_adapter(checkpoint).method), None
    if method.init == "loftq":
        names = base_config.model_dump(include={"model", "revision", "dtype"})
        original = load_base(**names, purpose=settings.purpose, device="cpu", on_event=on_event)
        return method, dict(loftq_starts(base.model, method, original.model))
    task = settings.on(base.model, base.processor, data)
    held_out = data.eval if isinstance(data.eval, float) else None  # a file is not read
    rows, _ = task.rows.load_splits(data.model_copy(update={"eval": held_out}))
    ranked, starts = init_from_rows(base.model, method, task, rows, seed=seed)
    return as_on_main(base.model, method, ranked, starts, World(base.device))


@torch.no_grad()
def loftq_starts(model: nn.Module, method: LoRA, original: nn.Module) -> dict[str, InitValues]:
    """Return initial values for a LoRA with init "loftq", from the unquantised model.

    Args:
        model: The bare, quantised base.
        method: Its targets and ranks are used.
        original: The same model before quantisation, on any device; it is not changed.

    Returns:
        The initial values for `attach(model, method, starts=starts)`.

    Raises:
        TargetError: A target is not a linear layer, is not in this model, or is not quantised.
    """
    starts: dict[str, InitValues] = {}
    for site in method.linear_sites(model):
        quantized = weight_of(model.get_submodule(site.path)).float()
        weight = weight_of(original.get_submodule(site.path))
        error = weight.to(quantized.device, torch.float32) - quantized  # (out, in)
        if not error.any():
            raise TargetError(
                f"init 'loftq' needs a quantisation error in {site.path}",
                found="The weight equals the original.",
                fix="Quantise the base (base.quantize), or leave this layer out of the targets.",
            )
        rank, scaling = method.scale_of(site)
        # a fused layer has a pair for each role
        parts = [error]
        if site.rows:
            parts = [error[rows.to(error.device)] for rows in site.rows.values()]
        best = [svd.of_matrix(part, rank) for part in parts]
        root = math.sqrt(scaling)
        starts[site.path] = (
            torch.cat([part.a for part in best]) / root,
            torch.cat([part.b for part in best]) / root,
        )
    return starts


def init_from_rows(
    model: nn.Module, method: LoRA, task: Task, rows: Sequence[object], *, seed: int = 0
) -> tuple[LoRA, dict[str, InitValues]]:
    """Return the method with EVA's ranks, and the initial values for `attach(starts=...)`.

    Args:
        model: The bare base.
        task: A task on this model.
        seed: Seed of the order of rows, which are read one at a time.

    Raises:
        TargetError, DataError: As `eva_starts`.
    """
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    batches = (_without_padding(task.collate([rows[int(index)]])) for index in order)
    return eva_starts(model, method, batches, forward=task.loss)


def as_on_main(
    model: nn.Module, configured: LoRA, method: LoRA, starts: dict[str, InitValues], world: World
) -> tuple[LoRA, dict[str, InitValues]]:
    """Return the ranks and initial values of the main process.

    The processes read the same rows, but sums on different GPUs may differ in the last bit, which
    could give different ranks and thus parameters of different shapes.

    Args:
        configured: The method before `init_from_rows`.
        method, starts: The results of `init_from_rows` on this process.
    """
    if world.world_size == 1:
        return method, starts
    sites = configured.linear_sites(model)
    ranks_here = torch.tensor([method.scale_of(site)[0] for site in sites])
    main_ranks = dict(
        zip((site.path for site in sites), world.from_main(ranks_here).tolist(), strict=True)
    )
    agreed: dict[str, InitValues] = {}
    for site in sites:
        a, rest = starts[site.path]
        shape = (main_ranks[site.path] * (len(site.rows) if site.rows else 1), a.shape[1])
        agreed[site.path] = world.from_main(a if a.shape == shape else a.new_zeros(shape)), rest
    unchanged = main_ranks == {site.path: configured.scale_of(site)[0] for site in sites}
    return configured if unchanged else with_ranks(configured, sites, main_ranks), agreed


def with_saved_ranks(model: nn.Module, method: LoRA, saved: Method) -> LoRA:
    """Return the method with the ranks of a saved adapter that is loaded next."""
    if method.init != "eva" or not isinstance(saved, LoRA):  # of another run: fit refuses it
        return method
    sites = method.linear_sites(model)
    return with_ranks(method, sites, {site.path: saved.scale_of(site)[0] for site in sites})


def _without_padding(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    mask = batch.get("attention_mask")
    if mask is None:
        return dict(batch)
    length = int(mask.sum())
    return {name: x[:, :length] if x.shape == mask.shape else x for name, x in batch.items()}


Forward = Callable[[nn.Module, Mapping[str, Any]], object]


def _call(model: nn.Module, batch: Mapping[str, object]) -> object:
    return model(**batch)


def eva_starts(
    model: nn.Module,
    method: LoRA,
    batches: Iterable[Mapping[str, object]],
    *,
    forward: Forward = _call,
) -> tuple[LoRA, dict[str, InitValues]]:
    """Return initial values for a LoRA with init "eva" from its layers' inputs on training data.

    Args:
        model: The bare base, quantised or not.
        method: Provides the targets and the average rank.
        batches: Batches without padding, since all positions count, and in random order, since
            reading stops once the directions of all layers have converged.
        forward: Runs the model on a batch.

    Returns:
        The method with ranks per layer, and the initial values for
        `attach(model, method, starts=starts)`.

    Raises:
        TargetError: A target is not a linear layer, or not in this model.
        DataError: The batches are padded, or have too few tokens for the ranks.
    """
    sites = method.linear_sites(model)
    ranks = {site.path: method.scale_of(site)[0] for site in sites}
    max_ranks = {
        path: min(round(rank * method.eva_rho), *linear_shape(model.get_submodule(path)))
        for path, rank in ranks.items()
    }
    with evaluating(model):
        read = _read(model, ranks, max_ranks, batches, forward)
    short_of = [path for path in ranks if len(read[path].scaled) < max_ranks[path]]
    if short_of:
        num_seen, needed = read[short_of[0]].num_seen, max_ranks[short_of[0]]
        raise DataError(
            f"init 'eva' got too few tokens for the rank of {short_of[0]}",
            found=f"{num_seen} tokens; at least {needed} are needed (rank times eva_rho)",
            fix="Use more data, a lower rank, or another init.",
        )
    final_ranks = _share_out({path: read[path].shares() for path in ranks}, ranks, max_ranks)
    starts: dict[str, InitValues] = {}
    for site in sites:
        a = read[site.path].basis(final_ranks[site.path])
        starts[site.path] = (a.repeat(len(site.rows) if site.rows else 1, 1), None)
    return method if final_ranks == ranks else with_ranks(method, sites, final_ranks), starts


def with_ranks(method: LoRA, sites: Iterable[Site], ranks: Mapping[str, int]) -> LoRA:
    """Return the method with these ranks by path; every layer keeps its scaling."""
    # longest first: the first pattern that matches the end of a path applies
    ordered = sorted(sites, key=lambda site: len(site.path), reverse=True)
    alphas = {}
    for site in ordered:
        rank, scaling = ranks[site.path], method.scale_of(site)[1]
        alphas[site.path] = scaling * (math.sqrt(rank) if method.rslora else rank)
    patterns = {
        "rank_pattern": {site.path: ranks[site.path] for site in ordered},
        "alpha_pattern": alphas,
    }
    return method.model_copy(update=patterns)


def _read(
    model: nn.Module,
    ranks: Mapping[str, int],
    max_ranks: Mapping[str, int],
    batches: Iterable[Mapping[str, object]],
    forward: Forward,
) -> dict[str, Directions]:
    """Run the batches; layers that read the same input share one PCA."""
    device = next(model.parameters()).device
    components: dict[str, Directions] = {}
    handles: dict[str, RemovableHandle] = {}
    try:
        for batch in batches:
            _refuse_padding(batch)
            moved = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in batch.items()}
            if not components:
                for paths in _grouped_by_input(model, list(ranks), moved, forward):
                    max_rank = max(max_ranks[p] for p in paths)
                    shared = Directions(max(ranks[p] for p in paths), max_rank)
                    components |= dict.fromkeys(paths, shared)
                    handles[paths[0]] = model.get_submodule(paths[0]).register_forward_pre_hook(
                        lambda _, args, directions=shared: directions.take(args[0])
                    )
            forward(model, moved)
            for path in [path for path in handles if components[path].converged]:
                handles.pop(path).remove()
            if not handles:
                break
    finally:
        for handle in handles.values():
            handle.remove()
    for directions in components.values():
        if not directions.converged:
            directions.flush()
    return components or {path: Directions(rank, max_ranks[path]) for path, rank in ranks.items()}


def _grouped_by_input(
    model: nn.Module, paths: list[str], batch: Mapping[str, object], forward: Forward
) -> list[list[str]]:
    """Return the layers grouped by identical input tensors."""
    read: dict[str, list[Tensor]] = {path: [] for path in paths}  # a reference keeps the ids unique
    handles = [
        model.get_submodule(path).register_forward_pre_hook(
            lambda _, args, path=path: read[path].append(args[0])
        )
        for path in paths
    ]
    try:
        forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    groups: dict[tuple[object, ...], list[str]] = {}
    for path, tensors in read.items():
        groups.setdefault(tuple(map(id, tensors)) or (path,), []).append(path)
    return list(groups.values())


def _share_out(
    shares: Mapping[str, list[float]], ranks: Mapping[str, int], max_ranks: Mapping[str, int]
) -> dict[str, int]:
    """Assign the total rank to the components that explain most; each layer gets at least one."""
    candidates = [(share, path) for path in ranks for share in shares[path][1 : max_ranks[path]]]
    candidates.sort(key=lambda pair: -pair[0])  # stable: ties in the order of the model
    result = dict.fromkeys(ranks, 1)
    for _, path in candidates[: sum(ranks.values()) - len(ranks)]:
        result[path] += 1
    return result


def _refuse_padding(batch: Mapping[str, object]) -> None:
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and not mask.all():
        raise DataError(
            "init 'eva' cannot use padded batches",
            found="The attention_mask of a batch has zeros.",
            fix="Pass batches of one row each.",
        )
