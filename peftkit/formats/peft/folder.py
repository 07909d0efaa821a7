"""Adapter folders in HF PEFT's format, both ways.

A folder holds adapter_config.json, adapter_model.safetensors, and, when made here, peftkit.json:
what PEFT's config has no place for (the method as asked, the base's fingerprint, the prompt style).
The format is PEFT 0.21's: a tensor of the module at `path` is "base_model.model.{path}.{name}".
Only the sixteen oldest config keys and those that differ from their defaults are written, because
PEFT before 0.14 refuses keys that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.adapter import Adapter, attach
from peftkit.errors import AdapterError, TargetError
from peftkit.files.disk import write_json, write_tensors
from peftkit.formats.guard import CONVERT, check_safetensors, read_json, read_tensors
from peftkit.formats.peft.config_fields import check_targets, with_implied_heads, written_fields
from peftkit.formats.peft.fit_to_model import check_targets_of, completed, fit_to_model
from peftkit.formats.peft.notes import OLDEST_FIELDS, Provenance, read_notes, write_notes
from peftkit.methods.protocol import Method
from peftkit.methods.table import format_of, method_from_peft
from peftkit.methods.virtual import NAME as PROMPT
from peftkit.model.places import is_conv1d

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
NOTES = "peftkit.json"
FINGERPRINT = "base_fingerprint"
"""Of the tensor file's metadata, for where peftkit.json is lost."""
PREFIX = "base_model.model."
BARE = "base_model."
"""Prefix of methods that act on the input and wrap no layers."""
DEFAULT_NAME = re.compile(r"\.default(?=\.weight$|$)")
"""PEFT's in-memory adapter name, which some tools leave in tensor names."""


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """The checked contents of an adapter folder, without its tensors."""

    folder: Path
    method: Method
    fields: Mapping[str, Any]
    provenance: Provenance
    made_here: bool

    def base_or(self, other: str | None) -> tuple[str, str | None]:
        """Return name and revision of its base, or of another one that is given instead.

        Raises:
            AdapterError: It does not name one, and none is given.
        """
        name = other or self.provenance.base
        if not name:
            raise AdapterError(
                f"{self.folder} does not say which base it belongs to",
                fix="Name the base it was trained on with --base MODEL.",
            )
        return name, None if other else self.provenance.revision


def save_adapter(
    adapter: Adapter, folder: str | Path, provenance: Provenance | None = None
) -> Path:
    """Write an adapter folder that peftkit and PEFT load.

    Args:
        adapter: All its trained tensors are saved.
        folder: Created if needed; its adapter files are replaced, each atomically.
        provenance: What is known about the base.

    Raises:
        RunError: A tensor is not finite, or the disk is full.
        OutputError: The folder is not writable.
    """
    provenance = provenance or Provenance()
    fields = _config_fields(adapter, provenance)
    state = format_of(adapter.method).to_file(adapter.state(), adapter.model, adapter.own)
    return write_folder(Path(folder), state, fields, adapter.method, provenance)


def write_folder(
    folder: Path,
    state: Mapping[str, Tensor],
    fields: Mapping[str, Any],
    method: Method,
    provenance: Provenance,
) -> Path:
    """Write the three files of an adapter folder; see `save_adapter`."""
    tensors = {_prefix(method, name) + name: tensor.cpu() for name, tensor in state.items()}
    folder.mkdir(parents=True, exist_ok=True)
    known = {FINGERPRINT: provenance.fingerprint} if provenance.fingerprint else {}
    write_tensors(tensors, folder / TENSORS, {"format": "pt", **known})
    write_json(fields, folder / CONFIG)
    write_notes(folder / NOTES, folder / TENSORS, method, fields, provenance)
    return folder


def _prefix(method: Method, name: str) -> str:
    if name in method.shared_names:
        return format_of(method).shared_prefix
    return BARE if method.acts_on_input else PREFIX


