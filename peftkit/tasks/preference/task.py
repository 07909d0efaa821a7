"""The task of preferences: rows of two documents, the log-probabilities of their answers, a loss.

Both answers of a pair go through the model beside each other, their prompt once, where documents
can share what they begin with. Only the answers' logits are made.

Shapes: B rows, D = 2 B documents, n answer tokens of them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from peftkit.data.load import DataConfig
from peftkit.data.pack import IGNORE, Row, labelled_pieces
from peftkit.events import Listener, ignore
from peftkit.tasks.measure import mean_metrics
from peftkit.tasks.preference.reference import ReferenceValues
from peftkit.tasks.preference.rows import AnswerEncoder, Compared
from peftkit.tasks.token_task import DocumentTask
from peftkit.train.task import SetupContext


class Preference(DocumentTask):
    """What all tasks of preferences have in common.

    Args:
        style: How the adapter in hand was trained to be prompted; None: the rows decide.

    Raises:
        BaseError: The model is not causal.
        DataError: A chat template or a length that cannot be.
    """

    encoder_type: ClassVar[type[AnswerEncoder]]

    def __init__(
        self, model: nn.Module, tokenizer: Any, config: Any, data: DataConfig, **more: Any
    ) -> None:
        super().__init__(model, tokenizer, config, data, **more)
        self.row_encoder = self.encoder_type(tokenizer, self.template, self.max_length)
        self._values = ReferenceValues(self._batch, self.log_probs)

    @property
    def paths(self) -> dict[str, str]:
        """Whether the prompt of a pair is computed once, and where the reference comes from."""
        chunks = "answer rows alone" + ", in chunks" * (self._head is not None)
        rows = "one row for both, the prompt once" if self._attention else "two rows"
        reference = "computed before training" if self.config.needs_reference else "none"
        known = {"attention": self._attention.kernel} if self._attention else {}
        loss = f"{self.config.loss}, {chunks}"
        return {**known, "loss": loss, "pairs": rows, "reference": reference}

    def setup(self, model: nn.Module, context: SetupContext) -> None:
        """Ask the reference about all rows, where the loss has one."""
        if self.config.needs_reference:
            self._values.find(model, self.reference, context)

    def num_positions(self, rows: Sequence[Compared]) -> int:
        """Return how many positions the documents of rows take that go through at once."""
        lengths = [length for row in rows for length in row.lengths]
        return self.positions(lengths, shared=sum(row.common for row in rows))

    def collate(self, rows: Sequence[Compared]) -> dict[str, Tensor]:
        """Return a batch: see `documents`; and reference (B, 2), where it is known."""
        batch = self._batch(rows)
        known = self._values.of(rows) if self.config.needs_reference else None
        return batch if known is None else {**batch, "reference": known}

    def _batch(self, rows: Sequence[Compared]) -> dict[str, Tensor]:
        made = self.documents([document for row in rows for document in row.documents])
        return {**made, "cut": torch.tensor([row.is_cut for row in rows])}

    def documents(self, documents: Sequence[Row]) -> dict[str, Tensor]:
        """Return documents as a batch, in one row if that is faster.

        Besides what all token tasks have: document (n,), whose each answer token is.
        """
        return super().collate(documents)

    def log_probs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed log-probability of each answer (B, 2)."""
        tokens = self.token_log_probs(model, batch)
        return summed(tokens, batch["document"], 2 * len(batch["cut"])).view(-1, 2)

    def reference_of(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return what the reference says of a batch (B, 2): as was found out, or asked now."""
        if not self.config.needs_reference:
            return torch.zeros(len(batch["cut"]), 2, device=batch["input_ids"].device)
        known = batch.get("reference")
        return self._values.compute(model, self.reference, batch) if known is None else known

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of rows."""
        return batch["cut"].numel()

    def metrics(
        self, model: nn.Module, rows: Sequence[Compared], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss, and what is told at each step of training."""
        return mean_metrics(self, model, rows, on_event=on_event)

    def watched(self, row: Compared) -> list[Row]:
        """Return the chosen answer; one that is not wanted is no reference."""
        return [] if row.wanted is False else super().watched(row.documents[0])

    def _spans(self, row: Compared, names: Sequence[str]) -> list[tuple[str, str]]:
        pairs = zip(row.documents, names, strict=False)
        return [piece for d, name in pairs for piece in labelled_pieces(d, self._text, name)]


def summed(tokens: Tensor, document: Tensor, count: int) -> Tensor:
    """Return the sums of what tokens have, by document (count,)."""
    return tokens.new_zeros(count).index_add(0, document, tokens)


def whole_answers(row: Row) -> Row:
    """Return a document all of whose tokens count, but the first, which nothing stands before."""
    return Row(row.input_ids, (IGNORE, *row.input_ids[1:]), row.lengths, row.source)
