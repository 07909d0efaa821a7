"""Compares the outputs of two models on a few prompts: largest difference of logits, top-1.

Shapes: T tokens of a prompt, V vocabulary, or labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peftkit.base.load import Base
from peftkit.base.purpose import CAUSAL_LM, Purpose

PROMPTS = (
    "The capital of France is",
    "Question: If I have three apples and eat one, how many are left?\nAnswer:",
    '{"name": "Anna", "order": ["pizza", "salad"], "total":',
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)
"""Default prompts: a fact, a question, data, code."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How the logits of two models agree.

    Attributes:
        max_difference: Largest absolute difference of a logit.
        largest: Largest absolute logit, as the scale of `max_difference`.
        top1: Share of positions, 0 to 1, with the same most likely token.
        num_positions: How many were compared.
    """

    max_difference: float
    largest: float
    top1: float
    num_positions: int


@torch.no_grad()
def logits_on(base: Base, prompts: Sequence[str], purpose: Purpose = CAUSAL_LM) -> list[Tensor]:
    """Return the logits (positions, V) on each prompt, float32, on the CPU.

    Args:
        purpose: What the base was loaded for. A classifier of texts has one position, or one for
            each token; a model of images is shown noise instead of prompts.
    """
    if purpose != CAUSAL_LM:
        found = (_call(base, number, prompt) for number, prompt in enumerate(prompts))
        return [logits.float().cpu().flatten(0, -2) for logits in found]
    ids = [base.tokenizer(prompt)["input_ids"] for prompt in prompts]
    # padded on the right, which no token of a causal model sees: weights are read once
    longest = max(map(len, ids))
    batch = torch.tensor([row + [row[-1]] * (longest - len(row)) for row in ids])
    logits = base.model(input_ids=batch.to(base.device), use_cache=False).logits
    return [rows[: len(row)].float().cpu() for rows, row in zip(logits, ids, strict=True)]


def _call(base: Base, number: int, prompt: str) -> Tensor:
    """Return the logits on one prompt, or on one picture of noise."""
    config = base.model.config
    if base.image_processor is not None:
        size = config.image_size
        shape = (1, config.num_channels, *([size, size] if isinstance(size, int) else size))
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        return base.model(pixel_values=noise.to(base.device, base.model.dtype)).logits
    ids = base.tokenizer(prompt, return_tensors="pt")["input_ids"].to(base.device)
    decoder = {"decoder_input_ids": ids} if config.is_encoder_decoder and not base.head else {}
    found = base.model(input_ids=ids, **decoder)
    # a bare model, that of an embedding, ends with its hidden states
    output: Tensor = found.logits if "logits" in found else found.last_hidden_state
    return output


def agreement(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> Agreement:
    """Compare the logits of two models on the same prompts; NaN makes the difference infinite."""
    a, b = torch.cat(list(ours)), torch.cat(list(reference))  # (positions, V)
    difference = float((a - b).abs().max())
    return Agreement(
        max_difference=difference if difference == difference else float("inf"),
        largest=float(b.abs().max()),
        top1=float((a.argmax(-1) == b.argmax(-1)).float().mean()),
        num_positions=len(a),
    )
