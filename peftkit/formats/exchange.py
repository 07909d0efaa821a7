"""Export adapters to the formats of other programs, and import adapters from them.

An export preserves the adapter's function. If a format lacks ranks, scales or layouts, they are
folded into the tensors; other unsupported features raise an error with the reason. An import
detects the kind of adapter from the content of its files and writes a folder that peftkit and PEFT
load. Unsupported kinds raise an error that names them.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from torch import nn

from peftkit.base.load import load_base
from peftkit.base.locate import Location, locate
from peftkit.base.new_tokens import grow, restore_tokens, saved_tokens
from peftkit.base.request import DTYPES
from peftkit.base.rope import rope_notice
from peftkit.base.skeleton import hollow, skeleton
from peftkit.config.lazy import LazyMap
from peftkit.errors import AdapterError, first_few
from peftkit.events import Listener, Notice, Saved, Stage, ignore
from peftkit.files import disk
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.folders import (
    CONFIG,
    NOTES,
    PROOF,
    START,
    TENSORS,
    TOKENIZER_FILES,
    check_free,
    copy_files,
    new_adapter_folder,
)
from peftkit.formats.gguf.header import read_header
from peftkit.formats.guard import check_safetensors, file_kind, read_json
from peftkit.formats.mlx import MLX_TENSORS, read_mlx
from peftkit.formats.open_adapter import task_of
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import check_recorded, load_adapter, read_adapter
from peftkit.formats.peft.low_rank import LowRank, misfits, save_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.formats.peft.targets import shortest_endings
from peftkit.methods.lora_format import check_layout
from peftkit.model.places import is_conv1d, is_linear
from peftkit.tasks.media.media_text import MediaTextConfig

Dtype = Literal["fp32", "fp16", "bf16", "q8_0"]

EXPORTERS = LazyMap[Callable[..., Mapping[str, str]]](
    {
        "peft": "peftkit.formats.serving:export_peft",
        "gguf": "peftkit.formats.gguf.convert:export_gguf",
        "mlx": "peftkit.formats.mlx:export_mlx",
    },
    "peftkit.exporters",
)
"""Export function of each format. It takes the adapter's folder, the output path, and the keywords
base, dtype, force and on_event, and returns the commands of `Exported`."""

_REPO_URL = "general.base_model.0.repo_url"
"""Key of GGUF files with the URL of the base."""
GGUF = "a GGUF file"
_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_MERGED = "Merge it with its own tool, or obtain it as a PEFT LoRA."
_REFUSED: tuple[tuple[str, str, str], ...] = (
    (
        r"lora_(unet|te\d?|transformer|prior)_",
        "kohya-ss (sd-scripts), an adapter of an image model",
        "peftkit adapts language models; use it with sd-scripts or another image program.",
    ),
    (
        r"(unet|text_encoder(_\d)?|diffusion_model)\.|transformer\.(single_)?transformer_blocks\.",
        "Diffusers, an adapter of an image model",
        "peftkit adapts language models; load it with diffusers' load_lora_weights.",
    ),
    (r".*\.hada_w[12]_[ab]$", "a LoHa, whose update is not a low-rank product", _MERGED),
    (r".*\.lokr_w[12](_[ab])?$", "a LoKr, whose update is not a low-rank product", _MERGED),
    (
        r".*\.lora_(down|up)\.weight$",
        "LyCORIS or kohya-ss (lora_down, lora_up), which have no config with the scale",
        _MERGED,
    ),
)


@dataclass(frozen=True, slots=True)
class Exported:
    """An adapter in another format.

    Attributes:
        commands: Program -> shell commands that run the adapter in it.
    """

    path: Path
    commands: Mapping[str, str]


def export_adapter(
    adapter: str | Path,
    out: str | Path,
    *,
    to: str,
    serving: bool = False,
    base: str | None = None,
    dtype: Dtype = "fp32",
    force: bool = False,
    on_event: Listener = ignore,
) -> Exported:
    """Write an adapter in the format of another program.

    Args:
        adapter: An adapter's folder, or its name on the hub.
        out: A folder for PEFT and MLX, a file for GGUF.
        to: peft, gguf, mlx, or a format of another package (entry points of peftkit.exporters).
        serving: Write a PEFT folder that vLLM accepts, or raise an error with the reasons.
        base: Location of the base, for GGUF; by default the recorded base.
        dtype: Data type of the tensors; q8_0 is only for GGUF.
        force: Replace existing output.

    Raises:
        AdapterError: The format does not support the adapter; the message lists the layers.
        OutputError: `out` is taken or cannot be written.
    """
    if to not in EXPORTERS:
        formats = f"Formats: {', '.join(map(repr, EXPORTERS))}."
        raise AdapterError(f"there is no format {to!r} to export to", fix=formats)
    source, out = adapter_folder(adapter), Path(out).expanduser()
    if serving and to != "peft":
        raise AdapterError(
            f"cannot export {source} to {to} for a server",
            found="The servers (vLLM, LoRAX) read PEFT's format.",
            fix="Export with to='peft', or without serving.",
        )
    if to != "gguf" and dtype not in DTYPES:
        fix = f"One of: {', '.join(DTYPES)}."
        raise AdapterError(f"there is no dtype {dtype} in {to}", fix=fix)
    if to != "peft" and isinstance(task_of(read_adapter(source)), MediaTextConfig):
        raise AdapterError(
            f"cannot export {source} to {to}",
            found="It was trained over a multimodal model; the format holds only language models.",
            fix=f"Run peftkit merge {source} --out merged and convert the merged model; or use "
            "--to peft.",
        )
    on_event(Stage(f"Exporting {source} to {to}"))
    export = EXPORTERS[to]
    if serving:
        from peftkit.formats.serving import export_for_server as export
    commands = export(source, out, base=base, dtype=dtype, force=force, on_event=on_event)
    if out.is_dir() and (source / PROOF).is_file():
        shutil.copyfile(source / PROOF, out / PROOF)
    loading = read_adapter(source).provenance.loading
    if (kind := str(loading.get("quantize", "none"))) != "none":
        on_event(Notice(_over_another_precision(kind, source)))
    if scaling := loading.get("rope_scaling"):
        on_event(Notice(rope_notice(scaling)))
    on_event(Saved(f"{to} adapter", out))
    return Exported(out, commands)


def _over_another_precision(kind: str, source: Path) -> str:
    return (
        f"It was trained over the base in {kind}. A program that loads the base in 16 bits, "
        "such as vLLM, gives slightly different answers; evaluate it there. Or merge it into the "
        f"quantized weights: peftkit merge {source} --from-quantized --out merged. Or "
        "train with base.quantize: none."
    )


@dataclass(frozen=True, slots=True)
class Imported:
    """An imported adapter and its original format."""

    folder: Path
    source: Literal["peft", "gguf", "mlx"]


class Foreign(NamedTuple):
    """An adapter of another program: its kind, its folder, and the file with the tensors."""

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
    """Convert an adapter of another program to a folder that peftkit and PEFT load.

    Args:
        path: A folder of mlx-lm or PEFT, or a GGUF file; detected by content.
        out: The new folder.
        base: The adapter's base: hub id, folder or short name; by default the base that the adapter
            records. Only its config is read.
        force: Replace the adapter in `out`.

    Raises:
        AdapterError: There is no adapter, its kind is not supported, or it does not fit the base;
            the message lists the layers.
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
            _save(_updates_of(foreign, model, base), folder, base, model, path)
    on_event(Saved("adapter", out))
    return Imported(out, foreign.kind)


