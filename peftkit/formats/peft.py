"""Adapter folders in HF PEFT's format, both ways.

A folder holds adapter_config.json, adapter_model.safetensors, and, when made here, peftkit.json:
what PEFT's config has no place for (the method as asked, the base's fingerprint, the prompt style).
The format is PEFT 0.21's: a tensor of the module at `path` is "base_model.model.{path}.{name}".
Only the sixteen oldest config keys and those that differ from their defaults are written, because
PEFT before 0.14 refuses keys that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.adapter import Adapter, attach
from peftkit.config import from_dict
from peftkit.data.encode import Style
from peftkit.errors import AdapterError, PeftkitError, TargetError
from peftkit.files import sha256_of, write_json, write_tensors
from peftkit.formats.endings import ANY, check_targets, shortest_endings, targeted, unmatched
from peftkit.formats.guard import check_safetensors, read_json, read_tensors
from peftkit.formats.places import sites_of, written_fields
from peftkit.formats.settings import (
    OLDEST_FIELDS,
    check_config,
    computing,
    notes_changed,
    settings_digest,
)
from peftkit.methods.protocol import Method
from peftkit.methods.table import METHODS, method_from_peft
from peftkit.methods.tuned import named_modules
from peftkit.strict_json import shown
from peftkit.targets import Site

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
NOTES = "peftkit.json"
FINGERPRINT = "base_fingerprint"
"""Key of the tensor file's metadata."""
PREFIX = "base_model.model."
DEFAULT_NAME = re.compile(r"\.default(?=\.weight$|$)")
"""PEFT's in-memory adapter name, which some tools leave in the file's tensor names."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where an adapter comes from, and what it takes to use it as it was trained.

    Attributes:
        base: Short name, hub id or path of the base. revision: Its commit, if pinned.
        hub_id: Where other tools find it, if it is published.
        fingerprint: Of the base's weights; an adapter on other weights is refused.
        loading: dtype, quantize and double_quant with which the base was loaded.
        prompt_style: How a prompt is put to the model; None where the file does not say.
        task_type: PEFT's name of the task.
    """

    base: str | None = None
    hub_id: str | None = None
    revision: str | None = None
    fingerprint: str | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)
    prompt_style: Style | None = None
    task_type: str | None = "CAUSAL_LM"


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """What an adapter folder says of itself, read and checked, without its tensors."""

    folder: Path
    method: Method
    fields: Mapping[str, Any]
    provenance: Provenance
    made_here: bool


def save_adapter(
    adapter: Adapter, folder: str | Path, provenance: Provenance | None = None
) -> Path:
    """Write an adapter folder that peftkit and PEFT load.

    Args:
        adapter: What is trained on it is what is saved.
        folder: Created if need be; its adapter files are replaced, each whole or not at all.
        provenance: What is known of the base.

    Raises:
        RunError: A tensor is not finite, or the disk is full.
        OutputError: The folder is not writable.
    """
    provenance = provenance or Provenance()
    fields = _config_fields(adapter, provenance)
    return write_folder(Path(folder), adapter.state(), fields, adapter.method, provenance)


