"""Puts adapter folders on a base: opened for use, trained on, or frozen next to another one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peftkit.adapter import Adapter
from peftkit.base.heads import unnamed
from peftkit.base.load import Base, load_base
from peftkit.base.new_tokens import restore_tokens
from peftkit.config.schema import from_dict
from peftkit.data.generation import default_style
from peftkit.data.style import Style
from peftkit.errors import AdapterError, ConfigError
from peftkit.events import Listener, Notice, Stage, ignore
from peftkit.files.disk import sha256_of
from peftkit.files.strict_json import shown
from peftkit.files.tensors import read_tensors
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.folders import CONFIG, NOTES, START, TENSORS
from peftkit.formats.guard import check_safetensors, read_json
from peftkit.formats.peft.load import AdapterFile, load_adapter, named_tensors, read_adapter
from peftkit.formats.peft.low_rank import A, B, layers_of, read_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.base import Method
from peftkit.model.side_adapter import SideAdapter
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.table import TASKS
from peftkit.tasks.tokens import CausalLMConfig

HEAD = re.compile(r"(^|\.)(classifier|score|classification_head)(\.out_proj)?\.weight$")
"""The last layer of a classification head, in a file of PEFT."""
CAUSAL = CausalLMConfig.auto_class
FREE = {"type", "start_from", "dropout"}
"""Fields of a method that its tensors do not depend on."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A base, an adapter on it, the content of the adapter's folder, and the task."""

    base: Base
    adapter: Adapter
    file: AdapterFile
    task: TaskConfig

    @property
    def is_causal(self) -> bool:
        """Whether it completes a prompt."""
        return self.task.generates

    @property
    def style(self) -> Style:
        """How a prompt is formatted: as in training, or by the chat template.

        Raises:
            AdapterError: It does not complete prompts.
        """
        require_causal(self.task, self.file.folder)
        recorded = self.file.provenance.prompt_style
        return recorded or default_style(self.base.processor)


def open_adapter(
    adapter: str | Path,
    base: str | None = None,
    *,
    quantize: str | None = None,
    dtype: str | None = None,
    device: torch.device | str | None = None,
    task: TaskConfig | None = None,
    force: bool = False,
    on_event: Listener = ignore,
) -> Opened:
    """Load an adapter's base, by default as in training, and the adapter on it.

    Args:
        adapter: A folder made by peftkit (a run, a checkpoint) or by PEFT.
        base: Where the base is, if not where recorded.
        quantize, dtype: By default as in training.
        device: By default a GPU, if available.
        task: The task with its labels, for a folder that does not record it.
        force: Accept a base with other weights than in training.

    Raises:
        AdapterError: No adapter there, or it belongs to another base.
        BaseError: The base cannot be found or loaded.
    """
    file = read_adapter(adapter_folder(adapter))
    task = task or task_of(file)
    loaded = base_of(
        file, base, quantize=quantize, dtype=dtype, device=device, task=task, on_event=on_event
    )
    on_event(Stage(f"Loading the adapter {file.folder}"))
    restore_tokens(loaded, file.folder)
    placed = load_adapter(loaded.model, file.folder, fingerprint=loaded.fingerprint, force=force)
    return Opened(loaded, placed, file, task)


def base_of(
    file: AdapterFile,
    base: str | None = None,
    *,
    quantize: str | None = None,
    dtype: str | None = None,
    device: torch.device | str | None = None,
    task: TaskConfig | None = None,
    on_event: Listener = ignore,
) -> Base:
    """Load an adapter's base, by default as in training; see `open_adapter`.

    Raises:
        AdapterError: The folder does not say which base it belongs to.
        BaseError: The base cannot be found or loaded.
    """
    name, revision = file.base_or(base)
    loading = file.provenance.loading
    return load_base(
        name,
        revision=revision,
        dtype=dtype or str(loading.get("dtype", "auto")),
        quantize=quantize or str(loading.get("quantize", "none")),
        double_quant=bool(loading.get("double_quant", True)),
        quantize_towers=bool(loading.get("quantize_towers", True)),  # before it, all were
        quantize_embeddings="none" if quantize else str(loading.get("quantize_embeddings", "none")),
        purpose=replace((task or task_of(file)).purpose, rope_scaling=loading.get("rope_scaling")),
        device=device,
        on_event=on_event,
    )


