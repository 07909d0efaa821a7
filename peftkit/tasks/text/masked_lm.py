"""Masked language modelling: predict the masked tokens of a text.

A share of a text's tokens are targets (Devlin et al., 2018, arXiv:1810.04805). Most of them become
the mask token, some a random token, and some stay unchanged. Their number depends on the text's
length alone. In training mode, each pass samples them from torch's generator, row by row, so the
batch size has no effect. Checkpoints contain the generator's state, and a retried step restores it.
In eval mode they are a function of the row.

Shapes: B rows, T tokens of the longest, n chosen tokens of the batch, V vocabulary.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from peftkit.data.examples import Example, Text
from peftkit.data.format import ParsedRow, parse
from peftkit.data.pack import padded_rows
from peftkit.data.records import Dropped, Record
from peftkit.data.rows.columns import StoredRows
from peftkit.data.rows.encoder import EncodedRows, RowEncoder
from peftkit.data.tokens import tokens
from peftkit.errors import BaseError, ConfigError, DataError
from peftkit.events import Listener, ignore
from peftkit.forward.batch_layout import BatchLayout
from peftkit.forward.loss import perplexity, target_logits, unwrapped
from peftkit.forward.noise import Trial
from peftkit.forward.probes import logits_of
from peftkit.model.modes import evaluating
from peftkit.model.places import unwrap_adapter
from peftkit.tasks.base import Task, over_batches
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.row_loader import longest
from peftkit.tasks.texts import SpecialTokens
from peftkit.tasks.tokens import TokenTask

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A text, or a part of a long one.

    Args:
        input_ids: Tokens, special ones included.
        maskable: Positions that may be masked: all except special tokens.
        source: "train.jsonl:7".
    """

    input_ids: tuple[int, ...]
    maskable: tuple[int, ...]
    source: str


NO_WORDS = "no words"
"""Reason to drop a text; see `RowEncoder.drops`."""


class MaskedEncoder(RowEncoder):
    """Encoder of texts, which makes one row of each, or several of a long one."""

    kind: ClassVar[type[MaskedRow]] = MaskedRow
    drops: Mapping[str, str] = {NO_WORDS: "give these rows a text"}

    def __init__(self, tokenizer: Any, config: MaskedLMConfig, name: Any, max_length: int) -> None:
        self.tokenizer, self._name = tokenizer, name
        self._splits, self._share = config.long_texts == "split", config.share
        self._frame = SpecialTokens(tokenizer)
        self._special = set(tokenizer.all_special_ids)
        self._room, self._max_length = self._frame.room(max_length), max_length
        self.settings = (name, self._room, self._splits, self._share)

    def read(self, records: Sequence[Record], where: str) -> ParsedRow[Example]:
        parsed = parse(records, self._name, where=where)
        if parsed.format != "text":
            raise DataError(
                f"Cannot mask tokens of {where}.",
                found=f"Its rows have the format '{parsed.format}'.",
                fix='Give rows {"text": "..."}; with data.format: text no other field is read.',
            )
        return parsed

    def rows(self, read: ParsedRow[Text]) -> EncodedRows:
        rows: list[MaskedRow | Dropped] = []
        for example in read.examples:
            ids = tokens(self.tokenizer, example.text)
            self.counts["split" if self._splits else "cut"] += len(ids) > self._room
            rows_of_text = self._rows(ids, example.source)
            self.counts["targets"] += sum(num_chosen(row, self._share) for row in rows_of_text)
            rows += rows_of_text or [Dropped(example.source, NO_WORDS)]
        agreed = self.agreed(read.examples, read.format)
        return EncodedRows(rows, agreed, Counter(self.counts), read.unused)

    def summary(self, rows: StoredRows) -> list[tuple[str, str]]:
        if "split" not in rows.counts:
            return []
        return [(f"split at {self._max_length:,} tokens", f"{rows.counts['split']:,}")]

    def _rows(self, ids: Sequence[int], source: str) -> list[MaskedRow]:
        """Return the rows of a text that have a token to mask."""
        stop = len(ids) if self._splits else min(len(ids), self._room)
        rows = []
        for start in range(0, stop, self._room):
            part = ids[start : min(start + self._room, stop)]
            lead = len(self._frame.lead)
            places = (lead + n for n, token in enumerate(part) if token not in self._special)
            row = MaskedRow(tuple(self._frame.put_around(part)), tuple(places), source)
            rows += [row] if row.maskable else []
        return rows


def num_chosen(row: MaskedRow, share: float) -> int:
    """Return how many of a row's tokens are targets."""
    return max(1, round(share * len(row.maskable)))


@torch.no_grad()
def reads_padding(model: nn.Module, pad_id: int) -> bool:
    """Return whether the logits of a row change with padding after it, despite its mask.

    Funnel Transformers pool a row's last token with the padding.
    """
    vocab = unwrapped(model).config.get_text_config().vocab_size
    rows = [[(3 + n) * 7 % vocab for n in range(size)] for size in (11, 7, 5)]

    def logits(some: Sequence[Sequence[int]]) -> Tensor:
        ids, mask = (tensor.to(unwrapped(model).device) for tensor in padded_rows(some, pad_id))
        return logits_of(model, ids, {"attention_mask": mask})

    with evaluating(model):
        padded = [found[: len(row)] for found, row in zip(logits(rows), rows, strict=True)]
        return not Trial(model, lambda: [logits([row])[0] for row in rows]).accepts(padded)


