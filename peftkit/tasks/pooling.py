"""How hidden states of a text become one vector, in the words of sentence-transformers.

Its folders say so in modules.json and in the config.json of the module of type Pooling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from peftkit.errors import BaseError
from peftkit.files.disk import write_json, write_text

Mode = Literal["mean", "cls", "last"]
FLAGS: dict[str, Mode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
NAMES: dict[str, Mode] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class Pooled:
    """What is taken of a text, and whether the vector's length becomes 1."""

    mode: Mode
    normalize: bool


def pooled(hidden: Tensor, mask: Tensor, how: Pooled) -> Tensor:
    """Return a vector of each text (B, D), in fp32.

    Args:
        hidden: (B, T, D). mask: (B, T), 1 where a token is; padding is on the right.
    """
    if how.mode == "mean":
        weights = mask[..., None].to(torch.float32)
        found = (hidden.float() * weights).sum(1) / weights.sum(1).clamp(min=1)
    else:
        last = mask.sum(1) - 1 if how.mode == "last" else torch.zeros_like(mask[:, 0])
        found = hidden[torch.arange(len(hidden), device=hidden.device), last].float()
    return functional.normalize(found, dim=-1) if how.normalize else found


def pooling_of(model: Any, mode: str, normalize: bool | str) -> Pooled:
    """Return what is asked for, "auto" as the base's own files say.

    Raises:
        BaseError: They say something that is not known here.
    """
    return pooling_for(model.config, Path(str(model.config._name_or_path)), mode, normalize)


def pooling_for(config: Any, folder: Path | None, mode: str, normalize: bool | str) -> Pooled:
    """Return the same of a model's config and of the folder with its files, if it has one."""
    own_mode, own_normalize = _of_files(folder) if folder else (None, None)
    is_decoder = hasattr(config, "num_key_value_heads") or config.is_decoder
    default: Mode = "last" if is_decoder else "mean"
    return Pooled(
        mode=(own_mode or default) if mode == "auto" else NAMES.get(mode, "last"),
        normalize=(True if own_normalize is None else own_normalize)
        if normalize == "auto"
        else bool(normalize),
    )


def write_modules(folder: Path, config: Any, how: Pooled) -> None:
    """Write what makes a model's folder one of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if how.normalize else [])]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    settings: dict[str, Any] = {"word_embedding_dimension": config.hidden_size}
    settings |= {flag: mode == how.mode for flag, mode in FLAGS.items()}
    (folder / "1_Pooling").mkdir()
    write_json(settings, folder / "1_Pooling" / "config.json")
    write_text(json.dumps(modules, indent=2) + "\n", folder / "modules.json")


def _of_files(folder: Path) -> tuple[Mode | None, bool | None]:
    """Return pooling and normalisation of a folder of sentence-transformers; None: it is none."""
    file = folder / "modules.json"
    if not file.is_file():
        return None, None
    try:
        modules: list[Mapping[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        kinds = {str(module["type"]).rpartition(".")[2]: module for module in modules}
        settings = json.loads(
            (folder / kinds["Pooling"]["path"] / "config.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise BaseError(
            f"cannot read how {folder} makes vectors.",
            found=f"{file}: {problem!r}",
            fix="Set task.pooling and task.normalize, and remove modules.json.",
        ) from None
    modes = {mode for name, mode in FLAGS.items() if settings.get(name)}
    others = [name for name in settings if name.startswith("pooling_mode_") and settings[name]]
    if named := settings.get("pooling_mode"):
        modes, others = {NAMES[named]} if named in NAMES else set(), [named]
    if len(modes) != 1 or len(others) != 1:
        raise BaseError(
            f"{folder} makes vectors in a way that is not known here.",
            found=f"1_Pooling: {', '.join(map(str, others)) or 'nothing'}",
            fix=f"Known are: {', '.join(NAMES)}.",
        )
    return modes.pop(), "Normalize" in kinds