def _config_fields(adapter: Adapter, provenance: Provenance) -> dict[str, Any]:
    fields = written_fields(adapter)
    where = where_fields(adapter.method, provenance, fields["target_modules"])
    if "fan_in_fan_out" in where:
        transposed = any(is_conv1d(m.base) for m in adapter.modules.values())
        where["fan_in_fan_out"] = transposed
    fields = where | fields
    return {k: v for k, v in fields.items() if k not in format_of(adapter.method).absent_fields}


def where_fields(method: Method, provenance: Provenance, targets: list[str]) -> dict[str, Any]:
    """Return the config fields on base and targets, and the defaults of PEFT's oldest fields."""
    form = format_of(method)
    oldest = {k: v for k, v in OLDEST_FIELDS.items() if k not in form.absent_fields}
    return {
        **oldest,
        "peft_type": form.peft_type,
        "task_type": provenance.task_type,
        "base_model_name_or_path": provenance.hub_id or provenance.base,
        "revision": provenance.revision,
        "target_modules": targets,
    }


def read_adapter(folder: str | Path) -> AdapterFile:
    """Read an adapter folder, except its tensors.

    Raises:
        AdapterError: There is no adapter, a file is damaged, or the method is not supported.
    """
    folder = Path(folder)
    fields = read_json(_existing(folder, CONFIG))
    if "peft_type" not in fields and {"fine_tune_type", "lora_parameters"} & fields.keys():
        raise AdapterError(
            f"{folder} is an adapter of mlx-lm",
            found=f"{CONFIG} has no peft_type",
            fix=f"Convert it first: peftkit import {folder} --base MODEL --out DIR",
        )
    for name in ("target_modules", "target_parameters"):
        check_targets(fields.get(name), f"cannot use {folder / CONFIG}", name)
    tensors = _existing(folder, TENSORS)
    if (folder / NOTES).exists():
        method_from_peft(fields)  # refuses what peftkit does not read
        method, origin = read_notes(folder / NOTES, tensors, folder / CONFIG, fields)
        return AdapterFile(folder, method, fields, origin, made_here=True)
    header = check_safetensors(tensors)
    fields = dict(with_implied_heads(fields, header.tensors))
    known = header.metadata.get(FINGERPRINT, "")
    origin = Provenance(
        base=fields.get("base_model_name_or_path") or None,
        revision=fields.get("revision"),
        fingerprint=known if re.fullmatch("sha256:[0-9a-f]{64}", known) else None,
        task_type=fields.get("task_type"),
    )
    return AdapterFile(folder, method_from_peft(fields), fields, origin, made_here=False)


def load_adapter(
    model: nn.Module,
    folder: str | Path,
    *,
    fingerprint: str | None = None,
    force: bool = False,
    trainable: bool = False,
    dropout: float | None = None,
    head: Sequence[str] = (),
) -> Adapter:
    """Attach an adapter folder's method to a model and load its tensors.

    Args:
        model: The base it was trained on; changed in place.
        folder: Made here or by PEFT.
        fingerprint: Of `model`; compared with the one recorded in the folder.
        force: Load although the fingerprints differ.
        trainable: Keep the adapter's tensors trainable.
        dropout: Another one than it was trained with.
        head: Modules to train in full too; they begin as they are where the folder has none.

    Raises:
        AdapterError: It is another base, or tensors do not fit; lists all of them.
    """
    file = read_adapter(folder)
    if fingerprint and not force:
        check_weights(file, fingerprint)
    fields, tensors = format_of(file.method).from_file(file.fields, named_tensors(file.folder))
    try:
        method, sites = fit_to_model(
            model, file.method, fields, tensors, folder=file.folder, made_here=file.made_here
        )
        method = _changed(method, dropout, head)
        # a stranger's file may leave out what is made from the weight
        adapter = attach(model, method, sites=sites, fresh=not file.made_here)
    except TargetError as error:
        raise AdapterError(
            f"the adapter in {folder} does not fit {type(model).__name__}", found=str(error)
        ) from error
    try:
        check_targets_of(fields, adapter, file.folder)
        if not file.made_here:
            tensors = completed(adapter, tensors)
        began = tuple(f"{path}." for path in head)
        fresh = {n: t for n, t in adapter.state().items() if n.startswith(began)} if head else {}
        adapter.load_state({**fresh, **tensors})
    except BaseException:
        adapter.detach()
        raise
    for parameter in adapter.parameters():
        parameter.requires_grad_(trainable)
    return adapter


