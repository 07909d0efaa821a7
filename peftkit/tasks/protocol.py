"""The seam between tasks and everything else.

A task is two things. Its *config*, a part of the recipe, says what model it needs: `purpose`, once
`resolve` has found in the data what the recipe leaves open (the labels). Its *task*, made by `on` a
model, turns files into rows, rows into batches, batches into a loss, and rows into metrics.

A new task is a file beside this one (a `TaskConfig` and a `Task`) and a line in table.py. Model
class, head, processor, saving, opening, evaluating and checking follow from the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from peftkit.base.purpose import Processor, Purpose
from peftkit.config.schema import Config
from peftkit.data.encode import Style
from peftkit.data.lengths import num_tokens, padded
from peftkit.data.load import DataConfig, Record
from peftkit.data.mixture import is_held_out
from peftkit.errors import DataError
from peftkit.events import Listener, Progress, ignore
from peftkit.tasks.attention import training_attention
from peftkit.tasks.loss import unwrapped
from peftkit.train import task as loop
from peftkit.train.batches import cut
from peftkit.train.checkpoints.identity import fingerprint
from peftkit.train.memory.out_of_memory import is_out_of_memory, release_memory, too_large

BATCH_SIZE = 8
_FIX = "Cut the rows (data.max_length), or load the base quantised (nf4)."


class Task(loop.Task, ABC):
    """What is learnt, on one model: what the training loop asks, and what is asked besides."""

    predicts_tokens: ClassVar[bool] = False
    """Whether the loss is that of each token of a text, so that its exp is a perplexity."""

    @property
    def paths(self) -> Mapping[str, str]:
        return {}

    @property
    def style(self) -> Style | None:
        """How generation prompts what learnt it; None where nothing is generated from a prompt."""
        return None

    def data_used(self, data: DataConfig) -> DataConfig:
        """Return the settings of the data as they are used: a default may give way to the model."""
        return data

    @abstractmethod
    def load(self, where: str) -> Sequence[Any]:
        """Read a file or data set (see `DataConfig.train`) as rows; emits the counts.

        Raises:
            DataError: Rows cannot be used; names them.
        """

    def num_positions(self, rows: Sequence[Any]) -> int:
        return len(rows) * padded(*rows)

    def training(self, model: nn.Module) -> AbstractContextManager[object]:
        return training_attention(unwrapped(model))

    def refer_to(self, state: Callable[[], AbstractContextManager[None]], key: str) -> None:
        """Say what the model was before it learnt, for a task that compares it with that.

        Args:
            state: Makes a context in which the model is what it was.
            key: Tells that from all others; "" where it is not known.
        """
        return None

    def split(self, where: str, share: float) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return a file's rows and a share of them that is held out, by what each row says."""
        rows = self.load(where)
        held = [is_held_out(fingerprint([row]), share) for row in rows]
        return (
            [row for row, out in zip(rows, held, strict=True) if not out],
            [row for row, out in zip(rows, held, strict=True) if out],
        )

    @abstractmethod
    def spans(self, row: Any) -> list[tuple[str, str]]:
        """Return a row as the loss sees it, in pieces: what each is, and its text."""

    @abstractmethod
    def metrics(
        self, model: nn.Module, rows: Sequence[Any], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss and what else this task is measured by; the model is in eval mode."""

    def predict_rows(
        self,
        model: nn.Module,
        records: Sequence[Record],
        where: str,
        *,
        on_event: Listener = ignore,
    ) -> list[dict[str, Any]]:
        """Return what is predicted of each row of a file, as fields to add to it.

        Raises:
            DataError: The task predicts nothing of rows, or rows lack what it reads.
        """
        raise self._predicts_nothing()

    def predict_texts(
        self, model: nn.Module, texts: Sequence[str | tuple[str, str]]
    ) -> list[dict[str, float]]:
        """Return what is predicted of each text, or pair of texts, the likeliest first.

        Raises:
            DataError: The task predicts nothing of texts, or they are not what it reads.
        """
        raise self._predicts_nothing()

    def _predicts_nothing(self) -> DataError:
        return DataError(
            f"{type(self).__name__} predicts nothing of a text.",
            fix="Adapters of sequence_classification, reward and embedding do.",
        )


class TaskConfig(Config, ABC):
    """What every task's config has: a recipe's `task`, as `{type: ...}` or as the type alone."""

    task_type: ClassVar[str | None]
    """PEFT's word for it; None where PEFT has none."""
    auto_class: ClassVar[str]
    """The class of transformers that picks the model's."""
    processor: ClassVar[Processor] = "tokenizer"
    """What makes the inputs; `on` gets it."""
    command: ClassVar[str] = "peftkit eval {folder} --data FILE"
    """What to do with an adapter that learnt it, at the command line."""
    generates: ClassVar[bool] = False
    """Whether what learnt it goes on from a prompt."""
    writes_text: ClassVar[bool] = False
    """Whether samples of its text can be taken while it trains (train.sample_every)."""
    data_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields of DataConfig, beside train and eval, that this task reads; others are refused."""

    task: ClassVar[Callable[..., Task]]
    """The task that it makes: of the model, the processor, this config and the data."""

    type: str

    def resolve(self, data: DataConfig) -> TaskConfig:
        """Return the config with all that `purpose` needs; reads the training data for it.

        Raises:
            DataError: The data cannot be read, or does not say.
        """
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether it is learnt by comparing the model with what it was."""
        return False

    @property
    def purpose(self) -> Purpose:
        """What the base is loaded for. A task with a head of classes says it here, resolved."""
        return Purpose(self.type, self.auto_class, self.processor)

    def write_beside(self, folder: Path, config: Any, base: Path | None) -> None:
        """Write what a merged model needs beside its weights to be used for the task.

        Args:
            folder: The merged model's. config: Its config. base: The base's folder, if it has one.
        """
        return None

    def on(
        self,
        model: nn.Module,
        processor: Any,
        data: DataConfig,
        *,
        style: Style | None = None,
        on_event: Listener = ignore,
    ) -> Task:
        """Make the task for a model that was loaded for `purpose`, adapter and all.

        Args:
            processor: The base's tokenizer or image processor.
            style: How the adapter in hand was trained to be prompted; None: the rows decide.

        Raises:
            PeftkitError: The model or the settings do not suit the task.
        """
        return self.task(model, processor, self, data, on_event=on_event)


@torch.no_grad()
def mean_loss(
    task: Task, model: nn.Module, rows: Sequence[Any], *, on_event: Listener = ignore
) -> tuple[float, int]:
    """Return the mean loss of rows and the number of targets: what most metrics begin with."""
    total, num_targets = 0.0, 0
    measured = over_batches(
        task, model, rows, "Measuring the loss", on_event, partial(task.loss_sum, model)
    )
    for batch, loss in measured:
        total += float(loss)
        num_targets += task.num_targets(batch)
    return total / num_targets, num_targets


def over_batches(
    task: Task,
    model: nn.Module,
    rows: Sequence[Any],
    text: str,
    on_event: Listener,
    compute: Callable[[Mapping[str, Tensor]], Tensor],
) -> Iterator[tuple[Mapping[str, Tensor], Tensor]]:
    """Yield rows, shortest first, as batches where the model is, each with what is computed of it.

    Batches that do not fit into memory are halved, they and those after them.

    Args:
        text: Of the progress.
        compute: Makes the logits, or the loss, of a batch.

    Raises:
        RunError: Not even one row fits.
    """
    device = next(model.parameters()).device
    ordered = sorted(rows, key=num_tokens)  # little padding
    alike = cut(ordered, task.num_positions, len(ordered), kind=task.kind)
    order = [row for part in alike for row in part]

    def attempt(some: Sequence[Any]) -> tuple[Mapping[str, Tensor], Tensor] | None:
        batch = {name: tensor.to(device) for name, tensor in task.collate(some).items()}
        try:
            return batch, compute(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None

    start, size = 0, BATCH_SIZE
    while start < len(order):
        on_event(Progress(text, start, len(order)))
        some = order[start : start + size]
        kind = task.kind(some[0])
        some = list(takewhile(lambda row: task.kind(row) == kind, some))  # noqa: B023
        done = attempt(some)
        if done is not None:
            yield done
            start += len(some)
            continue
        release_memory()
        if len(some) == 1:
            fits = lambda row: attempt([row]) is not None  # noqa: E731
            raise too_large(some[0], order, fits, fix=_FIX)
        size = len(some) // 2
