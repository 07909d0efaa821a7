"""Answers by transformers' own `generate`, for models whose cache cannot be taken apart.

Those are models with states or convolutions, encoder-decoders, virtual tokens, positions of their
own, and prompts with images. A batch is answered until its last row has ended; who comes meanwhile
waits for the next. Each row has its own settings, seed, adapter and end all the same.

Shapes: B rows, T tokens of the longest prompt, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from peftkit.inference.engine import Engine, Running, masked, table_of

MAX_ROWS = 16
"""Rows of a batch: all of them run until the last has ended."""


class PlainEngine(Engine):
    """As `Engine`; a step answers a whole batch, and the callbacks of its requests are called."""

    _batch: Sequence[Running] = ()

    def _prepare(self, stack: ExitStack) -> None:
        stack.callback(setattr, self.model, "generation_config", self.model.generation_config)
        # An empty one: what a config does not set, transformers fills in from the model's own.
        self.model.generation_config = GenerationConfig()

    @property
    def num_running(self) -> int:
        return len(self._batch)

    def step(self) -> None:
        waiting = [one for one in self._waiting if one.ended_by is None]
        texts = list(takewhile(lambda one: one.request.inputs is None, waiting))
        batch = texts[: min(self.limits.rows, MAX_ROWS)] or waiting[:1]
        self._batch, self._waiting = batch, deque(waiting[len(batch) :])
        if not batch:
            return
        inputs = batch[0].request.inputs
        if inputs is None:
            inputs = left_padded([one.request.ids for one in batch], self._pad or 0)
        try:
            with self._using([one.request.adapter for one in batch]):
                self.answer(batch, inputs)
        finally:
            self._batch = ()

    def answer(self, rows: Sequence[Running], inputs: Mapping[str, Tensor]) -> None:
        """Run a batch until its last row has ended.

        Args:
            inputs: Of prompts padded on the left: input_ids (B, T), and what goes with them.
        """
        settings = GenerationConfig(
            do_sample=False,
            use_cache=True,
            max_new_tokens=max(one.max_new_tokens for one in rows),
            pad_token_id=self._pad or 0,
        )
        generate = cast(Callable[..., Tensor], self.model.generate)  # its decorators hide its type
        generate(
            **{name: value.to(self.model.device) for name, value in inputs.items()},
            generation_config=settings,
            logits_processor=LogitsProcessorList([_Choose(rows, self.model.device)]),
            stopping_criteria=StoppingCriteriaList([_Ended(rows)]),
        )


class _Choose(LogitsProcessor):
    """Chooses each row's token by its own settings; transformers then finds it the likeliest."""

    def __init__(self, rows: Sequence[Running], device: torch.device) -> None:
        self._rows = rows
        self._table = table_of(rows, device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = self._table.choose(masked(scores, self._rows))
        for row, one in zip(self._rows, self._table.told(chosen.tolist()), strict=True):
            row.take(one)
        found = torch.full_like(scores, -torch.inf)
        return found.scatter_(1, chosen[:, :1].long(), 0.0)


class _Ended(StoppingCriteria):
    """Says which rows are over."""

    def __init__(self, rows: Sequence[Running]) -> None:
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: object) -> Tensor:
        ended = [row.ended_by is not None for row in self._rows]
        return torch.tensor(ended, device=input_ids.device)


def left_padded(prompts: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, Tensor]:
    """Return prompts as a batch whose last column is every row's last token."""
    width = max(map(len, prompts))
    input_ids = torch.full((len(prompts), width), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}
