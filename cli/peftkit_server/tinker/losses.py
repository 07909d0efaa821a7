"""Tinker's losses: functions of each target's log-probability, summed over tokens and datums.

With x the log-probability of a target by the current policy and q by the sampling policy,
r = exp(x - q), A the advantage, w the weight (default 1), and lo, hi the bounds of a ratio:

    cross_entropy        -w x
    importance_sampling  -w r A
    ppo                  -w min(r A, clip(r, lo, hi) A)                 (arXiv:1707.06347)
    cispo                -w sg(clip(r, lo, hi)) x A                     (arXiv:2506.13585)
    dro                  -w (x A - beta/2 (x - q)^2)                    (arXiv:2405.19107)
    gspo                 ppo with r replaced by sg(s) exp(x - sg(x)), where s = exp(mean of
                         x - q over sequence_ratio_mask)                (arXiv:2507.18071)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from peftkit.errors import did_you_mean
from peftkit_server.refusals import RequestError

Inputs = Mapping[str, Tensor]
"""The tensors of a datum's `loss_fn_inputs`."""
TARGETS = "target_tokens"


class Settings(NamedTuple):
    """`loss_fn_config`."""

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2
    beta: float = 0.05

    def clipped(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(self.clip_low_threshold, self.clip_high_threshold)


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function.

    Attributes:
        gain: Function of the targets' log-probabilities (n,), the inputs and the settings; returns
            the objective to maximize, for each target. The input `datum` has each target's index.
        needs: Required inputs, except targets and weights; each has the targets' shape.
        settings: Names of the settings that it reads.
        idle: Input whose zeros mark targets without a gradient; "": no such input.
    """

    gain: Callable[[Tensor, Inputs, Settings], Tensor]
    needs: tuple[str, ...] = ("logprobs", "advantages")
    settings: tuple[str, ...] = ()
    idle: str = "advantages"

    def of_tokens(self, log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
        """Return the loss of each target; see `gain`."""
        return -inputs["weights"] * self.gain(log_probs, inputs, settings)

    def is_learnt(self, inputs: Inputs) -> Tensor:
        """Return which targets have a gradient, a mask of the targets' shape."""
        has_gradient = torch.ones_like(inputs[TARGETS], dtype=torch.bool)
        for name in {"weights", self.idle} & inputs.keys():
            has_gradient &= inputs[name] != 0
        return has_gradient

    def check_names(self, inputs: Iterable[str], where: str) -> None:
        """Validate the names of a datum's inputs, before their tensors exist.

        Raises:
            RequestError: An input is missing or unknown.
        """
        missing = [name for name in (TARGETS, *self.needs) if name not in inputs]
        unknown = [name for name in inputs if name not in (TARGETS, "weights", *self.needs)]
        if missing or unknown:
            raise RequestError(
                f"{where}: the loss cannot use these loss_fn_inputs.",
                found="; ".join(
                    f"{word}: {', '.join(name[:40] for name in names[:8])}"
                    for word, names in (("missing", missing), ("unknown", unknown))
                    if names
                ),
            )

    def check(self, inputs: Inputs, where: str) -> None:
        """Validate the inputs of a datum, including its targets.

        Raises:
            RequestError: As `check_names`; or an input has another shape, or is not finite.
        """
        self.check_names(inputs, where)
        shape = inputs[TARGETS].shape
        for name, values in inputs.items():
            if values.shape != shape or not bool(values.isfinite().all()):
                reason = f"Its shape is {list(values.shape)}; the targets have {list(shape)}."
                if values.shape == shape:
                    reason = "It has values that are not finite."
                raise RequestError(f"{where}: {name} is invalid.", found=reason)


def _ratio(log_probs: Tensor, inputs: Inputs) -> Tensor:
    return (log_probs - inputs["logprobs"]).exp()


def _clipped_gain(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    advantages = inputs["advantages"]
    return torch.minimum(ratio * advantages, settings.clipped(ratio) * advantages)


def _cispo(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    ratio = settings.clipped(_ratio(log_probs, inputs)).detach()
    return ratio * log_probs * inputs["advantages"]


def _dro(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    distance = log_probs - inputs["logprobs"]
    return log_probs * inputs["advantages"] - 0.5 * settings.beta * distance.square()


def _gspo(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    mask = inputs["sequence_ratio_mask"]
    datum = inputs["datum"]
    distance = (log_probs - inputs["logprobs"]).detach() * mask
    sums = torch.zeros(2, len(mask), device=mask.device, dtype=distance.dtype)
    total, count = sums.index_add(1, datum, torch.stack([distance, mask.to(distance.dtype)]))
    ratio = (total / count.clamp(min=1e-9)).exp()[datum]
    return _clipped_gain(ratio * (log_probs - log_probs.detach()).exp(), inputs, settings)


_CLIP = ("clip_low_threshold", "clip_high_threshold")

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(lambda x, inputs, settings: x, needs=(), idle=""),
    "importance_sampling": Loss(
        lambda x, inputs, settings: _ratio(x, inputs) * inputs["advantages"]
    ),
    "ppo": Loss(
        lambda x, inputs, settings: _clipped_gain(_ratio(x, inputs), inputs, settings),
        settings=_CLIP,
    ),
    "cispo": Loss(_cispo, settings=_CLIP),
    "dro": Loss(_dro, settings=("beta",), idle=""),
    "gspo": Loss(_gspo, needs=("logprobs", "advantages", "sequence_ratio_mask"), settings=_CLIP),
}


def loss_of(name: str) -> Loss:
    """Return a loss by Tinker's name.

    Raises:
        RequestError: The name is not in `LOSSES`.
    """
    if name in LOSSES:
        return LOSSES[name]
    fix = did_you_mean(name, LOSSES)
    if name == "stable_reinforce":
        fix = 'Its formula is not public. Use loss_fn="importance_sampling".'
    raise RequestError(
        f"there is no loss '{name[:40]}'.", found=f"The losses are: {', '.join(LOSSES)}.", fix=fix
    )


def settings_of(name: str, config: Mapping[str, float | str]) -> Settings:
    """Return the settings of a loss.

    Raises:
        RequestError: A setting is unknown, not a finite number, or out of range.
    """
    names = LOSSES[name].settings
    for key, value in config.items():
        is_number = isinstance(value, float) and abs(value) < 1e9  # False for NaN
        if key not in names or not is_number:
            raise RequestError(
                f"the loss {name} cannot use {key[:40]} in loss_fn_config.",
                found=f"It takes numbers for: {', '.join(names) or 'nothing'}.",
            )
    settings = Settings(**config)  # type: ignore[arg-type]
    if not 0 <= settings.clip_low_threshold <= settings.clip_high_threshold or settings.beta < 0:
        raise RequestError(
            f"the loss {name} cannot use this loss_fn_config.",
            found=f"{settings}",
            fix="The thresholds bound the ratio of two probabilities; use values such as 0.8, 1.2.",
        )
    return settings
