"""Adapter folders in HF PEFT's format, written and read.

A folder holds adapter_config.json, adapter_model.safetensors, and, from peftkit, peftkit.json:
what PEFT's config cannot hold (the user's method, the base's fingerprint, the prompt style).
Folders of PEFT and of peftkit are read alike; where there is a peftkit.json, its facts are used.
The format is PEFT 0.21's: a tensor of the module at `path` is "base_model.model.{path}.{name}".
Only the sixteen oldest config keys and those that differ from their defaults are written, because
PEFT before 0.14 refuses keys that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.adapter import Adapter, attach
from peftkit.base.load import Base
from peftkit.errors import AdapterError, TargetError
from peftkit.files.disk import write_json
from peftkit.files.tensors import write_tensors
from peftkit.formats.folders import CONFIG, NOTES, START, TENSORS
from peftkit.formats.guard import check_safetensors, instead_of_pickle, read_json, read_tensors
from peftkit.formats.peft.notes import OLDEST_FIELDS, Provenance, read_notes, write_notes
from peftkit.formats.peft.targets import (
    check_targets,
    check_targets_of,
    fit_to_model,
    with_implied_heads,
    written_fields,
)
from peftkit.methods.base import MAGNITUDE, PROMPT, Method
from peftkit.methods.table import format_of, method_from_peft
from peftkit.model.places import is_conv1d

FINGERPRINT = "base_fingerprint"
"""Of the tensor file's metadata, for where peftkit.json is lost."""
PREFIX = "base_model.model."
BARE = "base_model."
"""Prefix of methods that act on the input and wrap no layers."""
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module)\.")
"""Prefixes that torch.compile and FSDP add to names."""
_LORA_NAME = re.compile(
    r"(?<=\.)(lora_[AB]|lora_magnitude_vector)\.(?!weight$|bias$)[A-Za-z0-9_-]+(?=\.weight$|$)"
)
_DEFAULT_NAME = re.compile(r"\.default(?=\.weight$|$)")
"""PEFT's in-memory adapter names, which some tools leave in tensor names."""


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """The checked contents of an adapter folder, without its tensors.

    Attributes:
        method: The user's from peftkit.json; without that file, as PEFT's config describes it.
        fields: The content of adapter_config.json.
        made_here: There is a peftkit.json.
    """

    folder: Path
    method: Method
    fields: Mapping[str, Any]
    provenance: Provenance
    made_here: bool

    def base_or(self, other: str | None) -> tuple[str, str | None]:
        """Return name and revision of its base; of `other`, where that is given.

        Raises:
            AdapterError: The folder names no base, and `other` is None.
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
    metadata = {"format": "pt"}
    if provenance.fingerprint:
        metadata[FINGERPRINT] = provenance.fingerprint
    write_tensors(tensors, folder / TENSORS, metadata)
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
    config, tensors, notes = _existing(folder, CONFIG), folder / TENSORS, folder / NOTES
    fields = read_json(config)
    _check_config(config, fields)
    header = check_safetensors(_existing(folder, TENSORS))
    complete = with_implied_heads(fields, header.tensors)
    method = method_from_peft(complete)
    fingerprint = header.metadata.get(FINGERPRINT, "")
    provenance = Provenance(
        base=fields.get("base_model_name_or_path") or None,
        revision=fields.get("revision"),
        fingerprint=fingerprint if re.fullmatch("sha256:[0-9a-f]{64}", fingerprint) else None,
        task_type=fields.get("task_type"),
    )
    if made_here := notes.exists():
        method, provenance = read_notes(notes, tensors, config, fields)
    return AdapterFile(folder, method, complete, provenance, made_here)


def _check_config(path: Path, fields: Mapping[str, Any]) -> None:
    if "peft_type" not in fields:
        raise AdapterError(
            f"{path.parent} is not an adapter in PEFT's format",
            found=f"{path.name} has no peft_type",
            fix="Convert an adapter of another program first: "
            f"peftkit import {path.parent} --base MODEL --out DIR",
        )
    for name in ("target_modules", "target_parameters"):
        check_targets(fields.get(name), f"cannot use {path}", name)


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
        dropout: Replaces the dropout that it was trained with.
        head: Modules to train in full too; without tensors in the folder they keep the base's.

    Raises:
        AdapterError: It is another base, or tensors do not fit; lists all of them.
    """
    file = read_adapter(folder)
    if fingerprint and not force:
        check_weights(file, fingerprint)
    form = format_of(file.method)
    fields, tensors = form.from_file(file.fields, named_tensors(file.folder))
    try:
        method, sites = fit_to_model(
            model, file.method, fields, tensors, folder=file.folder, made_here=file.made_here
        )
        adapter = attach(model, _changed(method, dropout, head), sites=sites, fresh=False)
    except TargetError as error:
        raise AdapterError(
            f"the adapter in {folder} does not fit {type(model).__name__}", found=str(error)
        ) from error
    try:
        check_targets_of(fields, adapter, file.folder)
        tensors = form.with_missing(fields, adapter.own, tensors)
        if head:  # its tensors that the folder lacks stay those of the base
            prefixes = tuple(f"{path}." for path in head)
            from_base = {n: t for n, t in adapter.state().items() if n.startswith(prefixes)}
            tensors = {**from_base, **tensors}
        adapter.load_state(tensors)
    except BaseException:
        adapter.detach()
        raise
    for parameter in adapter.parameters():
        parameter.requires_grad_(trainable)
    return adapter


