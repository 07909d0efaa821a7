"""What the prompts of a batch begin with in common, computed once.

Keys and values of a system prompt are the same for every prompt that begins with it. They are
computed for one row and given to all; the prompts' own tokens follow, padded on the left between
the two. Padding in the middle is only right where a key's place does not matter, but for the mask:
not for windows, states or convolutions, and so only caches of plain layers are shared.

Shapes: B prompts, P tokens in common.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from peftkit.inference.bank_layer import BankLinear
from peftkit.tasks.length import num_virtual

MIN_SAVED = 128
"""Tokens that have to be spared; a pass of its own costs about as much."""


def num_common(prompts: Sequence[Sequence[int]]) -> int:
    """Return P: of how many tokens all prompts begin alike, and have one more at least."""
    shortest = min(map(len, prompts)) - 1
    alike = (len(set(tokens)) == 1 for tokens in zip(*prompts, strict=False))
    return sum(1 for _ in takewhile(bool, islice(alike, shortest)))


def shared_cache(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> Any:
    """Return a cache (B, P) that holds what prompts have in common; None where that does not pay.

    Its model is in eval mode and wants no gradients.
    """
    common = num_common(prompts)
    if common * (len(prompts) - 1) < MIN_SAVED or not _can_share(model):
        return None
    cache = DynamicCache(config=model.config)
    if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    ids = torch.tensor([list(prompts[0][:common])], device=model.device)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(len(prompts))
    return cache


def _can_share(model: PreTrainedModel) -> bool:
    """Tell whether a model is told its tokens' positions, and computes all rows alike."""
    if any(isinstance(module, BankLinear) for module in model.modules()):  # each its own adapter
        return False
    names = inspect.signature(type(model).forward).parameters
    told = {"position_ids", "past_key_values", "logits_to_keep"} <= names.keys()
    return told and not model.config.is_encoder_decoder and num_virtual(model) == 0


def padded_between(prompts: Sequence[Sequence[int]], common: int, pad: int) -> dict[str, Tensor]:
    """Return prompts as a batch: what is common, padding, and the rest of each.

    The last column is every row's last token.
    """
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), width), pad)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        start = width - len(prompt) + common
        input_ids[row, :common] = torch.tensor(prompt[:common], dtype=torch.long)
        input_ids[row, start:] = torch.tensor(prompt[common:])
        attention_mask[row, :common] = 1
        attention_mask[row, start:] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}
