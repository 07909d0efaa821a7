"""Write adapter folders in HF PEFT's format; load.py reads them.

A folder holds adapter_config.json, adapter_model.safetensors, and, from peftkit, peftkit.json with
further facts (the user's method, the base's fingerprint, the prompt style). Folders of PEFT and of
peftkit are read by the same code, which uses peftkit.json if it exists. The format is PEFT 0.21's:
a tensor of the module at `path` is "base_model.model.{path}.{name}". Only the sixteen oldest config
keys and keys with other values than their defaults are written, because PEFT before 0.14 refuses
unknown keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from peftkit.adapter import Adapter
from peftkit.base.load import Base
from peftkit.files.disk import write_json
from peftkit.files.strict_json import Json
from peftkit.files.tensors import write_tensors
from peftkit.formats.folders import CONFIG, NOTES, START, TENSORS
from peftkit.formats.peft.load import BARE, FINGERPRINT, PREFIX, named_tensors
from peftkit.formats.peft.notes import OLDEST_FIELDS, Provenance, write_notes
from peftkit.formats.peft.targets import written_fields
from peftkit.methods.base import Method
from peftkit.methods.peft_format import PeftFormat
from peftkit.methods.table import format_of
from peftkit.model.places import is_conv1d


def save_adapter(
    adapter: Adapter, folder: str | Path, provenance: Provenance | None = None
) -> Path:
    """Write an adapter folder that peftkit and PEFT load.

    Args:
        adapter: The adapter, whose trained tensors are all saved.
        folder: Created if needed; its adapter files are replaced, each atomically.
        provenance: Facts about the base and the run.

    Raises:
        RunError: A tensor is not finite, or the disk is full.
        OutputError: The folder is not writable.
    """
    provenance, form = provenance or Provenance(), format_of(adapter.method)
    fields = _config_fields(adapter, form, provenance)
    state = form.to_file(adapter.state(), adapter.model, adapter.method_modules)
    return write_folder(Path(folder), state, fields, adapter.method, provenance)


def write_folder(
    folder: Path,
    state: Mapping[str, Tensor],
    fields: Mapping[str, object],
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


def _config_fields(adapter: Adapter, form: PeftFormat[Method], provenance: Provenance) -> Json:
    fields = written_fields(adapter, form)
    where = where_fields(form, provenance, fields["target_modules"])
    if "fan_in_fan_out" in where:
        transposed = any(is_conv1d(m.base) for m in adapter.modules.values())
        where["fan_in_fan_out"] = transposed
    fields = where | fields
    return {k: v for k, v in fields.items() if k not in form.absent_fields}


def where_fields(form: PeftFormat[Method], provenance: Provenance, targets: list[str]) -> Json:
    """Return the config fields for base and targets, and the defaults of PEFT's oldest fields."""
    oldest = {k: v for k, v in OLDEST_FIELDS.items() if k not in form.absent_fields}
    return {
        **oldest,
        "peft_type": form.peft_type,
        "task_type": provenance.task_type,
        "base_model_name_or_path": provenance.hub_id or provenance.base,
        "revision": provenance.revision,
        "target_modules": targets,
    }


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The adapter files of a checkpoint, which is itself an adapter folder.

    Attributes:
        base: The base, if it has tokens that the published base lacks; its tokenizer is then saved.
        start: The tensors before training, saved for `before_training`.
    """

    adapter: Adapter
    provenance: Provenance
    base: Base | None = None
    start: Mapping[str, Tensor] | None = None

    def save(self, folder: Path) -> None:
        """Write the initial tensors, the adapter's files, and the tokenizer with its new tokens."""
        if self.start is not None:  # first, because the notes hold its hash
            write_tensors({n: tensor.cpu() for n, tensor in self.start.items()}, folder / START)
        save_adapter(self.adapter, folder, self.provenance)
        if self.base is not None:
            from peftkit.base.new_tokens import save_tokenizer

            save_tokenizer(self.base, folder)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the tensors of a checkpoint's adapter files."""
        _, tensors = format_of(self.adapter.method).from_file({}, named_tensors(folder))
        self.adapter.load_state(tensors)
