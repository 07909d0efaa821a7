"""Read adapter folders in PEFT's format, written by peftkit or by PEFT."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.adapter import Adapter, attach
from peftkit.base.locate import locate
from peftkit.errors import AdapterError, BaseError, TargetError, is_url
from peftkit.files.strict_json import JsonMap, shown
from peftkit.formats.folders import CONFIG, NOTES, TENSORS
from peftkit.formats.guard import INSTEAD_OF_PICKLE, check_safetensors, read_json, read_tensors
from peftkit.formats.peft.notes import Provenance, read_notes
from peftkit.formats.peft.targets import (
    check_targets,
    fit_to_model,
    trained_fully,
    with_implied_heads,
)
from peftkit.methods.base import Method
from peftkit.methods.peft_format import MAGNITUDE, PROMPT
from peftkit.methods.table import format_of, method_from_peft
from peftkit.model.places import embedding_of, token_tables

FINGERPRINT = "base_fingerprint"
"""Metadata key of the tensor file, in case peftkit.json is lost."""
PREFIX = "base_model.model."
BARE = "base_model."
"""Prefix of methods that act on the input and wrap no layers."""

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module)\.")
"""Segments that torch.compile and FSDP add to names."""
_LORA_NAME = re.compile(
    r"(?<=\.)(lora_[AB]|lora_magnitude_vector)\.(?!weight$|bias$)[A-Za-z0-9_-]+(?=\.weight$|$)"
)
_DEFAULT_NAME = re.compile(r"\.default(?=\.weight$|$)")
"""PEFT's in-memory adapter names, which some tools leave in tensor names."""


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """The checked contents of an adapter folder, without its tensors.

    Attributes:
        method: The user's method from peftkit.json, or the method of PEFT's config.
        fields: The content of adapter_config.json.
        made_here: Whether there is a peftkit.json.
    """

    folder: Path
    method: Method
    fields: JsonMap
    provenance: Provenance
    made_here: bool

    def base_or(self, other: str | None) -> tuple[str, str | None]:
        """Return name and revision of the adapter's base, or of `other` if it is given.

        Raises:
            AdapterError: `other` is None, and the folder names no base, or a path that does not
                exist on this machine.
        """
        name = other or self.provenance.base
        if not name:
            raise AdapterError(
                f"{self.folder} does not name its base",
                fix="Name the base it was trained on with --base MODEL.",
            )
        if not other:
            check_recorded(name, self.folder)
        return name, None if other else self.provenance.revision


def check_recorded(base: str, adapter: Path) -> None:
    """Check that the base that an adapter records can be located; it may be of another machine.

    Raises:
        AdapterError: It cannot; the message names the adapter, the base and `--base`.
    """
    try:
        if not is_url(base):  # a URL is fetched when the base is loaded
            locate(base)
    except BaseError as error:
        raise AdapterError(
            f"the base of the adapter {adapter} is not on this machine",
            found=f"The adapter records {shown(base)}. {error.found}",
            fix="Name your copy of this base with --base MODEL.",
        ) from error


def read_adapter(folder: str | Path) -> AdapterFile:
    """Read an adapter folder without its tensors.

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


def _check_config(path: Path, fields: Mapping[str, object]) -> None:
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
        folder: A folder of peftkit or PEFT.
        fingerprint: Fingerprint of `model`, compared with the recorded one.
        force: Whether to load it even if the fingerprints differ.
        trainable: Whether the adapter's tensors stay trainable.
        dropout: Replaces the dropout of training.
        head: Modules to train in full too; tensors that the folder lacks keep the base's values.

    Raises:
        AdapterError: The base is another one, or tensors do not fit; lists all of them.
    """
    file = read_adapter(folder)
    if fingerprint and not force:
        check_weights(file, fingerprint)
    form = format_of(file.method)
    own, tables = split_tables(model, file.fields, named_tensors(file.folder))
    fields, tensors = form.from_file(file.fields, own)
    try:
        method, sites = fit_to_model(
            model, file.method, fields, tensors, folder=file.folder, made_here=file.made_here
        )
        differing = restore_tables(model, tables, tensors)
        adapter = attach(model, _changed(method, dropout, head), sites=sites, fresh=False)
    except TargetError as error:
        raise AdapterError(
            f"the adapter in {folder} does not fit {type(model).__name__}", found=str(error)
        ) from error
    if adapter.full:
        from peftkit.methods.modules_to_save import repeated_names, tie_copies

        repeated = repeated_names(adapter.modules)
        tensors = {name: t for name, t in tensors.items() if name not in repeated}
        if fields.get("ensure_weight_tying"):
            tie_copies(adapter.modules)
    adapter.tables = differing
    try:
        tensors = form.with_missing(fields, adapter.method_modules, tensors)
        tensors = {**tensors, **{name: tables[name] for name in differing}}
        if head:  # tensors that the folder lacks keep the base's values
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


