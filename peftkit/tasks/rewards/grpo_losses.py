"""The losses of policy gradients, each by its paper's formula.

r is exp(log p - log p_old) of a token, A its answer's advantage, and lo, hi the clip bounds.

| loss    | of a token                                         | divided by    | arXiv      |
| dapo    | -min(r A, clip(r, 1 - lo, 1 + hi) A)               | answer tokens | 2503.14476 |
| grpo    | the same; mean over the tokens of an answer        | answers       | 2402.03300 |
| dr_grpo | the same; sum over them / max_new_tokens           | answers       | 2503.20783 |
| gspo    | as grpo with r = exp(mean of log p - log p_old)    | answers       | 2507.18071 |
| cispo   | -min(r, hi) A log p, no gradient through r         | answer tokens | 2506.13585 |
| rloo    | as grpo with r = exp(sum of log p - log p_old)     | answers       | 2402.14740 |
| luspo   | as gspo; sum over the tokens of an answer          | answers       | 2602.05261 |
| sapo    | -4/t sigmoid(t (r - 1)) A; mean over the answer    | answers       | 2511.20347 |
| vespo   | -w^k e^(l (1 - w)) A log p, w = exp(sum of log p   | answer tokens | 2602.10693 |
|         | - log p_old), no gradient through w                |               |            |

t, k and l depend on the sign of A (`SAPO_TEMPERATURE`, `VESPO_SHAPE`).

Divided once over the whole step: over all micro-batches and processes.

Shapes: n answer tokens, D answers, G answers of one prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

LossName = Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo", "rloo", "luspo", "sapo", "vespo"]
CLIP: dict[LossName, tuple[float, float]] = {
    "dapo": (0.2, 0.28),
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (0.0, 5.0),
    "rloo": (0.2, 0.2),
    "luspo": (3e-4, 4e-4),
    "sapo": (0.0, 0.0),
    "vespo": (0.0, 0.0),
}
"""Low and high bounds where a recipe sets none; cispo's high is the largest r, not above 1. sapo
and vespo have none."""
OF_TOKENS = ("dapo", "cispo", "vespo")
"""Losses divided by the step's answer tokens; the others by its answers."""
SAPO_TEMPERATURE = (1.0, 1.05)
"""Of answers with a positive advantage, and of the others."""
VESPO_SHAPE = ((2.0, 3.0), (3.0, 2.0))
"""k and l of answers whose advantage is not negative, and of the others."""
STD_EPS = 1e-4
EQUAL = 1e-8
"""Groups whose rewards differ by no more are left out."""


class PolicyLosses(NamedTuple):
    """Losses, weights in the step's sum and in means, and which losses are clipped; (n,) each."""

    losses: Tensor
    weights: Tensor
    mean_weights: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def policy_losses(
    loss: LossName,
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    document: Tensor,
    *,
    clip: tuple[float, float],
    max_new_tokens: int,
) -> PolicyLosses:
    """Return the loss of each answer token, and its weights.

    Args:
        log_probs, old: (n,) of each token.
        advantages: (D,), one for each completion.
        document: (n,) index of each token's answer; negative: a token of none, with weight 0.
    """
    low, high = clip
    num_documents = len(advantages)
    ones, document = (document >= 0).to(log_probs), document.clamp(min=0)
    advantages = advantages.to(log_probs)[document]
    lengths = ones.new_zeros(num_documents).index_add(0, document, ones)[document]
    log_ratio = log_probs - old
    if loss in ("gspo", "luspo", "rloo", "vespo"):
        sums = log_ratio.new_zeros(num_documents).index_add(0, document, log_ratio)[document]
        log_ratio = sums if loss in ("rloo", "vespo") else sums / lengths
    mean_weights, never = (ones if loss in OF_TOKENS else ones / lengths), torch.zeros_like(ones)
    if loss == "vespo":
        losses = -_vespo_weights(log_ratio.detach(), advantages) * advantages * log_probs
        return PolicyLosses(losses, ones, ones, never, never)
    ratio = log_ratio.exp()
    if loss == "sapo":
        t = _where(advantages > 0, SAPO_TEMPERATURE)
        losses = -4 / t * torch.sigmoid(t * (ratio - 1)) * advantages
        return PolicyLosses(losses, mean_weights, mean_weights, never, never)
    if loss == "cispo":
        losses = -ratio.detach().clamp(max=high) * advantages * log_probs
        return PolicyLosses(losses, ones, ones, never, ratio.detach() > high)
    clamped = ratio.clamp(1 - low, 1 + high)
    losses = -torch.minimum(ratio * advantages, clamped * advantages)
    weights = {"dr_grpo": ones / max_new_tokens, "luspo": ones}.get(loss, mean_weights)
    below = (ratio < 1 - low) & (advantages < 0)
    above = (ratio > 1 + high) & (advantages > 0)
    return PolicyLosses(losses, weights, mean_weights, below, above)


def _vespo_weights(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return the weights of the answers (n,): 1 at a ratio of 1, smaller below and above."""
    log_ratio = log_ratio.clamp(math.log(1e-8), 20.0)  # where the weight is 0 in fp32
    positive, negative = VESPO_SHAPE
    k, rate = (_where(advantages >= 0, pair) for pair in zip(positive, negative, strict=True))
    return (k * log_ratio + rate * (1 - log_ratio.exp())).exp()


def _where(mask: Tensor, values: tuple[float, float]) -> Tensor:
    """Return the first value where the mask is true (n,), else the second."""
    return mask * values[0] + ~mask * values[1]


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