def task_of(file: AdapterFile) -> TaskConfig:
    """Return the task of an adapter, from our notes or PEFT's config.

    Raises:
        AdapterError: peftkit does not have the task, or the number of labels is unknown.
    """
    if file.provenance.task is not None:
        return _noted(file.provenance.task, str(file.folder / NOTES))
    task_type = file.provenance.task_type
    kinds = [kind for kind in TASKS.values() if kind.task_type == task_type is not None]
    if task_type is None:
        return CausalLMConfig()
    if not kinds:
        names = ", ".join(str(kind.task_type) for kind in TASKS.values() if kind.task_type)
        raise AdapterError(
            f"{file.folder} was trained for a task that peftkit does not have",
            found=f"its task_type is {shown(task_type)}; known are {names}",
            fix="If it is one of these anyway, use open_adapter(..., task=...).",
        )
    kind = kinds[0]
    has_labels = "labels" in kind.model_fields
    settings = {"labels": unnamed(_num_labels(file))} if has_labels else {}
    return from_dict(kind, settings, str(file.folder / CONFIG))


def _noted(settings: Mapping[str, Any], notes: str) -> TaskConfig:
    kind = TASKS.get(str(settings.get("type")))
    if kind is None:
        raise AdapterError(
            f"{notes} names a task that peftkit does not have",
            found=shown(settings.get("type")),
            fix=f"Tasks: {', '.join(TASKS)}.",
        )
    return from_dict(kind, settings, notes)


def require_causal(task: TaskConfig, folder: Path, *, media: bool = True) -> None:
    """Refuse an adapter that cannot complete a prompt.

    Args:
        media: Whether the prompt may hold some.

    Raises:
        AdapterError: It cannot.
    """
    if task.prompt_media and not media:
        what = f"prompts with {task.prompt_media}s"
        raise AdapterError(
            f"{folder} completes {what}, which a bank of adapters does not take",
            found=f"it was trained for the task {task.type}",
            fix=f"Open it alone: peftkit chat {folder}",
        )
    if not task.generates:
        raise AdapterError(
            f"{folder} does not complete prompts",
            found=f"it was trained for the task {task.type}",
            fix=f"Use peftkit eval {folder} --data FILE; for a text classifier: "
            f"peftkit predict {folder} --text TEXT",
        )


def _num_labels(file: AdapterFile) -> int:
    tensors = check_safetensors(file.folder / TENSORS).tensors
    heads = {name: entry.shape for name, entry in tensors.items() if HEAD.search(name)}
    if len(set(heads.values())) != 1:
        raise AdapterError(
            f"{file.folder} does not say how many labels there are",
            found=f"it holds {', '.join(map(shown, heads)) or 'no head'}",
            fix="Open it with open_adapter(..., task=...), which names them.",
        )
    return next(iter(heads.values()))[0]


@dataclass(frozen=True, slots=True)
class Continued:
    """An adapter that continues another.

    Attributes:
        start: A copy of its tensors before training.
        digest: The sha256 of the folder's tensors.
        has_tokens: Tokens were added to the base; the new folder needs them too.
        style: How its prompts were formatted; None if unknown.
    """

    adapter: Adapter
    start: Mapping[str, Tensor]
    digest: str
    has_tokens: bool
    style: Style | None = None


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
    digest, style = sha256_of(file.folder / TENSORS), file.provenance.prompt_style
    return Continued(adapter, start, digest, bool(tokens), style)


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
        AdapterError: The start is not one of this adapter, or its file is missing.
    """
    path = folder / START
    if not path.is_file():
        if (folder / NOTES).is_file() and START in read_json(folder / NOTES).get("sha256", ()):
            raise AdapterError(
                f"{path} is missing",
                found=f"{NOTES} has its hash: the adapter was trained from another adapter.",
                fix="Restore the file; the bare base is not the start of this adapter.",
            )
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


def _is_of(origin: Provenance, base: Base) -> bool:
    """Return whether an adapter was trained on a base, with a head of its own or without.

    By the weights where they are recorded; else, and where heads differ and only the weights with a
    head are recorded, by the base's name.
    """
    if origin.fingerprint == base.fingerprint or (origin.trunk and origin.trunk == base.trunk):
        return True
    has_head = origin.task is not None and _noted(origin.task, NOTES).auto_class != CAUSAL
    is_unknown = not (origin.trunk and base.trunk) if has_head else not origin.fingerprint
    return is_unknown and origin.base in (base.name, base.hub_id)


def read_side_adapter(path: str | Path, base: Base) -> SideAdapter:
    """Read a LoRA of the same base, with its value head if it has one.

    Args:
        base: The base that a run has loaded, with its own adapter on it.

    Raises:
        AdapterError: It is no LoRA, or of another base.
    """
    file, updates = read_low_rank(adapter_folder(path), with_head=True)
    origin = file.provenance
    if not _is_of(origin, base):
        raise AdapterError(
            f"the adapter in {file.folder} was trained on another base",
            found=f"trained on {origin.base} ({origin.fingerprint or 'of unknown weights'}); "
            f"this run's base is {base.name} ({base.fingerprint})",
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
