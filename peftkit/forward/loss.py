"""The cross entropy of target tokens, with logits in chunks if that is exact.

Only the hidden states before target tokens reach the head: if half of the labels are masked, half
of the largest matrix product and of the logits is skipped. A forward pre-hook on the model's output
embedding selects the rows. The model itself computes all later operations (soft-capping, logit
scales, biases, an adapter on the head), and nothing is patched.

For logits in chunks the head is a function of hidden rows. Scales and caps of logits come from the
model's config. The function is compared with the model once, and is not used if they differ.

Shapes: B rows, T tokens, C selected rows, H hidden size, V vocabulary, n target tokens of the
batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from peftkit.errors import AdapterError
from peftkit.execution.plan import ExecutionPlan
from peftkit.forward.noise import is_last_rounding
from peftkit.kernels.cross_entropy import (
    Divergence,
    chunked_cross_entropy,
    chunked_divergence,
    reference_divergence,
)
from peftkit.model.places import is_linear, linear_shape, unwrap_adapter


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity beyond the range of floats."""
    return math.exp(loss) if loss < 709 else math.inf


def unwrapped(model: nn.Module) -> Any:
    """Return the model inside torch.compile's wrapper, or the model itself."""
    return getattr(model, "_orig_mod", model)


def accepted(model: nn.Module, inputs: Mapping[str, object]) -> dict[str, Any]:
    """Return the inputs that the model accepts; some models have no position_ids.

    use_cache also passes through **kwargs, for GraniteMoe.
    """
    names = inspect.signature(type(unwrapped(model)).forward).parameters
    open_ended = any(name.kind is name.VAR_KEYWORD for name in names.values())
    return {
        name: value
        for name, value in inputs.items()
        if name in names or (open_ended and name == "use_cache")
    }


def in_dtype_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's inputs, with floating-point inputs cast to the dtype of its weights."""
    dtype = unwrapped(model).dtype
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}


def target_logits(model: nn.Module, inputs: Mapping[str, object], target_index: Tensor) -> Tensor:
    """Return the logits (n, V) at these positions of the flattened (B * T) tokens."""
    logits, rows = _through_head(model, inputs, target_index, num_logits=None)
    if rows is not None:  # (1, n, V)
        return logits.squeeze(0)
    # no head, or a head that is not called as a module: all logits are computed
    return logits.flatten(0, 1).index_select(0, target_index)


def target_rows(model: nn.Module, inputs: Mapping[str, object], target_index: Tensor) -> Tensor:
    """Return the head's input rows (n, H) at these positions, without computing logits.

    Raises:
        RuntimeError: The model has no separate head; see `head_of`.
    """
    _, rows = _through_head(model, inputs, target_index, num_logits=0)
    if rows is None:
        raise RuntimeError(f"{type(unwrapped(model)).__name__} has no separate head")
    return rows


def _through_head(
    model: nn.Module, inputs: Mapping[str, Any], target_index: Tensor, num_logits: int | None
) -> tuple[Tensor, Tensor | None]:
    """Run a model with selected rows as its head's input; return the logits and these rows (n, H).

    Args:
        num_logits: Number of rows for which logits are computed; None: all.
    """
    tokens = inputs["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"].shape
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


