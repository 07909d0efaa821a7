"""The best adapter of a rank for a full fine-tune: W_tuned - W_base, cut to rank R layer by layer.

Both models are read from their files one tensor at a time and never built. What no adapter of
linear layers can hold (norms, embeddings, biases, stacked experts, layers not asked for) is listed,
with its size, as not kept.
Shapes: out, in features of a layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from peftkit.base.fingerprint import fingerprint
from peftkit.base.load import local_folder
from peftkit.base.locate import locate
from peftkit.base.skeleton import skeleton
from peftkit.errors import BaseError, TargetError, first_few
from peftkit.events import Listener, Notice, Progress, Saved, Stage, Table, ignore
from peftkit.formats.card import Card, adapter_usage, write_card
from peftkit.formats.model_files import (
    ModelFiles,
    check_alike,
    difference,
    filled,
    model_files,
    names_of,
)
from peftkit.formats.peft.low_rank import LowRank, save_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.formats.shards import find_shards
from peftkit.formats.staged import check_free, new_adapter_folder
from peftkit.kernels import svd
from peftkit.model.places import is_conv1d, is_linear
from peftkit.model.roles import ALL_LINEAR, linear_role
from peftkit.model.targets import Site, resolve


@dataclass(slots=True)
class Explained:
    """Part of an update, and how much of it is kept.

    Attributes:
        count: Number of tensors. squared: Sum of squares of the update. kept: That of what is kept.
    """

    count: int = 0
    squared: float = 0.0
    kept: float = 0.0

    @property
    def norm(self) -> float:
        """Of the update."""
        return math.sqrt(self.squared)

    @property
    def share(self) -> float:
        """1 - ||residual||^2 / ||update||^2."""
        return self.kept / self.squared if self.squared else 1.0

    def add(self, squared: float, kept: float = 0.0, count: int = 1) -> None:
        """Count more tensors; the part that is kept cannot exceed the whole by rounding."""
        self.count += count
        self.squared += squared
        self.kept += min(kept, squared)


@dataclass(slots=True)
class Extracted:
    """The result of an extraction.

    Attributes:
        updates: Module path to what was written.
        roles: Of the layers that have an adapter now.
        left: Differences that are not kept, by name with * for the layer's number.
    """

    folder: Path
    updates: dict[str, LowRank] = field(default_factory=dict)
    roles: dict[str, Explained] = field(default_factory=dict)
    left: dict[str, Explained] = field(default_factory=dict)

    @property
    def adapted(self) -> Explained:
        """All layers that have an adapter now."""
        return _total(self.roles.values())

    @property
    def whole(self) -> Explained:
        """All differences of the two models."""
        return _total([*self.roles.values(), *self.left.values()])


def _total(parts: Iterable[Explained]) -> Explained:
    total = Explained()
    for part in parts:
        total.add(part.squared, part.kept, part.count)
    return total


def extract(
    base: str,
    tuned: str,
    rank: int,
    out: str | Path,
    *,
    targets: Sequence[str] | str = ALL_LINEAR,
    seed: int = 0,
    force: bool = False,
    on_event: Listener = ignore,
) -> Extracted:
    """Write the best rank-R adapter of a full fine-tune.

    Args:
        base, tuned: Folders or hub ids of two models with safetensors files on this machine.
        rank: R, for each layer; less where a layer is smaller.
        out: The new adapter folder; nothing appears in it before all of it is written.
        targets: Roles, groups or names of the layers, as in a recipe.
        seed: Of the decompositions of large matrices.
        force: Replace the adapter in `out`.

    Raises:
        BaseError: A model is missing or damaged, their shapes differ, or the weights asked for are
            equal.
        TargetError: A target matches nothing, or nothing that an adapter can change.
        OutputError: `out` is taken or cannot be written.
    """
    if rank < 1:
        raise TargetError(f"the rank is {rank}", fix="Give a rank of at least 1.")
    out = Path(out).expanduser()
    folders = [_folder(base), _folder(tuned)]
    check_free(out, force=force, sources=folders)
    on_event(Stage(f"Comparing {tuned} with {base}"))
    model = skeleton(base)
    first, second = (_files(folder, model) for folder in folders)
    check_alike(first, second)
    done = Extracted(out)
    sites = _sites(model, targets)
    names = names_of(first, second)
    _check_visited(sites, names, first)
    for number, name in enumerate(names, 1):
        on_event(Progress("Comparing tensors", number, len(names)))
        if (delta := difference(first, second, name)) is not None:
            _take(done, name, delta, sites.get(name), model, rank, seed)
    if not done.updates:
        raise _nothing(done, base, tuned)
    provenance = _provenance(base, model, first, on_event)
    linears = [path for path, module in model.named_modules() if is_linear(module)]
    with new_adapter_folder(out, force=force, sources=folders) as staged:
        save_low_rank(
            done.updates,
            staged,
            provenance,
            others=[path for path in linears if path not in done.updates],
            transposed=any(is_conv1d(model.get_submodule(path)) for path in done.updates),
        )
        write_card(_card(out.name, tuned, rank, done, provenance), staged)
    _report(done, on_event)
    on_event(Saved("adapter", out))
    return done


def _folder(name: str) -> Path:
    folder = local_folder(name)
    if folder is None:
        raise BaseError(
            f"there are no safetensors files of {name} on this machine",
            fix="Give a model folder with safetensors; download a hub model with: hf download ID",
        )
    return folder


def _files(folder: Path, model: nn.Module) -> ModelFiles:
    shards = find_shards(folder)
    if shards is None:
        raise BaseError(
            f"{folder} holds no safetensors",
            found=first_few(sorted(path.name for path in folder.iterdir()), 8, ", "),
            fix="Save the model again with save_pretrained.",
        )
    return model_files(shards, model)


def _sites(model: nn.Module, targets: Sequence[str] | str) -> dict[str, Site]:
    """Return the sites by the name of their weight: linear layers and parts of fused ones."""
    sites = {
        f"{site.path}.weight": site
        for site in resolve(model, targets)
        if site.parameter is None and is_linear(model.get_submodule(site.path))
    }
    if not sites:
        raise TargetError(
            f"none of the targets {targets} is a linear layer",
            fix="LoRA adapts linear layers: see peftkit inspect MODEL",
        )
    return sites


def _check_visited(sites: Mapping[str, Site], names: Sequence[str], source: ModelFiles) -> None:
    """Refuse a target that is tied to another weight: an adapter would change one use of it."""
    hidden = [name for name in sites if name in source.where and name not in names]
    if hidden:
        raise TargetError(
            f"{', '.join(hidden)} has no weight of its own",
            found="It is tied to the embeddings, which an adapter of it would not change.",
            fix="Leave it out of the targets.",
        )


def _take(
    done: Extracted,
    name: str,
    delta: Tensor,
    site: Site | None,
    model: nn.Module,
    rank: int,
    seed: int,
) -> None:
    """Reduce one difference to the rank, or count it as not kept."""
    squared = float(delta.double().square().sum())
    if site is None:
        done.left.setdefault(_starred(name), Explained()).add(squared)
        return
    if is_conv1d(model.get_submodule(site.path)):
        delta = delta.t()
    role = "+".join(site.roles) or linear_role(site.path)
    if site.rows:
        asked = torch.zeros_like(delta)
        rows = torch.cat(list(site.rows.values()))
        asked[rows] = delta[rows]
        rest = squared - float(asked.double().square().sum())
        if not torch.equal(asked, delta):
            done.left.setdefault(f"{_starred(name)}, rows of other roles", Explained()).add(rest)
        if not asked.any():
            return
        delta, squared = asked, squared - rest
    best = svd.of_matrix(delta.contiguous(), rank, seed=seed)
    done.updates[site.path] = LowRank(best.a, best.b, 1.0)
    done.roles.setdefault(role, Explained()).add(squared, best.kept)


def _starred(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _nothing(done: Extracted, base: str, tuned: str) -> BaseError:
    if not done.left:
        return BaseError(
            f"there is nothing to extract from {tuned}",
            found=f"Its weights are those of {base}, to the bit.",
            fix="Give the base first, then the fine-tuned model.",
        )
    return BaseError(
        f"there is nothing to extract from {tuned} in the layers asked for",
        found=f"It differs from the base in: {first_few(done.left, 8, ', ')}",
        fix="Name those of them that are linear with --targets.",
    )


def _provenance(base: str, model: nn.Module, source: ModelFiles, on_event: Listener) -> Provenance:
    """Record the base as training on it would; the model is a skeleton, and is filled here."""
    location = locate(base)
    identity = fingerprint(model) if filled(model, source) else None
    if identity is None:
        on_event(
            Notice(
                "The base's files name their tensors differently from the model, so the adapter "
                "records no fingerprint of its base."
            )
        )
    return Provenance(location.name, hub_id=location.hub_id, fingerprint=identity)


def _card(name: str, tuned: str, rank: int, done: Extracted, origin: Provenance) -> Card:
    facts = {
        "extracted from": tuned,
        "rank": str(rank),
        "kept of the adapted layers' update": f"{done.adapted.share:.2%}",
        "kept of all that differs": f"{done.whole.share:.2%}",
    }
    base = origin.hub_id or origin.base
    usage = adapter_usage(base, name, rank=rank)
    return Card(f"{name}: a fine-tune as an adapter", base, facts, usage=usage)


def _report(done: Extracted, on_event: Listener) -> None:
    rows = [
        (role, str(part.count), f"{part.norm:.4g}", f"{part.share:.2%}")
        for role, part in done.roles.items()
    ]
    rows += [
        (f"not kept: {name}", str(part.count), f"{part.norm:.4g}", "0%")
        for name, part in done.left.items()
    ]
    columns = ("role", "tensors", "norm of the update", "kept")
    on_event(Table("What the adapter keeps", columns, tuple(rows)))
    text = f"It keeps {done.adapted.share:.2%} of the update of its layers"
    if done.left:
        text += f", {done.whole.share:.2%} of all that differs"
    on_event(Notice(text + "."))
