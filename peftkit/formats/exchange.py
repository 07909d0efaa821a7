"""Adapters into the formats of other programs, and out of them again.

What is written computes what the adapter computes: other ranks, scales and layouts are folded in,
and what a format cannot hold is an error that says why.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Literal

import torch
from torch import nn

from peftkit.base.load import load_base
from peftkit.base.locate import Location, locate
from peftkit.base.purpose import rope_notice
from peftkit.base.request import DTYPES
from peftkit.base.skeleton import skeleton
from peftkit.errors import AdapterError, first_few
from peftkit.events import Listener, Notice, Saved, Stage, ignore
from peftkit.files import disk
from peftkit.files.tensors import write_tensors
from peftkit.formats.card import CARD
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.foreign import Found, peft_folder, recognise
from peftkit.formats.gguf.header import read_header
from peftkit.formats.guard import read_json, read_tensors
from peftkit.formats.mlx import read_mlx, write_mlx
from peftkit.formats.open_adapter import task_of
from peftkit.formats.peft.folder import (
    CONFIG,
    NOTES,
    PREFIX,
    TENSORS,
    AdapterFile,
    load_adapter,
    named_tensors,
    read_adapter,
    save_adapter,
)
from peftkit.formats.peft.low_rank import (
    LowRank,
    misfits,
    own_targets,
    read_low_rank,
    save_low_rank,
    uniform,
)
from peftkit.formats.peft.notes import Provenance
from peftkit.formats.peft.targets import shortest_endings
from peftkit.formats.serving import (
    MAX_LORA_RANKS,
    check_serving,
    largest_rank,
    served_over,
    vllm_serve,
)
from peftkit.formats.staged import check_free, new_adapter_folder
from peftkit.model.places import is_conv1d, is_linear
from peftkit.tasks.media_text import MediaTextConfig

Format = Literal["peft", "gguf", "mlx"]
Dtype = Literal["fp32", "fp16", "bf16", "q8_0"]
_REPO_URL = "general.base_model.0.repo_url"
"""Key of GGUF files that names the base's page."""


@dataclass(frozen=True, slots=True)
class Exported:
    """An adapter in another format.

    Attributes:
        commands: Program to the lines that run the adapter in it.
    """

    path: Path
    commands: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Imported:
    """An adapter that came from another program, and the format that it came in."""

    folder: Path
    source: Format


def export_adapter(
    adapter: str | Path,
    out: str | Path,
    *,
    to: Format,
    serving: bool = False,
    base: str | None = None,
    dtype: Dtype = "fp32",
    force: bool = False,
    on_event: Listener = ignore,
) -> Exported:
    """Write an adapter in the format of another program.

    Args:
        adapter: A folder of an adapter, or its name on the hub.
        out: A folder for PEFT and MLX, a file for GGUF.
        serving: Write the PEFT folder that vLLM accepts, or say why there is none.
        base: Where its base is, for GGUF; by default the one recorded.
        dtype: Of the tensors; q8_0 is GGUF's own.
        force: Replace what is there.

    Raises:
        AdapterError: The format cannot hold it: each layer in question is listed.
        OutputError: `out` is taken or cannot be written.
    """
    source, out = adapter_folder(adapter), Path(out).expanduser()
    if to != "gguf":
        if dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise AdapterError(f"there is no dtype {dtype} in {to}", fix=f"One of: {known}.")
        check_free(out, force=force, sources=[source])
    if serving:
        check_serving(source)
    file = read_adapter(source)
    if to != "peft" and isinstance(task_of(file), MediaTextConfig):
        raise AdapterError(
            f"cannot export {source} to {to}",
            found="It was trained over a model of media and text, whose language side is only a "
            "part: the format has no place for the rest.",
            fix=f"peftkit merge {source} --out merged, and convert the merged model; or --to peft.",
        )
    on_event(Stage(f"Exporting {source} to {to}"))
    if to == "gguf":
        from peftkit.formats.gguf.convert import export_gguf

        if note := export_gguf(source, out, base=base, dtype=dtype, force=force):
            on_event(Notice(note))
    else:
        with new_adapter_folder(out, force=force, sources=[source]) as folder:
            _write(source, folder, to, DTYPES[dtype], serving)
    if serving and (stored := str(file.provenance.loading.get("stored", ""))):
        on_event(Notice(served_over(stored)))
    if scaling := file.provenance.loading.get("rope_scaling"):
        on_event(Notice(rope_notice(scaling)))
    on_event(Saved(f"{to} adapter", out))
    return Exported(out, _commands(file, out, to, base))


