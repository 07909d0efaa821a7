"""A task, and the run that trains it.

A task turns files into rows, rows into batches, a batch into a loss, and rows into metrics. A new
one is a file in this folder: a `TaskConfig`, a `Task`, and a line in table.py. Model class, head,
processor, saving, opening, evaluating and checking follow from the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from peftkit.data.chat_template import choose_template, shortened
from peftkit.data.encode import agreed_style
from peftkit.data.generation import template_of
from peftkit.data.pack import padded
from peftkit.data.records import Record, sources_of
from peftkit.data.rows.cache import encoded
from peftkit.data.rows.columns import StoredRows
from peftkit.data.rows.encoder import RowEncoder
from peftkit.data.rows.lazy import LazyRows, View, tokens_of_each, weighted
from peftkit.data.style import STYLES, Style
from peftkit.errors import DataError
from peftkit.events import Event, Listener, Notice, Progress, Stage, Table, ignore
from peftkit.execution.parallel import Parallel, Part
from peftkit.execution.plan import ExecutionPlan
from peftkit.execution.signals import StopRequest
from peftkit.execution.state import State
from peftkit.execution.world import World
from peftkit.forward.attention import training_attention
from peftkit.forward.loss import unwrapped
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.batches import BATCH_SIZE, batches_that_fit, split_micro_batches
from peftkit.tasks.rows import (
    LEARNT_SYSTEM,
    NO_TEMPLATE,
    check_dropped,
    check_vocabulary,
    named,
    off_prompt,
)

if TYPE_CHECKING:
    from peftkit.model.side_adapter import SideAdapter


@dataclass(frozen=True, slots=True)
class Reference:
    """A state of the model that losses compare it with.

    Attributes:
        state: Makes a context in which the model is in this state.
        key: Identifies base, precision and values; "" if unknown: nothing is stored then.
    """

    state: Callable[[], AbstractContextManager[None]]
    key: str = ""


@dataclass(slots=True, kw_only=True)
class Run:
    """One training run, on one of its processes: what the loop works on, and what a task may use.

    Attributes:
        rows, eval_rows: Encoded rows, the same on every process.
        state: Of the run between two steps; `state.plan` is how rows go through the model now.
        parallel: How processes share rows and passes.
        stop: Whether a stop was requested.
        listeners: Receive the events of the run; empty but on the main process.
        indices: Which of `rows` this process has in the current step.
        figures: Metrics of the current step that a task adds to its loss, by name.
    """

    model: nn.Module
    task: Task
    rows: Sequence[Any]
    eval_rows: Sequence[Any]
    config: TrainConfig
    world: World
    parallel: Parallel
    state: State
    stop: StopRequest
    listeners: list[Listener] = field(default_factory=list)
    indices: Sequence[int] = ()
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def all_rows(self) -> Sequence[Any]:
        """Training rows, then eval rows."""
        return View([self.rows, self.eval_rows])

    def say(self, event: Event) -> None:
        """Send an event to all listeners."""
        for listener in self.listeners:
            listener(event)

    def micro_batches(self, rows: Sequence[Any]) -> list[Part]:
        """Return rows in parts that go through the model at once."""
        plan, task = self.state.plan, self.task
        return split_micro_batches(
            rows, task.num_positions, plan.rows, plan.tokens, task.bucket_key
        )


class Task(ABC):
    """What one model is trained on.

    To define: `build`, which makes `row_encoder`; `collate`, `num_targets` and `loss`; `spans`; and
    `metrics`, where there are more than the loss. All else has a default.

    A row may have a `source` ("train.jsonl:7"), its `input_ids` and, for an encoder-decoder, its
    `num_decoder_tokens`. The targets and the summed loss of several rows in one batch are the sums
    of those of the single rows, given what `before_step` computed for the whole step.

    Args:
        processor: The base's tokenizer, image processor, or processor of both.
        style: The prompt style that the adapter was trained with; None: that of the rows.

    Attributes:
        tokenizer: The processor, or its tokenizer.
        template: The chat template's text that is used instead of the tokenizer's own, if any.
        reasoning: How the assistant's reasoning is handled.
        row_encoder: Makes rows of records.
        max_length: Longest row in tokens.
    """

    predicts_tokens: ClassVar[bool] = False
    """Whether the loss is the mean over tokens of text, so that its exp is a perplexity."""
    metric_names: tuple[str, ...] = ()
    """Names of the sums that `loss` returns after the loss."""
    collates_ahead: ClassVar[bool] = True
    """Whether a thread may collate the rows of the next step. Not if `collate` draws random numbers
    or uses results of `before_step`."""
    why_nothing: ClassVar[str] = "no step had anything to learn from."
    """Why a run without a single target learnt nothing, in words."""
    row_encoder: RowEncoder
    max_length: int

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
        self.processor, self.config, self.data = processor, config, data
        self.tokenizer: Any = getattr(processor, "tokenizer", processor)
        check_vocabulary(model, self.tokenizer)
        self._style, self._on_event = style, on_event
        self._read: list[StoredRows] = []
        if style is not None and style.kind == "chat":
            self.template, self.reasoning = style.chat_template, style.reasoning
            if style.system and processor is self.tokenizer:
                self.template = template_of(processor, style)
                self._style = replace(style, chat_template=self.template)
                on_event(Notice(LEARNT_SYSTEM.format(shortened(style.system))))
        else:
            self.reasoning = data.reasoning
            self.template = choose_template(
                processor, data.chat_template, data.chat_template_kwargs
            )
        self.build(model)

    def build(self, model: nn.Module) -> None:
        """Make what the task needs of a model, its encoder of rows above all.

        Raises:
            PeftkitError: The model or the settings do not suit the task.
        """
        return None

    @property
    def style(self) -> Style | None:
        """The prompt style of generation; None where nothing is generated from a prompt."""
        return self._style

    @property
    def identity(self) -> Mapping[str, Any]:
        """What must be equal when a run is resumed, besides the task's config."""
        return {}

    @property
    def paths(self) -> Mapping[str, str]:
        """Chosen execution paths, for the run header."""
        return {}

    def compare_with(self, reference: Reference) -> None:
        """Set the model before training as the reference, for losses that need one."""
        return None

    @property
    def other_adapters(self) -> Sequence[str]:
        """Folders of adapters over the same base that the task computes with."""
        return ()

    def add_adapter(self, folder: str, adapter: SideAdapter) -> None:
        """Add one of `other_adapters`, read for the base of the run.

        Raises:
            AdapterError: It was trained for something else.
        """
        return None

    # Rows.

    def load(self, where: str) -> LazyRows:
        """Read a file or data set (see `DataConfig.train`) as rows; emits the counts.

        The rows are not in memory: each is read from a file of the cache on access.

        Raises:
            DataError: Rows cannot be used; names them.
            RunError: The disk has no room for them.
        """
        return self.prepare_rows(self.encode(where))

    def split(self, where: str, share: float) -> tuple[LazyRows, LazyRows]:
        """Return training rows and held-out rows of a file, split by a hash of each row."""
        left, held_out = self.encode(where).held_out(share)
        return self.prepare_rows(left), self.prepare_rows(held_out)

    def load_splits(self, data: DataConfig) -> tuple[LazyRows, Sequence[Any]]:
        """Return the training rows and the eval rows, as a recipe's data section says.

        Raises:
            DataError: Rows cannot be used; or no row, or every row, is held out.
        """
        sources, share = sources_of(data), data.eval
        if isinstance(share, str) or share is None:
            trained = [(self.load(source.path), source.weight) for source in sources]
            style = self._style
            held = [self.load(share)] if share else []
            self._style = style  # its system prompt is that of the rows that are learnt
        else:
            parts = [self.split(source.path, share) for source in sources]
            trained = [
                (rows, source.weight) for (rows, _), source in zip(parts, sources, strict=True)
            ]
            held = [out for _, out in parts]
            for what, count in (
                ("held out", sum(map(len, held))),
                ("left to train on", sum(len(rows) for rows, _ in trained)),
            ):
                if not count:
                    raise DataError(
                        f"data.eval: {share} is no share of {data.train_name}.",
                        found=f"No row is {what}.",
                        fix="Take another share, or name a file.",
                    )
        return weighted(trained), weighted([(rows, 1.0) for rows in held]) if held else []

    def encode(self, where: str) -> StoredRows:
        """Return the encoded rows of a file; emits a table of counts."""
        self._on_event(Stage(f"Reading {where}"))
        rows = encoded(where, self.row_encoder, on_event=self._on_event)
        lines = [*self._lines(rows)]
        counts = {
            "num_read": rows.num_read,
            "num_cut": sum(n for name, n in rows.counts.items() if name.startswith("cut")),
            "num_dropped": rows.num_dropped,
        }
        summary = (
            f"{where}: {counts['num_read']:,} rows read, {counts['num_cut']:,} cut, "
            f"{counts['num_dropped']:,} dropped"
        )
        columns = ("what", "how many")
        table = Table(f"Data: {where}", columns, tuple(lines), summary, where, counts)
        self._on_event(table)
        self.check(rows)
        self._report_duplicates(rows)
        return rows

    def _lines(self, rows: StoredRows) -> Iterator[tuple[str, str]]:
        """Yield the lines of the table of counts."""
        if "format" in rows.agreed:
            yield "format", rows.agreed["format"]
        yield "rows read", f"{rows.num_read:,}"
        yield "rows kept", f"{len(rows):,}"
        if "cut" in rows.counts:
            yield f"cut at {self.max_length:,} tokens", f"{rows.counts['cut']:,}"
        if self.data.chat_template_kwargs and "style" in rows.agreed:
            pairs = self.data.chat_template_kwargs.items()
            yield "chat template", ", ".join(f"{name}: {value}" for name, value in pairs)
        if "system" in rows.shared:
            yield "system prompt of all rows", shortened(rows.shared["system"])
        if rows.counts["thoughts"]:
            yield f"turns with reasoning ({self.reasoning})", f"{rows.counts['thoughts']:,}"
        if rows.counts["unwritten"]:
            yield "reasoning that the template leaves out", f"{rows.counts['unwritten']:,}"
        yield from self.counts(rows)
        for number, reason in enumerate(self.row_encoder.drops):
            yield f"dropped: {reason}", named(rows.dropped(number))
        if tokens := int(rows.num_tokens.sum()):
            yield "tokens", f"{tokens:,}"
            sizes = rows.num_tokens.sort().values[[len(rows) // 2, len(rows) * 19 // 20, -1]]
            yield "tokens of a row: median, 95 %, longest", ", ".join(map("{:,}".format, sizes))
        if "targets" in rows.counts:
            yield "target tokens", f"{rows.counts['targets']:,}"
        if rows.unused:
            yield "fields not used", ", ".join(rows.unused)

    def counts(self, rows: StoredRows) -> Sequence[tuple[str, str]]:
        """Return further lines for the table of counts."""
        return ()

    def check(self, rows: StoredRows) -> None:
        """Refuse a file that cannot be trained on, and take over its rows' style.

        Raises:
            DataError: Too many rows were dropped, or their styles differ.
        """
        if "style" in rows.agreed:
            kind = next(one for one in STYLES if one == rows.agreed["style"])
            is_chat = kind == "chat"
            system = rows.shared.get("system")
            style = Style(kind, self.template, self.reasoning, system) if is_chat else Style(kind)
            if self._style is None and kind == "alpaca":
                self._on_event(Notice(NO_TEMPLATE))
            of_adapter = not self._read
            self._style = agreed_style(self._style, style, rows.where, of_adapter=of_adapter)
        check_dropped(rows, self.data, self.row_encoder.drops)
        if number := rows.counts["off_prompt"]:
            self._on_event(Notice(off_prompt(rows.where, number)))

    def prepare_rows(self, rows: LazyRows) -> LazyRows:
        """Return encoded rows as the model is trained on them: packed, for example."""
        return rows

    def _report_duplicates(self, rows: StoredRows) -> None:
        """Report rows that a file repeats, or shares with a file that was read before."""
        if number := rows.num_duplicates:
            text = f"{rows.where}: {number:,} of {len(rows):,} rows repeat an earlier one."
            self._on_event(Notice(text))
        for other in self._read:
            if number := rows.num_shared(other):
                same = "It is the same file." if other.where == rows.where else ""
                text = (
                    f"{number:,} of {len(rows):,} rows of {rows.where} are in {other.where} too: "
                    f"metrics on them say nothing about unseen rows. {same}"
                )
                self._on_event(Notice(text.rstrip()))
        self._read.append(rows)

    # Training.

    def training(
        self, model: nn.Module, plan: ExecutionPlan | None = None
    ) -> AbstractContextManager[object]:
        """Return a context for training the model, with the attention of a plan."""
        return training_attention(unwrapped(model), plan, documents=False)

    def setup(self, run: Run) -> None:
        """Run once, before the first step or after a resume."""
        return None

    def before_step(self, rows: Sequence[Any], run: Run) -> Sequence[Sequence[Any]]:
        """Return the rows of each optimizer step to take with this process's share of a step.

        By default one step, with the same rows. A task may compute what the losses of rows share,
        or have the model answer prompts; with nothing to train on it returns no steps, the same on
        all processes. Metrics go into `run.figures`. Evaluations call it with all eval rows.
        """
        return [rows]

    def stop_reason(self, figures: Mapping[str, float]) -> str:
        """Return why the run ends after a step with these figures; "": it goes on."""
        return ""

    def evaluate(self, rows: Sequence[Any], run: Run) -> dict[str, float] | None:
        """Return the metrics of an evaluation, "loss" among them; None: the mean of `loss`.

        Args:
            rows: This process's share of the eval rows; the metrics are those of all.
        """
        return None

    @abstractmethod
    def collate(self, rows: Sequence[Any]) -> Mapping[str, Tensor]:
        """Return rows as a batch, on the CPU."""

    def num_positions(self, rows: Sequence[Any]) -> int:
        """Return how many tokens the model reads for these rows in one batch, with padding."""
        return len(rows) * padded(*rows)

    def bucket_key(self, row: Any) -> Any:
        """Return a key that all rows of a batch share; None: any rows go together."""
        return None

    @abstractmethod
    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number that the summed loss is divided by; must not wait for the GPU."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return (1 + K,) in fp32: the loss summed over the targets, then K sums of `metric_names`.

        Only the first has a gradient.
        """

    def metric_means(self, means: Sequence[float]) -> dict[str, float]:
        """Return metrics by name, from the means of `metric_names`."""
        return dict(zip(self.metric_names, means, strict=True))

    @abstractmethod
    def spans(self, row: Any) -> list[tuple[str, str]]:
        """Return a row as the loss sees it, as labelled segments of text."""

    def metrics(
        self, model: nn.Module, rows: Sequence[Any], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss and the task's other metrics; the model is in eval mode."""
        return self.mean_loss(model, rows, on_event)[0]

    @torch.no_grad()
    def mean_loss(
        self, model: nn.Module, rows: Sequence[Any], on_event: Listener = ignore
    ) -> tuple[dict[str, float], int]:
        """Return the means of `loss` and its metrics over rows, by name, and their targets."""
        total, num_targets = torch.zeros(1 + len(self.metric_names), dtype=torch.float64), 0
        compute = partial(self.loss, model)
        for _, batch, sums in self.over_batches(model, rows, "Measuring", on_event, compute):
            total += sums.cpu()
            num_targets += self.num_targets(batch)
        loss, *means = (total / num_targets).tolist()
        return {"loss": loss, **self.metric_means(means)}, num_targets

    def over_batches(
        self,
        model: nn.Module,
        rows: Sequence[Any],
        text: str,
        on_event: Listener,
        compute: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> Iterator[tuple[Sequence[Any], Mapping[str, Tensor], Tensor]]:
        """Yield rows, shortest first, their batch on the model's device, and its computed value.

        Args:
            text: Shown with the progress.
            compute: Makes the logits, or the loss, of a batch.

        Raises:
            RunError: Not even one row fits into memory.
        """
        device = next(model.parameters()).device
        order = tokens_of_each(rows).sort(stable=True).indices  # little padding

        def split(rows: Sequence[Any], size: int) -> list[Part]:
            return split_micro_batches(rows, len, size, bucket_key=self.bucket_key)

        def computed(part: Part) -> tuple[Mapping[str, Tensor], Tensor]:
            batch = {name: tensor.to(device) for name, tensor in self.collate(part).items()}
            return batch, compute(batch)

        done, fix = 0, "Cut the rows (data.max_length), or load the base quantised (nf4)."
        by_length = View([rows], order)
        for part, result, _ in batches_that_fit(by_length, BATCH_SIZE, split, computed, fix=fix):
            on_event(Progress(text, done, len(order)))
            yield part, *result
            done += len(part)

    def predict_rows(
        self, model: nn.Module, records: Sequence[Record], on_event: Listener = ignore
    ) -> list[dict[str, Any]]:
        """Return the prediction for each row of a file, as fields to add to it.

        Raises:
            DataError: The task makes no predictions, or rows lack its fields.
        """
        raise _predicts_nothing(self)

    def predict_texts(
        self, model: nn.Module, texts: Sequence[str | tuple[str, str]]
    ) -> list[dict[str, float]]:
        """Return the prediction for each text, or pair of texts, most likely label first.

        Raises:
            DataError: The task makes no predictions, or does not read such texts.
        """
        raise _predicts_nothing(self)


def _predicts_nothing(task: Task) -> DataError:
    return DataError(
        f"{type(task).__name__} makes no predictions.",
        fix="Adapters of sequence_classification, reward, embedding and reranker do.",
    )
