"""Load adapter folders onto a base: for use, for further training, or frozen next to another."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from peftkit.adapter import Adapter
from peftkit.base.heads import unnamed
from peftkit.base.load import Base, load_base
from peftkit.base.new_tokens import adopt_tokenizer
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
from peftkit.model.modes import SideAdapter
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.table import TASKS
from peftkit.tasks.tokens import CausalLMConfig

HEAD = re.compile(r"(^|\.)(classifier|score|classification_head)(\.out_proj)?\.weight$")
"""Tensor name of a classification head's last layer in PEFT's files."""
CAUSAL = CausalLMConfig.auto_class
FREE = {"type", "start_from", "dropout"}
"""Method fields that do not affect the tensors."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A base, the adapter on it, the adapter's file and the task."""

    base: Base
    adapter: Adapter
    file: AdapterFile
    task: TaskConfig

    @property
    def is_causal(self) -> bool:
        """Whether the model completes prompts."""
        return self.task.generates

    @property
    def style(self) -> Style:
        """The prompt style of training or of the template; raises AdapterError for other tasks."""
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
        adapter: A folder from peftkit (a run, a checkpoint) or PEFT.
        base: Location of the base; by default the recorded location.
        quantize, dtype: By default as in training.
        device: By default a GPU, if available.
        task: The task with its labels, for a folder that does not record it.
        force: Accept a base whose weights differ from training.

    Raises:
        AdapterError: There is no adapter, or it belongs to another base.
        BaseError: The base cannot be found or loaded.
    """
    file = read_adapter(adapter_folder(adapter))
    task = task or task_of(file)
    loaded = base_of(
        file, base, quantize=quantize, dtype=dtype, device=device, task=task, on_event=on_event
    )
    on_event(Stage(f"Loading the adapter {file.folder}"))
    adopt_tokenizer(loaded, file.folder, file.method.token_rows, on_event)
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
        AdapterError: The folder does not record its base.
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
        quantize_towers=bool(loading.get("quantize_towers", True)),  # True in older adapters
        quantize_embeddings="none" if quantize else str(loading.get("quantize_embeddings", "none")),
        purpose=replace((task or task_of(file)).purpose, rope_scaling=loading.get("rope_scaling")),
        device=device,
        on_event=on_event,
    )


def task_of(file: AdapterFile) -> TaskConfig:
    """Return the task of an adapter, from peftkit's notes or PEFT's config.

    Raises:
        AdapterError: The task is not supported, or the number of labels is unknown.
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
            f"{file.folder} was trained for a task that peftkit does not support",
            found=f"Its task_type is {shown(task_type)}; supported: {names}.",
            fix="If it has one of these tasks anyway, use open_adapter(..., task=...).",
        )
    kind = kinds[0]
    has_labels = "labels" in kind.model_fields
    settings = {"labels": unnamed(_num_labels(file))} if has_labels else {}
    return from_dict(kind, settings, str(file.folder / CONFIG))


def _noted(settings: Mapping[str, object], notes: str) -> TaskConfig:
    kind = TASKS.get(str(settings.get("type")))
    if kind is None:
        raise AdapterError(
            f"{notes} has a task that peftkit does not support",
            found=shown(settings.get("type")),
            fix=f"Tasks: {', '.join(TASKS)}.",
        )
    return from_dict(kind, settings, notes)


def require_causal(task: TaskConfig, folder: Path, *, media: bool = True) -> None:
    """Check that an adapter can complete prompts.

    Args:
        media: Whether prompts with media are supported.

    Raises:
        AdapterError: The task generates no text, or needs media where they are not supported.
    """
    if task.prompt_media and not media:
        what = f"prompts with {task.prompt_media}s"
        raise AdapterError(
            f"{folder} completes {what}, which a bank of adapters does not support",
            found=f"It was trained for the task {task.type}.",
            fix=f"Open it alone: peftkit chat {folder}",
        )
    if not task.generates:
        raise AdapterError(
            f"{folder} does not complete prompts",
            found=f"It was trained for the task {task.type}.",
            fix=f"Use peftkit eval {folder} --data FILE; for a text classifier: "
            f"peftkit predict {folder} --text TEXT",
        )


def _num_labels(file: AdapterFile) -> int:
    tensors = check_safetensors(file.folder / TENSORS).tensors
    heads = {name: entry.shape for name, entry in tensors.items() if HEAD.search(name)}
    if len(set(heads.values())) != 1:
        raise AdapterError(
            f"{file.folder} does not record its number of labels",
            found=f"It contains {', '.join(map(shown, heads)) or 'no head'}.",
            fix="Give the labels with open_adapter(..., task=...).",
        )
    return next(iter(heads.values()))[0]