class MaskedLM(TokenTask):
    """A loss over masked tokens of a bidirectional encoder with a head over the vocabulary.

    Raises:
        BaseError: The tokenizer has no mask token.
        DataError: A length that the model cannot read.
    """

    collates_ahead: ClassVar[bool] = False  # masks are drawn anew each time
    input_names = ("input_ids", "attention_mask")

    def build(self, model: nn.Module) -> None:
        super().build(model)
        self.layout = BatchLayout(share=False)
        tokenizer, config = self.tokenizer, self.config
        self.model = model
        if tokenizer.mask_token_id is None:
            raise BaseError(
                "Cannot train masked_lm with this base.",
                found="Its tokenizer has no mask token.",
                fix="Give an encoder that was trained with one (BERT, RoBERTa, ...), or name it in "
                "tokenizer_config.json.",
            )
        rows = self.rows
        rows.max_length = longest(model, tokenizer, rows.data.max_length)
        rows.encoder = MaskedEncoder(tokenizer, config, rows.data.format, rows.max_length)
        embedding: Any = unwrap_adapter(unwrapped(model).get_input_embeddings())
        self._num_words = min(len(tokenizer), embedding.num_embeddings)
        self._reads_padding = reads_padding(model, self.pad_id)

    def bucket_key(self, row: MaskedRow) -> int | None:
        return len(row.input_ids) if self._reads_padding else None

    def collate(self, rows: Sequence[MaskedRow]) -> dict[str, Tensor]:
        """Return a batch with tokens masked, padded or in one row.

        input_ids and attention_mask (B, T); target_index (n,), chosen positions in the flattened
        (B * T) tokens; targets (n,), their original tokens.
        """
        masked = [self._masked(row) for row in rows]
        input_ids, attention_mask = padded_rows([ids.tolist() for ids, _ in masked], self.pad_id)
        index, targets = [], []
        for number, (row, (_, chosen)) in enumerate(zip(rows, masked, strict=True)):
            index.append(chosen + number * input_ids.shape[1])
            targets.append(torch.tensor(row.input_ids)[chosen])
        batch = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "target_index": torch.cat(index),
            "targets": torch.cat(targets),
        }
        return self.layout.unpadded(batch)

    def spans(self, row: MaskedRow) -> list[tuple[str, str]]:
        """Return a row's text in labelled segments; "learnt" marks the targets of evaluation."""
        _, chosen = self._masked(row, fixed=True)
        places = set(chosen.tolist())
        segments = groupby(enumerate(row.input_ids), key=lambda pair: pair[0] in places)
        return [
            ("learnt" if is_target else "", self.tokenizer.decode([token for _, token in pairs]))
            for is_target, pairs in segments
        ]

    @torch.no_grad()
    def metrics(
        self, model: nn.Module, rows: Sequence[MaskedRow], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return loss and perplexity of the masked tokens, and accuracy."""
        loss, num_right, num_targets = 0.0, 0, 0

        def logits_of(batch: Mapping[str, Tensor]) -> Tensor:
            with self.model_inputs(model, batch) as inputs:
                return target_logits(model, inputs, batch["target_index"])

        for _, batch, logits in over_batches(self, model, rows, "Filling", on_event, logits_of):
            targets = batch["targets"]
            loss += float(nn.functional.cross_entropy(logits.float(), targets, reduction="sum"))
            num_right += int((logits.argmax(-1) == targets).sum())
            num_targets += len(targets)
        loss /= num_targets
        return {
            "loss": loss,
            "perplexity": perplexity(loss),
            "accuracy": num_right / num_targets,
            "num_targets": num_targets,
        }

    def _masked(self, row: MaskedRow, *, fixed: bool = False) -> tuple[Tensor, Tensor]:
        """Return a row's tokens (T,) with some masked, and their positions in order."""
        generator = None  # torch's default one
        if fixed or not self.model.training:
            seed = zlib.crc32(array("q", row.input_ids).tobytes())
            generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(row.maskable), generator=generator)[
            : num_chosen(row, self.config.share)
        ]
        chosen = torch.tensor(row.maskable)[order]
        fate = torch.rand(len(chosen), generator=generator)
        other = torch.randint(self._num_words, (len(chosen),), generator=generator)
        ids = torch.tensor(row.input_ids)
        is_mask, is_random = self.config.as_mask, self.config.as_mask + self.config.as_random
        other = torch.where(fate < is_random, other, ids[chosen])
        ids[chosen] = torch.where(fate < is_mask, int(self.tokenizer.mask_token_id), other)
        return ids, chosen.sort().values


class MaskedLMConfig(TaskConfig):
    """Masked language modelling: adapt an encoder to texts of a domain."""

    task_type: ClassVar[None] = None
    auto_class: ClassVar[str] = "AutoModelForMaskedLM"
    task: ClassVar[Callable[..., Task]] = MaskedLM
    data_fields: ClassVar[frozenset[str]] = frozenset({"format", "max_length"})

    type: Literal["masked_lm"] = "masked_lm"
    share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of a text's tokens that are targets; at least one of each text."""
    as_mask: Share = 0.8
    """Share of these that become the mask token."""
    as_random: Share = 0.1
    """Share of these that become a random token; the others stay unchanged."""
    long_texts: Literal["split", "cut"] = "split"
    """Split or cut texts of more than data.max_length tokens."""

    @model_validator(mode="after")
    def _shares(self) -> MaskedLMConfig:
        if self.as_mask + self.as_random > 1:
            raise ConfigError(
                f"as_mask ({self.as_mask}) and as_random ({self.as_random}) add up to more than 1.",
                fix="Give shares whose sum is at most 1.",
            )
        return self
