"""Drift: how far training has moved a model on text that has nothing to do with the task.

The default measure is KL(before, now) in nats per token, on answers that the model before training
gave to unrelated prompts. It needs no text, sees the whole distribution at each token and is never
negative. The alternative is the rise of the cross entropy on a text, the "forgetting" of PEFT's
method comparison. Both states run on the same batches, so an adapter without effect gives exactly
zero.

Shapes: n target tokens of a batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peftkit.data.general import MEASURED, TEXTS
from peftkit.data.pack import IGNORE, Row, collate
from peftkit.data.tokens import with_bos
from peftkit.errors import DataError, RunError
from peftkit.events import Listener, Progress, Stage, ignore
from peftkit.forward.loss import (
    Head,
    accepted,
    changes_head,
    divergence_of,
    head_of,
    target_logits,
    target_rows,
    token_log_probs,
)
from peftkit.inference.engine import AnswerTooLarge
from peftkit.inference.generate import PromptFormat, own_answers
from peftkit.kernels.cross_entropy import Divergence
from peftkit.model.modes import evaluating
from peftkit.settings import DriftConfig

LENGTH, SEED = 40, 1000
"""Maximum tokens of an answer, and the seed of all answers."""
BLOCK, ROWS = 256, 8
"""Tokens of a row of text, and rows of a batch."""
State = Callable[[], AbstractContextManager[None]]


class Drift:
    """Measures drift; the rows are made at the first measurement and stay the same.

    Args:
        before: Returns a context with the model as it was before training.
        forget_layout: Makes the model read each row of a batch as one document.
        prompt_format: How the model reads prompts; by default as the tokenizer says.

    Raises:
        DataError: The file in `config.on` cannot be read, or is too short.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        before: State,
        config: DriftConfig,
        *,
        forget_layout: Callable[[], None] = lambda: None,
        prompt_format: PromptFormat | None = None,
        on_event: Listener = ignore,
    ) -> None:
        self._model, self._tokenizer, self._before = model, tokenizer, before
        self._config, self._forget_layout, self._on_event = config, forget_layout, on_event
        self._prompt_format = prompt_format
        self._texts = TEXTS if config.on == "text" else _file(config.on)
        self._hidden: dict[int, Tensor] = {}  # before training, by the batch's first row

    def measure(self) -> dict[str, float]:
        """Return drift in nats per token; for answers also drift_95 and drift_same.

        drift_95 is the 95 % quantile of the tokens' KL, drift_same the share of tokens at which
        both states agree on the most likely token.

        Raises:
            RunError: Memory does not suffice.
        """
        with evaluating(self._model):
            self._forget_layout()
            if self._texts:
                (drift,), _ = self._over_tokens(self._rise)
                return {"drift": drift}
            (drift, same), values = self._over_tokens(self._divergence)
            return {"drift": drift, "drift_95": values.quantile(0.95).item(), "drift_same": same}

    def is_within_limit(self, metrics: Mapping[str, float]) -> bool:
        """Return whether measured drift is at most train.drift.limit."""
        return self._config.limit is None or metrics["drift"] <= self._config.limit

    @cached_property
    def _rows(self) -> list[Row]:
        if self._texts:
            return text_rows(self._tokenizer, self._texts, self._config.tokens)
        options: Any = {"length": LENGTH, "seed": SEED, "prompt_format": self._prompt_format}
        text = f"Answering {len(MEASURED)} general prompts, on which train.drift is measured"
        self._on_event(Stage(f"{text}; as long as a few steps"))
        try:
            with self._before():
                return own_answers(self._model, self._tokenizer, MEASURED, **options)
        except AnswerTooLarge as error:
            raise RunError(
                error.problem, found=error.found, fix="Leave train.drift out, or set on: text."
            ) from None

    @cached_property
    def _head(self) -> Head | None:
        """The head, if both states share it; without it, all logits of a batch are computed."""
        return None if changes_head(self._model) else head_of(self._model)

    def _over_tokens(
        self, measure: Callable[[dict[str, Tensor], int], tuple[Tensor, Tensor]]
    ) -> tuple[list[float], Tensor]:
        """Return the means of k figures over all targets, and the first one of each target (n,).

        Args:
            measure: Returns the sums (k,) over the targets of a batch, and the first figure of
                each target.
        """
        sums, number, total = torch.zeros((), dtype=torch.float64), 0, len(self._rows)
        values = []
        device = next(self._model.parameters()).device
        for start in range(0, total, ROWS):
            self._on_event(Progress("Measuring drift", start, total))
            batch = collate(self._rows[start : start + ROWS], pad_id=0)
            number += batch["targets"].numel()
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            batch_sums, of_tokens = measure(batch, start)
            sums = sums + batch_sums.double().cpu()
            values.append(of_tokens.double().cpu())
        return (sums / number).tolist(), torch.cat(values)

    def _states(self) -> Iterator[None]:
        """Iterate over the two states: before training, then now."""
        with self._before():
            yield
        yield

    def _inputs(self, batch: dict[str, Tensor]) -> dict[str, object]:
        return accepted(self._model, {"input_ids": batch["input_ids"], "use_cache": False})

    def _rise(self, batch: dict[str, Tensor], start: int) -> tuple[Tensor, Tensor]:
        """Return the rise of the cross entropy: the sum (1,), and of each token (n,)."""
        inputs, targets = self._inputs(batch), (batch["target_index"], batch["targets"])
        before, now = (
            token_log_probs(self._model, self._head, inputs, *targets).double()
            for _ in self._states()
        )
        return (before.sum() - now.sum())[None], before - now

    def _divergence(self, batch: dict[str, Tensor], start: int) -> tuple[Tensor, Tensor]:
        """Return KL(before, now) and equal most likely tokens: sums (2,), and each KL (n,)."""
        head, inputs, index = self._head, self._inputs(batch), batch["target_index"]
        compute = target_logits if head is None else target_rows
        before = self._hidden.get(start)
        if before is None:
            with self._before():
                before = compute(self._model, inputs, index)
            if head is not None:  # logits would take too much memory
                self._hidden[start] = before.cpu()
        now = compute(self._model, inputs, index)
        before = before.to(now.device)
        values, same = divergence_of(now, before, head, Divergence())
        return torch.stack([values.double().sum(), same.double().sum()]), values


def _file(name: str) -> Sequence[str]:
    """Return the text of a file as one text; none for answers."""
    if name == "self":
        return ()
    try:
        return (Path(name).expanduser().read_text(encoding="utf-8-sig"),)
    except (OSError, UnicodeDecodeError) as error:
        fix = "train.drift.on is self, text, or a text file in UTF-8."
        raise DataError(f"Cannot read train.drift.on {name}.", found=str(error), fix=fix) from None


def text_rows(tokenizer: object, texts: Sequence[str], limit: int) -> list[Row]:
    """Return texts as rows of at most 256 tokens whose targets are all tokens but the first.

    Args:
        limit: Maximum tokens of all rows.

    Raises:
        DataError: The texts have no two tokens.
    """
    rows, left = list[Row](), limit
    for number, text in enumerate(texts, 1):
        ids = with_bos(tokenizer, text)
        for start in range(0, len(ids), BLOCK):
            block = ids[start : start + min(BLOCK, left)]
            if len(block) < 2:
                continue
            labels = (IGNORE, *block[1:])
            rows.append(Row(tuple(block), labels, (len(block),), f"text {number}"))
            left -= len(block)
            if left < 2:
                return rows
    if not rows:
        raise DataError("the text in train.drift.on is empty")
    return rows
