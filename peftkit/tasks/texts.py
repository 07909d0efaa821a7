"""Tasks on whole texts: classification, regression and scores by a head, and embeddings.

Shapes: B texts, T tokens of the longest, n targets of the batch, L labels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional

from peftkit.base.heads import ClassHead, ProblemType
from peftkit.data.pack import padded_rows, rounded_up
from peftkit.data.tokens import decoded, special_tokens_around
from peftkit.errors import BaseError, DataError
from peftkit.events import ClassReport, Listener, Progress, ignore
from peftkit.forward.loss import accepted, unwrapped
from peftkit.tasks.base import Task, over_batches
from peftkit.tasks.batches import BATCH_SIZE, batches_that_fit, equal_parts
from peftkit.tasks.classes.labels import RecordEncoder, check_names
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.metrics import class_report, mean_f1
from peftkit.tasks.row_loader import longest


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a text, or of a pair of texts.

    Args:
        input_ids: Token ids, truncated to the model's maximum.
        types: Token type ids: 0 for the first text of a pair, 1 for the second; empty if the
            tokenizer returns none.
        is_cut: Whether the text was truncated.
        offsets: Character (start, end) of each token, (0, 0) for special tokens; empty unless
            requested.
    """

    input_ids: tuple[int, ...]
    types: tuple[int, ...]
    is_cut: bool
    offsets: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TextsRow:
    """A row of texts, which the model encodes independently.

    Args:
        input_ids, types: Token ids and types of all texts, concatenated.
        lengths: Number of tokens of each text.
    """

    input_ids: tuple[int, ...]
    types: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def texts(self) -> list[Encoded]:
        """The tokens of each text."""
        stops = [*accumulate(self.lengths)]
        parts = [
            slice(stop - length, stop) for stop, length in zip(stops, self.lengths, strict=True)
        ]
        return [Encoded(self.input_ids[part], self.types[part], False) for part in parts]


def joined_texts(texts: Sequence[Encoded]) -> dict[str, tuple[int, ...]]:
    """Concatenate texts; return the fields of a `TextsRow` by name."""
    return {
        "input_ids": tuple(token for text in texts for token in text.input_ids),
        "types": tuple(kind for text in texts for kind in text.types),
        "lengths": tuple(len(text.input_ids) for text in texts),
    }


