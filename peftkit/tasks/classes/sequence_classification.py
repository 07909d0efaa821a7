"""Sequence classification: one label, several labels or a number for a text or a pair of texts.

Shapes: B rows, L labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from peftkit.base.heads import ClassHead, ProblemType, labels_of
from peftkit.data.records import Record
from peftkit.data.rows.columns import StoredRows
from peftkit.errors import BaseError, ConfigError, DataError
from peftkit.events import ClassReport, Listener, ignore
from peftkit.files.strict_json import shown
from peftkit.forward.loss import unwrapped
from peftkit.settings import DataConfig
from peftkit.tasks.base import Task
from peftkit.tasks.classes.labels import (
    Problem,
    field_of,
    label_name,
    label_names,
    list_of,
    listed,
    names_in,
    number_of,
    problem_of,
    text_of,
    training_records,
    value_of,
    values_in,
)
from peftkit.tasks.config import Predicts
from peftkit.tasks.metrics import class_metrics, multi_label_metrics, number_metrics
from peftkit.tasks.texts import (
    Classifier,
    ClassifierConfig,
    Texts,
    TextsEncoder,
    TextsRow,
    TextTask,
    joined_texts,
)

PROBLEM_TYPES: dict[Problem, ProblemType] = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}
NUMBER = "value"
"""Name of the output of a regression."""


@dataclass(frozen=True, slots=True)
class LabelledRow(TextsRow):
    """A text, or a pair of texts, and its label.

    Args:
        target: (index of the label,); for several labels, 1.0 or 0.0 for each; or (the number,).
        source: "train.jsonl:7".
    """

    target: tuple[float, ...]
    source: str


class LabelledEncoder(TextsEncoder):
    """Encoder of records with a text, or a pair of texts, and a label."""

    kind: ClassVar[type[LabelledRow]] = LabelledRow
    what = "a text and its label"

    def __init__(self, texts: Texts, config: Any, labels: Sequence[str], problem: Problem) -> None:
        super().__init__(texts, config, labels)
        self._problem = problem
        self.settings = (*self.settings, problem)

    def parse(self, record: Record, where: str) -> tuple[LabelledRow, Sequence[str]]:
        config, target = self.config, self._target(record.fields)
        text = self.texts.encode(*self.texts_of(record.fields))
        self.counts["cut"] += text.is_cut
        row = LabelledRow(**joined_texts([text]), target=target, source=record.source)
        return row, (config.text, config.pair or "", config.label)

    def texts_of(self, fields: Mapping[str, object]) -> tuple[str, str | None]:
        """Return the text, and the second text of a pair, of a record."""
        pair = self.config.pair
        second = None if pair is None else text_of(fields, pair, "task.pair")
        return text_of(fields, self.config.text, "task.text"), second

    def _target(self, fields: Mapping[str, object]) -> tuple[float, ...]:
        name = self.config.label
        value = field_of(fields, name, "task.label")
        if self._problem == "regression":
            return (value_of(value),)
        if self._problem == "single_label":
            return (number_of(label_name(value), self.numbers),)
        labels = label_names(list_of(fields, name, "task.label"))
        numbers = {number_of(label, self.numbers) for label in labels}
        return tuple(float(number in numbers) for number in range(len(self.numbers)))

    def summary(self, rows: StoredRows) -> list[tuple[str, str]]:
        values, labels = rows.values("target"), self.numbers
        if self._problem == "regression":
            return [("numbers", f"{values.min():g} to {values.max():g}")]
        if self._problem == "multi_label":
            counts = values.view(-1, len(labels)).sum(0).long()
        else:
            counts = values.long().bincount(minlength=len(labels))
        pairs = zip(labels, counts.tolist(), strict=True)
        return [("rows per label", ", ".join(f"{name} {count:,}" for name, count in pairs))]


class SequenceClassification(Classifier, TextTask):
    """Classification of texts, or regression on them; the model's config has the labels."""

    def build(self, model: nn.Module) -> None:
        super().build(model)
        settings = unwrapped(model).config
        end = settings.eos_token_id if settings.is_encoder_decoder else None
        if end is not None and self.texts.encode("a").input_ids[-1] != end:
            raise BaseError(
                f"{type(unwrapped(model)).__name__} classifies by the end token.",
                found="The tokenizer does not append it to a text.",
                fix="Give the base's own tokenizer, or another base.",
            )
        self.set_labels(labels_of(settings))
        self.problem = _problem(settings, len(self.labels))
        if self.problem == "regression":
            self.metric_names = ()
        elif self.problem == "multi_label":
            self.metric_names += ("rows with all labels right",)
        weights = self.config.class_weights
        self.weights = torch.tensor([weights[name] for name in self.labels]) if weights else None
        self.encoder = LabelledEncoder(self.texts, self.config, self.labels, self.problem)
        self.rows.encoder = self.encoder

    def collate(self, rows: Sequence[LabelledRow]) -> dict[str, Tensor]:
        """Return a batch of tokens, and targets: (B,), or (B, L) for several labels a row."""
        dtype = torch.long if self.problem == "single_label" else torch.float32
        targets = torch.tensor([row.target for row in rows], dtype=dtype)
        if self.problem != "multi_label":
            targets = targets[:, 0]
        return {**self.tokens(rows), "targets": targets}

    def names(self, row: LabelledRow) -> Sequence[str]:
        if self.problem == "multi_label":
            names = [name for name, on in zip(self.labels, row.target, strict=True) if on]
            label = ", ".join(names) or "none"
        else:
            (target,) = row.target
            label = f"{target:g}" if self.problem == "regression" else self.labels[int(target)]
        return [label]

    def measured(
        self, logits: Tensor, targets: Tensor, rows: Sequence[LabelledRow]
    ) -> dict[str, float]:
        if self.problem == "regression":
            return number_metrics(logits[:, 0], targets)
        if self.problem == "multi_label":
            return multi_label_metrics(logits > 0, targets > 0)
        return class_metrics(logits.argmax(-1), targets)

    def sums(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.problem == "regression":
            return logits.new_zeros(0)
        if self.problem == "single_label":
            return super().sums(logits, targets)
        predicted, true = logits > 0, targets > 0
        counts = [(predicted & true).sum(0), true.sum(0), predicted.sum(0)]
        return torch.cat([*counts, (predicted == true).all(1).sum()[None]]).to(logits.dtype)

    def eval_means(self, means: Sequence[float]) -> dict[str, float]:
        if self.problem == "regression":
            return {}
        if self.problem == "single_label":
            return super().eval_means(means)
        *counts, right = means
        hits, true, predicted = torch.tensor(counts, dtype=torch.float64).view(3, -1)
        return {
            "accuracy": right * len(self.labels),  # the means are over all labels of all rows
            "f1_macro": float((2 * hits / (true + predicted)).nan_to_num(0.0).mean()),
        }

    def report(self, logits: Tensor, targets: Tensor) -> ClassReport | None:
        return super().report(logits, targets) if self.problem == "single_label" else None

    @torch.no_grad()
    def predict(
        self, model: nn.Module, texts: Sequence[str | tuple[str, str]], on_event: Listener = ignore
    ) -> Tensor:
        """Return the probability of each label (B, L), or the number (B, 1).

        Args:
            texts: Texts, or pairs of texts, as in training.

        Raises:
            DataError: A text is empty, or single texts and pairs are mixed up.
        """
        pairs = [(text, None) if isinstance(text, str) else text for text in texts]
        for pair in pairs:
            if (pair[1] is None) != (self.config.pair is None) or not all(
                part is None or part.strip() for part in pair
            ):
                raise DataError(
                    f"cannot classify {shown(pair[0])}.",
                    found="It is empty, or it differs from training in being a text or a pair.",
                    fix="Give one text." if self.config.pair is None else "Give pairs of texts.",
                )
        rows = [self.texts.encode(*pair) for pair in pairs]
        return torch.tensor(self.for_each(model, rows, self._predicted, self.progress, on_event))

    def _predicted(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.logits(model, batch)
        if self.problem == "regression":
            return logits
        return logits.sigmoid() if self.problem == "multi_label" else logits.softmax(-1)

    def predict_texts(
        self, model: nn.Module, texts: Sequence[str | tuple[str, str]]
    ) -> list[dict[str, float]]:
        """Return the probability of each label, or the "value", of each text."""
        return self.by_label(self.predict(model, texts))

    def predict_rows(
        self, model: nn.Module, records: Sequence[Record], on_event: Listener = ignore
    ) -> list[dict[str, object]]:
        """Return each row's `predicted_label` and `prediction`: the probabilities, or the value."""
        pairs = (texts for texts, _ in values_in(records, self.encoder.texts_of))
        texts = [text if pair is None else (text, pair) for text, pair in pairs]
        predictions = self.by_label(self.predict(model, texts, on_event))
        if self.problem == "regression":
            return [{"prediction": prediction} for prediction in predictions]
        return [{"predicted_label": self._label(p), "prediction": p} for p in predictions]

    def _label(self, prediction: Mapping[str, float]) -> str | list[str]:
        """Return the likeliest label; for several labels those of probability above 0.5."""
        if self.problem == "single_label":
            return next(iter(prediction))
        return [label for label, probability in prediction.items() if probability > 0.5]

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.problem == "regression":
            return functional.mse_loss(logits[:, 0], targets, reduction="sum")
        if self.problem == "multi_label":
            return functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        if self.weights is None:
            return super().loss_of(logits, targets)
        self.weights = self.weights.to(logits.device)
        return functional.cross_entropy(logits, targets, self.weights, reduction="sum")


class SequenceClassificationConfig(ClassifierConfig):
    """Sequence classification: sentiment, topic, intent, entailment, a score."""

    task_type: ClassVar[str] = "SEQ_CLS"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    task: ClassVar[Callable[..., Task]] = SequenceClassification
    predicts: ClassVar[frozenset[Predicts]] = frozenset({"texts", "rows"})
    command: ClassVar[str] = "peftkit predict {folder} --text TEXT"

    type: Literal["sequence_classification"] = "sequence_classification"
    text: str = "text"
    """Field with the text."""
    pair: str | None = None
    """Field with a second text, for pairs; null: single texts."""
    label: str = "label"
    """Field with the label, the list of labels, or the number."""
    problem: Literal["auto"] | Problem = "auto"
    """auto: lists are several labels, fractions are regression, all else is a single label."""
    class_weights: Literal["balanced"] | dict[str, Annotated[float, Field(gt=0)]] | None = None
    """Weight of each label in the training and the eval loss, {label: weight}, for a single label;
    balanced: rows / (labels * rows of the label), from data.train; null: 1 for all."""

    @model_validator(mode="after")
    def _labels(self) -> SequenceClassificationConfig:
        if self.labels and self.problem == "regression":
            raise ConfigError(
                "a regression has no labels.", fix="Remove task.labels or task.problem."
            )
        self._check_weights()
        return self

    def resolve(self, data: DataConfig) -> SequenceClassificationConfig:
        """Infer the problem and the labels from the training data if they are not set."""
        is_balanced = self.class_weights == "balanced"
        if self.problem == "regression" or (
            self.problem != "auto" and self.labels and not is_balanced
        ):
            return self
        read = partial(field_of, name=self.label, setting="task.label")
        values, labels = values_in(training_records(data), read), self.labels
        problem = problem_of(values) if self.problem == "auto" else self.problem
        if problem != "regression" and not labels:
            labels = names_in(data, partial(self._names, problem == "multi_label"))
        weights = self.class_weights
        if is_balanced and problem == "single_label":
            counts = Counter(label_name(v) for v, _ in values_in(training_records(data), read))
            rows = counts.total()
            weights = {name: rows / (len(labels) * max(counts[name], 1)) for name in labels}
        update = {"problem": problem, "labels": labels, "class_weights": weights}
        resolved = self.model_copy(update=update)
        resolved._check_weights()
        return resolved

    def _check_weights(self) -> None:
        weights, names = self.class_weights, set(self.labels)
        if weights and self.problem in ("multi_label", "regression"):
            found = f"The problem of this recipe is {self.problem}."
            raise ConfigError("task.class_weights needs rows with one label each", found=found)
        different = set(weights) ^ names if isinstance(weights, dict) and names else None
        if different:
            raise ConfigError(
                "task.class_weights does not match the labels",
                found=f"Only one of the two has: {listed(sorted(different))}.",
                fix=f"Give each of these labels a weight: {listed(self.labels)}.",
            )

    def _names(self, several: bool, fields: Mapping[str, object]) -> list[str]:
        read = list_of if several else field_of
        value = read(fields, self.label, "task.label")
        return label_names(value if several else [value])

    @property
    def problem_type(self) -> ProblemType | None:
        return None if self.problem == "auto" else PROBLEM_TYPES[self.problem]

    @property
    def head(self) -> ClassHead:
        labels = (NUMBER,) if self.problem == "regression" else self.labels
        return ClassHead(labels, self.problem_type, self.fresh_head)


def _problem(settings: Any, num_labels: int) -> Problem:
    """Return the problem of a model's config; by default, the same as transformers."""
    problem_type = (
        settings.problem_type or PROBLEM_TYPES["regression" if num_labels == 1 else "single_label"]
    )
    return next(problem for problem, kind in PROBLEM_TYPES.items() if kind == problem_type)