@dataclass(frozen=True, slots=True)
class Continued:
    """An adapter that continues the training of another.

    Attributes:
        start: A copy of its tensors before training.
        digest: SHA-256 of the original folder's tensors.
        has_tokens: Whether its tokenizer differs from the base's, and the new folder must store it.
        style: Prompt style of its training; None if unknown.
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
    """Load the adapter of `method.start_from` onto a base for further training.

    Args:
        quantize: Quantization of the base.
        auto_class: The class of the loaded base. If the adapter was trained on another class (a
            causal model that becomes a reward model), the bases are compared by name.

    Raises:
        AdapterError: There is no adapter, or it belongs to another base.
        ConfigError: The method's settings differ from the adapter's.
    """
    file = read_adapter(adapter_folder(str(method.start_from)))
    _check_settings(method, file)
    file.method.check_quantize(quantize)
    before = file.provenance.loading.get("quantize", quantize)
    if before != quantize:
        on_event(
            Notice(
                f"{file.folder} was trained over a base with quantize: {before}. This run uses "
                f"{quantize}, so its initial outputs differ slightly."
            )
        )
    same_class = task_of(file).auto_class == auto_class
    if not same_class:
        _check_name(file, base)
    has_own = adopt_tokenizer(base, file.folder, file.method.token_rows, on_event)
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
    return Continued(adapter, start, digest, has_own, style)


def _check_name(file: AdapterFile, base: Base) -> None:
    """Check the base by name, since the heads differ and the weights cannot be compared."""
    recorded = file.provenance.base
    if recorded not in (base.name, base.hub_id, None):
        raise AdapterError(
            f"{file.folder} may belong to another base",
            found=f"It was trained on {recorded}. This base is {base.name} with another head, "
            "so their weights cannot be compared.",
            fix=f"Set base.model: {recorded}.",
        )


def _check_settings(method: Method, file: AdapterFile) -> None:
    """Check that the method's settings equal the adapter's."""
    saved, given = file.method, method.model_fields_set - FREE
    if method.type != saved.type and (given or method.type != "lora"):
        raise ConfigError(
            f"method.type: {method.type} differs from the adapter in {file.folder}.",
            found=f"The adapter's method is {saved.type}.",
            fix="Remove all settings of the method except start_from; the adapter defines them.",
        )
    for name in sorted(given):
        if getattr(method, name) != getattr(saved, name):
            raise ConfigError(
                f"method.{name} differs from the adapter in {file.folder}.",
                found=f"The recipe has {getattr(method, name)!r}, the adapter "
                f"{getattr(saved, name)!r}.",
                fix="Remove it; the adapter defines the method's settings except dropout.",
            )


def before_training(adapter: Adapter, folder: Path) -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of contexts in which the adapter is in its state before training.

    Args:
        folder: The adapter's folder. If it stores no start, the contexts disable the adapter.

    Raises:
        AdapterError: The stored start does not match the adapter, or is missing.
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
            f"{path} is not the start of this adapter",
            found="Its tensors have other names or shapes.",
            fix="Restore the folder, or remove the file to compare with the base.",
        )
    return partial(adapter.swapped_state, start)


def _is_of(origin: Provenance, base: Base) -> bool:
    """Return whether an adapter was trained on a base; a head of the adapter may differ.

    Compare fingerprints of the weights. If they are missing, or if the heads differ and only a
    fingerprint with the head is recorded, compare the names of the bases.
    """
    if origin.fingerprint == base.fingerprint or (origin.trunk and origin.trunk == base.trunk):
        return True
    has_head = origin.task is not None and _noted(origin.task, NOTES).auto_class != CAUSAL
    is_unknown = not (origin.trunk and base.trunk) if has_head else not origin.fingerprint
    return is_unknown and origin.base in (base.name, base.hub_id)


def read_side_adapter(path: str | Path, base: Base) -> SideAdapter:
    """Read a LoRA of the same base, with its value head if it has one.

    Args:
        base: The run's base, with the trained adapter on it.

    Raises:
        AdapterError: The adapter is not a LoRA, or belongs to another base.
    """
    file, updates = read_low_rank(adapter_folder(path), with_head=True)
    origin = file.provenance
    if not _is_of(origin, base):
        raise AdapterError(
            f"the adapter in {file.folder} was trained on another base",
            found=f"Its base is {origin.base} ({origin.fingerprint or 'unknown weights'}); "
            f"this run's base is {base.name} ({base.fingerprint}).",
            fix="Train it on this base.",
        )
    tensors = named_tensors(file.folder)
    head = {name: t for name, t in tensors.items() if not name.endswith((A, B))}
    if len({name.rpartition(".")[0] for name in head}) > 1:
        raise AdapterError(
            f"{file.folder} cannot be used next to the trained adapter",
            found=f"It has more than a LoRA and a head: {', '.join(sorted(head)[:3])}.",
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
