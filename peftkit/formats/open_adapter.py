"""Loads an adapter together with its base, ready to use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peftkit.adapter import Adapter
from peftkit.base.load import Base, load_base
from peftkit.base.new_tokens import restore_tokens
from peftkit.base.purpose import unnamed
from peftkit.config.schema import from_dict
from peftkit.data.encode import Style, default_style
from peftkit.errors import AdapterError
from peftkit.events import Listener, Stage, ignore
from peftkit.files.strict_json import shown
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.folders import CONFIG, NOTES, TENSORS
from peftkit.formats.guard import check_safetensors
from peftkit.formats.peft.folder import AdapterFile, load_adapter, read_adapter
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.media_text import MediaTextConfig
from peftkit.tasks.table import TASKS
from peftkit.tasks.tokens import CausalLMConfig

HEAD = re.compile(r"(^|\.)(classifier|score|classification_head)(\.out_proj)?\.weight$")
"""The last layer of a classification head, in a file of PEFT."""


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
    if isinstance(task, MediaTextConfig) and not media:
        what = f"prompts with {task.media.kind}s"
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
    """Return the number of outputs of the head in a PEFT folder."""
    tensors = check_safetensors(file.folder / TENSORS).tensors
    heads = {name: entry.shape for name, entry in tensors.items() if HEAD.search(name)}
    if len(set(heads.values())) != 1:
        raise AdapterError(
            f"{file.folder} does not say how many labels there are",
            found=f"it holds {', '.join(map(shown, heads)) or 'no head'}",
            fix="Open it with open_adapter(..., task=...), which names them.",
        )
    return next(iter(heads.values()))[0]
