"""causal_lm with an anchor: training keeps the model's answers to general prompts.

Before the first step, the model answers 32 general prompts. Each step also contains one to four of
these answers (`anchors_per_step`), with the loss KL(before, now) at each of their tokens.
`task.anchor` times its mean is added to the mean loss of the step's targets. The answers share
batches with the rows, so the anchor costs only their tokens.

Shapes: n targets of a batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from peftkit.data.general import ANCHORS
from peftkit.data.pack import Row, cut_document
from peftkit.data.rows.lazy import tokens_of_each
from peftkit.defaults import anchors_per_step
from peftkit.events import Progress, Stage
from peftkit.forward.loss import check_shared_head, divergence_of
from peftkit.inference.generate import own_answers
from peftkit.kernels.cross_entropy import Divergence
from peftkit.model.modes import adapters_off, evaluating
from peftkit.tasks.batches import split_micro_batches
from peftkit.tasks.run_hooks import Reference, Run, RunHooks
from peftkit.tasks.tokens import IGNORED, CausalLM

LENGTH, SEED, TOGETHER = 24, 2000, 8
"""Maximum tokens of an answer, the seed of all answers, and answers of a forward pass."""
OF_ROWS, OF_ANCHOR, BEFORE = "of_rows", "of_anchor", "anchor_before"
"""Keys of a batch: indices into its targets, and the head's input or logits before training."""


@dataclass(frozen=True, slots=True)
class AnchorRow(Row):
    """A general prompt and its answer; `number` is its index."""

    number: int = 0


class AnchoredLM(RunHooks, CausalLM):
    """Supervised fine-tuning with an anchor.

    Raises:
        AdapterError: The adapter changes the head, which both states share.
    """

    # the last target is an ignored one
    ignored_targets: ClassVar[Mapping[str, int] | None] = {
        **IGNORED,
        OF_ROWS: -1,
        OF_ANCHOR: -1,
        BEFORE: 0,
    }

    def build(self, model: nn.Module) -> None:
        check_shared_head(model, "task.anchor")
        super().build(model)
        self._reference = Reference(partial(adapters_off, model))
        self._rows: list[AnchorRow] = []
        self._before: dict[int, Tensor] = {}
        self._scale = torch.ones(())
        self._mean_tokens = 0.0

    def set_reference(self, reference: Reference) -> None:
        self._reference = reference

    @property
    def paths(self) -> dict[str, str]:
        """How the loss is computed, and what the anchor adds to a step."""
        number = f"{self.rows_added} answer{'s' * (self.rows_added > 1)} a step"
        tokens = f"about {self.rows_added * self._mean_tokens:.0f} tokens"
        return {**super().paths, "anchor": f"{number}, {tokens}"}

    def setup(self, run: Run) -> None:
        """Answer the general prompts, and store the hidden states before the head."""
        self.metric_names = ("anchor_kl",)
        self._scale = torch.ones((), device=run.world.device)
        run.say(
            Stage(
                f"Answering {len(ANCHORS)} general prompts, whose answers training preserves; as "
                "long as a few steps (without it: --set task.anchor=null)"
            )
        )
        self.layout.forget()
        with evaluating(run.model), self._reference.state(), run.world.autocast():
            rows = own_answers(run.model, self.tokenizer, ANCHORS, length=LENGTH, seed=SEED)
            rows = [cut_document(row, self.rows.max_length) for row in rows]
            rows = [row for row in rows if row.num_targets]
            self._rows = [
                AnchorRow(row.input_ids, row.labels, row.lengths, row.source, number)
                for number, row in enumerate(rows)
            ]
            for part in split_micro_batches(
                self._rows, self.num_positions, TOGETHER, bucket_key=self.bucket_key
            ):
                run.say(Progress("Preparing the anchor", len(self._before), len(self._rows)))
                batch = {
                    name: each.to(run.world.device) for name, each in self.padded(part).items()
                }
                before = self.before_head(run.model, batch).cpu()
                of_each = before.split([row.num_targets for row in part])
                self._before |= {
                    row.number: hidden for row, hidden in zip(part, of_each, strict=True)
                }
        if self._rows:
            self._mean_tokens = tokens_of_each(self._rows).double().mean().item()
            of_row = tokens_of_each(run.rows).double().mean().item()
            tokens = run.config.rows_per_step() * of_row
            self.rows_added = anchors_per_step(tokens, self._mean_tokens)

    def before_step(self, rows: Sequence[Row], run: Run) -> Sequence[Sequence[Row]]:
        """Add the step's anchor rows to rows; none to an evaluation."""
        if not torch.is_grad_enabled() or not self._rows:
            return [rows]
        world, anchors = run.world, self._anchors(run.state.step, run)
        counts = [sum(row.num_targets for row in each) for each in (rows, anchors)]
        targets, of_anchor = world.sum(torch.tensor(counts, device=world.device)).tolist()
        self._scale.fill_(targets / of_anchor)  # the loss is divided by the targets of the rows
        return [[*rows, *anchors]]

    def rows_ahead(self, rows: Sequence[Row], run: Run) -> Sequence[Row] | None:
        return [*rows, *self._anchors(run.state.step + 1, run)] if rows else None

    def _anchors(self, step: int, run: Run) -> list[AnchorRow]:
        """Return this process's anchor rows of a step, which depend on its number alone."""
        first = (step * run.world.world_size + run.world.rank) * self.rows_added
        return [self._rows[n % len(self._rows)] for n in range(first, first + self.rows_added)]

    def collate(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        parts = ((row,) if isinstance(row, AnchorRow) else self._apart((row,)) for row in rows)
        rows = [row for part in parts for row in part]
        batch = self.padded(rows)
        row_of = batch["target_index"] // batch["input_ids"].shape[1]
        is_anchor = torch.tensor([isinstance(row, AnchorRow) for row in rows])[row_of]
        if is_anchor.any():
            before = [self._before[row.number] for row in rows if isinstance(row, AnchorRow)]
            batch[BEFORE] = torch.cat(before)
            batch[OF_ROWS], batch[OF_ANCHOR] = (
                each.nonzero().flatten() for each in (~is_anchor, is_anchor)
            )
        return self.layout.unpadded(batch)

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of target tokens of rows, without those of the anchor."""
        return batch[OF_ROWS if BEFORE in batch else "targets"].numel()

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of rows and anchor, and the anchor's KL, both summed."""
        if BEFORE not in batch:
            loss = super().loss(model, batch)
            return torch.cat([loss, loss.new_zeros(len(self.metric_names))])
        now, of_rows, of_anchor = self.before_head(model, batch), batch[OF_ROWS], batch[OF_ANCHOR]
        values, _ = divergence_of(now[of_anchor], batch[BEFORE], self.head, Divergence())
        divergence = (values * (of_anchor >= 0)).sum() * self._scale
        loss = self.config.anchor * divergence
        if of_rows.numel():
            loss = loss + self._cross_entropy(now[of_rows], batch["targets"][of_rows])
        return torch.stack([loss, divergence.detach()])

    def eval_means(self, means: Sequence[float]) -> dict[str, float]:
        return {}  # an evaluation has no anchor rows

    def _cross_entropy(self, now: Tensor, targets: Tensor) -> Tensor:
        if self.head is None:
            return nn.functional.cross_entropy(now.float(), targets, reduction="sum")
        return self.head.losses(now, targets, equal_weights=True).sum()