def _write(source: Path, folder: Path, to: Format, dtype: torch.dtype, serving: bool) -> None:
    """Write a folder of PEFT, for a server if asked, or of MLX."""
    if serving:
        file, modules = read_low_rank(source)
        save_low_rank(
            uniform(modules)[0],  # older servers ignore patterns and rsLoRA silently
            folder,
            file.provenance,
            targets=own_targets(file, modules),
            transposed=bool(file.fields.get("fan_in_fan_out")),
            dtype=dtype,
        )
    elif to == "mlx":
        write_mlx(*read_low_rank(source), folder, dtype=dtype)
    else:
        _copy(source, folder, dtype)


def _copy(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write what PEFT reads; the notes that say more hold of the very same tensors only."""
    tensors = read_tensors(source / TENSORS)
    names = [CONFIG, CARD]
    if all(tensor.dtype == dtype for tensor in tensors.values()):
        names += [TENSORS, NOTES]
    else:
        cast = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        write_tensors(cast, folder / TENSORS, {"format": "pt"})
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _commands(file: AdapterFile, out: Path, to: Format, base: str | None) -> dict[str, str]:
    """Return how the result is run, program by program."""
    model = quote(base or file.provenance.hub_id or file.provenance.base or "BASE")
    place = quote(str(out))
    if to == "mlx":
        return {"mlx-lm": f'mlx_lm.generate --model {model} --adapter-path {place} --prompt "..."'}
    if to == "gguf":
        return {"llama.cpp": f"llama-server -m BASE.gguf --lora {place}"}
    rank = largest_rank(read_json(out / CONFIG))
    if not 0 < rank <= MAX_LORA_RANKS[-1]:
        return {}
    return {"vLLM": vllm_serve(model, rank, f"{out.resolve().name}={out}")}


def import_adapter(
    path: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    force: bool = False,
    on_event: Listener = ignore,
) -> Imported:
    """Write an adapter of another program as a folder that peftkit and PEFT load.

    Args:
        path: A folder of mlx-lm or PEFT, or a GGUF file; told apart by their content.
        out: The new folder.
        base: What it was trained on: hub id, folder or short name; by default what the adapter
            names. Only its config is read.
        force: Replace the adapter in `out`.

    Raises:
        AdapterError: Not an adapter, of a kind that is refused, or it does not fit the base: each
            layer in question is listed.
        OutputError: `out` is taken or cannot be written.
    """
    path, out = Path(path).expanduser(), Path(out).expanduser()
    found = recognise(path)
    check_free(out, force=force, sources=[found.folder])
    base = base or _base_named_by(found)
    on_event(Stage(f"Importing {path}"))
    model = skeleton(base)
    with new_adapter_folder(out, force=force, sources=[found.folder]) as folder:
        if found.kind == "peft":
            _import_peft(found, folder, base, model, on_event)
        else:
            modules = _updates_of(found, model, base)
            location = locate(base)
            commit = getattr(model.config, "_commit_hash", None)
            origin = Provenance(location.name, revision=commit)
            _save(modules, folder, origin, location, model, path)
    on_event(Saved("adapter", out))
    return Imported(out, found.kind)


def _updates_of(found: Found, model: nn.Module, base: str) -> dict[str, LowRank]:
    """Read an adapter of mlx-lm or llama.cpp."""
    if found.kind == "mlx":
        return read_mlx(found.folder, found.file.name)
    from peftkit.formats.gguf.convert import read_gguf

    return read_gguf(found.file, model, base)


def _base_named_by(found: Found) -> str:
    """Return the base that an adapter of another program says it was trained on.

    Raises:
        AdapterError: It says none.
    """
    if found.kind == "gguf":
        with disk.open_regular(found.file) as file:
            address = str(read_header(found.file, file).keys.get(_REPO_URL, ""))
        base = address.removeprefix("https://huggingface.co/")
    else:
        fields = read_json(found.folder / CONFIG)
        base = fields.get("base_model_name_or_path") or fields.get("model") or ""
    if not isinstance(base, str) or not base:
        raise AdapterError(
            f"{found.file} does not say which base it belongs to",
            fix="Name the base it was trained on with --base MODEL.",
        )
    return base


def _import_peft(
    found: Found, folder: Path, base: str, model: nn.Module, on_event: Listener
) -> None:
    with tempfile.TemporaryDirectory(prefix="peftkit-") as scratch:
        source = peft_folder(found, Path(scratch))
        init = read_json(source / CONFIG).get("init_lora_weights")
        if init in ("pissa", "olora"):  # what it subtracts is made from the base's weights
            loaded = load_base(base, device="cpu", dtype="fp32", on_event=on_event)
            adapter = load_adapter(loaded.model, source)
            adapter.method = adapter.method.model_copy(update={"targets": tuple(adapter.own)})
            origin = Provenance(loaded.name, loaded.hub_id, loaded.revision, loaded.fingerprint)
            save_adapter(adapter, folder, origin)
            return
        if read_json(source / CONFIG).get("target_parameters"):
            _keep(source, folder, model, locate(base), Path(scratch))
            return
        file, modules = read_low_rank(source)
        _save(modules, folder, file.provenance, locate(base), model, found.folder)


def _keep(source: Path, folder: Path, model: nn.Module, location: Location, scratch: Path) -> None:
    """Write an adapter of stacked experts, whose layout is the same here.

    Args:
        model: The base's skeleton, on which it must fit.
    """
    bare = scratch / "bare"  # without our notes: what they say of roles needs the base's values
    bare.mkdir()
    for name in (CONFIG, TENSORS):
        shutil.copyfile(source / name, bare / name)
    load_adapter(model, bare).detach()
    if (source / NOTES).is_file():
        for name in (TENSORS, NOTES):
            shutil.copyfile(source / name, folder / name)
    else:
        tensors = {PREFIX + name: tensor for name, tensor in named_tensors(bare).items()}
        write_tensors(tensors, folder / TENSORS, {"format": "pt"})
    named = {"base_model_name_or_path": location.hub_id or location.name}
    disk.write_json(read_json(source / CONFIG) | named, folder / CONFIG)


def _save(
    modules: Mapping[str, LowRank],
    folder: Path,
    known: Provenance,
    location: Location,
    model: nn.Module,
    source: Path,
) -> None:
    """Write updates that fit the model, together with what is known of their origin."""
    linears = {path: module for path, module in model.named_modules() if is_linear(module)}
    if problems := misfits(modules, linears):
        raise AdapterError(
            f"{source} does not fit {location.name}",
            found=first_few(problems, 20),
            fix="Name the base that it was trained on with --base MODEL.",
        )
    origin = _origin(known, location)
    transposed = any(is_conv1d(linears[path]) for path in modules)
    targets = shortest_endings(modules, linears.keys() - modules.keys())
    save_low_rank(modules, folder, origin, targets=targets, transposed=transposed)


def _origin(known: Provenance, location: Location) -> Provenance:
    """Return what is known of an adapter's origin, with the base that was asked for."""
    revision = known.revision if known.base == location.name else None
    return replace(known, base=location.name, hub_id=location.hub_id, revision=revision)