def check_weights(file: AdapterFile, fingerprint: str | None) -> None:
    """Refuse an adapter that was trained on weights with another fingerprint.

    Raises:
        AdapterError: The fingerprints differ; an adapter or base without one passes.
    """
    recorded = file.provenance.fingerprint
    if recorded and fingerprint and recorded != fingerprint:
        raise AdapterError(
            f"the adapter in {file.folder} was trained on another base",
            found=f"trained on {file.provenance.base} ({recorded[:23]}...); "
            f"this base is {fingerprint[:23]}...",
            fix="Give the right base with --base, or load it anyway with --force.",
        )


def named_tensors(folder: Path) -> dict[str, Tensor]:
    """Read an adapter's tensors, with the names of `Adapter.state()`.

    Raises:
        AdapterError: The file is unreadable, or tensors are not finite or have the same name.
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
                fix=f"Save it again with the tool that saved it; PEFT's names begin with {BARE}",
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
    """Convert a tensor's name in PEFT's file to its name in `Adapter.state()`."""
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
        fix = INSTEAD_OF_PICKLE.format(pickles[0])
    raise AdapterError(
        f"{folder} holds no {name}",
        found=("there is " + ", ".join(files)) if files else "no such folder, or an empty one",
        fix=fix,
    )


# PEFT saves embedding and head with an adapter if the base was resized or one is a target. Names
# of the frozen table of a module at `path`:
#   path.weight                           the module is not adapted
#   path.base_layer.weight                it has LoRA
#   path.token_adapter.base_layer.weight  some of its rows are trained
#   path.original_module.weight           it is trained in full; the trained table is path.weight,
#                                         which path.modules_to_save.weight repeats
_FROZEN = re.compile(r"(?:\.(original_module|(?:token_adapter\.)?base_layer))?\.(weight|bias)$")
_COPY = re.compile(r"\.modules_to_save(?=\.(?:weight|bias)$)")


def split_tables(
    model: nn.Module, fields: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a file's tensors into the adapter's and the base's frozen tables."""
    paths, full = token_tables(model), trained_fully(fields, model)
    ours: dict[str, Tensor] = {}
    tables: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _FROZEN.search(name)
        path = name[: match.start()] if match else ""
        if path in paths and match and (match[1] or path not in full):
            tables[name] = tensor
        elif _COPY.search(name) and _COPY.sub("", name).rpartition(".")[0] in paths:
            ours.setdefault(_COPY.sub("", name), tensor)
        else:
            ours[name] = tensor
    return ours, tables


def restore_tables(
    model: nn.Module, tables: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, nn.Parameter]:
    """Give a base the number of tokens and the frozen tables of an adapter's file, in place.

    Args:
        tables, tensors: The base's tables, and the adapter's tensors.

    Returns:
        File name to parameter for the tables of a resized base, and for tables that differed. Tied
        tables occur once, tables of modules that are trained in full do not.

    Raises:
        TargetError: The base has another number of rows, which are quantised.
        AdapterError: The file's tables have several shapes.
    """
    named = {f"{path}.weight" for path in token_tables(model)} & tensors.keys()
    sizes = {len(t) for t in [*tables.values(), *(tensors[n] for n in named)] if t.ndim == 2}
    num_rows = getattr(embedding_of(model), "num_embeddings", None)
    if is_resized := len(sizes) == 1 and sizes != {num_rows}:
        from peftkit.base.new_tokens import resize  # a leaf

        resize(model, *sizes)
    modules, differing = token_tables(model), dict[str, nn.Parameter]()
    for name, table in tables.items():
        match = _FROZEN.search(name)
        assert match is not None
        parameter = modules[name[: match.start()]]._parameters.get(match[2])
        if parameter is None:  # it is packed, and has the same number of rows
            continue
        if parameter.shape != table.shape:
            raise AdapterError(
                f"the adapter does not fit {type(model).__name__}",
                found=f"misshapen: {name} is {tuple(table.shape)}, not {tuple(parameter.shape)}",
                fix="Use the base it was trained on: peftkit inspect ADAPTER",
            )
        frozen = parameter.detach().cpu()
        is_equal = torch.equal(frozen, table.to(frozen)) or torch.equal(frozen.to(table), table)
        if not is_equal:
            parameter.data = table.to(parameter)
        is_stored = match[1] == "original_module" or any(parameter is p for p in differing.values())
        if (is_resized or not is_equal) and not is_stored:
            differing[name] = parameter
    return differing
