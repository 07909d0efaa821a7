"""KTO: answers that are wanted or not, measured against a point that all rows of a step give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from peftkit.data.load import Record
from peftkit.data.pack import LazyRows, cut_document
from peftkit.data.preferences import Verdict, check_both_labels, read_verdicts
from peftkit.data.rows import Dropped, EncodedRows, StoredRows
from peftkit.events import Listener, ignore
from peftkit.tasks.base import Run
from peftkit.tasks.preference.losses import kto_losses
from peftkit.tasks.preference.rows import AnswerEncoder, Compared, Judged, answer_start
from peftkit.tasks.preference.task import Preference, summed
from peftkit.tasks.whole_step import INDEX, WholeStep

OTHER = "other_"
"""How the names of a batch begin that are of the prompts with other prompts' answers."""


Read = tuple[list[Verdict], tuple[str, ...], str]


class JudgedEncoder(AnswerEncoder):
    """Makes a row of each judged answer; of one that is cut away none."""

    kind: ClassVar[type[Judged]] = Judged

    def read(self, records: Sequence[Record], where: str) -> Read:
        return read_verdicts(records, where)

    def rows(self, read: Read) -> EncodedRows:
        verdicts, unused, name = read
        rows, counts = list[Any](), Counter[str]()
        for verdict in verdicts:
            whole = self.encode(verdict.example)
            row = cut_document(whole, self.max_length)
            counts["wanted" if verdict.wanted else "unwanted"] += 1
            if row.num_targets == 0:
                rows.append(Dropped(verdict.source, 1 if whole.num_targets else 0))
                continue
            is_cut = row is not whole
            counts.update(cut=is_cut, targets=row.num_targets)
            start = answer_start(row)
            rows.append(
                Judged(row.input_ids, row.labels, start, is_cut, verdict.wanted, verdict.source)
            )
        return EncodedRows(
            rows, {**self.agreed(verdicts[0].example), "format": name}, counts, unused
        )


class WithOtherAnswers(LazyRows):
    """Judged answers, each with its prompt before the answer of the row before it.

    What KTO measures its reference point on; of the first row it is the last one's answer. TRL
    takes the same within each of its batches.
    """

    def __init__(self, rows: LazyRows, starts: Tensor, max_length: int) -> None:
        self._rows, self._max_length = rows, max_length
        other = starts + (rows.num_tokens - starts).roll(1)
        both = rows.num_tokens + other.clamp(max=max_length)
        super().__init__(both.int(), f"{rows.fingerprint} with the answers before")

    def row(self, place: int) -> Compared:
        own, before = self._rows.row(place), self._rows.row((place or len(self)) - 1)
        return own.beside(before, self._max_length)


class KTO(Preference):
    """An answer is learnt by whether it is wanted.

    A row's second document is its prompt with another row's answer: what these gain on average,
    over all rows of the step, is the point z that answers are measured against.
    """

    metric_names = (
        *("wanted", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected"),
        *("accuracy", "z", "cut"),
    )
    collates_ahead: ClassVar[bool] = False
    _step: WholeStep | None = None

    encoder_type: ClassVar[type[AnswerEncoder]] = JudgedEncoder

    def counts(self, rows: StoredRows) -> list[tuple[str, str]]:
        wanted = f"{rows.counts['wanted']:,}, {rows.counts['unwanted']:,}"
        first = [("format", rows.agreed["format"]), ("wanted, unwanted", wanted)]
        return [*first, *super().counts(rows)]

    def check(self, rows: StoredRows) -> None:
        check_both_labels(rows.where, rows.counts["wanted"], rows.counts["unwanted"])
        super().check(rows)

    def prepare_rows(self, rows: LazyRows) -> LazyRows:
        return WithOtherAnswers(rows, rows.values("start"), self.max_length)

    @property
    def paths(self) -> dict[str, str]:
        rows = "without padding, common beginnings once" if self._attention else "padded"
        known = {name: how for name, how in super().paths.items() if name != "pairs"}
        return {**known, "rows": rows}

    def num_positions(self, rows: Sequence[Compared]) -> int:
        return self.positions([max(row.lengths) for row in rows])

    def _batch(self, rows: Sequence[Compared]) -> dict[str, Tensor]:
        pairs = [row.documents for row in rows]
        others = self.documents([other for _, other in pairs])
        return {
            **self.documents([own for own, _ in pairs]),
            **{OTHER + name: tensor for name, tensor in others.items()},
            "cut": torch.tensor([row.is_cut for row in rows]),
            "wanted": torch.tensor([bool(row.wanted) for row in rows]),
        }

    def _own(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        tokens = self.token_log_probs(model, batch)
        return summed(tokens, batch["document"], len(batch["cut"]))

    def _others(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        given = {n.removeprefix(OTHER): t for n, t in batch.items() if n.startswith(OTHER)}
        return self._own(model, {**given, "cut": batch["cut"]})

    def log_probs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probabilities of each answer, and of the other one (B, 2)."""
        return torch.stack([self._own(model, batch), self._others(model, batch)], dim=1)

    def before_step(self, rows: Sequence[Any], run: Run) -> Sequence[Sequence[Any]]:
        """Compute what the answers of other prompts gain, over the whole step."""
        self._step = WholeStep(self, rows, run, super().collate, self.gains)
        return [rows]

    def collate(self, rows: Sequence[Compared]) -> dict[str, Tensor]:
        return super().collate(rows) if self._step is None else self._step.batch(rows)

    def metrics(
        self, model: nn.Module, rows: Sequence[Any], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        self._step = None
        return super().metrics(model, rows, on_event=on_event)

    @torch.no_grad()
    def gains(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return what another prompt's answer gains over the reference (B, 1)."""
        reference = self.reference_of(model, batch)[:, 1]
        return (self._others(model, batch) - reference)[:, None]

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        shared = self._step.values if self._step is not None and INDEX in batch else None
        gains = self.gains(model, batch) if shared is None else shared
        z = gains.mean().clamp(min=0)
        reference = self.reference_of(model, batch)[:, 0]
        log_probs, wanted = self._own(model, batch), batch["wanted"]
        gain = log_probs - reference.to(log_probs)
        losses = kto_losses(gain, wanted, z.to(gain), beta=self.config.beta)
        gain, log_probs, on = gain.detach(), log_probs.detach(), wanted.to(gain)
        rewards = self.config.beta * gain
        told = (
            on,
            rewards * on,
            rewards * (1 - on),
            log_probs * on,
            log_probs * (1 - on),
            torch.where(wanted, gain > z, gain < z),
            z.expand(len(gain)),
            batch["cut"],
        )
        return torch.stack([losses.sum(), *(each.to(losses).sum() for each in told)])

    def metric_means(self, means: Sequence[float]) -> dict[str, float]:
        """Return means over wanted and unwanted answers; accuracy: share on their side of z."""
        found = super().metric_means(means)
        wanted = found.pop("wanted")
        for side, share in (("chosen", wanted), ("rejected", 1 - wanted)):
            for name in (f"reward_{side}", f"logp_{side}"):  # a step may have one side alone
                found[name] = found[name] / share if share > 0 else 0.0
        return {**found, "margin": found["reward_chosen"] - found["reward_rejected"]}

    def spans(self, row: Compared) -> list[tuple[str, str]]:
        return self._spans(row, ("wanted" if row.wanted else "unwanted",))
