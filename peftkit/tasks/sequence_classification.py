"""Sequence classification: a text, or a pair of texts, has one label, several, or a number.

Shapes: B rows, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional

from peftkit.base.purpose import ClassHead, ProblemType, Purpose, labels_of
from peftkit.data.load import DataConfig, Record, read_records
from peftkit.errors import BaseError, ConfigError, DataError
from peftkit.events import Listener, Progress, Stage, Table, ignore
from peftkit.files.strict_json import shown
from peftkit.tasks.labels import (
    Problem,
    check_names,
    field_of,
    label_name,
    list_of,
    number_of,
    problem_of,
    sorted_names,
    text_of,
    value_of,
)
from peftkit.tasks.loss import accepted, unwrapped
from peftkit.tasks.metrics import class_metrics, multi_label_metrics, number_metrics
from peftkit.tasks.protocol import BATCH_SIZE, Task, TaskConfig, over_batches
from peftkit.tasks.texts import Texts

PROBLEM_TYPES: dict[Problem, ProblemType] = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}
PROGRESS_EVERY = 500
NUMBER = "value"
"""Name of the one output of a regression."""


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """A text and what it is.

    Args:
        input_ids, types: See `Encoded`.
        target: Number of the label; for each label whether it has it, 1.0 or 0.0; or the number.
        source: "train.jsonl:7".
    """

    input_ids: tuple[int, ...]
    types: tuple[int, ...]
    target: int | float | tuple[float, ...]
    source: str


class SequenceClassification(Task):
    """Rows from texts and labels, batches from rows, a loss from batches.

    Args:
        model: With a head of classes: its config names the labels and the problem.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        config: SequenceClassificationConfig,
        data: DataConfig,
        *,
        on_event: Listener = ignore,
    ) -> None:
        self.config, self._on_event = config, on_event
        self.texts = Texts(model, tokenizer, data.max_length)
        settings = unwrapped(model).config
        ends = settings.eos_token_id if settings.is_encoder_decoder else None
        if ends is not None and self.texts.encode("a").input_ids[-1] != ends:
            raise BaseError(
                f"{type(unwrapped(model)).__name__} reads the label off the end token.",
                found="The tokenizer puts none at the end of a text.",
                fix="Give the base's own tokenizer, or another base.",
            )
        self.labels = labels_of(settings)
        self.problem = _problem(settings, len(self.labels))
        self._numbers = {label: number for number, label in enumerate(self.labels)}

    def load(self, where: str) -> list[LabelledRow]:
        """Read a file or data set; emits how many rows there are of each label.

        Raises:
            DataError: A row has no text, no label, or one that the head does not know.
        """
        self._on_event(Stage(f"Reading {where}"))
        records = read_records(where)
        rows, num_cut = [], 0
        for number, record in enumerate(records):
            if number % PROGRESS_EVERY == 0:
                self._on_event(Progress(f"Encoding {where}", number, len(records)))
            pair = self.config.pair
            second = None if pair is None else text_of(record, pair, "task.pair")
            text = self.texts.encode(text_of(record, self.config.text, "task.text"), second)
            num_cut += text.is_cut
            target = self._target(record)
            rows.append(LabelledRow(text.input_ids, text.types, target, record.source))
        lines = [("rows", f"{len(rows):,}"), *self._counts(rows)]
        lines.append((f"cut at {self.texts.max_length:,} tokens", f"{num_cut:,}"))
        lines.append(("tokens", f"{sum(len(row.input_ids) for row in rows):,}"))
        self._on_event(Table(f"Data: {where}", ("what", "how many"), tuple(lines)))
        return rows

    def collate(self, rows: Sequence[LabelledRow]) -> dict[str, Tensor]:
        """Return a batch of tokens, and targets: (B,), or (B, L) for several labels a row."""
        dtype = torch.long if self.problem == "single_label" else torch.float32
        targets = torch.tensor([row.target for row in rows], dtype=dtype)
        return {**self.texts.collate(rows), "targets": targets}

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of rows, or of pairs of row and label."""
        return batch["targets"].numel()

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return cross entropy, binary cross entropy, or squared error, summed, in fp32."""
        return self._loss(self._logits(model, batch), batch["targets"])

    def spans(self, row: LabelledRow) -> list[tuple[str, str]]:
        """Return the text, after the label or number that is learnt."""
        if isinstance(row.target, tuple):
            there = [name for name, on in zip(self.labels, row.target, strict=True) if on]
            label = ", ".join(there) or "none"
        else:
            regression = self.problem == "regression"
            label = f"{row.target:g}" if regression else self.labels[int(row.target)]
        return [(label, self.texts.pieces(row.input_ids))]

    @torch.no_grad()
    def metrics(
        self, model: nn.Module, rows: Sequence[LabelledRow], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss, and accuracy and F1, or squared error and correlation."""
        found, true, loss = [], [], 0.0
        logits_of = partial(self._logits, model)
        for batch, logits in over_batches(self, model, rows, "Classifying", on_event, logits_of):
            loss += float(self._loss(logits, batch["targets"]))
            found.append(logits.cpu())
            true.append(batch["targets"].cpu())
        logits, targets = torch.cat(found), torch.cat(true)
        loss /= targets.numel()
        if self.problem == "regression":
            return {"loss": loss, **number_metrics(logits[:, 0], targets)}
        if self.problem == "multi_label":
            return {"loss": loss, **multi_label_metrics(logits > 0, targets > 0)}
        return {"loss": loss, **class_metrics(logits.argmax(-1), targets)}

    @torch.no_grad()
    def predict(self, model: nn.Module, texts: Sequence[str | tuple[str, str]]) -> Tensor:
        """Return the probability of each label (B, L), or the number (B, 1).

        Args:
            texts: Each a text, or a pair of texts if the task is of pairs.

        Raises:
            DataError: One is empty, or is no pair, or one too many.
        """
        device = next(model.parameters()).device
        pairs = [(text, None) if isinstance(text, str) else text for text in texts]
        for pair in pairs:
            if (pair[1] is None) != (self.config.pair is None) or not all(
                part is None or part.strip() for part in pair
            ):
                raise DataError(
                    f"cannot classify {shown(pair[0])}.",
                    found="Part of it is empty, or it is not of the kind that the adapter learnt.",
                    fix="Give one text." if self.config.pair is None else "Give pairs of texts.",
                )
        rows = [self.texts.encode(*pair) for pair in pairs]
        batch = {name: t.to(device) for name, t in self.texts.collate(rows).items()}
        logits = self._logits(model, batch)
        if self.problem == "regression":
            return logits
        return logits.sigmoid() if self.problem == "multi_label" else logits.softmax(-1)

    def predict_texts(
        self, model: nn.Module, texts: Sequence[str | tuple[str, str]]
    ) -> list[dict[str, float]]:
        """Return the probability of each label, or the "value", of each text."""
        found: list[dict[str, float]] = []
        for start in range(0, len(texts), BATCH_SIZE):
            for row in self.predict(model, texts[start : start + BATCH_SIZE]).tolist():
                labelled = zip(self.labels, row, strict=True)
                found.append(dict(sorted(labelled, key=lambda pair: -pair[1])))
        return found

    def predict_rows(
        self,
        model: nn.Module,
        records: Sequence[Record],
        where: str,
        *,
        on_event: Listener = ignore,
    ) -> list[dict[str, Any]]:
        """Return the probabilities of each row's text, or its value, as `prediction`."""
        first, second = self.config.text, self.config.pair
        texts: list[str | tuple[str, str]] = []
        for record in records:
            text = text_of(record, first, "task.text")
            pair = None if second is None else text_of(record, second, "task.pair")
            texts.append(text if pair is None else (text, pair))
        return [{"prediction": found} for found in self.predict_texts(model, texts)]

    def _logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        inputs: dict[str, Any] = {n: t for n, t in batch.items() if n != "targets"}
        logits: Tensor = model(**accepted(model, {**inputs, "use_cache": False})).logits
        return logits.float()

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.problem == "regression":
            return functional.mse_loss(logits[:, 0], targets, reduction="sum")
        if self.problem == "multi_label":
            return functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        return functional.cross_entropy(logits, targets, reduction="sum")

    def _target(self, record: Record) -> int | float | tuple[float, ...]:
        name, source = self.config.label, record.source
        if self.problem == "regression":
            return value_of(field_of(record, name, "task.label"), source)
        if self.problem == "single_label":
            label = label_name(field_of(record, name, "task.label"), source)
            return number_of(label, self._numbers, source)
        there = {label_name(item, source) for item in list_of(record, name, "task.label")}
        found = {number_of(label, self._numbers, source) for label in there}
        return tuple(float(number in found) for number in range(len(self.labels)))

    def _counts(self, rows: Sequence[LabelledRow]) -> list[tuple[str, str]]:
        if self.problem == "regression":
            numbers = [float(row.target) for row in rows if isinstance(row.target, int | float)]
            return [("numbers", f"{min(numbers):g} to {max(numbers):g}")]
        batch = torch.tensor([row.target for row in rows])
        if batch.ndim == 1:
            batch = functional.one_hot(batch, len(self.labels))
        counts = [int(count) for count in batch.sum(0)]
        return [
            (
                "of each label",
                ", ".join(f"{n} {c:,}" for n, c in zip(self.labels, counts, strict=True)),
            )
        ]


class SequenceClassificationConfig(TaskConfig):
    """Sequence classification: sentiment, topic, intent, entailment, a score."""

    task_type: ClassVar[str] = "SEQ_CLS"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    task: ClassVar[Callable[..., Task]] = SequenceClassification
    command: ClassVar[str] = "peftkit predict {folder} --text TEXT"
    data_fields: ClassVar[frozenset[str]] = frozenset({"max_length"})

    type: Literal["sequence_classification"] = "sequence_classification"
    text: str = "text"
    """Field with the text."""
    pair: str | None = None
    """Field with a second text, for pairs; null: there is none."""
    label: str = "label"
    """Field with the label, the list of labels, or the number."""
    labels: tuple[str, ...] = ()
    """Names of all labels, in the order of the head's outputs; by default those in data.train."""
    problem: Literal["auto"] | Problem = "auto"
    """auto: lists are several labels, numbers with a point are regression, all else one label."""
    fresh_head: bool = False
    """Make a new head although the base has one."""

    @model_validator(mode="after")
    def _labels(self) -> SequenceClassificationConfig:
        check_names(self.labels)
        if self.labels and self.problem == "regression":
            raise ConfigError("a regression has no labels.", fix="Leave one of the two out.")
        return self

    def resolve(self, data: DataConfig) -> SequenceClassificationConfig:
        """Find the problem and the labels in the training data, as far as they are not given."""
        if self.problem == "regression" or (self.problem != "auto" and self.labels):
            return self
        records = read_records(data.sources)
        values = [(field_of(r, self.label, "task.label"), r.source) for r in records]
        problem = problem_of(values) if self.problem == "auto" else self.problem
        labels = self.labels
        if problem == "multi_label" and not labels:
            lists = (list_of(record, self.label, "task.label") for record in records)
            pairs = [(v, r.source) for r, vs in zip(records, lists, strict=True) for v in vs]
            labels = sorted_names((label_name(v, source) for v, source in pairs), data.train_name)
        elif problem == "single_label" and not labels:
            labels = sorted_names((label_name(v, source) for v, source in values), data.train_name)
        return self.model_copy(update={"problem": problem, "labels": labels})

    @property
    def purpose(self) -> Purpose:
        if self.problem == "auto":  # of a file of PEFT: as the base says
            head = ClassHead(self.labels, None, self.fresh_head)
        else:
            labels = (NUMBER,) if self.problem == "regression" else self.labels
            head = ClassHead(labels, PROBLEM_TYPES[self.problem], self.fresh_head)
        return Purpose(self.type, self.auto_class, self.processor, head)


def _problem(settings: Any, num_labels: int) -> Problem:
    """Return the problem that a model's config says; as transformers does where it does not."""
    told = (
        settings.problem_type or PROBLEM_TYPES["regression" if num_labels == 1 else "single_label"]
    )
    return next(problem for problem, kind in PROBLEM_TYPES.items() if kind == told)
