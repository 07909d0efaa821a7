"""Combines several adapters of one base into one, without the base.

D_i = s_i B_i A_i is the update of adapter i and w_i its weight; a weight scales the update, not
both A and B. The methods, layer by layer:

- cat: sum w_i D_i, exactly, by stacking the factors; the ranks add up.
- linear: sum w_i D_i, exactly, at its minimal rank. (PEFT's method of this name sums the A and the
  B of adapters, which adds products of one adapter's B with another's A.)
- svd: the best rank-R matrix for sum w_i D_i.
- magnitude_prune: sum w_i trim(D_i), where trim keeps the largest `density` of the entries.
- ties (Yadav et al., 2023, arXiv:2306.01708): trim(w_i D_i); elect the sign of each entry's sum;
  take the mean of the nonzero entries with this sign.
- dare_linear, dare_ties (Yu et al., 2023, arXiv:2311.03099): drop(D_i) instead of trim(D_i), which
  keeps each entry with probability `density` and divides it by `density`. The dropped entries
  depend on the seed, the layer and the adapter's tensors: a repeated adapter drops the same
  entries.

The last four work on full matrices and are truncated to rank R at the end. Invariants: an adapter
at weight 1 is unchanged (for pruning methods at density 1); the same adapter at 1 and at -1 gives
zero, written as a rank-1 adapter that changes nothing, with a notice; cat and linear are the sum of
the updates. A layer that an adapter lacks counts as zero and does not vote in the election of
signs. DoRA is refused: its magnitudes need the weights of the base.

Shapes: r rank; out, in features of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from peftkit.errors import AdapterError, did_you_mean, first_few
from peftkit.events import Listener, Notice, Progress, Saved, ignore
from peftkit.formats.card import Card, adapter_usage, write_card
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.folders import check_free, new_adapter_folder
from peftkit.formats.peft.load import AdapterFile
from peftkit.formats.peft.low_rank import LowRank, read_low_rank, rewritten_targets, save_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.kernels import svd

EXACT = ("linear", "cat")
SUMS = (*EXACT, "svd")

ROUNDING = 1e-7
"""Relative to the largest input norm, smaller singular values count as zero: adapters are stored in
float32."""

Weighted = tuple[LowRank, float]
DENSITY = 0.5
"""Share of entries that the pruning methods keep by default."""


@dataclass(frozen=True, slots=True)
class Combined:
    """The result of a combination.

    Attributes:
        updates: Module path to the written update.
        error: Norm of the truncation error over all layers, relative to the exact combination; only
            rounding for linear and cat.
    """

    folder: Path
    updates: Mapping[str, LowRank]
    error: float

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max(update.rank for update in self.updates.values())


@dataclass(frozen=True, slots=True)
class _Source:
    """An input adapter."""

    file: AdapterFile
    updates: Mapping[str, LowRank]
    weight: float

    @property
    def name(self) -> str:
        return str(self.file.folder)


def combine(
    adapters: Sequence[tuple[str | Path, float]],
    method: str,
    out: str | Path,
    *,
    rank: int | None = None,
    density: float | None = None,
    seed: int = 0,
    force: bool = False,
    on_event: Listener = ignore,
) -> Combined:
    """Combine adapters of one base into a new adapter folder that peftkit and PEFT load.

    Args:
        adapters: Folder and weight of each.
        method: linear, cat, svd, ties, dare_linear, dare_ties or magnitude_prune.
        out: The new folder; nothing appears in it before all of it is written.
        rank: Maximum rank per layer for svd and the pruning methods; the default is the layer's
            largest rank in any of the adapters. linear and cat are exact and take no rank.
        density: Share of entries that pruning methods keep, DENSITY by default.
        seed: Seed of DARE's drops.
        force: Replace the adapter in `out`.

    Raises:
        AdapterError: There is no adapter, the adapters have different bases or tasks, or the method
            does not support them.
        OutputError: `out` exists or cannot be written.
    """
    _check_settings(adapters, method, rank, density)
    kept_share = (DENSITY if density is None else density) if method in PRUNING else 1.0
    settings = Settings(method, rank, kept_share, seed)
    out = Path(out).expanduser()
    folders = [adapter_folder(adapter) for adapter, _ in adapters]
    check_free(out, force=force, sources=folders)
    pairs = zip(folders, adapters, strict=True)
    sources = [_Source(*read_low_rank(folder), weight) for folder, (_, weight) in pairs]
    origin = _origin(sources, on_event)
    _check_layers(sources)
    combined = _combined(out, sources, settings, on_event)
    with new_adapter_folder(out, force=force, sources=folders) as staged:
        save_low_rank(
            combined.updates,
            staged,
            origin,
            targets=sorted({t for s in sources for t in rewritten_targets(s.file, s.updates)}),
            transposed=any(source.file.fields.get("fan_in_fan_out") for source in sources),
        )
        write_card(_card(sources, settings, combined, origin), staged)
    if method not in EXACT:
        share = f"Rank {combined.rank} keeps {1 - combined.error**2:.2%} of the combined update"
        on_event(Notice(f"{share} (relative error {combined.error:.2g})."))
    if all(svd.is_zero(update.a, update.b) for update in combined.updates.values()):
        on_event(Notice("The combined update is zero: this adapter leaves its base unchanged."))
    on_event(Saved("adapter", out))
    return combined


def _check_settings(
    adapters: Sequence[tuple[str | Path, float]],
    method: str,
    rank: int | None,
    density: float | None,
) -> None:
    if method not in RULES:
        raise AdapterError(
            f"there is no combination method {method!r}",
            found=did_you_mean(method, RULES),
            fix=f"One of {', '.join(RULES)}.",
        )
    if rank is not None and method in EXACT:
        raise AdapterError(
            f"{method} takes no rank",
            found="It is exact and chooses the rank that this requires.",
            fix=f"For a rank of {rank} at most: --method svd --rank {rank}",
        )
    if rank is not None and rank < 1:
        raise AdapterError(f"the rank is {rank}", fix="Give a rank of at least 1.")
    if density is not None and method not in PRUNING:
        fix = f"It belongs to {', '.join(PRUNING)}: leave it out."
        raise AdapterError(f"{method} takes no density", fix=fix)
    if density is not None and not 0 < density <= 1:
        raise AdapterError(f"the density is {density:g}", fix="Give a share above 0, up to 1.")
    if not adapters:
        raise AdapterError("there is nothing to combine", fix="Give adapters: A=0.7 B=0.3")
    for adapter, weight in adapters:
        if not math.isfinite(weight):
            fix = "Give a finite number, such as 0.5."
            raise AdapterError(f"the weight of {adapter} is {weight}", fix=fix)


def _origin(sources: Sequence[_Source], on_event: Listener) -> Provenance:
    """Return the provenance that all sources share, without the fields that differ.

    Raises:
        AdapterError: The sources belong to different bases or tasks.
    """
    origins = [source.file.provenance for source in sources]
    named = [o for o in origins if o.fingerprint or o.base or o.hub_id]
    reference = next((o for o in origins if o.fingerprint), named[0] if named else origins[0])
    if others := [
        source for source in sources if not _same_base(reference, source.file.provenance)
    ]:
        first = sources[origins.index(reference)]
        raise AdapterError(
            "these adapters belong to different bases",
            found="\n".join(f"{s.name}: {_described(s.file.provenance)}" for s in (first, *others)),
            fix="Only updates of the same weights can be added. If the base is the same under two "
            "names, correct base_model_name_or_path in one adapter_config.json.",
        )
    if len({o.task_type for o in origins}) > 1:
        raise AdapterError(
            "these adapters are for different tasks",
            found="\n".join(f"{s.name}: {s.file.provenance.task_type}" for s in sources),
            fix="Their heads have nothing in common: combine adapters of one task.",
        )
    loadings = [o.loading for o in origins if o.loading]
    styles = [o.prompt_style for o in origins if o.prompt_style]
    same_loading = all(loading == loadings[0] for loading in loadings)
    if len({style.system for style in styles}) > 1:
        styles = [replace(style, system=None) for style in styles]
        on_event(Notice("The adapters have different system prompts; the new one records none."))
    same_style = all(style == styles[0] for style in styles)
    differ = [] if same_loading else ["loading settings"]
    if differ := differ + ([] if same_style else ["prompt styles"]):
        note = f"The adapters have different {' and '.join(differ)}; the new one records none."
        on_event(Notice(note))
    return replace(
        reference,
        base=reference.base or next((o.base for o in origins if o.base), None),
        loading=loadings[0] if loadings and same_loading else {},
        prompt_style=styles[0] if styles and same_style else None,
    )


def _same_base(first: Provenance, second: Provenance) -> bool:
    """Compare fingerprints if both have one, otherwise the known names and revisions."""
    if first.fingerprint and second.fingerprint:
        return first.fingerprint == second.fingerprint
    names, others = ({o.base, o.hub_id} - {None} for o in (first, second))
    if names and others and not names & others:
        return False
    return not first.revision or not second.revision or first.revision == second.revision


def _described(origin: Provenance) -> str:
    parts = (origin.base or origin.hub_id or "no name", origin.revision, origin.fingerprint)
    return ", ".join(part[:23] if part.startswith("sha256:") else part for part in parts if part)


def _check_layers(sources: Sequence[_Source]) -> None:
    """Raise AdapterError for DoRA and for layers of different shapes."""
    shapes: dict[str, tuple[str, tuple[int, int]]] = {}
    problems = []
    for source in sources:
        if any(update.magnitude is not None for update in source.updates.values()):
            raise AdapterError(
                f"cannot combine {source.name}",
                found="It is a DoRA: the effect of its magnitudes depends on the base's weights.",
                fix="Merge it into its base: peftkit merge ADAPTER --out MODEL",
            )
        for path, update in source.updates.items():
            shape = (update.b.shape[0], update.a.shape[1])
            name, first = shapes.setdefault(path, (source.name, shape))
            if shape != first:
                problems.append(f"{path}: {first} in {name}, {shape} in {source.name}")
    if problems:
        raise AdapterError(
            "these adapters belong to models of different shapes",
            found=first_few(problems, 5),
            fix="Only adapters of one base can be combined.",
        )


def _combined(
    out: Path, sources: Sequence[_Source], settings: Settings, on_event: Listener
) -> Combined:
    paths = list(dict.fromkeys(path for source in sources for path in source.updates))
    blended: dict[str, Blended] = {}
    for number, path in enumerate(paths, 1):
        layers = [(s.updates[path], s.weight) for s in sources if path in s.updates]
        blended[path] = blend(path, layers, settings)
        on_event(Progress("Combining layers", number, len(paths)))
    lost = sum(layer.lost for layer in blended.values())
    total = sum(layer.total for layer in blended.values())
    updates = {path: layer.update for path, layer in blended.items()}
    return Combined(out, updates, math.sqrt(lost / total) if total else 0.0)


def _card(
    sources: Sequence[_Source], settings: Settings, combined: Combined, origin: Provenance
) -> Card:
    name, base = combined.folder.name, origin.hub_id or origin.base
    parts = ", ".join(f"{source.file.folder.name} x {source.weight:g}" for source in sources)
    facts = {"adapters": parts, "method": settings.rule, "rank": str(combined.rank)}
    if settings.rule in PRUNING:
        facts["density"] = f"{settings.density:g}"
    if settings.rule not in EXACT:
        facts["relative error of the rank"] = f"{combined.error:.2g}"
    usage = adapter_usage(base, name, rank=combined.rank)
    return Card(f"{name}: a combination of adapters", base, facts, usage=usage)


@dataclass(frozen=True, slots=True)
class Settings:
    """The method of a combination and its settings; see the module.

    Attributes:
        rank: R; None means the layer's largest rank in any of the adapters.
        density: Share of entries that are not pruned.
        seed: Seed of random drops and of large decompositions.
    """

    rule: str
    rank: int | None = None
    density: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Blended:
    """The combined update of a layer.

    Attributes:
        lost: Squared norm of the truncation error.
        total: Squared norm of the exact combination.
    """

    update: LowRank
    lost: float = 0.0
    total: float = 0.0


def blend(path: str, layers: Sequence[Weighted], settings: Settings) -> Blended:
    """Combine the updates of one layer; adapters without it count as zero and are left out.

    Args:
        path: Path of the layer, which seeds DARE's drops.
        layers: One or more plain updates of one shape.
    """
    first = layers[0][0]
    counted = [(update, weight) for update, weight in layers if weight != 0.0]
    if not counted:
        zero = LowRank(torch.zeros(1, first.a.shape[1]), torch.zeros(first.b.shape[0], 1), 1.0)
        return Blended(zero)
    rank = settings.rank or max(update.rank for update, _ in layers)
    pruned = settings.rule in PRUNING and settings.density < 1.0
    if len(counted) == 1 and not pruned and (settings.rule in EXACT or counted[0][0].rank <= rank):
        return Blended(_scaled(*counted[0]))
    if settings.rule in PRUNING:
        best = svd.of_matrix(_pruned(path, counted, settings), rank, seed=settings.seed)
    else:
        best = _summed(counted, settings.rule, rank)
    return Blended(LowRank(best.a, best.b, 1.0), best.lost, best.total)


def _summed(counted: Sequence[Weighted], rule: str, rank: int) -> svd.Truncated:
    a = torch.cat([update.a.double() for update, _ in counted])  # (sum of r, in)
    b = torch.cat([w * u.scaling * u.b.double() for u, w in counted], dim=1)  # (out, sum of r)
    smallest = min(a.shape[1], b.shape[0])
    # a rank above the layer's smaller side adds nothing, and loading refuses it
    if rule == "cat" and len(a) <= smallest:
        return svd.Truncated(a.float(), b.float(), 0.0, 0.0)
    parts = (abs(w * u.scaling) * float(svd.singular_values(u.a, u.b)[0]) for u, w in counted)
    max_rank = min(rank, smallest) if rule == "svd" else None
    return svd.of_product(a, b, max_rank, negligible=ROUNDING * sum(parts))


def _scaled(update: LowRank, weight: float) -> LowRank:
    """Apply a weight; 1 leaves the update unchanged to the bit."""
    if weight == 1.0:
        return update
    return LowRank(update.a, (weight * update.scaling * update.b.double()).float(), 1.0)


def _pruned(path: str, counted: Sequence[Weighted], settings: Settings) -> Tensor:
    """Return the full matrix (out, in) of a pruning method, before truncation."""
    prune, merge = PRUNING[settings.rule]
    pruned = []
    for update, weight in counted:
        seed = crc32(f"{settings.seed} {path} {update.scaling}".encode())
        for tensor in (update.a, update.b):
            seed = crc32(tensor.float().contiguous().numpy().data, seed)
        pruned.append(weight * prune(update.delta(), settings.density, seed))
    return merge(pruned)


def trim(delta: Tensor, density: float, seed: int = 0) -> Tensor:
    """Keep the share `density` of entries with the largest magnitude, and zero the others."""
    number = max(1, round(density * delta.numel()))
    flat = delta.flatten()
    largest = flat.abs().topk(number, sorted=False).indices
    return torch.zeros_like(flat).index_copy(0, largest, flat[largest]).view_as(delta)


def drop(delta: Tensor, density: float, seed: int) -> Tensor:
    """Keep each entry with probability `density`, divided by `density`; zero the others."""
    generator = torch.Generator().manual_seed(seed)
    return delta * (torch.rand(delta.shape, generator=generator) < density) / density


def _sum(deltas: Sequence[Tensor]) -> Tensor:
    return sum(deltas[1:], deltas[0])


def elected_mean(deltas: Sequence[Tensor]) -> Tensor:
    """Return the mean of the entries that have the sign of their sum; zero where that is zero."""
    sign = _sum(deltas).sign()
    agreeing = [(delta.sign() == sign) & (delta != 0) for delta in deltas]
    total = _sum([delta * agrees for delta, agrees in zip(deltas, agreeing, strict=True)])
    return total / _sum([agrees.float() for agrees in agreeing]).clamp(min=1.0)


Prune = Callable[[Tensor, float, int], Tensor]
Merge = Callable[[Sequence[Tensor]], Tensor]
PRUNING: Mapping[str, tuple[Prune, Merge]] = {
    "ties": (trim, elected_mean),
    "dare_linear": (drop, _sum),
    "dare_ties": (drop, elected_mean),
    "magnitude_prune": (trim, _sum),
}
RULES = (*SUMS, *PRUNING)
