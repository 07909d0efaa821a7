"""The losses of policy gradients, each by its paper's formula.

r is exp(log p - log p_old) of a token, A its answer's advantage, and lo, hi the clip bounds.

| loss    | of a token                                         | divided by    | arXiv      |
| dapo    | -min(r A, clip(r, 1 - lo, 1 + hi) A)               | answer tokens | 2503.14476 |
| grpo    | the same; mean over the tokens of an answer        | answers       | 2402.03300 |
| dr_grpo | the same; sum over them / max_new_tokens           | answers       | 2503.20783 |
| gspo    | as grpo with r = exp(mean of log p - log p_old)    | answers       | 2507.18071 |
| cispo   | -min(r, hi) A log p, no gradient through r         | answer tokens | 2506.13585 |
| rloo    | as grpo with r = exp(sum of log p - log p_old)     | answers       | 2402.14740 |

Divided once over the whole step: over all micro-batches and processes.

Shapes: n answer tokens, D answers, G answers of one prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

LossName = Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo", "rloo"]
CLIP: dict[LossName, tuple[float, float]] = {
    "dapo": (0.2, 0.28),
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (0.0, 5.0),
    "rloo": (0.2, 0.2),
}
"""Low and high bounds where a recipe sets none; cispo's high is the largest r, not above 1."""
OF_TOKENS = ("dapo", "cispo")
"""Losses divided by the step's answer tokens; the others by its answers."""
STD_EPS = 1e-4
EQUAL = 1e-8
"""Groups whose rewards differ by no more are left out."""


class PolicyLosses(NamedTuple):
    """(n,) each: losses, their weights in the step's sum and in means, and what was clipped."""

    losses: Tensor
    weights: Tensor
    mean_weights: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def policy_losses(
    loss: LossName,
    log_probs: Tensor,
    old: Tensor,
    worth: Tensor,
    document: Tensor,
    *,
    clip: tuple[float, float],
    max_new_tokens: int,
) -> PolicyLosses:
    """Return the loss of each answer token, and its weights.

    Args:
        log_probs, old: (n,) of each token.
        worth: (D,) the advantage of each answer.
        document: (n,) index of each token's answer.
    """
    low, high = clip
    advantages, num_documents = worth.to(log_probs)[document], len(worth)
    ones = torch.ones_like(log_probs)
    lengths = ones.new_zeros(num_documents).index_add(0, document, ones.detach())[document]
    log_ratio = log_probs - old
    if loss in ("gspo", "rloo"):
        sums = log_ratio.new_zeros(num_documents).index_add(0, document, log_ratio)[document]
        log_ratio = sums / lengths if loss == "gspo" else sums
    ratio = log_ratio.exp()
    if loss == "cispo":
        losses = -ratio.detach().clamp(max=high) * advantages * log_probs
        return PolicyLosses(losses, ones, ones, torch.zeros_like(ones), ratio.detach() > high)
    clamped = ratio.clamp(1 - low, 1 + high)
    losses = -torch.minimum(ratio * advantages, clamped * advantages)
    mean_weights = ones if loss in OF_TOKENS else 1 / lengths
    weights = ones / max_new_tokens if loss == "dr_grpo" else mean_weights
    below = (ratio < 1 - low) & (advantages < 0)
    above = (ratio > 1 + high) & (advantages > 0)
    return PolicyLosses(losses, weights, mean_weights, below, above)


def kl_to_reference(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Return the estimate e^d - d - 1 of each token's divergence, d = log p_ref - log p (n,)."""
    d = reference - log_probs
    return d.exp() - d - 1


def advantages(loss: LossName, rewards: Sequence[float], normalise: bool) -> list[float] | None:
    """Return the advantage of each of G answers over its group; None if all rewards are equal.

    Args:
        rewards: NaN for an answer without a score; its advantage is 0.
        normalise: Divide by the group's standard deviation (of G - 1).
    """
    scored = [reward for reward in rewards if not math.isnan(reward)]
    if len(scored) < 2 or max(scored) - min(scored) <= EQUAL:
        return None
    mean, number = sum(scored) / len(scored), len(scored)
    if loss == "rloo":  # less the mean of the others
        values = [(reward - mean) * number / (number - 1) for reward in rewards]
    else:
        values = [reward - mean for reward in rewards]
    if normalise:
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in scored) / (number - 1))
        values = [value / (deviation + STD_EPS) for value in values]
    return [0.0 if math.isnan(value) else value for value in values]