def recognise(path: Path) -> Foreign:
    """Detect the kind of adapter at `path` from the content of its files.

    Raises:
        AdapterError: There are no adapters or several, or the kind is not supported.
    """
    path = path.expanduser()
    message = f"cannot import {path}"
    if not path.exists():
        raise AdapterError(message, found="There is no such file or folder.")
    file = path if path.is_file() else _only_file(path, message)
    kind = file_kind(file)
    if kind == GGUF:
        return Foreign("gguf", file.parent, file)
    names = list(check_safetensors(file).tensors)
    _refuse(names, message)
    if any(name.endswith((".lora_a", ".lora_b")) for name in names):
        foreign = Foreign("mlx", file.parent, file)
    elif _is_of_peft(file.parent) or any(".lora_" in name for name in names):
        foreign = Foreign("peft", file.parent, file)
        _check_experts(file.parent, names)
    else:
        raise AdapterError(
            message,
            found=f"{file.name} has no LoRA tensors, but {names[0]}, and no {CONFIG} next to it "
            "has a peft_type.",
            fix="Give an adapter of PEFT, mlx-lm or llama.cpp.",
        )
    if not (file.parent / CONFIG).is_file():
        raise AdapterError(
            message,
            found=f"There is no {CONFIG} next to {file.name}; it contains the scale.",
            fix=f"Get {CONFIG} from the source of the tensors.",
        )
    return foreign


def _is_of_peft(folder: Path) -> bool:
    """Return whether peftkit wrote a folder, or it has a PEFT config of any method."""
    if (folder / NOTES).is_file():
        return True
    config = folder / CONFIG
    return config.is_file() and "peft_type" in read_json(config)