class SpecialTokens:
    """The special tokens that a tokenizer adds before and after every text.

    Attributes:
        lead, tail: Tokens before and after.

    Raises:
        BaseError: The tokenizer adds different tokens to different texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.lead, self.tail = special_tokens_around(tokenizer, "a")
        if special_tokens_around(tokenizer, "the 2 of us") != (self.lead, self.tail):
            raise BaseError(
                "Cannot determine the special tokens that the tokenizer adds to a text.",
                found="They differ between texts.",
                fix="Use a base whose tokenizer adds the same tokens to every text.",
            )

    def room(self, max_length: int) -> int:
        """Return the maximum number of tokens of a text in a row of `max_length` tokens.

        Raises:
            DataError: The special tokens fill the row.
        """
        room = max_length - len(self.lead) - len(self.tail)
        if room < 1:
            raise DataError(
                f"Cannot use data.max_length: {max_length}.",
                found=f"The tokenizer alone puts {max_length - room} tokens around a text.",
                fix="Set it to 128, for example.",
            )
        return room

    def put_around(self, ids: Sequence[int]) -> list[int]:
        """Return tokens between `lead` and `tail`."""
        return [*self.lead, *ids, *self.tail]


class Texts:
    """Tokenizer and collator of texts.

    Attributes:
        max_length: Maximum number of tokens of a text, including special tokens.
        pad_id: Token of the padding.

    Raises:
        BaseError: The model has no padding token.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, max_length: int | None) -> None:
        self.tokenizer = tokenizer
        self.max_length = longest(model, tokenizer, max_length)
        pad_id = unwrapped(model).config.get_text_config().pad_token_id
        if pad_id is None:
            raise BaseError(
                f"{type(unwrapped(model)).__name__} has no padding token.",
                found="Its config has no pad_token_id.",
                fix="Load it for this task: load_base(..., purpose=task.purpose).",
            )
        self.pad_id = int(pad_id)

    def encode(self, text: str, pair: str | None = None, *, offsets: bool = False) -> Encoded:
        """Tokenize a text or a pair of texts; the longer text of a pair is truncated first."""
        options: dict[str, object] = {"return_offsets_mapping": True} if offsets else {}
        fields = self.tokenizer(text, pair, verbose=False, **options)
        is_cut = len(fields["input_ids"]) > self.max_length
        if is_cut:
            options |= {"truncation": True, "max_length": self.max_length}
            fields = self.tokenizer(text, pair, **options)
        return Encoded(
            tuple(fields["input_ids"]) or (self.pad_id,),
            tuple(fields.get("token_type_ids", ())),
            is_cut,
            tuple(fields.get("offset_mapping", ())),
        )

    def collate(self, texts: Sequence[Encoded]) -> dict[str, Tensor]:
        """Return input_ids, attention_mask and, if there are any, token_type_ids (B, T).

        Padding is on the right: a decoder's head reads the last token that is not padding.

        Args:
            texts: `Encoded` texts.
        """
        ids, mask = padded_rows([text.input_ids for text in texts], self.pad_id)
        batch = {"input_ids": ids, "attention_mask": mask}
        if texts[0].types:
            batch["token_type_ids"], _ = padded_rows([text.types for text in texts], 0)
        return batch

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, including special tokens."""
        return decoded(self.tokenizer, ids, special=True)


class TextsEncoder(RecordEncoder):
    """Encodes records with texts.

    Args:
        config: The config of the task, which names the fields.
        labels: Label names, in the order of the head's outputs.
    """

    def __init__(self, texts: Texts, config: Any, labels: Sequence[str] = ()) -> None:
        self.texts, self.config, self.tokenizer = texts, config, texts.tokenizer
        self.numbers = {label: number for number, label in enumerate(labels)}
        self.settings = (texts.max_length, texts.pad_id, config.model_dump_json(), tuple(labels))


def head_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the logits of a model with a classification head, in fp32."""
    logits: Tensor = model(**accepted(model, {**batch, "use_cache": False})).logits
    return logits.float()


class TextTask(Task):
    """A task whose rows are `TextsRow`s.

    Attributes:
        texts: Tokenizes and collates them.
    """

    def build(self, model: nn.Module) -> None:
        super().build(model)
        self.texts = Texts(model, self.tokenizer, self.rows.data.max_length)
        self.rows.max_length = self.texts.max_length

    def num_positions(self, rows: Sequence[TextsRow]) -> int:
        lengths = [length for row in rows for length in row.lengths]
        return len(lengths) * rounded_up(max(lengths))

    def tokens(self, rows: Sequence[TextsRow]) -> dict[str, Tensor]:
        """Return the tokens of all texts of the rows as a batch; see `Texts.collate`."""
        return self.texts.collate([text for row in rows for text in row.texts])

    def names(self, row: Any) -> Sequence[str]:
        """Return a name for each text of a row."""
        raise NotImplementedError

    def spans(self, row: Any) -> list[tuple[str, str]]:
        pairs = zip(self.names(row), row.texts, strict=True)
        return [(name, self.texts.decode(text.input_ids)) for name, text in pairs]

    @torch.no_grad()
    def for_each(
        self,
        model: nn.Module,
        encoded: Sequence[Encoded],
        compute: Callable[[nn.Module, Mapping[str, Tensor]], Tensor],
        progress: str,
        on_event: Listener,
    ) -> list[Any]:
        """Return the values that `compute` returns for each text, in the order of `encoded`.

        Shorter texts are computed first.

        Args:
            compute: Returns one or more numbers for each text of a batch.
        """
        device = next(model.parameters()).device
        order = sorted(range(len(encoded)), key=lambda n: len(encoded[n].input_ids))

        def values(part: Sequence[int]) -> list[Any]:
            batch = self.texts.collate([encoded[n] for n in part])
            on_device = {name: tensor.to(device) for name, tensor in batch.items()}
            return list(compute(model, on_device).tolist())

        results: dict[int, Any] = {}
        for part, computed, _ in batches_that_fit(order, 2 * BATCH_SIZE, equal_parts, values):
            on_event(Progress(progress, len(results), len(order)))
            results.update(zip(part, computed, strict=True))
        return [results[n] for n in range(len(encoded))]


