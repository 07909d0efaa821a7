"""The summed cross entropy of a causal language model, over the tokens that are learnt.

Only the hidden states before learnt tokens reach the head: with half of the labels masked, half of
the largest matrix product and of the logits is never made. The rows are chosen by a forward
pre-hook on the model's own output embedding, so that the model itself does whatever follows it
(soft-capping, logit scales, biases, an adapter on the head) and nothing of it is patched.

Shapes: B rows, T tokens, H hidden size, V vocabulary, n learnt tokens of the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def unwrapped(model: nn.Module) -> Any:
    """Return the model itself, out of DistributedDataParallel and torch.compile."""
    inner: Any = model
    while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
    return inner


def accepted(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that the model takes: some know no position_ids.

    use_cache also passes through **kwargs, as GraniteMoe takes it.
    """
    names = inspect.signature(type(unwrapped(model)).forward).parameters
    open_ended = any(name.kind is name.VAR_KEYWORD for name in names.values())
    return {
        name: value
        for name, value in inputs.items()
        if name in names or (open_ended and name == "use_cache")
    }


def cross_entropy_sum(
    model: nn.Module, inputs: Mapping[str, Any], target_index: Tensor, targets: Tensor
) -> Tensor:
    """Return the sum of -log p(target), in fp32.

    Args:
        inputs: What the model is called with: input_ids (B, T) ..., or decoder_input_ids (B, T)
            beside the encoder's.
        target_index: (n,) positions in the flattened (B * T) tokens.
        targets: (n,) the tokens that follow them.
    """
    logits = target_logits(model, inputs, target_index)
    # fp32: a bf16 log-sum-exp over 100,000 logits is off in the second digit
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def target_logits(model: nn.Module, inputs: Mapping[str, Any], target_index: Tensor) -> Tensor:
    """Return the logits (n, V) at some positions of the flattened (B * T) tokens."""
    logits, rows = _through_head(model, inputs, target_index, num_logits=None)
    if rows is not None:  # (1, n, V)
        return logits.squeeze(0)
    # no head of its own, or one that is not called as a module: all logits are made
    return logits.flatten(0, 1).index_select(0, target_index)


def target_rows(model: nn.Module, inputs: Mapping[str, Any], target_index: Tensor) -> Tensor:
    """Return what reaches the head (n, H) at some positions, without making any logits.

    Raises:
        RuntimeError: The model has no head of its own: see `peftkit.tasks.head`.
    """
    _, rows = _through_head(model, inputs, target_index, num_logits=0)
    if rows is None:
        raise RuntimeError(f"{type(unwrapped(model)).__name__} has no head that can be set apart")
    return rows


def _through_head(
    model: nn.Module, inputs: Mapping[str, Any], target_index: Tensor, num_logits: int | None
) -> tuple[Tensor, Tensor | None]:
    """Run a model whose head is given chosen rows; return its logits, and these rows (n, H).

    Args:
        num_logits: Of how many of the rows logits are made; None: of all.
    """
    tokens = inputs.get("decoder_input_ids", inputs["input_ids"]).shape
    rows: Tensor | None = None

    def choose(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        nonlocal rows
        if not args or not isinstance(args[0], Tensor) or args[0].shape[:-1] != tokens:
            return None
        rows = args[0].flatten(0, 1).index_select(0, target_index)
        return rows[None, :num_logits], *args[1:]

    head = find_head(unwrapped(model))
    hook = head.register_forward_pre_hook(choose) if head is not None else None
    try:
        logits: Tensor = model(**inputs).logits
    finally:
        if hook is not None:
            hook.remove()
    return logits, rows


def find_head(model: Any) -> nn.Module | None:
    """Return a model's output embedding, if it has one that is a module."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    return head if isinstance(head, nn.Module) else None