def write_folder(
    folder: Path,
    state: Mapping[str, Tensor],
    fields: Mapping[str, Any],
    method: Method,
    provenance: Provenance,
) -> Path:
    """Write the three files of an adapter folder; see `save_adapter`."""
    tensors = {
        _prefix(method, name) + name: tensor.cpu()
        for name, tensor in state.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"}
    if provenance.fingerprint:
        metadata[FINGERPRINT] = provenance.fingerprint
    write_tensors(tensors, folder / TENSORS, metadata)
    write_json(fields, folder / CONFIG)
    spec, config = method.model_dump(mode="json"), computing(fields)
    notes = {
        "version": 1,
        "sha256": {TENSORS: sha256_of(folder / TENSORS), "settings": settings_digest(spec, config)},
        "method": spec,
        "config": config,
        "base": {
            "name": provenance.base,
            "hub_id": provenance.hub_id,
            "revision": provenance.revision,
            "fingerprint": provenance.fingerprint,
            "loading": dict(provenance.loading),
        },
        "prompt_style": asdict(provenance.prompt_style) if provenance.prompt_style else None,
    }
    write_json(notes, folder / NOTES)
    return folder


def _prefix(method: Method, name: str) -> str:
    return method.shared_prefix if name in method.shared_names else PREFIX


def _config_fields(adapter: Adapter, provenance: Provenance) -> dict[str, Any]:
    fields = written_fields(adapter)
    where = where_fields(adapter.method, provenance, fields["target_modules"])
    if "fan_in_fan_out" in where:
        transposed = any(type(m.base).__name__ == "Conv1D" for m in adapter.modules.values())
        where["fan_in_fan_out"] = transposed
    return where | fields


def where_fields(method: Method, provenance: Provenance, targets: list[str]) -> dict[str, Any]:
    """Return the config fields that say where an adapter sits, with the oldest ones' defaults."""
    oldest = {k: v for k, v in OLDEST_FIELDS.items() if k not in method.foreign_fields}
    return {
        **oldest,
        "peft_type": method.peft_type,
        "task_type": provenance.task_type,
        "base_model_name_or_path": provenance.hub_id or provenance.base,
        "revision": provenance.revision,
        "target_modules": targets,
    }


def read_adapter(folder: str | Path) -> AdapterFile:
    """Read what an adapter folder says of itself.

    Raises:
        AdapterError: No adapter there, a file that is not what it says, or a method unknown here.
    """
    folder = Path(folder)
    fields = read_json(_existing(folder, CONFIG))
    for name in ("target_modules", "target_parameters"):
        check_targets(fields.get(name), f"cannot use {folder / CONFIG}", name)
    foreign = method_from_peft(fields)
    if not (folder / NOTES).exists():
        provenance = Provenance(
            base=fields.get("base_model_name_or_path") or None,
            revision=fields.get("revision"),
            fingerprint=_fingerprint_inside(folder),
            task_type=fields.get("task_type"),
        )
        return AdapterFile(folder, foreign, fields, provenance, made_here=False)
    notes = read_json(folder / NOTES)
    try:
        spec, base, config = notes["method"], notes["base"], dict(notes["config"])
        digest, settings = notes["sha256"][TENSORS], notes["sha256"]["settings"]
        method = from_dict(METHODS[spec["type"]], spec, str(folder / NOTES))
        provenance = Provenance(
            base["name"],
            base["hub_id"],
            base["revision"],
            base["fingerprint"],
            base["loading"],
            Style(**notes["prompt_style"]) if notes["prompt_style"] else None,
            fields.get("task_type"),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, PeftkitError):
            raise
        raise AdapterError(
            f"{folder / NOTES} is not one that peftkit wrote",
            found=f"{error} is missing or of the wrong type",
            fix="Restore it, or delete it to load the folder as a plain PEFT adapter.",
        ) from error
    if settings_digest(spec, config) != settings:
        raise notes_changed(folder / NOTES)
    check_config(folder / CONFIG, fields, config)
    if sha256_of(_existing(folder, TENSORS)) != digest:
        raise AdapterError(
            f"{folder / TENSORS} is not the file that was saved",
            found="its sha256 is another one than that in " + NOTES,
            fix="Get it again; or delete the notes to load it as a plain PEFT adapter.",
        )
    return AdapterFile(folder, method, fields, provenance, made_here=True)


def load_adapter(
    model: nn.Module,
    folder: str | Path,
    *,
    fingerprint: str | None = None,
    force: bool = False,
    trainable: bool = False,
) -> Adapter:
    """Attach an adapter folder's method to a model and load its tensors.

    Args:
        model: The base it was trained on; changed in place.
        folder: Made here or by PEFT.
        fingerprint: Of `model`; compared with the one recorded in the folder.
        force: Load although the fingerprints differ.
        trainable: Leave the adapter's tensors trainable.

    Raises:
        AdapterError: The base is another one, or the tensors do not fit: all of them are listed.
    """
    file = read_adapter(folder)
    if fingerprint and not force:
        check_weights(file, fingerprint)
    tensors = named_tensors(file.folder)
    full = _trained_whole(file, tensors, model)
    of_method = [name for name in tensors if not any(name.startswith(f"{p}.") for p in full)]
    sites, method = _sites(file, of_method, model), file.method
    if not file.made_here:  # saved again, it says where it sits
        places = (f"{s.path}.{s.parameter}" if s.parameter else s.path for s in sites)
        targets = tuple(dict.fromkeys(places))
        method = method.model_copy(update={"targets": targets, "train_fully": tuple(full)})
    try:
        adapter = attach(model, method, sites=sites)
    except TargetError as error:
        raise AdapterError(
            f"the adapter in {folder} does not fit {type(model).__name__}", found=str(error)
        ) from error
    try:
        _check_config(file, adapter)
        if not file.made_here:
            tensors = _completed(adapter, tensors)
        adapter.load_state(tensors)
    except BaseException:
        adapter.detach()
        raise
    for parameter in adapter.parameters():
        parameter.requires_grad_(trainable)
    return adapter


def _fingerprint_inside(folder: Path) -> str | None:
    """Return the base's fingerprint from the tensor file, where it outlives our notes."""
    text = check_safetensors(_existing(folder, TENSORS)).metadata.get(FINGERPRINT, "")
    return text if re.fullmatch("sha256:[0-9a-f]{64}", text) else None


def check_weights(file: AdapterFile, fingerprint: str) -> None:
    """Refuse an adapter that was trained on other weights than those of this fingerprint.

    Raises:
        AdapterError: It says so; one that does not say passes.
    """
    recorded = file.provenance.fingerprint
    if recorded and recorded != fingerprint:
        raise AdapterError(
            f"the adapter in {file.folder} was trained on other weights than this base's",
            found=f"trained on {file.provenance.base} ({recorded[:23]}...); "
            f"this base is {fingerprint[:23]}...",
            fix="Give the right base with --base, or load it all the same with --force.",
        )


def named_tensors(folder: Path) -> dict[str, Tensor]:
    """Read an adapter's tensors under the names of `Adapter.state()`.

    Raises:
        AdapterError: Unreadable, not finite, or a name that occurs twice.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in read_tensors(_existing(folder, TENSORS)).items():
        plain = DEFAULT_NAME.sub("", name.removeprefix(PREFIX).removeprefix("base_model."))
        if plain in named:
            raise AdapterError(f"{folder / TENSORS} holds {plain} twice", found=f"again as {name}")
        named[plain] = tensor
    return named


def _trained_whole(file: AdapterFile, tensors: Collection[str], model: nn.Module) -> list[str]:
    """Return the paths of the modules that were trained whole, beside the method's own."""
    names = file.method.train_fully
    if file.made_here:
        return named_modules(model, names)
    return [  # PEFT's own rule, which takes no notice of dots; and names what is not there, too
        path
        for path, _ in model.named_modules()
        if path.endswith(names) and any(name.startswith(f"{path}.") for name in tensors)
    ]


def _sites(file: AdapterFile, tensors: Collection[str], model: nn.Module) -> list[Site]:
    """Return the modules that the folder's targets mean in this model; the tensors must agree."""
    places = file.method.candidates(model)
    shared = file.method.shared_names
    strange = sorted(name for name in tensors if name not in shared and not _owner(name, places))
    if strange or not tensors:
        raise AdapterError(
            f"the adapter in {file.folder} does not fit {type(model).__name__}",
            found="\n".join(f"unexpected: {name}" for name in strange) or "no tensors",
            fix="Use the base it was trained on: peftkit inspect ADAPTER",
        )
    if file.made_here:
        return file.method.sites(model)
    return sites_of(file.fields, places, {_owner(name, places) for name in tensors})


def _owner(name: str, places: Collection[str]) -> str:
    """Return the module whose tensor this is, or an empty string."""
    while name and name not in places:
        name = name.rpartition(".")[0]
    return name


def _check_config(file: AdapterFile, adapter: Adapter) -> None:
    """Refuse a config that says otherwise than the tensors' modules: its scale would be wrong."""
    paths = {path for path, module in adapter.own.items() if not module.stacked}
    targets = file.fields.get("target_modules")
    stacks = [
        f"{path}.{name}"
        for path, module in adapter.own.items()
        for name in module.stacked or ("weight",)
    ]
    missing = unmatched(targets, paths) + unmatched(file.fields.get("target_parameters"), stacks)
    if missing:
        raise AdapterError(
            f"{file.folder} has no tensors for the target {_some(missing)}",
            found=f"tensors for {_some(shortest_endings(paths, []))}",
            fix="The file is incomplete, or belongs to another base.",
        )
    extra = paths - set(targeted(paths, targets))
    extra -= {p for p in paths if targeted([f"{p}.weight"], file.fields.get("target_parameters"))}
    if extra and targets not in (None, ANY):
        raise AdapterError(
            f"{file.folder} has tensors for modules that its config does not target",
            found=_some(sorted(extra)),
            fix="The config or the tensors belong to another adapter.",
        )


def _some(names: Sequence[str]) -> str:
    """Return a few of a stranger's names, shortened."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(shown(name) for name in names[:5]) + more


def _completed(adapter: Adapter, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Let each module add what a foreign file leaves to be made from the weight."""
    complete: dict[str, Tensor] = {}
    for path, module in adapter.modules.items():
        own = {
            n.removeprefix(path + "."): t for n, t in tensors.items() if n.startswith(path + ".")
        }
        try:
            own = dict(module.complete(own))
        except KeyError as error:
            raise AdapterError(
                f"{path} has no tensor {error}", fix="The file is incomplete."
            ) from error
        complete |= {f"{path}.{name}": tensor for name, tensor in own.items()}
    return complete | {name: t for name, t in tensors.items() if name not in complete}


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if path.exists():
        return path
    found = sorted(p.name for p in folder.iterdir())[:12] if folder.is_dir() else []
    fix = "Give the folder that a run wrote, or one saved by PEFT."
    if name == TENSORS and any(f.endswith((".bin", ".pt", ".pth")) for f in found):
        fix = "A pickle can run code when it is read; ask for the adapter as safetensors."
    raise AdapterError(
        f"{folder} holds no {name}",
        found=("there is " + ", ".join(found)) if found else "no such folder, or an empty one",
        fix=fix,
    )


class AdapterFolder:
    """The adapter's side of a checkpoint: every checkpoint is an adapter folder."""

    def __init__(self, adapter: Adapter, provenance: Provenance) -> None:
        self._adapter, self._provenance = adapter, provenance

    def save(self, folder: Path) -> None:
        """Write the adapter files into a checkpoint."""
        save_adapter(self._adapter, folder, self._provenance)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take the tensors of a checkpoint's adapter files, bit for bit."""
        self._adapter.load_state(named_tensors(folder))
