"""Adapters of other tools: recognised by content, and refused by name where they are unusable."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from peftkit.errors import AdapterError, first_few
from peftkit.formats.guard import check_safetensors, read_json, what_is
from peftkit.formats.mlx import MLX_TENSORS
from peftkit.formats.peft.folder import CONFIG, NOTES, TENSORS
from peftkit.methods.lora_format import check_layout

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


class Found(NamedTuple):
    """An adapter that was found: its kind, its folder, and the file with the tensors."""

    kind: Literal["peft", "mlx", "gguf"]
    folder: Path
    file: Path


def recognise(path: Path) -> Found:
    """Return what kind of adapter is at `path`, from the content of its files.

    Raises:
        AdapterError: There is none, there are several, or it is of a kind that is refused, by name.
    """
    path = path.expanduser()
    asked = f"cannot import {path}"
    if not path.exists():
        raise AdapterError(asked, found="There is no such file or folder.")
    file = path if path.is_file() else _only_file(path, asked)
    kind = what_is(file)
    if kind == GGUF:
        return Found("gguf", file.parent, file)
    names = list(check_safetensors(file).tensors)
    _refuse(names, asked)
    if any(name.endswith((".lora_a", ".lora_b")) for name in names):
        found = Found("mlx", file.parent, file)
    elif (file.parent / NOTES).is_file() or any(".lora_" in name for name in names):
        found = Found("peft", file.parent, file)
        _refuse_experts(file.parent, names)
    else:
        raise AdapterError(
            asked,
            found=f"{file.name} holds no tensors of a LoRA, as {names[0]}",
            fix="Give an adapter of PEFT, mlx-lm or llama.cpp.",
        )
    if not (file.parent / CONFIG).is_file():
        raise AdapterError(
            asked,
            found=f"There is no {CONFIG} beside {file.name}; the scale is in it.",
            fix=f"Get {CONFIG} from the source of the tensors.",
        )
    return found


def _only_file(folder: Path, asked: str) -> Path:
    """Return the one file of a folder that holds tensors."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    # mlx-lm's trainer leaves those of earlier steps beside its last
    known = [path for path in paths if path.name in (TENSORS, MLX_TENSORS)]
    usable = known or [path for path in paths if path.suffix in _SUFFIXES]
    if len(usable) == 1:
        return usable[0]
    names = first_few((path.name for path in usable or paths), 8, ", ")
    raise AdapterError(
        asked,
        found=f"It holds {'several' if usable else 'no tensors, only'}: {names or 'nothing'}.",
        fix="Give the path of the file of an adapter of PEFT, mlx-lm or llama.cpp.",
    )


def _refuse(names: Iterable[str], asked: str) -> None:
    for name in names:
        for pattern, what, fix in _REFUSED:
            if re.match(pattern, name):
                raise AdapterError(asked, found=f"It is from {what}: {name}", fix=fix)


def _refuse_experts(folder: Path, names: Iterable[str]) -> None:
    """Refuse stacked experts whose layout is ambiguous, whatever the config targets."""
    found = (re.match(r".*\.experts(?=\.(base_layer\.)*lora_[AB]\.)", name) for name in names)
    stacked = [match[0] for match in found if match]
    if stacked and (folder / CONFIG).is_file():
        check_layout(read_json(folder / CONFIG) | {"target_parameters": stacked})


def peft_folder(found: Found, scratch: Path) -> Path:
    """Return a PEFT adapter's folder; a copy in `scratch`, where its file has another name."""
    if found.file.name == TENSORS:
        return found.folder
    shutil.copyfile(found.file, scratch / TENSORS)
    shutil.copyfile(found.folder / CONFIG, scratch / CONFIG)
    return scratch
