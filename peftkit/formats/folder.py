"""From the name of an adapter to a base with the adapter on it, ready to be used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from peftkit.adapter import Adapter
from peftkit.base import Base, load_base
from peftkit.data.encode import Style, default_style
from peftkit.errors import AdapterError
from peftkit.events import Listener, Stage, ignore
from peftkit.formats.hub import resolve_adapter
from peftkit.formats.hub_id import is_hub_id
from peftkit.formats.peft import CONFIG, AdapterFile, load_adapter, read_adapter


@dataclass(frozen=True, slots=True)
class Opened:
    """A base, an adapter on it, and what the adapter's folder says."""

    base: Base
    adapter: Adapter
    file: AdapterFile

    @property
    def style(self) -> Style:
        """How a prompt is put to it: as it was trained, else by the chat template if it has one."""
        recorded = self.file.provenance.prompt_style
        return recorded or default_style(self.base.tokenizer)


def open_adapter(
    adapter: str | Path,
    base: str | None = None,
    *,
    quantize: str | None = None,
    dtype: str | None = None,
    device: torch.device | str | None = None,
    force: bool = False,
    on_event: Listener = ignore,
) -> Opened:
    """Load an adapter's base, as it was trained unless told otherwise, and the adapter on it.

    Args:
        adapter: A folder made by peftkit (a run, a checkpoint) or by PEFT.
        base: Another place of the same base than the one recorded.
        quantize, dtype: Other than those it was trained with.
        device: Where to; by default a GPU where there is one.
        force: Accept a base whose weights are not those it was trained on.

    Raises:
        AdapterError: No adapter there, or it belongs to another base.
        BaseError: The base cannot be found or loaded.
    """
    file = read_adapter(adapter_folder(adapter))
    loaded = base_of(file, base, quantize=quantize, dtype=dtype, device=device, on_event=on_event)
    on_event(Stage(f"Loading the adapter {file.folder}"))
    placed = load_adapter(loaded.model, file.folder, fingerprint=loaded.fingerprint, force=force)
    return Opened(loaded, placed, file)


def base_of(
    file: AdapterFile,
    base: str | None = None,
    *,
    quantize: str | None = None,
    dtype: str | None = None,
    device: torch.device | str | None = None,
    on_event: Listener = ignore,
) -> Base:
    """Load an adapter's base, as it was trained unless told otherwise; see `open_adapter`.

    Raises:
        AdapterError: The folder does not say which base it belongs to.
        BaseError: The base cannot be found or loaded.
    """
    origin = file.provenance
    name = base or origin.base
    if not name:
        raise AdapterError(
            f"{file.folder} does not say which base it belongs to",
            fix="Name the base it was trained on with --base MODEL.",
        )
    loading = origin.loading
    return load_base(
        name,
        revision=None if base else origin.revision,
        dtype=dtype or str(loading.get("dtype", "auto")),
        quantize=quantize or str(loading.get("quantize", "none")),
        double_quant=bool(loading.get("double_quant", True)),
        device=device,
        on_event=on_event,
    )


def adapter_folder(adapter: str | Path) -> Path:
    """Return the folder that is meant; what is on the hub is fetched first.

    Raises:
        AdapterError: It does not exist, or is a file; or the hub has it not, or cannot be reached.
    """
    folder = Path(adapter).expanduser()
    if folder.is_file() and folder.name in (CONFIG, "adapter_model.safetensors"):
        folder = folder.parent
    if folder.is_dir():
        return folder
    if is_hub_id(str(adapter)):
        return resolve_adapter(str(adapter))
    near = sorted(str(p.parent) for p in Path().glob(f"runs/*/{CONFIG}"))
    raise AdapterError(
        f"no adapter folder {str(adapter)!r}",
        found="it is a file" if folder.exists() else "no such folder",
        fix=f"Adapters here: {', '.join(near)}" if near else "Give the folder that a run wrote.",
    )