COUNTS = ("hits", "true", "predicted")


class Classifier(Task):
    """A task that predicts each target by a classification head.

    Its batches have the model's inputs and `targets`, whose first dimension is n.
    """

    progress: ClassVar[str] = "Classifying"
    """Shown with the progress of an evaluation."""
    labels: Sequence[str]

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        return batch["targets"].numel()

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits, targets = self.logits(model, batch), batch["targets"]
        loss = self.loss_of(logits, targets)[None]
        if torch.is_grad_enabled():  # the sums are metrics of evaluations
            return torch.cat([loss, loss.new_zeros(len(self.metric_names))])
        return torch.cat([loss, self.sums(logits, targets)])

    def set_labels(self, labels: Sequence[str]) -> None:
        """Set the labels, and the counts of each that an evaluation sums up."""
        self.labels = labels
        self.metric_names = tuple(f"{name}/{label}" for name in COUNTS for label in labels)

    def sums(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sums of `metric_names` (K,) in fp32, without synchronizing."""
        predicted, counts = logits.argmax(-1), logits.new_zeros(3, len(self.labels))
        ones = counts.new_ones(len(targets))
        counts[0].scatter_add_(0, targets, (predicted == targets).to(counts.dtype))
        counts[1].scatter_add_(0, targets, ones)
        counts[2].scatter_add_(0, predicted, ones)
        return counts.flatten()

    def metric_means(self, means: Sequence[float]) -> dict[str, float]:
        """Return no metrics: those of the few rows of a training step are noise."""
        return {}

    def eval_means(self, means: Sequence[float]) -> dict[str, float]:
        hits, true, predicted = torch.tensor(means, dtype=torch.float64).view(3, -1)
        return {"accuracy": float(hits.sum()), "f1_macro": mean_f1(hits, true, predicted)}

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of each target (n, L), in fp32."""
        return head_logits(model, batch)

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of logits, summed over the targets."""
        return functional.cross_entropy(logits, targets, reduction="sum")

    @torch.no_grad()
    def metrics(
        self, model: nn.Module, rows: Sequence[Any], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss, and metrics of all logits and targets together."""
        predicted, true, seen, loss = list[Tensor](), list[Tensor](), list[object](), 0.0
        compute = partial(self.logits, model)
        for part, batch, logits in over_batches(
            self, model, rows, self.progress, on_event, compute
        ):
            loss += float(self.loss_of(logits, batch["targets"]))
            predicted.append(logits.cpu())
            true.append(batch["targets"].cpu())
            seen += part
        targets = torch.cat(true)
        logits = torch.cat(predicted)
        measured = self.measured(logits, targets, seen)
        if (report := self.report(logits, targets)) is not None:
            on_event(report)
        return {"loss": loss / targets.numel(), **measured}

    def by_label(self, values: Tensor) -> list[dict[str, float]]:
        """Return the values (B, L) of each row by label, the highest first."""
        named = [zip(self.labels, row, strict=True) for row in values.tolist()]
        return [dict(sorted(row, key=lambda pair: -pair[1])) for row in named]

    def report(self, logits: Tensor, targets: Tensor) -> ClassReport | None:
        """Return the metrics of each label; None if rows have several labels or numbers."""
        return class_report(logits.argmax(-1), targets, self.labels)

    @abstractmethod
    def measured(self, logits: Tensor, targets: Tensor, rows: Sequence[Any]) -> dict[str, float]:
        """Return metrics of the logits (n, L) and targets of these rows."""


class ClassifierConfig(TaskConfig):
    """Base of the configs of classifiers."""

    data_fields: ClassVar[frozenset[str]] = frozenset({"max_length"})

    labels: tuple[str, ...] = ()
    """Names of all labels, in the order of the head's outputs; by default those in data.train."""
    fresh_head: bool = False
    """Initialize a new head even if the base has one."""

    @model_validator(mode="after")
    def _check_labels(self) -> ClassifierConfig:
        check_names(self.labels)
        return self

    @property
    def problem_type(self) -> ProblemType | None:
        """The problem type as in transformers; None: the problem type of the base."""
        return None

    @property
    def head(self) -> ClassHead:
        return ClassHead(self.labels, self.problem_type, self.fresh_head)
