"""Continuing training: an adapter's folder as checkpoint, as start, and as frozen companion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from peftkit.adapter import Adapter
from peftkit.base.load import Base
from peftkit.base.new_tokens import restore_tokens
from peftkit.errors import AdapterError, ConfigError
from peftkit.events import Listener, Notice, ignore
from peftkit.files.disk import sha256_of
from peftkit.files.tensors import read_tensors
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.folders import TENSORS
from peftkit.formats.open_adapter import task_of
from peftkit.formats.peft.folder import (
    START,
    AdapterFile,
    load_adapter,
    named_tensors,
    read_adapter,
)
from peftkit.formats.peft.low_rank import A, B, layers_of, read_low_rank
from peftkit.methods.base import Method
from peftkit.model.side_adapter import SideAdapter

FREE = {"type", "start_from", "dropout"}
"""Fields of a method that its tensors do not depend on."""


@dataclass(frozen=True, slots=True)
class Continued:
    """An adapter that continues another.

    Attributes:
        start: A copy of its tensors before training.
        digest: The sha256 of the folder's tensors.
        has_tokens: Tokens were added to the base; the new folder needs them too.
    """

    adapter: Adapter
    start: Mapping[str, Tensor]
    digest: str
    has_tokens: bool


def continue_adapter(
    base: Base,
    method: Method,
    quantize: str,
    *,
    auto_class: str = "AutoModelForCausalLM",
    on_event: Listener = ignore,
) -> Continued:
    """Put the adapter that `method.start_from` names on a base, to be trained on.

    Args:
        quantize: How the base is quantised.
        auto_class: The class that the base was loaded with. Where the adapter was trained on
            another one (a causal model that becomes a reward model), the bases are compared by
            name.

    Raises:
        AdapterError: There is none, or it is of another base.
        ConfigError: The method has settings that the adapter does not have.
    """
    file = read_adapter(adapter_folder(str(method.start_from)))
    _check_settings(method, file)
    file.method.check_quantize(quantize)
    before = file.provenance.loading.get("quantize", quantize)
    if before != quantize:
        on_event(
            Notice(
                f"{file.folder} was trained over a base with quantize: {before}; here it is "
                f"{quantize}, so that it begins a little off."
            )
        )
    same_class = task_of(file).auto_class == auto_class
    if not same_class:
        _check_name(file, base)
    tokens = restore_tokens(base, file.folder)
    adapter = load_adapter(
        base.model,
        file.folder,
        fingerprint=base.fingerprint if same_class else None,
        trainable=True,
        dropout=getattr(method, "dropout", None) if "dropout" in method.model_fields_set else None,
        head=base.head,
    )
    start = {name: tensor.clone() for name, tensor in adapter.state().items()}
    return Continued(adapter, start, sha256_of(file.folder / TENSORS), bool(tokens))


def _check_name(file: AdapterFile, base: Base) -> None:
    """Refuse a base of another name: its weights have another head, and cannot be compared."""
    recorded = file.provenance.base
    if recorded not in (base.name, base.hub_id, None):
        raise AdapterError(
            f"{file.folder} may belong to another base",
            found=f"It was trained on {recorded}; this base is {base.name}, and has another head, "
            "so that their weights cannot be compared.",
            fix=f"Set base.model: {recorded}.",
        )


def _check_settings(method: Method, file: AdapterFile) -> None:
    """Refuse what the folder's tensors cannot be."""
    saved, given = file.method, method.model_fields_set - FREE
    if method.type != saved.type and (given or method.type != "lora"):
        raise ConfigError(
            f"method.type: {method.type} is not what {file.folder} is.",
            found=f"It is {saved.type}.",
            fix="Leave everything of the method out but start_from: it is the adapter's.",
        )
    for name in sorted(given):
        if getattr(method, name) != getattr(saved, name):
            raise ConfigError(
                f"method.{name} is not what {file.folder} has.",
                found=f"The recipe has {getattr(method, name)!r}, the adapter "
                f"{getattr(saved, name)!r}.",
                fix="Leave it out: the method is the adapter's, but for its dropout.",
            )


def before_training(adapter: Adapter, folder: Path) -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of contexts in which a model computes as before its adapter was trained.

    Args:
        folder: The adapter's; without a start in it that is the base.

    Raises:
        AdapterError: The start is not one of this adapter.
    """
    path = folder / START
    if not path.is_file():
        return adapter.disabled
    start = read_tensors(path)
    shapes = {name: tensor.shape for name, tensor in adapter.state().items()}
    if {name: tensor.shape for name, tensor in start.items()} != shapes:
        raise AdapterError(
            f"{path} is not what this adapter began with",
            found="its tensors have other names or shapes",
            fix="Restore the folder; without the file it is compared with the bare base.",
        )
    return partial(adapter.swapped_state, start)


def read_side_adapter(path: str | Path, base: Base) -> SideAdapter:
    """Read a LoRA of the same base, with its value head if it has one.

    Args:
        base: The base that a run has loaded, with its own adapter on it.

    Raises:
        AdapterError: It is no LoRA, or of another base.
    """
    file, updates = read_low_rank(adapter_folder(path), with_head=True)
    origin = file.provenance
    if origin.fingerprint != base.fingerprint and origin.base != base.name:
        raise AdapterError(
            f"the adapter in {file.folder} was trained on another base",
            found=f"trained on {origin.base}; this run's base is {base.name}",
            fix="Train it on this base.",
        )
    tensors = named_tensors(file.folder)
    head = {name: t for name, t in tensors.items() if not name.endswith((A, B))}
    if len({name.rpartition(".")[0] for name in head}) > 1:
        raise AdapterError(
            f"{file.folder} cannot be used next to the adapter that is trained",
            found=f"it has more than a plain LoRA and a head: {', '.join(sorted(head)[:3])}",
            fix="Use a plain LoRA.",
        )
    layers_of(file, updates, base.model)
    return SideAdapter(
        {path: (one.a, one.scaling * one.b.float()) for path, one in updates.items()},
        {name.rpartition(".")[2]: tensor for name, tensor in head.items()},
        origin.task or {},
        origin.prompt_style,
        sha256_of(file.folder / TENSORS)[:16],
    )
