"""A model's embeddings of tokens."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from peftkit.errors import TargetError


def embedding_of(model: nn.Module) -> nn.Module | None:
    """Return what a model gives as its input embedding; None where it has none of tokens."""
    try:
        found = cast(Any, model).get_input_embeddings()
    except (AttributeError, NotImplementedError):  # models of two towers have none
        return None
    return found if isinstance(found, nn.Module) else None


def input_embedding(model: nn.Module) -> str:
    """Return the path of a model's input embedding.

    Raises:
        TargetError: It has none.
    """
    module = embedding_of(model)
    path = next((p for p, m in model.named_modules() if m is module), None)
    if module is None or path is None:
        raise TargetError(
            f"{type(model).__name__} has no input embedding of tokens",
            fix="Name the module: token_rows: {NAME: [...]}",
        )
    return path
