"""Inputs and logits of models with virtual tokens."""

from typing import Any

import torch
from torch import Tensor

IDS = torch.arange(18).view(2, 9).mul(7).remainder(300) + 5  # no special token among them


def logits(model: Any, ids: Tensor = IDS, **settings: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs_of(model, ids), **settings).logits


def inputs_of(model: Any, ids: Tensor = IDS) -> dict[str, Tensor]:
    """What a model is called with; an encoder-decoder's decoder has fewer tokens."""
    decoder = {"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {}
    return {"input_ids": ids, **decoder}
