"""Prove adapters and merged models in folders and files, in any format that peftkit reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peftkit.base.load import load_base
from peftkit.errors import AdapterError
from peftkit.events import Listener, ignore
from peftkit.files.disk import open_regular
from peftkit.formats.exchange import import_adapter, recognise
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.folders import CONFIG, TENSORS, is_hub_id
from peftkit.formats.gguf.header import read_header
from peftkit.formats.mlx import read_mlx
from peftkit.formats.open_adapter import open_adapter
from peftkit.formats.peft.load import read_adapter
from peftkit.formats.peft.low_rank import LowRank, read_low_rank
from peftkit.kernels.checked import relative_difference
from peftkit.proof.judge import Verdict
from peftkit.proof.record import prove, read_proof

SAME = 0.98
"""Cosine of two updates that differ by rounding alone, to 8 bits or more."""


def prove_files(
    target: str | Path,
    proof: str | Path | None = None,
    base: str | None = None,
    on_event: Listener = ignore,
) -> Verdict:
    """Prove an adapter or a merged model.

    Args:
        target: Folder, .gguf file, or the name of either on the hub.
        proof: Adapter folder or proof.json; None: the target's. If it is an adapter's folder and
            the target a copy of it in any format, weights are compared, without the base.
        base: Location of the base; by default the recorded one.

    Raises:
        AdapterError: There is no proof, or no adapter or model.
    """
    path = Path(target).expanduser()
    if is_hub_id(str(target)) and _is_adapter_on_hub(str(target)):
        path = adapter_folder(target)
    source = Path(proof).expanduser() if proof else None
    if not (path / CONFIG).is_file() and not _is_gguf_adapter(path):
        content = read_proof(source or (path.parent if path.is_file() else path))
        loaded = load_base(str(path) if path.exists() else str(target), on_event=on_event)
        return prove(loaded.model, content, tokenizer=loaded.tokenizer)
    if source and (source / TENSORS).is_file() and source.resolve() != path.resolve():
        base = base or read_adapter(source).provenance.base
        try:
            return prove_updates(_updates(path, base), read_low_rank(source)[1])
        except AdapterError:
            if not (path / TENSORS).is_file():
                raise
    content = read_proof(source or (path.parent if path.is_file() else path))
    with TemporaryDirectory(prefix="peftkit-") as scratch:
        if not (path / TENSORS).is_file():
            name = base or content.base["hub_id"] or content.base["name"]
            path = import_adapter(path, Path(scratch, "adapter"), base=name).folder
        opened = open_adapter(path, base, force=True, on_event=on_event)
    verdict, recorded = prove(opened.base.model, content), content.base["fingerprint"]
    if verdict.is_applied or recorded in (None, opened.base.fingerprint):
        return verdict
    found = f"the base's fingerprint is {opened.base.fingerprint[:23]}..., not {recorded[:23]}..."
    return replace(verdict, kind="other_base", evidence=(*verdict.evidence, found), share=None)


def _is_adapter_on_hub(name: str) -> bool:
    try:
        return bool(adapter_folder(name))
    except AdapterError as error:
        if "full model" in (error.fix or ""):
            return False
        raise


def _is_gguf_adapter(path: Path) -> bool:
    if path.suffix != ".gguf" or not path.is_file():
        return False
    try:
        with open_regular(path) as file:
            return bool(read_header(path, file))
    except AdapterError:  # a model
        return False


def _updates(path: Path, base: str | None) -> dict[str, LowRank]:
    """Return the updates of an adapter in any format."""
    foreign = recognise(path)
    if foreign.kind == "mlx":
        return read_mlx(foreign.folder, foreign.file.name)
    if foreign.kind == "peft":
        return read_low_rank(foreign.folder)[1]
    with TemporaryDirectory(prefix="peftkit-") as scratch:
        return read_low_rank(import_adapter(path, Path(scratch, "adapter"), base=base).folder)[1]


def prove_updates(found: Mapping[str, LowRank], reference: Mapping[str, LowRank]) -> Verdict:
    """Return whether the updates of a converted adapter are those of its source, by weights."""
    both = [path for path in reference if path in found]
    product = sum(_inner(found[path], reference[path]) for path in both)
    squares = [sum(_inner(u, u) for u in all_.values()) for all_ in (found, reference)]
    if min(squares) == 0:
        return Verdict("not_applied", ("its update is zero",), 0.0, method="weights")
    share, angle = product / squares[1], product / math.sqrt(squares[0] * squares[1])
    facts = (f"{len(both)} of {len(reference)} layers; share {share:.4f}, cosine {angle:.4f}",)
    shown: dict[str, Any] = {"share": share, "method": "weights"}
    if any(_inner(u, u) and not _is_in(found, path, u) for path, u in reference.items()):
        return Verdict("part", facts, **shown)
    if angle > SAME:
        return Verdict("applied" if abs(share - 1) < 1 - SAME else "strength", facts, **shown)
    turned = {path: replace(u, b=u.b.T.reshape(u.b.shape)) for path, u in reference.items()}
    swapped = {p: replace(u, a=u.b.T, b=u.a.T) for p, u in reference.items()}
    for fault in (turned, swapped):
        inner = sum(_inner(found[path], fault[path]) for path in both)
        if inner > SAME * math.sqrt(squares[0] * squares[1]):
            return Verdict("transposed", facts, **shown)
    return Verdict("other_adapter", facts, **shown)


def _is_in(found: Mapping[str, LowRank], path: str, update: LowRank) -> bool:
    """Return whether a copy has an update of a layer, and with DoRA its magnitude."""
    if path not in found or _inner(found[path], found[path]) == 0:
        return False
    copy, magnitude = found[path].magnitude, update.magnitude
    if copy is None or magnitude is None:
        return copy is magnitude
    return copy.shape == magnitude.shape and relative_difference(copy, magnitude) < 1 - SAME


def _inner(one: LowRank, other: LowRank) -> float:
    """Return the inner product of two updates, from their factors; 0 if shapes differ."""
    if one.a.shape[1] != other.a.shape[1] or one.b.shape[0] != other.b.shape[0]:
        return 0.0
    a, b = one.a.double() @ other.a.double().T, one.b.double().T @ other.b.double()
    return one.scaling * other.scaling * float((a * b).sum())
