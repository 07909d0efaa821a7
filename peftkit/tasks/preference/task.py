"""The task of preferences: rows of two documents, the log-probabilities of their answers, a loss.

Both answers of a pair go through the model beside each other, their prompt once, where documents
can share what they begin with. Only the answers' logits are made.

Shapes: B rows, D = 2 B documents, n answer tokens of them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from peftkit.data.load import Record
from peftkit.data.pack import IGNORE, Row, labelled_segments
from peftkit.data.preferences import Pair, read_pairs_of
from peftkit.data.rows import Dropped, EncodedRows, StoredRows
from peftkit.tasks.base import Run
from peftkit.tasks.preference.losses import Answers, pair_losses, rewards
from peftkit.tasks.preference.reference import ReferenceValues
from peftkit.tasks.preference.rows import AnswerEncoder, Compared, after_common_tokens, compared
from peftkit.tasks.token_task import DocumentTask


class Preference(DocumentTask):
    """What all tasks of preferences have in common."""

    encoder_type: ClassVar[type[AnswerEncoder]]

    def build(self, model: nn.Module) -> None:
        super().build(model)
        self.row_encoder = self.encoder_type(self.tokenizer, self.template, self.max_length)
        self._values = ReferenceValues(self._batch, self.log_probs)

    @property
    def paths(self) -> dict[str, str]:
        chunks = "answer rows alone" + ", in chunks" * (self._head is not None)
        rows = "one row for both, the prompt once" if self._attention else "two rows"
        reference = "computed before training" if self.config.needs_reference else "none"
        known = {"attention": self._attention.kernel} if self._attention else {}
        loss = f"{self.config.loss}, {chunks}"
        return {**known, "loss": loss, "pairs": rows, "reference": reference}

    def setup(self, run: Run) -> None:
        if self.config.needs_reference:
            self._values.find(self.reference, run)

    def num_positions(self, rows: Sequence[Compared]) -> int:
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
        return batch["cut"].numel()

    def watched(self, row: Compared) -> list[Row]:
        """Return the chosen answer; one that is not wanted is no reference."""
        return [] if row.wanted is False else super().watched(row.documents[0])

    def _spans(self, row: Compared, names: Sequence[str]) -> list[tuple[str, str]]:
        pairs = zip(row.documents, names, strict=False)
        return [piece for d, name in pairs for piece in labelled_segments(d, self._text, name)]


def summed(tokens: Tensor, document: Tensor, count: int) -> Tensor:
    """Return the sums of what tokens have, by document (count,)."""
    return tokens.new_zeros(count).index_add(0, document, tokens)


def whole_answers(row: Row) -> Row:
    """Return a document all of whose tokens count, but the first, which nothing stands before."""
    return Row(row.input_ids, (IGNORE, *row.input_ids[1:]), row.lengths, row.source)


Read = tuple[list[Pair | Dropped], tuple[str, ...]]


class ComparedEncoder(AnswerEncoder):
    """Makes a row of each pair; of one whose difference is cut away none."""

    kind: ClassVar[type[Compared]] = Compared

    def read(self, records: Sequence[Record], where: str) -> Read:
        return read_pairs_of(records, where)

    def rows(self, read: Read) -> EncodedRows:
        pairs, unused = read
        rows, counts = list[Any](), Counter[str]()
        for pair in pairs:
            if isinstance(pair, Dropped):
                rows.append(pair)
                continue
            both = self.encode(pair.chosen), self.encode(pair.rejected)
            both = after_common_tokens(*both) if pair.shared else both
            row = compared(*both, self.max_length)
            rows.append(row or Dropped(pair.source, 1))
            if row is not None:
                counts.update(cut=row.is_cut, targets=row.num_targets, common=row.common)
        agreed = next((self.agreed(pair.chosen) for pair in pairs if isinstance(pair, Pair)), {})
        return EncodedRows(rows, agreed, counts, unused)


class PreferencePairs(Preference):
    """A pair is learnt by what its two answers are worth."""

    metric_names = (
        *("accuracy", "margin", "reward_chosen", "reward_rejected"),
        *("logp_chosen", "logp_rejected", "cut"),
    )

    encoder_type: ClassVar[type[AnswerEncoder]] = ComparedEncoder

    def counts(self, rows: StoredRows) -> list[tuple[str, str]]:
        common = f"{rows.counts['common']:,}"
        return [*super().counts(rows), ("tokens common to both answers, once more", common)]

    def _batch(self, rows: Sequence[Compared]) -> dict[str, Tensor]:
        if self.config.loss != "orpo":
            return super()._batch(rows)
        # ORPO also learns the prompt: all of the chosen document is scored
        pairs = [row.documents for row in rows]
        made = self.documents([d for a, b in pairs for d in (whole_answers(a), b)])
        answers = [
            label != IGNORE
            for a, b in pairs
            for document, row in ((whole_answers(a), a), (b, b))
            for label, counts in zip(row.labels[1:], document.labels[1:], strict=True)
            if counts != IGNORE
        ]
        cut = torch.tensor([row.is_cut for row in rows])
        return {**made, "cut": cut, "answers": torch.tensor(answers)}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        settings, count = self.config, len(batch["cut"])
        reference = self.reference_of(model, batch)
        tokens, document = self.token_log_probs(model, batch), batch["document"]
        answers = batch.get("answers")
        scored = tokens if answers is None else torch.where(answers, tokens, 0.0)
        counted = torch.ones_like(tokens) if answers is None else answers.to(tokens.dtype)
        log_probs = summed(scored, document, 2 * count).view(-1, 2)
        lengths = summed(counted, document, 2 * count).view(-1, 2)
        chosen, rejected = (
            Answers(log_probs[:, n], reference[:, n].to(log_probs), lengths[:, n]) for n in (0, 1)
        )
        losses = pair_losses(
            settings.loss,
            chosen,
            rejected,
            beta=settings.beta,
            label_smoothing=settings.of("label_smoothing"),
            gamma=settings.of("gamma"),
        )
        if weight := settings.of("nll_weight"):
            whole = summed(tokens, document, 2 * count).view(-1, 2)[:, 0]
            length = summed(torch.ones_like(tokens), document, 2 * count).view(-1, 2)[:, 0]
            losses = losses - weight * whole / length
        good, bad = (rewards(settings.loss, s, beta=settings.beta) for s in (chosen, rejected))
        told = (good > bad, good - bad, good, bad, *log_probs.detach().unbind(1), batch["cut"])
        return torch.stack([losses.sum(), *(each.to(losses).sum() for each in told)])

    def spans(self, row: Compared) -> list[tuple[str, str]]:
        return self._spans(row, ("chosen", "rejected"))
