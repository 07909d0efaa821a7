"""Token classification: a tag for each word of a text, as in named entity recognition.

Only the first token of a word is classified (Devlin et al., 2018, section 5.3).

Shapes: B rows, T tokens, n tagged words of the batch, L tags.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from peftkit.base.heads import labels_of
from peftkit.data.messages import WrongField, texts_of
from peftkit.data.records import Record
from peftkit.data.rows.columns import StoredRows
from peftkit.errors import BaseError, DataError
from peftkit.forward.loss import unwrapped
from peftkit.settings import DataConfig
from peftkit.tasks.base import Task
from peftkit.tasks.classes.labels import label_names, list_of, names_in, number_of
from peftkit.tasks.metrics import are_spans, entity_metrics, tag_metrics
from peftkit.tasks.texts import (
    Classifier,
    ClassifierConfig,
    TextsEncoder,
    TextsRow,
    TextTask,
    joined_texts,
)


@dataclass(frozen=True, slots=True)
class TaggedRow(TextsRow):
    """A text and the tags of its words.

    Args:
        places: Positions of the first token of each tagged word.
        tags: Indices of their tags.
        source: "train.jsonl:7".
    """

    places: tuple[int, ...]
    tags: tuple[int, ...]
    source: str


class TaggedEncoder(TextsEncoder):
    """Encoder of records with words and their tags."""

    kind: ClassVar[type[TaggedRow]] = TaggedRow
    what = "words and their tags"

    def parse(self, record: Record, where: str) -> tuple[TaggedRow, Sequence[str]]:
        """Tokenize the words as one text; a token belongs to the word of its last character.

        The tokens thus equal the tokens of the plain text for any treatment of spaces.
        """
        names, fields = (self.config.words, self.config.tags), record.fields
        list_of(fields, names[0], "task.words")
        words = texts_of(fields, names[0])
        tags = label_names(list_of(fields, names[1], "task.tags"))
        if len(words) != len(tags):
            raise WrongField(names[1], f"{len(words)} words and {len(tags)} tags")
        numbers = [number_of(tag, self.numbers) for tag in tags]
        starts = [0, *accumulate(len(word) + 1 for word in words[:-1])]
        text = self.texts.encode(" ".join(words), offsets=True)
        places: dict[int, int] = {}  # word -> its first token
        for place, (start, end) in enumerate(text.offsets):
            if end > start:  # special tokens have no characters
                places.setdefault(bisect_right(starts, end - 1) - 1, place)
        self.counts.update(words=len(words), tagged=len(places), cut=text.is_cut)
        fields = {"places": tuple(places.values()), "tags": tuple(numbers[word] for word in places)}
        return TaggedRow(**joined_texts([text]), **fields, source=record.source), names

    def summary(self, rows: StoredRows) -> list[tuple[str, str]]:
        return [
            ("words", f"{rows.counts['words']:,}"),
            ("words without a token", f"{rows.counts['words'] - rows.counts['tagged']:,}"),
        ]

    def check(self, rows: StoredRows) -> None:
        if not rows.counts["tagged"]:
            raise DataError(f"Cannot use {rows.where}.", found="No row has a tagged word.")


class TokenClassification(Classifier, TextTask):
    """Classification of the words of a text; the model's config has the tags.

    Raises:
        BaseError: The tokenizer does not map tokens to characters.
    """

    progress: ClassVar[str] = "Tagging"

    def build(self, model: nn.Module) -> None:
        if not self.tokenizer.is_fast:
            raise BaseError(
                "Cannot tag words with this base.",
                found="Its tokenizer does not map tokens to characters.",
                fix="Add a tokenizer.json to its folder.",
            )
        super().build(model)
        self.set_labels(labels_of(unwrapped(model).config))
        self.rows.encoder = TaggedEncoder(self.texts, self.config, self.labels)

    def collate(self, rows: Sequence[TaggedRow]) -> dict[str, Tensor]:
        """Return a batch of tokens, with target_index and targets (n,) of the tagged words."""
        batch = self.tokens(rows)
        width = batch["input_ids"].shape[1]
        places = [number * width + place for number, row in enumerate(rows) for place in row.places]
        targets = [tag for row in rows for tag in row.tags]
        return {
            **batch,
            "target_index": torch.tensor(places, dtype=torch.long),
            "targets": torch.tensor(targets, dtype=torch.long),
        }

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of the tagged words (n, L), in fp32."""
        every = super().logits(model, batch)
        return every.flatten(0, 1).index_select(0, batch["target_index"])

    def eval_means(self, means: Sequence[float]) -> dict[str, float]:
        """Return the accuracy; F1 of entities needs whole texts."""
        return {"accuracy": super().eval_means(means)["accuracy"]}

    def spans(self, row: TaggedRow) -> list[tuple[str, str]]:
        """Return the tokens of the text, the first of each word with its tag."""
        tags = dict(zip(row.places, row.tags, strict=True))
        return [
            (self.labels[tags[place]] if place in tags else "", self.texts.decode([token]))
            for place, token in enumerate(row.input_ids)
        ]

    def measured(
        self, logits: Tensor, targets: Tensor, rows: Sequence[TaggedRow]
    ) -> dict[str, float]:
        """Return the accuracy over words, and F1 of entities or of tags."""
        numbers = logits.argmax(-1)
        sizes = [len(row.places) for row in rows]
        predicted, true = (
            [[self.labels[tag] for tag in text.tolist()] for text in tags.split(sizes)]
            for tags in (numbers, targets)
        )
        measure = entity_metrics if are_spans(self.labels) else tag_metrics
        return {"accuracy": float((numbers == targets).double().mean()), **measure(predicted, true)}


class TokenClassificationConfig(ClassifierConfig):
    """Token classification: a tag for each word."""

    task_type: ClassVar[str] = "TOKEN_CLS"
    auto_class: ClassVar[str] = "AutoModelForTokenClassification"
    task: ClassVar[Callable[..., Task]] = TokenClassification

    type: Literal["token_classification"] = "token_classification"
    words: str = "words"
    """Field with the list of words."""
    tags: str = "tags"
    """Field with the list of their tags."""

    def resolve(self, data: DataConfig) -> TokenClassificationConfig:
        """Read the tags from the training data if they are not set."""
        if self.labels:
            return self
        names = names_in(data, lambda row: label_names(list_of(row, self.tags, "task.tags")))
        return self.model_copy(update={"labels": names})
