"""The losses of comparisons, each by its paper's formula.

s is the log-probability of an answer, summed over its tokens, s/n its mean, and "ref" the
reference's; D is (s - ref) of the chosen answer less that of the rejected one.

| loss   | formula                                                          | source           |
| dpo    | -log sigmoid(beta D)                                             | arXiv:2305.18290 |
| ipo    | (D of means - 1 / (2 beta))^2                                    | arXiv:2310.12036 |
| robust | [-(1 - e) log sigmoid(beta D) + e log sigmoid(-beta D)]/(1 - 2e) | arXiv:2403.00409 |
| hinge  | max(0, 1 - beta D)                                               | arXiv:2305.10425 |
| orpo   | -beta log sigmoid(log odds of means), + NLL of prompt and answer | arXiv:2403.07691 |
| simpo  | -log sigmoid(beta (s/n of chosen - of rejected) - gamma)         | arXiv:2405.14734 |
| cpo    | -log sigmoid(beta (s of chosen - of rejected)), + NLL of chosen  | arXiv:2401.08417 |
| kto    | 1 - sigmoid(beta (s - ref - z)) of a wanted answer,              | arXiv:2402.01306 |
|        | 1 - sigmoid(beta (z - s + ref)) of another                       |                  |

e is label_smoothing; cpo and simpo take it as -(1 - e) log sigmoid(x) - e log sigmoid(-x). The NLL
is the mean over its tokens, times nll_weight. z is the mean of s - ref over answers that belong to
other prompts, at least 0, without gradient.

Shapes: P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LossName = Literal["dpo", "ipo", "robust", "hinge", "orpo", "simpo", "cpo", "kto"]

DEFAULTS: dict[LossName, dict[str, float]] = {
    "dpo": {"nll_weight": 0.0},
    "ipo": {"nll_weight": 0.0},
    "robust": {"label_smoothing": 0.0, "nll_weight": 0.0},
    "hinge": {"nll_weight": 0.0},
    "orpo": {"nll_weight": 1.0},
    "simpo": {"label_smoothing": 0.0, "gamma": 0.5, "nll_weight": 0.0},
    "cpo": {"label_smoothing": 0.0, "nll_weight": 1.0},
    "kto": {},
}
"""Settings of each loss besides beta, with TRL's defaults."""
WITH_REFERENCE = ("dpo", "ipo", "robust", "hinge", "kto")
"""Losses that need the reference model."""
OF_MEANS = ("orpo", "simpo")
"""Losses whose rewards are means over tokens."""
CERTAIN = -1e-6
"""Largest mean log-probability in log odds, which are infinite at 0."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The chosen or the rejected answers of P pairs.

    Attributes:
        log_probs: (P,) summed over each answer's tokens.
        reference: (P,) the same of the reference model; zeros where the loss has none.
        lengths: (P,) tokens of each answer.
    """

    log_probs: Tensor
    reference: Tensor
    lengths: Tensor

    @property
    def gain(self) -> Tensor:
        """Log-ratio to the reference."""
        return self.log_probs - self.reference

    @property
    def mean(self) -> Tensor:
        """Mean log-probability of a token."""
        return self.log_probs / self.lengths


def pair_losses(
    loss: LossName,
    chosen: Answers,
    rejected: Answers,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
) -> Tensor:
    """Return the loss of each pair (P,), without its NLL."""
    gap = chosen.gain - rejected.gain
    if loss == "dpo":
        return -logsigmoid(beta * gap)
    if loss == "hinge":
        return torch.relu(1 - beta * gap)
    if loss == "ipo":
        means = chosen.gain / chosen.lengths - rejected.gain / rejected.lengths
        return (means - 1 / (2 * beta)) ** 2
    if loss == "robust":
        clean, flipped = logsigmoid(beta * gap), logsigmoid(-beta * gap)
        e = label_smoothing
        return (-(1 - e) * clean + e * flipped) / (1 - 2 * e)
    if loss == "orpo":
        odds = [side.mean - _log_of_rest(side.mean) for side in (chosen, rejected)]
        return -beta * logsigmoid(odds[0] - odds[1])
    if loss == "simpo":
        score = beta * (chosen.mean - rejected.mean) - gamma
    else:
        assert loss == "cpo", loss
        score = beta * (chosen.log_probs - rejected.log_probs)
    return -(1 - label_smoothing) * logsigmoid(score) - label_smoothing * logsigmoid(-score)


def kto_losses(gain: Tensor, wanted: Tensor, z: Tensor, *, beta: float) -> Tensor:
    """Return the loss of each answer (P,).

    Args:
        gain: (P,) s - ref. wanted: (P,) booleans. z: () what other answers gain, at least 0.
    """
    ahead = torch.where(wanted, gain - z, z - gain)
    return 1 - torch.sigmoid(beta * ahead)


def rewards(loss: LossName, answers: Answers, *, beta: float) -> Tensor:
    """Return the implicit reward of each answer (P,), for metrics; without gradient."""
    return beta * (answers.mean if loss in OF_MEANS else answers.gain).detach()


def _log_of_rest(log_prob: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of x < 0, exact near 0 and far from it."""
    x = log_prob.clamp(max=CERTAIN)
    near = x > -0.6931
    # torch.where computes both: each gets only numbers that it can take
    close = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, close, far)
