"""Pairs of a chosen and a rejected answer: all losses but KTO's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from peftkit.data.columns import Dropped
from peftkit.data.encoding import EncodedRows
from peftkit.data.lazy_rows import StoredRows
from peftkit.data.load import Record
from peftkit.data.pack import IGNORE
from peftkit.data.preferences import Pair, read_pairs_of
from peftkit.tasks.preference.losses import Answers, pair_losses, rewards
from peftkit.tasks.preference.rows import AnswerEncoder, Compared, after_common_tokens, compared
from peftkit.tasks.preference.task import Preference, summed, whole_answers

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

    num_metrics: ClassVar[int] = 6

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

    def loss_and_metric_sums(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss, the rewards, and the log-probabilities; see `figures`."""
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
        worth = [rewards(settings.loss, side, beta=settings.beta) for side in (chosen, rejected)]
        told = (*worth, worth[0] > worth[1], *log_probs.detach().unbind(1), batch["cut"])
        return torch.stack([losses.sum(), *(each.to(losses).sum() for each in told)])

    def metric_means(self, means: Sequence[float]) -> dict[str, float]:
        """Return means over pairs; accuracy: share of pairs whose chosen answer is worth more."""
        chosen, rejected, accuracy, log_prob_chosen, log_prob_rejected, cut = means
        return {
            "accuracy": accuracy,
            "margin": chosen - rejected,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "logp_chosen": log_prob_chosen,
            "logp_rejected": log_prob_rejected,
            "cut": cut,
        }

    def spans(self, row: Compared) -> list[tuple[str, str]]:
        """Return both answers with what stands before them."""
        return self._spans(row, ("chosen", "rejected"))
