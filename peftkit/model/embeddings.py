"""A model's embeddings of tokens."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from peftkit.errors import TargetError


def input_embedding(model: nn.Module) -> str:
    """Return the path of a model's input embedding.

    Raises:
        TargetError: It has none.
    """
    try:
        module = cast(Any, model).get_input_embeddings()
    except (AttributeError, NotImplementedError):
        module = None
    path = next((p for p, m in model.named_modules() if m is module), None)
    if module is None or path is None:
        raise TargetError(
            f"{type(model).__name__} has no input embedding of tokens",
            fix="Name the module: token_rows: {NAME: [...]}",
        )
    return path
