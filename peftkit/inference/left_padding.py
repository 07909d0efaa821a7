"""Which rows of a plain batch may be padded on the left: `takes_padding` probes the model.

States (RWKV), blocks of linear attention (MiniMax) and attention that selects keys (DeepSeek V3.2)
may count padding as tokens, also in transformers' `generate`. A probe compares a padded row with
the same row alone.

Shapes: B rows, T tokens of the longest, V tokens of the vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from peftkit.data.pack import padded_rows
from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.execution.plan import compute_dtype
from peftkit.forward.noise import Trial

LENGTHS = (23, 11, 6)
"""Of the rows of the probe."""
NEW_TOKENS = 3
"""Tokens after each row: a first one is right in some models whose state is not."""

_answers: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()


def takes_padding(model: Any, pad: int) -> bool:
    """Return whether a row that is padded on the left has the logits that it has alone.

    Runs the model on a few tokens, once for each dtype. The model is in eval mode.
    """
    answers, dtype = _answers.setdefault(model, {}), compute_dtype(model)
    if dtype not in answers:
        vocab = model.config.get_text_config().vocab_size
        rows = [[(3 + i) * (7 + size) % vocab for i in range(size)] for size in LENGTHS]
        try:
            together = Trial(model, lambda: list(_next_logits(model, rows, pad)))
            answers[dtype] = together.accepts([_next_logits(model, [row], pad)[0] for row in rows])
        except Exception as error:  # whatever a model raises that cannot read padding
            if is_out_of_memory(error):
                raise
            return answers.setdefault(dtype, False)
    return answers[dtype]


def _next_logits(model: Any, rows: Sequence[Sequence[int]], pad: int) -> Tensor:
    """Return the logits (B, NEW_TOKENS, V) of the next tokens of rows, with given tokens chosen."""
    ids, mask = padded_rows(rows, pad, left=True)
    forced = _Forced(ids.shape[1])
    model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=GenerationConfig(
            do_sample=False, use_cache=True, max_new_tokens=NEW_TOKENS, pad_token_id=pad
        ),
        logits_processor=LogitsProcessorList([forced]),
    )
    return torch.stack(forced.logits, 1)


class _Forced(LogitsProcessor):
    """Records logits and chooses token 3, then 4, and so on."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logits.append(scores.float().cpu())
        only_chosen = torch.full_like(scores, -torch.inf)
        only_chosen[:, 3 + input_ids.shape[1] - self._width] = 0.0
        return only_chosen
