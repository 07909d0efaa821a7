"""The adapters of a combination: whether they belong together, and what they have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from peftkit.errors import AdapterError, first_few
from peftkit.events import Listener, Notice
from peftkit.formats.peft.folder import AdapterFile
from peftkit.formats.peft.low_rank import LowRank
from peftkit.formats.peft.notes import Provenance
from peftkit.merging.blend import ELECTING, EXACT, Settings


@dataclass(frozen=True, slots=True)
class Source:
    """One adapter that goes in."""

    file: AdapterFile
    updates: Mapping[str, LowRank]
    weight: float


def joined(sources: Sequence[Source], on_event: Listener) -> Provenance:
    """Return the provenance that all sources share; harmless differences are dropped with a notice.

    Raises:
        AdapterError: They belong to different bases or tasks.
    """
    origins = [source.file.provenance for source in sources]
    for index, later in enumerate(origins):
        for earlier, origin in enumerate(origins[:index]):
            _check_same_base(sources[earlier].file, origin, sources[index].file, later)
    tasks = {_name(s): str(s.file.provenance.task_type) for s in sources}
    if len(set(tasks.values())) > 1:
        raise AdapterError(
            "these adapters are for different tasks",
            found="\n".join(f"{name}: {task}" for name, task in tasks.items()),
            fix="Their heads have nothing in common: combine adapters of one task.",
        )
    silent = [_name(s) for s, o in zip(sources, origins, strict=True) if not _says_base(o)]
    if silent and len(silent) < len(sources):
        on_event(Notice(f"{', '.join(silent)} names no base; the others' base is assumed."))
    known = next(
        (o for o in origins if o.fingerprint), next(filter(_says_base, origins), origins[0])
    )
    loadings = [o.loading for o in origins if o.loading]
    if any(loading != loadings[0] for loading in loadings):
        on_event(
            Notice(
                "The adapters were trained with differently loaded bases; the new one records none."
            )
        )
        loadings = []
    styles = {o.prompt_style for o in origins if o.prompt_style}
    if len(styles) > 1:
        on_event(
            Notice(
                "The adapters were trained with different prompt styles; the new one records none."
            )
        )
    return replace(
        known,
        base=known.base or next((o.base for o in origins if o.base), None),
        loading=loadings[0] if loadings else {},
        prompt_style=styles.pop() if len(styles) == 1 else None,
    )


def _says_base(origin: Provenance) -> bool:
    return bool(origin.fingerprint or origin.base or origin.hub_id)


def _name(source: Source) -> str:
    return str(source.file.folder)


def _check_same_base(
    one: AdapterFile, first: Provenance, other: AdapterFile, second: Provenance
) -> None:
    """Compare fingerprints where both have one, else names and revisions as far as known."""
    if first.fingerprint and second.fingerprint:
        same = first.fingerprint == second.fingerprint
    else:
        names, others = ({o.base, o.hub_id} - {None} for o in (first, second))
        same = not names or not others or bool(names & others)
        same = same and (
            not first.revision or not second.revision or first.revision == second.revision
        )
    if same:
        return
    raise AdapterError(
        "these adapters belong to different bases",
        found="\n".join(f"{f.folder}: {_described(o)}" for f, o in ((one, first), (other, second))),
        fix="Only updates of the same weights can be added. If the base is the same under two "
        "names, correct base_model_name_or_path in one adapter_config.json.",
    )


def _described(origin: Provenance) -> str:
    parts = (origin.base or origin.hub_id or "no name", origin.revision, origin.fingerprint)
    return ", ".join(part[:23] if part.startswith("sha256:") else part for part in parts if part)


def check_layers(sources: Sequence[Source], settings: Settings) -> None:
    """Refuse layers that do not fit together, and DoRA where it cannot be combined."""
    dora = [
        source
        for source in sources
        if any(u.magnitude is not None for u in source.updates.values())
    ]
    if dora and (len(sources) > 1 or dora[0].weight != 1.0 or settings.rule not in EXACT):
        raise AdapterError(
            f"{settings.rule} is not defined for DoRA",
            found=f"{', '.join(map(_name, dora))}: the effect of its magnitudes depends on the "
            "base's weights, so it cannot be scaled, added or reduced",
            fix="Turn it into a LoRA first: peftkit merge ADAPTER --out MODEL, then\n"
            "peftkit extract --base BASE --tuned MODEL --rank R --out LORA",
        )
    problems = []
    shapes: dict[str, tuple[str, tuple[int, int]]] = {}
    for source in sources:
        for path, update in source.updates.items():
            shape = (update.b.shape[0], update.a.shape[1])
            name, first = shapes.setdefault(path, (_name(source), shape))
            if shape != first:
                problems.append(f"{path}: {first} in {name}, {shape} in {_name(source)}")
    if problems:
        raise AdapterError(
            "these adapters belong to models of different shapes",
            found=first_few(problems, 5),
            fix="Only adapters of one base can be combined.",
        )
    if settings.rule in ELECTING:
        missing = [
            f"{path} is not in {_name(source)}"
            for source in sources
            for path in shapes
            if path not in source.updates
        ]
        if missing:
            raise AdapterError(
                f"{settings.rule} needs adapters with the same layers, because it elects signs",
                found=first_few(missing, 5),
                fix="linear, cat, svd, dare_linear and magnitude_prune take a missing layer as "
                "zero.",
            )


def endings_to_avoid(sources: Sequence[Source]) -> set[str]:
    """Return paths that no target ending of the combination may match.

    Each adapter's endings match exactly its layers in the base, so the endings of all adapters
    together match those of the combination; shorter ones might match more. If an adapter names
    its layers in another way, full paths are written.
    """
    endings: set[str] = set()
    for source in sources:
        fields = source.file.fields
        targets = fields.get("target_modules")
        narrowed = any(fields.get(name) for name in ("layers_to_transform", "exclude_modules"))
        if isinstance(targets, list) and not narrowed:
            endings.update(map(str, targets))
        else:
            endings.update(source.updates)
    return {"?." + ending.partition(".")[2] for ending in endings if "." in ending}
