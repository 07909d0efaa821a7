"""The task of preferences: rows of two documents, the log-probabilities of their answers, a loss.

Both answers of a pair go through the model beside each other, their prompt once, where documents
can share what they begin with. Only the answers' logits are made.

Shapes: B rows, D = 2 B documents, n answer tokens of them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from peftkit.data.chat import choose_template
from peftkit.data.documents import style_of
from peftkit.data.encode import Style
from peftkit.data.lengths import MULTIPLE
from peftkit.data.load import DataConfig
from peftkit.data.pack import IGNORE, Row, collate
from peftkit.data.stored import StoredRows
from peftkit.events import Listener, ignore
from peftkit.model.modes import adapters_off
from peftkit.tasks.head import TokenTask, head_of, token_log_probs
from peftkit.tasks.isolation import check_causal
from peftkit.tasks.length import exact_length
from peftkit.tasks.measure import over_batches
from peftkit.tasks.preference.losses import LossName
from peftkit.tasks.preference.reference import Reference, ReferenceValues
from peftkit.tasks.preference.rows import AnswerEncoder, Compared, pieces
from peftkit.tasks.rows import agreed_style, check_dropped, named
from peftkit.tasks.unpadding import num_positions
from peftkit.train.task import SetupContext


class Settings(Protocol):
    """What is asked of the task: the part of its config that it reads."""

    @property
    def loss(self) -> LossName:
        """Which loss."""

    @property
    def beta(self) -> float:
        """How much a difference of log-probabilities counts."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with what it was."""

    def of(self, name: str) -> float:
        """Return what else the loss takes."""


