"""Adapters of other tools: recognised by content, refused by name, or written as PEFT's folders."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from torch import nn

from peftkit.base.load import load_base
from peftkit.base.locate import Location, locate
from peftkit.base.skeleton import skeleton
from peftkit.errors import AdapterError, first_few
from peftkit.events import Listener, Saved, Stage, ignore
from peftkit.files import disk
from peftkit.files.tensors import write_tensors
from peftkit.formats.folders import CONFIG, NOTES, TENSORS, check_free, new_adapter_folder
from peftkit.formats.gguf.header import read_header
from peftkit.formats.guard import check_safetensors, read_json, what_is
from peftkit.formats.mlx import MLX_TENSORS, read_mlx
from peftkit.formats.peft.folder import PREFIX, load_adapter, named_tensors, save_adapter
from peftkit.formats.peft.low_rank import LowRank, misfits, read_low_rank, save_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.formats.peft.targets import shortest_endings
from peftkit.methods.lora_format import check_layout
from peftkit.model.places import is_conv1d, is_linear

_REPO_URL = "general.base_model.0.repo_url"
"""Key of GGUF files that names the base's page."""
GGUF = "a GGUF file"
_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_MERGED = "Merge it in the tool that made it, or ask for it as a PEFT LoRA."
_REFUSED: tuple[tuple[str, str, str], ...] = (
    (
        r"lora_(unet|te\d?|transformer|prior)_",
        "kohya-ss (sd-scripts), an adapter of an image model",
        "peftkit adapts language models; use it in the program that it was made for.",
    ),
    (
        r"(unet|text_encoder(_\d)?|diffusion_model)\.|transformer\.(single_)?transformer_blocks\.",
        "Diffusers, an adapter of an image model",
        "peftkit adapts language models; load it with diffusers' load_lora_weights.",
    ),
    (r".*\.hada_w[12]_[ab]$", "a LoHa, whose update is no low-rank product", _MERGED),
    (r".*\.lokr_w[12](_[ab])?$", "a LoKr, whose update is no low-rank product", _MERGED),
    (
        r".*\.lora_(down|up)\.weight$",
        "LyCORIS or kohya-ss (lora_down, lora_up), whose scale stands in no config",
        _MERGED,
    ),
)


@dataclass(frozen=True, slots=True)
class Imported:
    """An adapter from another program, and its format there."""

    folder: Path
    source: Literal["peft", "gguf", "mlx"]


class Foreign(NamedTuple):
    """An adapter of another tool: its kind, its folder, and the file with the tensors."""

    kind: Literal["peft", "mlx", "gguf"]
    folder: Path
    file: Path


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
        path: A folder of mlx-lm or PEFT, or a GGUF file; recognised by content.
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
    foreign = recognise(path)
    check_free(out, force=force, sources=[foreign.folder])
    base = base or _base_named_by(foreign)
    on_event(Stage(f"Importing {path}"))
    model = skeleton(base)
    with new_adapter_folder(out, force=force, sources=[foreign.folder]) as folder:
        if foreign.kind == "peft":
            _import_peft(foreign, folder, base, model, on_event)
        else:
            modules = _updates_of(foreign, model, base)
            location = locate(base)
            commit = getattr(model.config, "_commit_hash", None)
            origin = Provenance(location.name, revision=commit)
            _save(modules, folder, origin, location, model, path)
    on_event(Saved("adapter", out))
    return Imported(out, foreign.kind)


def recognise(path: Path) -> Foreign:
    """Return what kind of adapter is at `path`, from the content of its files.

    Raises:
        AdapterError: There is none, there are several, or it is of a kind that is refused, by name.
    """
    path = path.expanduser()
    message = f"cannot import {path}"
    if not path.exists():
        raise AdapterError(message, found="There is no such file or folder.")
    file = path if path.is_file() else _only_file(path, message)
    kind = what_is(file)
    if kind == GGUF:
        return Foreign("gguf", file.parent, file)
    names = list(check_safetensors(file).tensors)
    _refuse(names, message)
    if any(name.endswith((".lora_a", ".lora_b")) for name in names):
        foreign = Foreign("mlx", file.parent, file)
    elif (file.parent / NOTES).is_file() or any(".lora_" in name for name in names):
        foreign = Foreign("peft", file.parent, file)
        _refuse_experts(file.parent, names)
    else:
        raise AdapterError(
            message,
            found=f"{file.name} holds no tensors of a LoRA, as {names[0]}",
            fix="Give an adapter of PEFT, mlx-lm or llama.cpp.",
        )
    if not (file.parent / CONFIG).is_file():
        raise AdapterError(
            message,
            found=f"There is no {CONFIG} next to {file.name}; the scale is in it.",
            fix=f"Get {CONFIG} from the source of the tensors.",
        )
    return foreign


