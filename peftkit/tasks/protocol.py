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
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from peftkit.base.purpose import Processor, Purpose
from peftkit.config.schema import Config
from peftkit.data.chat import choose_template
from peftkit.data.encode import STYLES, Style, agreed_style
from peftkit.data.load import DataConfig, Record
from peftkit.data.pack import LazyRows, padded, weighted
from peftkit.data.rows import RowEncoder, StoredRows, encoded
from peftkit.errors import DataError
from peftkit.events import Listener, Notice, Stage, Table, ignore
from peftkit.execution.plan import ExecutionPlan
from peftkit.tasks import training as loop
from peftkit.tasks.attention import training_attention
from peftkit.tasks.batches import mean_metrics
from peftkit.tasks.length import check_vocabulary
from peftkit.tasks.loss import unwrapped
from peftkit.tasks.rows import NO_TEMPLATE, check_dropped, named, off_prompt


class Task(loop.Task, ABC):
    """What is learnt, on one model: what the training loop asks, and what is asked besides.

    Args:
        processor: The base's tokenizer, image processor, or processor of both.
        style: How the adapter in hand was trained to be prompted; None: the rows decide.

    Attributes:
        tokenizer: The processor, or its tokenizer.
        template: The chat template's text that is used instead of the tokenizer's own, if any.
        reasoning: What becomes of the assistant's reasoning.
        row_encoder: Makes rows of records.
        max_length: Longest row in tokens.
    """

    predicts_tokens: ClassVar[bool] = False
    """Whether the loss is that of each token of a text, so that its exp is a perplexity."""
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
    def paths(self) -> Mapping[str, str]:
        return {}

    @property
    def style(self) -> Style | None:
        """How generation prompts what learnt it; None where nothing is generated from a prompt."""
        return self._style

    def load(self, where: str) -> LazyRows:
        """Read a file or data set (see `DataConfig.train`) as rows; emits the counts.

        The rows are not in memory: each is read from a file of the cache when it is asked for.

        Raises:
            DataError: Rows cannot be used; names them.
            RunError: The disk has no room for them.
        """
        return self.prepare_rows(self.encode(where))

    def split(self, where: str, share: float) -> tuple[LazyRows, LazyRows]:
        """Return a file's rows and a share of them that is held out, by a hash of each row."""
        left, held_out = self.encode(where).held_out(share)
        return self.prepare_rows(left), self.prepare_rows(held_out)

    def load_splits(self, data: DataConfig) -> tuple[LazyRows, Sequence[Any]]:
        """Return the training rows and the eval rows, as a recipe's data section says.

        Raises:
            DataError: Rows cannot be used; or the share that is held out is none or all of them.
        """
        sources, share = data.sources, data.eval
        if isinstance(share, str) or share is None:
            trained = [(self.load(source.path), source.weight) for source in sources]
            held = [self.load(share)] if share else []
        else:
            parts = [self.split(source.path, share) for source in sources]
            trained = [
                (rows, source.weight) for (rows, _), source in zip(parts, sources, strict=True)
            ]
            held = [out for _, out in parts]
            for what, count in (
                ("held out", sum(map(len, held))),
                ("left to learn from", sum(len(rows) for rows, _ in trained)),
            ):
                if not count:
                    raise DataError(
                        f"data.eval: {share} is no share of {data.train_name}.",
                        found=f"No row is {what}.",
                        fix="Take another share, or name a file.",
                    )
        return weighted(trained), weighted([(rows, 1.0) for rows in held]) if held else []

    def encode(self, where: str) -> StoredRows:
        """Return a file's rows as the encoder makes them, and tell what became of them."""
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
        self._tell_repeated(rows)
        return rows

    def _lines(self, rows: StoredRows) -> Iterator[tuple[str, str]]:
        """Yield what became of a file's rows: what, and how many."""
        if "format" in rows.agreed:
            yield "format", rows.agreed["format"]
        yield "rows read", f"{rows.num_read:,}"
        yield "rows kept", f"{len(rows):,}"
        if "cut" in rows.counts:
            yield f"cut at {self.max_length:,} tokens", f"{rows.counts['cut']:,}"
        if self.data.chat_template_kwargs and "style" in rows.agreed:
            pairs = self.data.chat_template_kwargs.items()
            yield "chat template", ", ".join(f"{name}: {value}" for name, value in pairs)
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
            yield "learnt tokens", f"{rows.counts['targets']:,}"
        if rows.unused:
            yield "fields not used", ", ".join(rows.unused)

    def counts(self, rows: StoredRows) -> Sequence[tuple[str, str]]:
        """Return what else is told of a file's rows, beside what is told of all tasks'."""
        return ()

    def check(self, rows: StoredRows) -> None:
        """Refuse a file that cannot be learnt from, as a whole, and note what all rows share.

        Raises:
            DataError: Too many rows were dropped, or they are not of one kind.
        """
        if "style" in rows.agreed:
            kind = next(one for one in STYLES if one == rows.agreed["style"])
            is_chat = kind == "chat"
            style = Style(kind, self.template, self.reasoning) if is_chat else Style(kind)
            if self._style is None and kind == "alpaca":
                self._on_event(Notice(NO_TEMPLATE))
            self._style = agreed_style(self._style, style, rows.where)
        check_dropped(rows, self.data, self.row_encoder.drops)
        if number := rows.counts["off_prompt"]:
            self._on_event(Notice(off_prompt(rows.where, number)))

    def prepare_rows(self, rows: LazyRows) -> LazyRows:
        """Return encoded rows as they are trained on: packed, for example."""
        return rows

    def _tell_repeated(self, rows: StoredRows) -> None:
        """Say which rows stand there more than once, or in a file that was read before."""
        if number := rows.num_duplicates:
            text = (
                f"{rows.where}: {number:,} of {len(rows):,} rows teach what one before them does."
            )
            self._on_event(Notice(text))
        for other in self._read:
            if number := rows.num_shared(other):
                same = "It is the same file." if other.where == rows.where else ""
                text = (
                    f"{number:,} of {len(rows):,} rows of {rows.where} stand in {other.where} too: "
                    f"what is measured on them says nothing of other rows. {same}"
                )
                self._on_event(Notice(text.rstrip()))
        self._read.append(rows)

    def num_positions(self, rows: Sequence[Any]) -> int:
        return len(rows) * padded(*rows)

    def training(
        self, model: nn.Module, plan: ExecutionPlan | None = None
    ) -> AbstractContextManager[object]:
        return training_attention(unwrapped(model), plan, documents=False)

    @abstractmethod
    def spans(self, row: Any) -> list[tuple[str, str]]:
        """Return a row as the loss sees it, in pieces: what each is, and its text."""

    def metrics(
        self, model: nn.Module, rows: Sequence[Any], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss and what else this task is measured by; the model is in eval mode."""
        return mean_metrics(self, model, rows, on_event)[0]

    def predict_rows(
        self, model: nn.Module, records: Sequence[Record], on_event: Listener = ignore
    ) -> list[dict[str, Any]]:
        """Return what is predicted of each row of a file, as fields to add to it.

        Raises:
            DataError: The task predicts nothing of rows, or rows lack what it reads.
        """
        raise _predicts_nothing(self)

    def predict_texts(
        self, model: nn.Module, texts: Sequence[str | tuple[str, str]]
    ) -> list[dict[str, float]]:
        """Return what is predicted of each text, or pair of texts, the likeliest first.

        Raises:
            DataError: The task predicts nothing of texts, or they are not what it reads.
        """
        raise _predicts_nothing(self)


def _predicts_nothing(task: Task) -> DataError:
    return DataError(
        f"{type(task).__name__} predicts nothing of a text.",
        fix="Adapters of sequence_classification, reward, embedding and reranker do.",
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
    takes_parts: ClassVar[bool] = False
    """Whether the tokens of a row may lie on several processes (train.context_parallel)."""
    data_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields of DataConfig, beside train and eval, that this task reads; others are refused."""
    measures_before: ClassVar[bool] = False
    """Whether what it is measured by is also told of the base, before the first step."""
    num_texts: ClassVar[int] = 1
    """Texts of one row that the model reads, each at most data.max_length long; at least."""

    task: ClassVar[Callable[..., Task]]
    """Makes the task, of what `on` is given."""

    type: str

    def resolve(self, data: DataConfig) -> TaskConfig:
        """Return the config with all that `purpose` needs; reads the training data for it.

        Raises:
            DataError: The data cannot be read, or does not say.
        """
        return self

    @property
    def texts_per_row(self) -> int:
        """Texts of one row that go through the model in a step, to plan its memory."""
        return self.num_texts

    @property
    def needs_reference(self) -> bool:
        """Whether it is learnt by comparing the model with what it was."""
        return False

    def saved(self) -> dict[str, Any]:
        """Return the config that the adapter's folder names: what it is used and measured as."""
        return self.model_dump(mode="json")

    @property
    def plain_purpose(self) -> Purpose:
        """What the base is loaded for, before the data say which labels its head has."""
        return Purpose(self.type, self.auto_class, self.processor)

    @property
    def purpose(self) -> Purpose:
        """What the base is loaded for. A task with a head of classes says it here, resolved."""
        return self.plain_purpose

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
        return self.task(model, processor, self, data, style=style, on_event=on_event)
