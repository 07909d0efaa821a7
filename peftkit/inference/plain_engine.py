"""The engine over `model.generate`, which runs batch after batch.

`PlainEngine` serves models whose cache cannot be split by rows: encoder-decoders, virtual tokens,
custom cache classes, custom positions, and prompts with media. It runs a batch until its last row
has ended; later requests wait for the next batch. Each row still has separate settings, seed,
adapter and end tokens, and completes its prompt as it does alone: rows are padded only if the
model's numbers do not depend on it (`takes_padding`, `limits_of`). States (RWKV), blocks of linear
attention (MiniMax) and attention that selects keys (DeepSeek V3.2) may count padding as tokens.

Shapes: B rows, T tokens of the longest prompt, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from peftkit.data.pack import padded_rows
from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.execution.plan import compute_dtype
from peftkit.forward.noise import Trial
from peftkit.forward.row_lengths import limits_of
from peftkit.inference.engine import Completion, Engine, masked, table_of

PLAIN_ROWS = 16
"""Rows of a plain batch, which all run until the last one has ended."""

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
    _generate(model, {"input_ids": ids, "attention_mask": mask}, NEW_TOKENS, pad, forced)
    return torch.stack(forced.logits, 1)


def _generate(
    model: Any,
    inputs: Mapping[str, Tensor],
    num_new: int,
    pad: int,
    choose: LogitsProcessor,
    stops: Sequence[StoppingCriteria] = (),
) -> None:
    """Run `model.generate`; `choose` makes the next tokens the likeliest ones."""
    model.generate(
        **{name: value.to(model.device) for name, value in inputs.items()},
        generation_config=GenerationConfig(
            do_sample=False, use_cache=True, max_new_tokens=num_new, pad_token_id=pad
        ),
        logits_processor=LogitsProcessorList([choose]),
        stopping_criteria=StoppingCriteriaList(stops),
    )


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


class PlainEngine(Engine):
    """An engine whose step answers a batch to its end, by `model.generate`."""

    _batch: Sequence[Completion] = ()
    _begun: Sequence[Completion] = ()

    def _prepare(self, stack: ExitStack) -> None:
        stack.callback(setattr, self.model, "generation_config", self.model.generation_config)
        # Empty: transformers fills in from the model's own what a config does not set.
        self.model.generation_config = GenerationConfig()
        self._limit = limits_of(self.model).batch

    def _running(self) -> list[Completion]:
        return list(self._batch)

    def forget(self, adapter: str) -> None:
        """Nothing is kept from batch to batch."""

    def _take_back(self) -> list[Completion]:
        return list(self._begun)

    def _advance(self) -> None:
        self._begun = ()
        waiting = [one for one in self._waiting if one.ended_by is None]
        texts = list(takewhile(lambda one: one.request.inputs is None, waiting))
        batch = texts[: self._num_rows(texts)] or waiting[:1]
        self._batch = self._begun = batch
        self._waiting = deque(waiting[len(batch) :])
        if not batch:
            return
        inputs = batch[0].request.inputs
        if inputs is None:
            prompts = [one.tokens for one in batch]
            ids, mask = padded_rows(prompts, self._pad or 0, left=True)
            inputs = {"input_ids": ids, "attention_mask": mask}
        try:
            with self._using([one.request.adapter for one in batch]):
                self.answer(batch, inputs)
        finally:
            self._batch = ()

    def _num_rows(self, rows: Sequence[Completion]) -> int:
        """Return how many of the first rows fit into a batch, at least one."""
        most = math.inf if self.limits.tokens is None else self.limits.tokens
        number = longest = 0
        for row in rows[: min(self.limits.rows, PLAIN_ROWS)]:
            longest = max(longest, row.num_tokens)
            if number and (number + 1) * longest > most:
                break
            if not self._can_pad([*rows[:number], row]):
                break
            adapters = [one.request.adapter for one in rows[:number]]
            if not self._can_join(row.request.adapter, adapters):
                break
            number += 1
        return number

    def _can_pad(self, rows: Sequence[Completion]) -> bool:
        """Return whether rows in one batch have the completions that they have alone."""
        lengths = {len(row.tokens) for row in rows}
        if len(lengths) == 1:
            return True
        # a row that has ended grows with the others
        width = max(lengths) + max(row.max_new_tokens - len(row.ids) for row in rows)
        fits = self._limit is None or width <= self._limit
        return fits and takes_padding(self.model, self._pad or 0)

    def answer(self, rows: Sequence[Completion], inputs: Mapping[str, Tensor]) -> None:
        """Run a batch until its last row has ended.

        Args:
            inputs: The model's inputs, padded on the left: input_ids (B, T) and others.
        """
        num_new = max(one.max_new_tokens - len(one.ids) for one in rows)
        choose = _Choose(rows, self.model.device)
        _generate(self.model, inputs, num_new, self._pad or 0, choose, [_Ended(rows)])


class _Choose(LogitsProcessor):
    """Chooses each row's token by its own settings, and makes it the likeliest."""

    def __init__(self, rows: Sequence[Completion], device: torch.device) -> None:
        self._rows = rows
        self._table = table_of(rows, device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = self._table.choose(masked(scores, self._rows))
        for row, choice in zip(self._rows, self._table.choices(chosen.tolist()), strict=True):
            row.take(choice)
        only_chosen = torch.full_like(scores, -torch.inf)
        return only_chosen.scatter_(1, chosen[:, :1].to(scores.device, torch.long), 0.0)


class _Ended(StoppingCriteria):
    """Stops the rows that have ended."""

    def __init__(self, rows: Sequence[Completion]) -> None:
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: object) -> Tensor:
        ended = [row.ended_by is not None for row in self._rows]
        return torch.tensor(ended, device=input_ids.device)
