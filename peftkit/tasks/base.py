"""The protocol of a task: rows to batches, a batch to a loss, and rows to metrics.

A new task is one file with a `TaskConfig` and a `Task`, and one line in table.py. Loading the
model, its head and its processor, saving, opening, evaluating and checking follow from the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from peftkit.data.pack import padded
from peftkit.data.rows.lazy import LazyRows, View, tokens_of_each
from peftkit.data.style import Style
from peftkit.events import Listener, Progress, ignore
from peftkit.execution.plan import ExecutionPlan
from peftkit.execution.world import Part, Rows
from peftkit.forward.attention import training_attention
from peftkit.forward.loss import unwrapped
from peftkit.model.places import num_embeddings
from peftkit.settings import DataConfig
from peftkit.tasks.batches import BATCH_SIZE, batches_that_fit, split_micro_batches
from peftkit.tasks.row_loader import RowLoader, check_vocabulary


class Task(ABC):
    """What a model is trained on.

    A subclass defines `build`, which sets `rows.encoder`, and `collate`, `num_targets` and `loss`.
    All other methods have defaults. A task that takes part in the whole run, with rollouts
    or a reference model, also derives from `peftkit.tasks.run_hooks.RunHooks`.

    A row may have a `source` ("train.jsonl:7"), its `input_ids` and, for an encoder-decoder,
    `num_decoder_tokens`. The loss and the target count of a batch are sums over its rows, given
    the values that `RunHooks.before_step` computed for the step.

    Args:
        processor: The base's tokenizer, image processor, or processor of both.
        style: Prompt style of the adapter's training; None: the style of the rows.

    Attributes:
        tokenizer: The processor, or its tokenizer.
        rows: Reads files as encoded rows.
    """

    row_loader: ClassVar[type[RowLoader]] = RowLoader
    """The class of `rows`."""
    predicts_tokens: ClassVar[bool] = False
    """Whether the loss is the mean over tokens of text: exp(loss) is a perplexity."""
    metric_names: tuple[str, ...] = ()
    """Names of the sums that `loss` returns after the loss."""
    ignored_targets: ClassVar[Mapping[str, int] | None] = None
    """Entries of a batch with a value for each target, and values of further targets that add
    nothing to `loss`. A class that sets it promises that `loss` reads nothing that changes between
    steps, except the batch and tensors at fixed addresses: its passes are recorded on a GPU. It is
    not inherited, since a subclass may have another loss. None: passes run eagerly."""
    collates_ahead: ClassVar[bool] = True
    """Whether a thread may collate the rows of the next step. Must be False if `collate` draws
    random numbers or reads results of `before_step`."""

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        config: Any,
        data: DataConfig,
        *,
        style: Style | None = None,
        on_event: Listener = ignore,
    ) -> None:
        self.processor, self.config = processor, config
        self.tokenizer: Any = getattr(processor, "tokenizer", processor)
        check_vocabulary(model, self.tokenizer)
        self.rows = self.row_loader(processor, data, style, on_event)
        self.rows.num_embeddings = num_embeddings(unwrapped(model))
        self.build(model)

    def build(self, model: nn.Module) -> None:
        """Set up what depends on the model; set `rows.encoder`.

        Raises:
            PeftkitError: The model or the settings do not suit the task.
        """
        from peftkit.forward.row_lengths import keep_lengths_apart

        keep_lengths_apart(model)

    def load(self, where: str) -> LazyRows:
        """Read a file or data set as rows; see `RowLoader.load`."""
        return self.rows.load(where)

    @property
    def paths(self) -> Mapping[str, str]:
        """Chosen execution paths, for the run header."""
        return {}

    def training(
        self, model: nn.Module, plan: ExecutionPlan | None = None
    ) -> AbstractContextManager[object]:
        """Return a context for training the model, with a plan's attention kernel."""
        return training_attention(unwrapped(model), plan, documents=False)

    @abstractmethod
    def collate(self, rows: Rows) -> Mapping[str, Tensor]:
        """Return rows as a batch, on the CPU."""

    def num_positions(self, rows: Rows) -> int:
        """Return how many tokens the model reads for these rows in one batch, with padding."""
        return len(rows) * padded(*rows)

    def bucket_key(self, row: Any) -> Any:
        """Return a key that all rows of a batch share; None: any rows share a batch."""
        return None

    @abstractmethod
    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the divisor of the summed loss; must not synchronize with the GPU."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return (1 + K,) in fp32: the loss summed over the targets, then K sums of `metric_names`.

        Only the first has a gradient.
        """

    def metric_means(self, means: Sequence[float]) -> dict[str, float]:
        """Return a dictionary of metrics, from the means of `metric_names`."""
        return dict(zip(self.metric_names, means, strict=True))

    def eval_means(self, means: Sequence[float]) -> dict[str, float]:
        """Return metrics of an evaluation during training, from the means over all its rows."""
        return self.metric_means(means)

    def spans(self, row: Any) -> list[tuple[str, str]]:
        """Return a row as the loss sees it, as labelled segments of text."""
        return [("", str(self.tokenizer.decode(row.input_ids)))]

    def metrics(
        self, model: nn.Module, rows: Rows, *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss and the task's other metrics; the model is in eval mode."""
        return mean_loss(self, model, rows, on_event)[0]


@torch.no_grad()
def mean_loss(
    task: Task, model: nn.Module, rows: Sequence[object], on_event: Listener = ignore
) -> tuple[dict[str, float], int]:
    """Return the means of a task's loss and metrics over rows, and the target count."""
    total, num_targets = torch.zeros(1 + len(task.metric_names), dtype=torch.float64), 0
    compute = partial(task.loss, model)
    for _, batch, sums in over_batches(task, model, rows, "Measuring", on_event, compute):
        total += sums.cpu()
        num_targets += task.num_targets(batch)
    loss, *means = (total / num_targets).tolist()
    return {"loss": loss, **task.metric_means(means)}, num_targets


def over_batches(
    task: Task,
    model: nn.Module,
    rows: Sequence[object],
    text: str,
    on_event: Listener,
    compute: Callable[[Mapping[str, Tensor]], Tensor],
) -> Iterator[tuple[Sequence[Any], Mapping[str, Tensor], Tensor]]:
    """Yield rows, shortest first, their batch on the model's device, and its computed value.

    Args:
        text: Shown with the progress.
        compute: Computes the logits, or the loss, of a batch.

    Raises:
        RunError: A single row does not fit into memory.
    """
    device = next(model.parameters()).device
    order = tokens_of_each(rows).sort(stable=True).indices  # rows of one length: little padding

    def split(rows: Rows, size: int) -> list[Part]:
        return split_micro_batches(rows, len, size, bucket_key=task.bucket_key)

    def computed(part: Part) -> tuple[Mapping[str, Tensor], Tensor]:
        batch = {name: tensor.to(device) for name, tensor in task.collate(part).items()}
        return batch, compute(batch)

    done, fix = 0, "Lower data.max_length, or quantise the base (base.quantize: nf4)."
    by_length = View([rows], order)
    for part, result, _ in batches_that_fit(by_length, BATCH_SIZE, split, computed, fix=fix):
        on_event(Progress(text, done, len(order)))
        yield part, *result
        done += len(part)