class Preference(TokenTask):
    """What all tasks of preferences have in common.

    Args:
        style: How the adapter in hand was trained to be prompted; None: the rows decide.

    Raises:
        BaseError: The model is not causal.
        DataError: A chat template or a length that cannot be.
    """

    predicts_tokens: ClassVar[bool] = False
    is_causal: ClassVar[bool] = True
    encoder_type: ClassVar[type[AnswerEncoder]]

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        settings: Settings,
        data: DataConfig,
        *,
        style: Style | None = None,
        on_event: Listener = ignore,
    ) -> None:
        self.settings, self.config, self.tokenizer = settings, data, tokenizer
        self._style, self._on_event = style, on_event
        check_causal(model)
        self.max_length = exact_length(model, tokenizer, data.max_length)
        self._head = head_of(model)
        template = choose_template(tokenizer, data.chat_template)
        if style is not None and style.kind == "chat":
            template = style.chat_template
        self._template = template
        self.row_encoder = self.encoder_type(tokenizer, template, self.max_length)
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self._pad_id: int = next(token for token in pads if token is not None)
        self._reference = Reference(partial(adapters_off, model))
        self._values = ReferenceValues(self._batch, self.log_probs)

    @property
    def style(self) -> Style:
        """How generation has to prompt a model that learnt from the rows encoded so far."""
        assert self._style is not None, "no rows have been encoded"
        return self._style

    @property
    def paths(self) -> dict[str, str]:
        """Whether the prompt of a pair is computed once, and where the reference comes from."""
        chunks = "answer rows alone" + ", in chunks" * (self._head is not None)
        rows = "one row for both, the prompt once" if self._attention else "two rows"
        reference = "computed before training" if self.settings.needs_reference else "none"
        known = {"attention": self._attention.kernel} if self._attention else {}
        loss = f"{self.settings.loss}, {chunks}"
        return {**known, "loss": loss, "pairs": rows, "reference": reference}

    def set_reference(self, state: Any, key: str) -> None:
        """Compare with the model in this state; see `Reference`."""
        self._reference = Reference(state, key)

    def setup(self, model: nn.Module, context: SetupContext) -> None:
        """Ask the reference about all rows, where the loss has one."""
        if self.settings.needs_reference:
            self._values.find(model, self._reference, context)

    def counts(self, rows: StoredRows) -> list[tuple[str, str]]:
        return [
            ("rows read", f"{rows.num_read:,}"),
            ("rows kept", f"{len(rows):,}"),
            (f"cut at {self.max_length:,} tokens", f"{rows.counts['cut']:,}"),
            ("dropped: no answer, or no difference, before the cut", named(rows.dropped(0))),
            ("tokens", f"{int(rows.num_tokens.sum()):,}"),
            ("answer tokens", f"{rows.counts['targets']:,}"),
        ]

    def check(self, rows: StoredRows) -> None:
        style = style_of(rows.agreed, self._template)
        self._style = agreed_style(self._style, style, rows.where)
        why = {f"Nothing to compare within {self.max_length} tokens": rows.dropped(0)}
        check_dropped(rows.where, rows.num_read, why, self.config, "Raise data.max_length")

    def num_positions(self, rows: Sequence[Compared]) -> int:
        """Return how many positions the documents of rows take that go through at once."""
        lengths = [length for row in rows for length in row.lengths]
        longest = -(-max(lengths) // MULTIPLE) * MULTIPLE
        padded = len(lengths) * longest
        if self._attention is None:
            return padded
        shared = sum(row.common for row in rows)
        if self._attention.takes_spans:
            return sum(lengths) - shared
        return min(padded, num_positions(lengths) - shared)

    def collate(self, rows: Sequence[Compared]) -> dict[str, Tensor]:
        """Return a batch: see `documents`; and reference (B, 2), where it is known."""
        batch = self._batch(rows)
        known = self._values.of(rows) if self.settings.needs_reference else None
        return batch if known is None else {**batch, "reference": known}

    def _batch(self, rows: Sequence[Compared]) -> dict[str, Tensor]:
        made = self.documents([document for row in rows for document in row.documents])
        return {**made, "cut": torch.tensor([row.is_cut for row in rows])}

    def documents(self, documents: Sequence[Row]) -> dict[str, Tensor]:
        """Return documents as a batch, in one row if that is faster.

        Besides what all token tasks have: document (n,), whose each answer token is.
        """
        return super().collate(documents)

    def padded(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Return documents as a batch, padded on the right."""
        batch = collate(rows, self._pad_id, self.max_length)
        width = batch["input_ids"].shape[1]
        return {**batch, "document": batch["target_index"] // width}

    def inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the tokens alone: a causal model needs no mask of padding."""
        return {"input_ids": batch["input_ids"]}

    def token_log_probs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probability of each answer token (n,), in fp32."""
        inputs = self.model_inputs(model, batch)
        found = token_log_probs(model, self._head, inputs, batch["target_index"], batch["targets"])
        if not found.requires_grad and self._attention:  # no backward pass will ask again
            self._attention.layout = ()
        return found

    def log_probs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed log-probability of each answer (B, 2)."""
        tokens = self.token_log_probs(model, batch)
        return summed(tokens, batch["document"], 2 * len(batch["cut"])).view(-1, 2)

    def reference_of(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return what the reference says of a batch (B, 2): as was found out, or asked now."""
        if not self.settings.needs_reference:
            return torch.zeros(len(batch["cut"]), 2, device=batch["input_ids"].device)
        known = batch.get("reference")
        return self._values.compute(model, self._reference, batch) if known is None else known

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of rows."""
        return batch["cut"].numel()

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss summed over the rows of a batch, in fp32."""
        return self.loss_and_metric_sums(model, batch)[0]

    @torch.no_grad()
    def metrics(
        self, model: nn.Module, rows: Sequence[Compared], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss, and what is told at each step of training."""
        total, count = torch.zeros(1 + self.num_metrics), 0
        compute = partial(self.loss_and_metric_sums, model)
        for batch, sums in over_batches(self, model, rows, "Comparing", on_event, compute):
            total += sums.cpu()
            count += self.num_targets(batch)
        loss, *means = (total / count).tolist()
        return {"loss": loss, **self.metric_means(means)}

    def _spans(self, row: Compared, names: Sequence[str]) -> list[tuple[str, str]]:
        named_documents = zip(row.documents, names, strict=False)
        return [piece for d, name in named_documents for piece in pieces(d, self.tokenizer, name)]


def summed(tokens: Tensor, document: Tensor, count: int) -> Tensor:
    """Return the sums of what tokens have, by document (count,)."""
    return tokens.new_zeros(count).index_add(0, document, tokens)


def whole_answers(row: Row) -> Row:
    """Return a document all of whose tokens count, but the first, which nothing stands before."""
    return Row(row.input_ids, (IGNORE, *row.input_ids[1:]), row.lengths, row.source)
