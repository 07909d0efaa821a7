"""Preferences: pairs of a chosen and a rejected answer, or answers with a label (KTO).

Both answers of a pair go through the model in one row, with their prompt once, where the model can
share prefixes. Only the logits of the answers are computed.

Shapes: B rows, D = 2 B documents, n answer tokens of them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from peftkit.data.examples import Example
from peftkit.data.format import ParsedRow
from peftkit.data.pack import IGNORE, Row, cut_document, labelled_segments
from peftkit.data.preferences import (
    USELESS,
    Pair,
    Verdict,
    check_both_labels,
    read_pairs_of,
    read_verdicts,
)
from peftkit.data.records import Dropped, Record
from peftkit.data.rows.columns import StoredRows
from peftkit.data.rows.lazy import LazyRows
from peftkit.errors import ConfigError
from peftkit.events import Listener, ignore
from peftkit.model.modes import evaluating
from peftkit.settings import CHAT, DataConfig
from peftkit.tasks.base import over_batches
from peftkit.tasks.pairs.preference_losses import (
    DEFAULTS,
    WITH_REFERENCE,
    Answers,
    LossName,
    kto_losses,
    pair_losses,
    rewards,
)
from peftkit.tasks.pairs.preference_rows import (
    NOTHING_LEFT,
    AnswerEncoder,
    Compared,
    Judged,
    ReferencedTask,
    after_common_tokens,
    answer_start,
    compared,
)
from peftkit.tasks.run_hooks import Run
from peftkit.tasks.tokens import IGNORED, AnswerConfig
from peftkit.tasks.whole_step import INDEX, WholeStepTask


class Preference(ReferencedTask):
    """Base of the tasks of preferences."""

    encoder_type: ClassVar[type[AnswerEncoder]]

    def build(self, model: nn.Module) -> None:
        super().build(model)
        rows = self.rows
        rows.encoder = self.encoder_type(self.tokenizer, rows.template, rows.max_length)

    @property
    def paths(self) -> dict[str, str]:
        chunks = "answer rows alone" + ", in chunks" * (self.head is not None)
        rows = "one row for both, the prompt once" if self.layout.attention else "two rows"
        reference = "computed before training" if self.config.needs_reference else "none"
        others = {"attention": self.layout.attention.kernel} if self.layout.attention else {}
        loss = f"{self.config.loss}, {chunks}"
        return {**others, "loss": loss, "pairs": rows, "reference": reference}

    def setup(self, run: Run) -> None:
        if self.config.needs_reference:
            self.find_reference(run)

    def num_positions(self, rows: Sequence[Compared]) -> int:
        lengths = [length for row in rows for length in row.lengths]
        return self.positions(lengths, shared=sum(row.common for row in rows))

    def collate(self, rows: Sequence[Compared]) -> dict[str, Tensor]:
        """Return a batch (see `documents`), with reference (B, 2) if it was computed before."""
        batch = self.batch_of(rows)
        reference = self.stored_reference(rows) if self.config.needs_reference else None
        return batch if reference is None else {**batch, "reference": reference}

    def batch_of(self, rows: Sequence[Compared]) -> dict[str, Tensor]:
        batch = self.documents([document for row in rows for document in row.documents])
        return {**batch, "cut": torch.tensor([row.is_cut for row in rows])}

    def log_probs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed log-probability of each answer (B, 2)."""
        tokens = self.token_log_probs(model, batch)
        return summed(tokens, batch["document"], 2 * len(batch["cut"])).view(-1, 2)

    def reference_of(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the reference's log-probabilities (B, 2): stored ones, or computed now."""
        if not self.config.needs_reference:
            return torch.zeros(len(batch["cut"]), 2, device=batch["input_ids"].device)
        stored = batch.get("reference")
        if stored is not None:
            return stored
        with torch.no_grad(), evaluating(model), self.reference.state():
            return self.log_probs(model, batch)

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        return batch["cut"].numel()

    def prompts(self, row: Compared) -> Sequence[Row]:
        """Return the chosen answer; an unwanted answer is no reference."""
        return [] if row.wanted is False else super().prompts(row.documents[0])

    def _spans(self, row: Compared, names: Sequence[str]) -> list[tuple[str, str]]:
        pairs = zip(row.documents, names, strict=False)
        return [piece for d, name in pairs for piece in labelled_segments(d, self.text, name)]


def summed(tokens: Tensor, document: Tensor, count: int) -> Tensor:
    """Return the sums over the tokens of each document (count,); those of no document are 0."""
    return tokens.new_zeros(count).index_add(0, document.clamp(min=0), tokens)


def whole_answers(row: Row) -> Row:
    """Return a document with all tokens as targets, except the first."""
    return Row(row.input_ids, (IGNORE, *row.input_ids[1:]), row.lengths, row.source)


class ComparedEncoder(AnswerEncoder):
    """Encoder of pairs; drops those whose difference is cut away."""

    kind: ClassVar[type[Compared]] = Compared

    def read(self, records: Sequence[Record], where: str) -> ParsedRow[Pair | Dropped]:
        return read_pairs_of(records, where)

    def row(self, example: Pair) -> Compared | Dropped:
        encode = self._encoder.encode
        both = encode(example.chosen), encode(example.rejected)
        both = after_common_tokens(*both) if example.shared else both
        row = compared(*both, self.max_length)
        if row is None:
            return Dropped(example.source, NOTHING_LEFT)
        self.counts.update(cut=row.is_cut, targets=row.num_targets, common=row.common)
        return row

    def example_of(self, example: Pair) -> Example:
        return example.chosen

    def summary(self, rows: StoredRows) -> list[tuple[str, str]]:
        return [("tokens common to both answers, once more", f"{rows.counts['common']:,}")]


class PreferencePairs(Preference):
    """A loss of the two answers of each pair."""

    ignored_targets: ClassVar[Mapping[str, int] | None] = {**IGNORED, "document": -1, "answers": 0}

    metric_names = (
        *("accuracy", "margin", "reward_chosen", "reward_rejected"),
        *("logp_chosen", "logp_rejected", "cut"),
    )

    encoder_type: ClassVar[type[AnswerEncoder]] = ComparedEncoder

    def batch_of(self, rows: Sequence[Compared]) -> dict[str, Tensor]:
        if self.config.loss != "orpo":
            return super().batch_of(rows)
        # ORPO's NLL is over the prompt, too: all of the chosen document is scored
        pairs = [row.documents for row in rows]
        batch = self.documents([d for a, b in pairs for d in (whole_answers(a), b)])
        answers = [
            label != IGNORE
            for a, b in pairs
            for document, row in ((whole_answers(a), a), (b, b))
            for label, counts in zip(row.labels[1:], document.labels[1:], strict=True)
            if counts != IGNORE
        ]
        cut = torch.tensor([row.is_cut for row in rows])
        return {**batch, "cut": cut, "answers": torch.tensor(answers)}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        settings, count = self.config, len(batch["cut"])
        reference = self.reference_of(model, batch)
        tokens, document = self.token_log_probs(model, batch), batch["document"]
        answers = batch.get("answers")
        scored = tokens if answers is None else torch.where(answers, tokens, 0.0)
        ones = (document >= 0).to(tokens.dtype)
        counted = ones if answers is None else answers.to(tokens.dtype)

        def of_answers(values: Tensor) -> Tensor:
            return summed(values, document, 2 * count).view(-1, 2)

        log_probs, lengths = of_answers(scored), of_answers(counted)
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
            whole, length = (of_answers(each)[:, 0] for each in (tokens, ones))
            losses = losses - weight * whole / length
        good, bad = (rewards(settings.loss, s, beta=settings.beta) for s in (chosen, rejected))
        figures = (good > bad, good - bad, good, bad, *log_probs.detach().unbind(1), batch["cut"])
        return torch.stack([losses.sum(), *(each.to(losses).sum() for each in figures)])

    def spans(self, row: Compared) -> list[tuple[str, str]]:
        return self._spans(row, ("chosen", "rejected"))


# KTO.


OTHER = "other_"
"""Prefix of a batch's names for prompts with other prompts' answers."""


class JudgedEncoder(AnswerEncoder):
    """Encoder of judged answers; drops answers beyond the cut."""

    kind: ClassVar[type[Judged]] = Judged

    def read(self, records: Sequence[Record], where: str) -> ParsedRow[Verdict]:
        return read_verdicts(records, where)

    def row(self, example: Verdict) -> Judged | Dropped:
        whole = self._encoder.encode(example.example)
        row = cut_document(whole, self.max_length)
        self.counts["wanted" if example.wanted else "unwanted"] += 1
        if row.num_targets == 0:
            return Dropped(example.source, NOTHING_LEFT if whole.num_targets else USELESS)
        is_cut, start = row is not whole, answer_start(row)
        self.counts.update(cut=is_cut, targets=row.num_targets)
        return Judged(row.input_ids, row.labels, start, is_cut, example.wanted, example.source)

    def example_of(self, example: Verdict) -> Example:
        return example.example

    def summary(self, rows: StoredRows) -> list[tuple[str, str]]:
        return [("wanted, unwanted", f"{rows.counts['wanted']:,}, {rows.counts['unwanted']:,}")]

    def check(self, rows: StoredRows) -> None:
        check_both_labels(rows.where, rows.counts["wanted"], rows.counts["unwanted"])

    def prepare(self, rows: LazyRows) -> LazyRows:
        return WithOtherAnswers(rows, rows.values("start"), self.max_length)


class WithOtherAnswers(LazyRows):
    """Judged answers, each with its prompt before the answer of the row before it.

    KTO estimates its reference point z on these; the first row gets the last one's answer. TRL does
    the same within each of its batches.
    """

    def __init__(self, rows: LazyRows, starts: Tensor, max_length: int) -> None:
        self._rows, self._max_length = rows, max_length
        other = starts + (rows.num_tokens - starts).roll(1)
        both = rows.num_tokens + other.clamp(max=max_length)
        super().__init__(both.int(), f"{rows.fingerprint} with the answers before")

    def row(self, place: int) -> Compared:
        row, before = self._rows.row(place), self._rows.row((place or len(self)) - 1)
        return row.compared_with(before, self._max_length)


class KTO(WholeStepTask, Preference):
    """A loss of single answers that are wanted or not.

    A row's second document is its prompt with another row's answer: their mean gain over all rows
    of the step is the reference point z.
    """

    metric_names = (
        *("wanted", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected"),
        *("accuracy", "z", "cut"),
    )

    encoder_type: ClassVar[type[AnswerEncoder]] = JudgedEncoder
    _measured: Tensor | None = None
    """Gains of all rows of an evaluation; None: use the gains of the step or of the batch."""

    @property
    def paths(self) -> dict[str, str]:
        rows = "without padding, common beginnings once" if self.layout.attention else "padded"
        others = {name: how for name, how in super().paths.items() if name != "pairs"}
        return {**others, "rows": rows}

    def num_positions(self, rows: Sequence[Compared]) -> int:
        return self.positions([max(row.lengths) for row in rows])

    def batch_of(self, rows: Sequence[Compared]) -> dict[str, Tensor]:
        pairs = [row.documents for row in rows]
        others = self.documents([other for _, other in pairs])
        return {
            **self.documents([answer for answer, _ in pairs]),
            **{OTHER + name: tensor for name, tensor in others.items()},
            "cut": torch.tensor([row.is_cut for row in rows]),
            "wanted": torch.tensor([bool(row.wanted) for row in rows]),
        }

    def _answers(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        tokens = self.token_log_probs(model, batch)
        return summed(tokens, batch["document"], len(batch["cut"]))

    def _others(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        others = {n.removeprefix(OTHER): t for n, t in batch.items() if n.startswith(OTHER)}
        return self._answers(model, {**others, "cut": batch["cut"]})

    def log_probs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probabilities of each answer, and of the other one (B, 2)."""
        return torch.stack([self._answers(model, batch), self._others(model, batch)], dim=1)

    def row_batch(self, rows: Sequence[Compared]) -> dict[str, Tensor]:
        return Preference.collate(self, rows)

    @torch.no_grad()
    def row_values(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the gain of another prompt's answer over the reference (B, 1)."""
        reference = self.reference_of(model, batch)[:, 1]
        return (self._others(model, batch) - reference)[:, None]

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        shared = self._measured
        if self._step is not None and INDEX in batch:
            shared = self._step.values
        gains = self.row_values(model, batch) if shared is None else shared
        z = gains.mean().clamp(min=0)
        reference = self.reference_of(model, batch)[:, 0]
        log_probs, wanted = self._answers(model, batch), batch["wanted"]
        gain = log_probs - reference.to(log_probs)
        losses = kto_losses(gain, wanted, z.to(gain), beta=self.config.beta)
        gain, log_probs, on = gain.detach(), log_probs.detach(), wanted.to(gain)
        rewards = self.config.beta * gain
        figures = (
            on,
            rewards * on,
            rewards * (1 - on),
            log_probs * on,
            log_probs * (1 - on),
            torch.where(wanted, gain > z, gain < z),
            z.expand(len(gain)),
            batch["cut"],
        )
        return torch.stack([losses.sum(), *(each.to(losses).sum() for each in figures)])

    def metrics(
        self, model: nn.Module, rows: Sequence[Compared], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss and its metrics; z is the mean over all rows, as in evaluations."""
        self._step, gain = None, partial(self.row_values, model)
        text = "Finding the reference point"
        gains = [part for *_, part in over_batches(self, model, rows, text, on_event, gain)]
        self._measured = torch.cat(gains)
        try:
            return super().metrics(model, rows, on_event=on_event)
        finally:
            self._measured = None

    def metric_means(self, means: Sequence[float]) -> dict[str, float]:
        """Return means over wanted and unwanted answers; accuracy: share on their side of z."""
        named = super().metric_means(means)
        wanted = named.pop("wanted")
        for side, share in (("chosen", wanted), ("rejected", 1 - wanted)):
            for name in (f"reward_{side}", f"logp_{side}"):  # a step may have one side alone
                named[name] = named[name] / share if share > 0 else 0.0
        return {**named, "margin": named["reward_chosen"] - named["reward_rejected"]}

    def spans(self, row: Compared) -> list[tuple[str, str]]:
        return self._spans(row, ("wanted" if row.wanted else "unwanted",))


# The recipe's section.


OPTIONAL = ("label_smoothing", "gamma", "nll_weight")


class PreferenceConfig(AnswerConfig):
    """Preferences: pairs of a better and a worse answer, or answers that are wanted or not."""

    num_texts: ClassVar[int] = 2
    scores_documents: ClassVar[bool] = True
    data_fields: ClassVar[frozenset[str]] = frozenset({"max_length", *CHAT})

    type: Literal["preference"] = "preference"
    loss: LossName = "dpo"
    """kto takes rows with a label, all others pairs."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Factor of the differences of log-probabilities."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """Assumed share of pairs with swapped labels: of robust, cpo and simpo; null: 0."""
    gamma: Annotated[float, Field(ge=0)] | None = None
    """Target margin of simpo; null: 0.5."""
    nll_weight: Annotated[float, Field(ge=0)] | None = None
    """Weight of the chosen answer's NLL; null: 1 of orpo and cpo, 0 of the others."""

    @model_validator(mode="after")
    def _loss_uses_what_is_set(self) -> PreferenceConfig:
        for name in OPTIONAL:
            if getattr(self, name) is not None and name not in DEFAULTS[self.loss]:
                users = [loss for loss, takes in DEFAULTS.items() if name in takes]
                raise ConfigError(
                    f"task.{name} is not used by the loss {self.loss}.",
                    found=f"Losses that use it: {', '.join(users)}.",
                    fix="Leave it out.",
                )
        if self.loss == "robust" and not self.label_smoothing:
            raise ConfigError(
                "the loss robust needs task.label_smoothing above 0.",
                found="With 0 it is the loss dpo.",
                fix="Set the assumed share of pairs with swapped labels, for example 0.1.",
            )
        return self

    @property
    def needs_reference(self) -> bool:
        return self.loss in WITH_REFERENCE

    def of(self, name: str) -> float:
        """Return an optional setting; its default is the loss's, or 0."""
        value = getattr(self, name)
        return float(DEFAULTS[self.loss].get(name, 0.0) if value is None else value)

    @staticmethod
    def task(
        model: nn.Module, tokenizer: Any, config: PreferenceConfig, data: DataConfig, **more: Any
    ) -> Preference:
        kind = KTO if config.loss == "kto" else PreferencePairs
        return kind(model, tokenizer, config, data, **more)