def _changed(method: Method, dropout: float | None, head: Sequence[str]) -> Method:
    whole = tuple(dict.fromkeys((*method.train_fully, *head)))
    update: dict[str, Any] = {"train_fully": whole, "start_from": None}
    return method.model_copy(update=update if dropout is None else {**update, "dropout": dropout})


def check_weights(file: AdapterFile, fingerprint: str) -> None:
    """Refuse an adapter that was trained on weights with another fingerprint.

    Raises:
        AdapterError: The fingerprints differ; an adapter without one passes.
    """
    recorded = file.provenance.fingerprint
    if recorded and recorded != fingerprint:
        raise AdapterError(
            f"the adapter in {file.folder} was trained on another base",
            found=f"trained on {file.provenance.base} ({recorded[:23]}...); "
            f"this base is {fingerprint[:23]}...",
            fix="Give the right base with --base, or load it anyway with --force.",
        )


def named_tensors(folder: Path) -> dict[str, Tensor]:
    """Read an adapter's tensors under the names of `Adapter.state()`.

    Raises:
        AdapterError: Unreadable, not finite, or a name that occurs twice.
    """
    named: dict[str, Tensor] = {}
    tensors = read_tensors(_existing(folder, TENSORS))
    prefix = BARE if PROMPT in tensors else PREFIX
    for name, tensor in tensors.items():
        plain = DEFAULT_NAME.sub("", name.removeprefix(prefix).removeprefix(BARE))
        if f".{BARE}" in plain:
            raise AdapterError(
                f"{folder / TENSORS} holds a tensor that belongs to no adapter",
                found=f"{plain}: {BARE} is in the middle of its name",
                fix="Save it again with the tool that made it; PEFT's names begin with that.",
            )
        if plain in named:
            raise AdapterError(f"{folder / TENSORS} holds {plain} twice", found=f"again as {name}")
        named[plain] = tensor
    return named


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if path.exists():
        return path
    found = sorted(p.name for p in folder.iterdir())[:12] if folder.is_dir() else []
    fix = "Give the folder that a run wrote, or one saved by PEFT."
    pickles = [f for f in found if f.endswith((".bin", ".pt", ".pth"))]
    if name == TENSORS and pickles:
        fix = (
            "A pickle can run code when it is read; ask for the adapter as safetensors. This line, "
            f"run in the folder, reads tensors and nothing else:\n{CONVERT.format(pickles[0])}"
        )
    raise AdapterError(
        f"{folder} holds no {name}",
        found=("there is " + ", ".join(found)) if found else "no such folder, or an empty one",
        fix=fix,
    )


class AdapterFolder:
    """The adapter's side of a checkpoint: every checkpoint is an adapter folder.

    Args:
        beside: Writes further files that the adapter needs into the folder.
    """

    def __init__(
        self,
        adapter: Adapter,
        provenance: Provenance,
        beside: Callable[[Path], None] | None = None,
    ) -> None:
        self._adapter, self._provenance, self._beside = adapter, provenance, beside

    def save(self, folder: Path) -> None:
        """Write the adapter files and the further ones."""
        save_adapter(self._adapter, folder, self._provenance)
        if self._beside is not None:
            self._beside(folder)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the tensors of a checkpoint's adapter files, bit for bit."""
        _, tensors = format_of(self._adapter.method).from_file({}, named_tensors(folder))
        self._adapter.load_state(tensors)
