"""Changes to the logits of one completion: penalties of repeated tokens, and a bias by token.

Shapes: V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peftkit.errors import DataError


@dataclass(frozen=True, slots=True)
class Penalties:
    """Changes to the logits before each token, in this order.

    Attributes:
        repetition: Divide the positive logits of tokens in the prompt or the completion by this
            factor, and multiply the negative ones; 1: no change. Source: CTRL (2019), section 4.1.
        frequency: Subtract this for each occurrence of a token in the completion.
        presence: Subtract this for tokens that occur in the completion. Source of both: OpenAI's
            API reference.
        bias: Numbers to add to the logits of tokens.

    Raises:
        DataError: A value is out of range.
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.repetition) and self.repetition > 0):
            raise DataError(
                f"the repetition penalty is {self.repetition}.",
                fix="Give a number above 0; 1 changes nothing.",
            )
        if not all(map(math.isfinite, (self.frequency, self.presence, *self.bias.values()))):
            raise DataError("a penalty or bias is not finite.", fix="Give a finite number.")

    def applied(self, logits: Tensor, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Return changed logits (V,) in float32.

        Args:
            prompt, ids: Tokens of the prompt and of the completion so far.
        """
        out, device = logits.float(), logits.device
        if self.repetition != 1:
            seen = torch.tensor(sorted({*prompt, *ids}), device=device)
            values = out[seen]
            factor = torch.where(values > 0, 1 / self.repetition, self.repetition)
            out = out.index_copy(0, seen, values * factor)
        if ids and (self.frequency or self.presence):
            tokens, counts = torch.tensor(ids, device=device).unique(return_counts=True)
            out = out.index_add(0, tokens, -(self.frequency * counts + self.presence).to(out))
        if self.bias:
            tokens = torch.tensor([*self.bias], device=device)
            out = out.index_add(0, tokens, torch.tensor([*self.bias.values()]).to(out))
        return out