def find_head(model: nn.Module) -> nn.Module | None:
    """Return a model's output embedding, if it is a module."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    return head if isinstance(head, nn.Module) else None


class Head:
    """Maps (C, H) hidden rows to (C, V) logits.

    Attributes:
        module: The output layer, possibly with an adapter.
        scale: Factor of the logits (Cohere), or the inverse of a divisor (Granite).
        cap: Logits are cap * tanh(logits / cap) (Gemma 2).
        chunk_bytes: Maximum bytes of a chunk's logits.
    """

    def __init__(
        self, module: nn.Module, scale: float, cap: float | None, chunk_bytes: int
    ) -> None:
        self.module, self.scale, self.cap, self.chunk_bytes = module, scale, cap, chunk_bytes

    def __call__(self, rows: Tensor) -> Tensor:
        # flatten instead of [0], whose gradient would be a second, zero-filled array of logits
        logits: Tensor = self.module(rows[None]).flatten(0, 1)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def losses(self, rows: Tensor, targets: Tensor, *, equal_weights: bool = False) -> Tensor:
        """Return the cross entropy of each row (n,), 0 for a negative target.

        See `chunked_cross_entropy`. If the head is trained, there must be no negative target.
        """
        values = chunked_cross_entropy(
            rows,
            targets.clamp(min=0),
            self,
            trainable=[p for p in self.module.parameters() if p.requires_grad],
            equal_weights=equal_weights,
            vocab_size=self.vocab_size,
            chunk_bytes=self.chunk_bytes,
        )
        return values * (targets >= 0)

    @property
    def vocab_size(self) -> int:
        return linear_shape(unwrap_adapter(self.module))[1]


def head_of(model: nn.Module, extra: Mapping[str, Tensor] | None = None) -> Head | None:
    """Return a model's head, or None if it cannot be separated from the model.

    Runs the model on a few tokens without gradients, in its current mode.

    Args:
        extra: Inputs that the model needs in addition to tokens.
    """
    whole: Any = unwrapped(model)
    module = find_head(whole)
    if module is None or not is_linear(unwrap_adapter(module)):
        return None
    config = whole.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    chunk_bytes = ExecutionPlan.for_model(whole).chunk_bytes
    head = Head(module, scale, None if cap is None else float(cap), chunk_bytes)
    return head if _agrees(whole, head, extra or {}) else None


def token_loss(
    model: nn.Module,
    head: Head | None,
    inputs: Mapping[str, object],
    target_index: Tensor,
    targets: Tensor,
) -> Tensor:
    """Return the sum of -log p(target) in fp32, with logits in chunks.

    Args:
        head: The model's head; None: all logits together.
        inputs: The model's inputs: input_ids (B, T), ..., or the encoder's inputs and
            decoder_input_ids (B, T).
        target_index: (n,) positions in the flattened (B * T) tokens.
        targets: (n,) the tokens that follow these positions.
    """
    if head is None:
        logits = target_logits(model, inputs, target_index).float()
        return functional.cross_entropy(logits, targets, reduction="sum")
    rows = target_rows(model, inputs, target_index)
    return head.losses(rows, targets, equal_weights=True).sum()


def token_log_probs(
    model: nn.Module,
    head: Head | None,
    inputs: Mapping[str, object],
    target_index: Tensor,
    targets: Tensor,
) -> Tensor:
    """Return log p(target) for each target (n,) in fp32; see `token_loss`."""
    if head is None:
        logits = target_logits(model, inputs, target_index)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return -functional.cross_entropy(wide, targets, reduction="none")
    return -head.losses(target_rows(model, inputs, target_index), targets)


@torch.no_grad()
def _agrees(model: Any, head: Head, extra: Mapping[str, Tensor]) -> bool:
    """Return whether a head computes the model's logits of a few tokens."""
    hidden: list[Tensor] = []
    hook = head.module.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    device = next(model.get_input_embeddings().parameters()).device
    ids = torch.arange(3, 11, device=device)[None]
    try:
        inputs = {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False, **extra}
        logits = model(**accepted(model, inputs)).logits
    finally:
        hook.remove()
    if len(hidden) != 1 or hidden[0].shape[:-1] != ids.shape:
        return False
    output = head(hidden[0][0])
    same = output.shape == logits[0].shape
    return same and is_last_rounding(output.float(), logits[0].float(), output.dtype)


def changes_head(model: nn.Module) -> bool:
    """Return whether the adapter changes the model's head."""
    head = find_head(unwrapped(model))
    if head is None:
        return False
    return unwrap_adapter(head) is not head or any(p.requires_grad for p in head.parameters())


def check_shared_head(model: nn.Module, setting: str) -> None:
    """Check that the adapter does not change the head.

    Args:
        setting: What compares two states of the model: "the task distill".

    Raises:
        AdapterError: The adapter changes the head.
    """
    if changes_head(model):
        raise AdapterError(
            f"{setting} cannot train an adapter on the head.",
            found="Teacher and student share it; a tied head is also the token embedding.",
            fix="Remove the head from method.targets and method.train_fully, and remove "
            "method.token_rows and base.new_tokens.",
        )


def divergence_of(
    student: Tensor,
    teacher: Tensor,
    head: Head | None,
    divergence: Divergence,
    *,
    teacher_head: Head | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the divergence of each token (n,) in float32, and whether both choose the same token.

    Args:
        student, teacher: What the heads read (n, H); without a head, logits (n, V). Only the
            student gets a gradient.
        teacher_head: By default the student's.
    """
    if head is None:
        values = reference_divergence(student.float(), teacher.float(), divergence)
        return values, student.argmax(-1) == teacher.argmax(-1)
    return chunked_divergence(
        student,
        teacher,
        head,
        divergence,
        teacher_head=teacher_head,
        vocab_size=head.vocab_size,
        chunk_bytes=head.chunk_bytes,
    )