def _changed(method: Method, dropout: float | None, head: Sequence[str]) -> Method:
    full = tuple(dict.fromkeys((*method.train_fully, *head)))
    update: dict[str, Any] = {"train_fully": full, "start_from": None}
    if dropout is not None:
        update["dropout"] = dropout
    return method.model_copy(update=update)


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
    tensors = read_tensors(_existing(folder, TENSORS))
    prefix = BARE if PROMPT in tensors else PREFIX
    named: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in tensors.items():
        plain = plain_name(name, prefix)
        if f".{BARE}" in plain:
            raise AdapterError(
                f"{folder / TENSORS} holds a tensor that belongs to no adapter",
                found=f"{plain}: {BARE} is in the middle of its name",
                fix="Save it again with the tool that made it; PEFT's names begin with that.",
            )
        if plain in named:
            raise AdapterError(
                f"{folder / TENSORS} holds {plain} twice",
                found=f"{names[plain]} and {name} are one tensor of two adapters.",
                fix="Save one adapter at a time.",
            )
        named[plain], names[plain] = tensor, name
    return named


def plain_name(name: str, prefix: str = PREFIX) -> str:
    """Return the name in `Adapter.state()` of a tensor in a file of PEFT."""
    plain = _WRAPPERS.sub("", name).removeprefix(prefix).removeprefix(BARE)
    plain = _DEFAULT_NAME.sub("", _LORA_NAME.sub(r"\1", plain))
    return plain.removesuffix(".weight" if plain.endswith(f"{MAGNITUDE}.weight") else "")


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if path.exists():
        return path
    files = sorted(p.name for p in folder.iterdir())[:12] if folder.is_dir() else []
    fix = "Give the folder that a run wrote, or one saved by PEFT."
    pickles = [f for f in files if f.endswith((".bin", ".pt", ".pth"))]
    if name == TENSORS and pickles:
        fix = instead_of_pickle(pickles[0])
    raise AdapterError(
        f"{folder} holds no {name}",
        found=("there is " + ", ".join(files)) if files else "no such folder, or an empty one",
        fix=fix,
    )


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The adapter's part of a checkpoint: every checkpoint is an adapter folder.

    Attributes:
        base: Has tokens that the published base lacks, so that its tokenizer is saved too.
        start: The tensors that the adapter began with, saved for `before_training`.
    """

    adapter: Adapter
    provenance: Provenance
    base: Base | None = None
    start: Mapping[str, Tensor] | None = None

    def save(self, folder: Path) -> None:
        """Write the start, the adapter's files, and the tokenizer with its new tokens."""
        if self.start is not None:  # first: the notes hold its hash
            write_tensors({n: tensor.cpu() for n, tensor in self.start.items()}, folder / START)
        save_adapter(self.adapter, folder, self.provenance)
        if self.base is not None:
            from peftkit.base.new_tokens import save_tokenizer

            save_tokenizer(self.base, folder)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the tensors of a checkpoint's adapter files, bit for bit."""
        _, tensors = format_of(self.adapter.method).from_file({}, named_tensors(folder))
        self.adapter.load_state(tensors)
