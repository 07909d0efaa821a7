"""Combines several adapters of one base into one, without the base.

blend.py says what each method computes. The laws: an adapter at weight 1 gives itself (under a
pruning method at density 1); the same adapter at 1 and at -1 gives zero, which is written as an
adapter of rank 1 that changes nothing, and is told; cat and linear are the sum of the updates.
A layer that an adapter lacks counts as zero, except where signs are elected (ties, dare_ties):
there the adapters must have the same layers. DoRA is no sum of updates, since its magnitudes need
the weights of the base: one DoRA at weight 1 with linear or cat gives itself, all else is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peftkit.errors import AdapterError, did_you_mean
from peftkit.events import Listener, Notice, Progress, Saved, ignore
from peftkit.formats.card import Card, adapter_usage, write_card
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.peft.low_rank import LowRank, read_low_rank, save_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.formats.staged import check_free, new_adapter_folder
from peftkit.kernels import svd
from peftkit.merging.blend import EXACT, PRUNING, RULES, Blended, Rule, Settings, blend
from peftkit.merging.combine_sources import Source, check_layers, endings_to_avoid, joined

DENSITY = 0.5
"""Share of entries that the pruning methods keep unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Combined:
    """The result of a combination.

    Attributes:
        updates: Module path to what was written.
        error: Norm of what was cut off by the rank, relative to the exact combination, over all
            layers; only rounding for linear and cat.
    """

    folder: Path
    updates: Mapping[str, LowRank]
    error: float

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max(update.rank for update in self.updates.values())


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
        rank: Of svd and of the pruning methods: at most this for each layer; by default the largest
            that the layer has in any of the adapters. linear and cat are exact and take none.
        density: Of the pruning methods: the share of entries that is kept, DENSITY by default.
        seed: Of what DARE drops.
        force: Replace the adapter in `out`.

    Raises:
        AdapterError: There is no adapter, they do not belong together, or the method is not defined
            for them.
        OutputError: `out` is taken or cannot be written.
    """
    settings = _settings(method, rank, density, seed)
    out = Path(out).expanduser()
    folders = [adapter_folder(adapter) for adapter, _ in adapters]
    _check_weights(adapters)
    check_free(out, force=force, sources=folders)
    sources = [
        Source(*read_low_rank(folder), weight)
        for folder, (_, weight) in zip(folders, adapters, strict=True)
    ]
    provenance = joined(sources, on_event)
    check_layers(sources, settings)
    blended = _blend_all(sources, settings, on_event)
    combined = _combined(out, blended)
    with new_adapter_folder(out, force=force, sources=folders) as staged:
        save_low_rank(
            combined.updates,
            staged,
            provenance,
            others=endings_to_avoid(sources),
            transposed=any(source.file.fields.get("fan_in_fan_out") for source in sources),
        )
        write_card(_card(out.name, sources, settings, combined, provenance), staged)
    _report(combined, settings, on_event)
    on_event(Saved("adapter", out))
    return combined


def _settings(method: str, rank: int | None, density: float | None, seed: int) -> Settings:
    rule: Rule | None = next((rule for rule in RULES if rule == method), None)
    if rule is None:
        raise AdapterError(
            f"there is no combination method {method!r}",
            found=did_you_mean(method, RULES),
            fix=f"One of {', '.join(RULES)}.",
        )
    if rank is not None and rule in EXACT:
        raise AdapterError(
            f"{rule} takes no rank",
            found="It is exact, with the rank that this needs.",
            fix=f"For a rank of {rank} at most: --method svd --rank {rank}",
        )
    if rank is not None and rank < 1:
        raise AdapterError(f"the rank is {rank}", fix="Give a rank of at least 1.")
    if density is not None and rule not in PRUNING:
        raise AdapterError(
            f"{rule} takes no density", fix=f"It belongs to {', '.join(PRUNING)}: leave it out."
        )
    if density is not None and not 0 < density <= 1:
        raise AdapterError(f"the density is {density:g}", fix="Give a share above 0, up to 1.")
    kept = 1.0 if rule not in PRUNING else DENSITY if density is None else density
    return Settings(rule, rank, kept, seed)


def _check_weights(adapters: Sequence[tuple[str | Path, float]]) -> None:
    if not adapters:
        raise AdapterError("there is nothing to combine", fix="Give adapters: A=0.7 B=0.3")
    for adapter, weight in adapters:
        if not math.isfinite(weight):
            raise AdapterError(
                f"the weight of {adapter} is {weight}", fix="Give a finite number, such as 0.5."
            )


def _blend_all(
    sources: Sequence[Source], settings: Settings, on_event: Listener
) -> dict[str, Blended]:
    paths = list(dict.fromkeys(path for source in sources for path in source.updates))
    blended = {}
    for done, path in enumerate(paths, 1):
        if len(sources) == 1 and sources[0].weight == 1.0 and settings.rule in EXACT:
            blended[path] = Blended(sources[0].updates[path])  # a DoRA keeps its magnitude
        else:
            layers = [(s.updates[path], s.weight) for s in sources if path in s.updates]
            blended[path] = blend(path, layers, settings)
        on_event(Progress("Combining layers", done, len(paths)))
    return blended


def _combined(out: Path, blended: Mapping[str, Blended]) -> Combined:
    updates = {path: layer.update for path, layer in blended.items()}
    lost = sum(layer.lost for layer in blended.values())
    total = sum(layer.total for layer in blended.values())
    return Combined(out, updates, math.sqrt(lost / total) if total else 0.0)


def _report(done: Combined, settings: Settings, on_event: Listener) -> None:
    if settings.rule not in EXACT:
        on_event(
            Notice(
                f"Rank {done.rank} keeps {1 - done.error**2:.2%} of the combined update "
                f"(relative error {done.error:.2g})."
            )
        )
    if all(svd.is_zero(update.a, update.b) for update in done.updates.values()):
        on_event(Notice("The combined update is zero: this adapter leaves its base unchanged."))


def _card(
    name: str, sources: Sequence[Source], settings: Settings, done: Combined, origin: Provenance
) -> Card:
    parts = ", ".join(f"{source.file.folder.name} x {source.weight:g}" for source in sources)
    facts = {"adapters": parts, "method": settings.rule, "rank": str(done.rank)}
    if settings.rule in PRUNING:
        facts["density"] = f"{settings.density:g}"
    if settings.rule not in EXACT:
        facts["relative error of the rank"] = f"{done.error:.2g}"
    base = origin.hub_id or origin.base
    has_magnitude = any(update.magnitude is not None for update in done.updates.values())
    usage = adapter_usage(base, name, rank=0 if has_magnitude else done.rank)
    return Card(f"{name}: a combination of adapters", base, facts, usage=usage)
