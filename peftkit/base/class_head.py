"""The head of a model of classes: which modules it is, and how a new one begins.

A new head is the same whatever was drawn before, in whatever precision and on whatever device.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.errors import BaseError
from peftkit.files.disk import open_tensors

SEED = 20_210_617
"""Of every new head."""
LANGUAGE_HEAD = "lm_head.weight"
POOLER = "pooler"
"""Part of some encoders that only heads of classes use; models of masked words come without it."""


def head_of_classes(model: Any) -> tuple[str, ...]:
    """Return the paths of what a model has beside its backbone, which is where the blocks are."""
    return tuple(
        name
        for name, child in model.named_children()
        if child is not model.base_model
        and not any(isinstance(module, nn.ModuleList) for module in child.modules())
        and any(True for _ in child.parameters())
    )


def owners(names: Iterable[str], head: Iterable[str]) -> dict[str, str]:
    """Return for each parameter that belongs to a head the path that it is trained under.

    Args:
        names: Of parameters.
        head: What `head_of_classes` says.
    """
    found = {}
    for name in names:
        segments = name.split(".")
        if POOLER in segments[:-1]:
            found[name] = ".".join(segments[: segments.index(POOLER) + 1])
        for path in head:
            if name.startswith(f"{path}."):
                found[name] = path
    return found


@torch.no_grad()
def renew(model: nn.Module, names: Iterable[str]) -> None:
    """Draw the matrices among these parameters again; biases become 0, scales of norms 1."""
    generator = torch.Generator().manual_seed(SEED)
    std = getattr(model.config, "initializer_range", None) or 0.02
    for name in sorted(names):
        parameter = model.get_parameter(name)
        if parameter.ndim > 1:
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


@torch.no_grad()
def start_from_words(
    model: Any, names: Iterable[str], word_ids: tuple[int, int], where: str
) -> None:
    """Have a new head of one output begin as the difference of two rows of the language head.

    What it says is then by how much the first word is likelier than the second, in log-odds.

    Args:
        names: Of the head's parameters. where: The base, for messages.

    Raises:
        BaseError: The head has more than one row, or the language head is not at hand.
    """
    rows = model.get_input_embeddings().weight
    new = {name: model.get_parameter(name) for name in sorted(names)}
    if [tuple(parameter.shape) for parameter in new.values()] != [(1, rows.shape[1])]:
        raise BaseError(
            f"A head of {where} cannot start from words.",
            found=f"New in it: {', '.join(new) or 'nothing, the base has a head already'}.",
            fix="Leave task.answers out, or give a decoder without a head.",
        )
    if not model.config.get_text_config().tie_word_embeddings:
        rows = _language_head(Path(str(model.config._name_or_path)), where)
    difference = rows[word_ids[0]].float() - rows[word_ids[1]].float()
    for parameter in new.values():
        parameter.copy_(difference[None])


def _language_head(folder: Path, where: str) -> Tensor:
    for path in sorted(folder.glob("*.safetensors")):
        with open_tensors(path, error=BaseError) as file:
            if LANGUAGE_HEAD in file.header.tensors:
                return file.tensor(LANGUAGE_HEAD)
    raise BaseError(
        f"A head cannot start from words of {where}.",
        found=f"No {LANGUAGE_HEAD} is in its safetensors files.",
        fix="Leave task.answers out, or give the folder of a base that has it.",
    )