def _only_file(folder: Path, message: str) -> Path:
    """Return the one file of a folder that holds tensors."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    # mlx-lm's trainer keeps files of earlier steps, too
    final = [path for path in paths if path.name in (TENSORS, MLX_TENSORS)]
    usable = final or [path for path in paths if path.suffix in _SUFFIXES]
    if len(usable) == 1:
        return usable[0]
    names = first_few((path.name for path in usable or paths), 8, ", ")
    raise AdapterError(
        message,
        found=f"It holds {'several' if usable else 'no tensors, only'}: {names or 'nothing'}.",
        fix="Give the path of the file of an adapter of PEFT, mlx-lm or llama.cpp.",
    )


def _refuse(names: Iterable[str], message: str) -> None:
    for name in names:
        for pattern, what, fix in _REFUSED:
            if re.match(pattern, name):
                raise AdapterError(message, found=f"It is from {what}: {name}", fix=fix)


def _refuse_experts(folder: Path, names: Iterable[str]) -> None:
    """Refuse stacked experts whose layout is ambiguous, whatever the config targets."""
    matches = (re.match(r".*\.experts(?=\.(base_layer\.)*lora_[AB]\.)", name) for name in names)
    stacked = [match[0] for match in matches if match]
    if stacked and (folder / CONFIG).is_file():
        check_layout(read_json(folder / CONFIG) | {"target_parameters": stacked})


def peft_folder(foreign: Foreign, scratch: Path) -> Path:
    """Return a PEFT adapter's folder; a copy in `scratch`, where its file has another name."""
    if foreign.file.name == TENSORS:
        return foreign.folder
    shutil.copyfile(foreign.file, scratch / TENSORS)
    shutil.copyfile(foreign.folder / CONFIG, scratch / CONFIG)
    return scratch


def _updates_of(foreign: Foreign, model: nn.Module, base: str) -> dict[str, LowRank]:
    """Read an adapter of mlx-lm or llama.cpp."""
    if foreign.kind == "mlx":
        return read_mlx(foreign.folder, foreign.file.name)
    from peftkit.formats.gguf.convert import read_gguf

    return read_gguf(foreign.file, model, base)


def _base_named_by(foreign: Foreign) -> str:
    """Return the name of the base that an adapter of another program records.

    Raises:
        AdapterError: It records none.
    """
    if foreign.kind == "gguf":
        with disk.open_regular(foreign.file) as file:
            address = str(read_header(foreign.file, file).keys.get(_REPO_URL, ""))
        base = address.removeprefix("https://huggingface.co/")
    else:
        fields = read_json(foreign.folder / CONFIG)
        base = fields.get("base_model_name_or_path") or fields.get("model") or ""
    if not isinstance(base, str) or not base:
        raise AdapterError(
            f"{foreign.file} does not say which base it belongs to",
            fix="Name the base it was trained on with --base MODEL.",
        )
    return base


def _import_peft(
    foreign: Foreign, folder: Path, base: str, model: nn.Module, on_event: Listener
) -> None:
    with tempfile.TemporaryDirectory(prefix="peftkit-") as scratch:
        source = peft_folder(foreign, Path(scratch))
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
        _save(modules, folder, file.provenance, locate(base), model, foreign.folder)


def _keep(source: Path, folder: Path, model: nn.Module, location: Location, scratch: Path) -> None:
    """Write an adapter of stacked experts, whose layout is the same here.

    Args:
        model: The base's skeleton, on which it must fit.
    """
    bare = scratch / "bare"  # without our notes, whose roles need the base's values
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
    own: Provenance,
    location: Location,
    model: nn.Module,
    source: Path,
) -> None:
    """Write updates that fit the model; of their origin the base is replaced by `location`."""
    linears = {path: module for path, module in model.named_modules() if is_linear(module)}
    if problems := misfits(modules, linears):
        raise AdapterError(
            f"{source} does not fit {location.name}",
            found=first_few(problems, 20),
            fix="Name the base that it was trained on with --base MODEL.",
        )
    revision = own.revision if own.base == location.name else None
    own = replace(own, base=location.name, hub_id=location.hub_id, revision=revision)
    transposed = any(is_conv1d(linears[path]) for path in modules)
    targets = shortest_endings(modules, linears.keys() - modules.keys())
    save_low_rank(modules, folder, own, targets=targets, transposed=transposed)