def _only_file(folder: Path, message: str) -> Path:
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    # mlx-lm's trainer also keeps files of earlier steps
    final = [path for path in paths if path.name in (TENSORS, MLX_TENSORS)]
    usable = final or [path for path in paths if path.suffix in _SUFFIXES]
    if len(usable) == 1:
        return usable[0]
    names = first_few((path.name for path in usable or paths), 8, ", ")
    raise AdapterError(
        message,
        found=f"It contains {'several' if usable else 'no tensors, only'}: {names or 'nothing'}.",
        fix="Give the path of an adapter's file, from PEFT, mlx-lm or llama.cpp.",
    )


def _refuse(names: Iterable[str], message: str) -> None:
    for name in names:
        for pattern, what, fix in _REFUSED:
            if re.match(pattern, name):
                raise AdapterError(message, found=f"It is from {what}: {name}", fix=fix)


def _check_experts(folder: Path, names: Iterable[str]) -> None:
    """Raise AdapterError for stacked experts with an ambiguous layout, for any targets."""
    matches = (re.match(r".*\.experts(?=\.(base_layer\.)*lora_[AB]\.)", name) for name in names)
    stacked = [match[0] for match in matches if match]
    if stacked and (folder / CONFIG).is_file():
        check_layout(read_json(folder / CONFIG) | {"target_parameters": stacked})


def peft_folder(foreign: Foreign, scratch: Path) -> Path:
    """Return a PEFT adapter's folder, or a copy in `scratch` if its file has another name."""
    if foreign.file.name == TENSORS:
        return foreign.folder
    shutil.copyfile(foreign.file, scratch / TENSORS)
    shutil.copyfile(foreign.folder / CONFIG, scratch / CONFIG)
    return scratch


def _updates_of(foreign: Foreign, model: nn.Module, base: str) -> dict[str, LowRank]:
    if foreign.kind == "mlx":
        return read_mlx(foreign.folder, foreign.file.name)
    from peftkit.formats.gguf.convert import read_gguf

    return read_gguf(foreign.file, model, base)


def _base_named_by(foreign: Foreign) -> str:
    """Return the base that an adapter of another program records.

    Raises:
        AdapterError: The adapter records no base.
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
    check_recorded(base, foreign.folder)
    return base


def _import_peft(
    foreign: Foreign, folder: Path, base: str, model: nn.Module, on_event: Listener
) -> None:
    """Load an adapter of PEFT or peftkit onto its base, and save it again."""
    location = locate(base)
    with tempfile.TemporaryDirectory(prefix="peftkit-") as scratch:
        source = peft_folder(foreign, Path(scratch))
        file = read_adapter(source)
        if file.fields.get("init_lora_weights") in ("pissa", "olora"):
            # the subtracted update depends on the base's weights
            loaded = load_base(base, device="cpu", dtype="fp32", on_event=on_event)
            origin = Provenance(loaded.name, loaded.hub_id, loaded.revision, loaded.fingerprint)
            restore_tokens(loaded, foreign.folder, file.method.token_rows)
            adapter = load_adapter(loaded.model, source)
        else:
            origin = _moved(file.provenance, location)
            if tokens := saved_tokens(foreign.folder):
                grow(model, max(tokens) + 1)
            adapter = load_adapter(hollow(model), source)
    # START before save_adapter writes its digest into the notes
    copy_files(foreign.folder, folder, (START, *TOKENIZER_FILES))
    save_adapter(adapter, folder, origin)


def _moved(origin: Provenance, location: Location) -> Provenance:
    """Replace the base in an adapter's provenance; keep the revision if the name is equal."""
    revision = origin.revision if origin.base == location.name else None
    return replace(origin, base=location.name, hub_id=location.hub_id, revision=revision)


def _save(
    modules: Mapping[str, LowRank], folder: Path, base: str, model: nn.Module, source: Path
) -> None:
    """Write updates as a PEFT folder if they fit the model."""
    location = locate(base)
    linears = {path: module for path, module in model.named_modules() if is_linear(module)}
    if problems := misfits(modules, linears):
        raise AdapterError(
            f"{source} does not fit {location.name}",
            found=first_few(problems, 20),
            fix="Give the base that it was trained on with --base MODEL.",
        )
    commit = getattr(model.config, "_commit_hash", None)
    origin = Provenance(location.name, location.hub_id, revision=commit)
    transposed = any(is_conv1d(linears[path]) for path in modules)
    targets = shortest_endings(modules, linears.keys() - modules.keys())
    save_low_rank(modules, folder, origin, targets=targets, transposed=transposed)
