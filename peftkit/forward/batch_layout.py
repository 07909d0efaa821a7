"""The layout of a task's batches of tokens: padded, or padding-free where the model allows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from peftkit.data.pack import padded
from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.execution.plan import ExecutionPlan
from peftkit.forward.attention import TrainingAttention, training_attention
from peftkit.forward.loss import unwrapped
from peftkit.forward.padding_free import faster, laid_out, num_positions, unpadded
from peftkit.forward.probes import why_padded
from peftkit.model.places import num_virtual


class BatchLayout:
    """Chooses between padded and padding-free batches while a model trains.

    Args:
        share: Whether documents may share a prefix: no token depends on later ones.
        padded: Whether rows stay padded even if the model can do without.

    Attributes:
        attention: The model's attention while it trains on padding-free batches.
        why_padded: Why rows are padded although the task has padding-free batches; "" if none.
        rounds: Whether batches have few different shapes, for recorded passes.
    """

    def __init__(self, *, share: bool = True, padded: bool = False) -> None:
        self.share, self.padded, self.why_padded = share, padded, ""
        self.attention: TrainingAttention | None = None
        self.rounds = False

    @property
    def has_few_shapes(self) -> bool:
        """Whether the shapes of batches can be rounded: rows and documents need no padded grid."""
        attention = self.attention
        return attention is not None and attention.takes_spans and attention.mixers is None

    @property
    def paths(self) -> dict[str, str]:
        """The attention kernel and the layout, for the run header."""
        if self.attention is None:
            return {"rows": "padded"}
        rows = "without padding" + ", common beginnings once" * self.share
        kernel = {"attention": self.attention.kernel} if self.attention.num_layers else {}
        if self.attention.mixers is not None:
            kernel["mixers"] = self.attention.mixers.description
        return {**kernel, "rows": rows}

    @contextmanager
    def training(self, model: nn.Module, plan: ExecutionPlan | None = None) -> Iterator[None]:
        """Train with a plan's attention, and without padding where the model allows it."""
        bare = unwrapped(model)
        self.why_padded, self.rounds = "", False
        if not (self.padded or num_virtual(bare) or bare.config.is_encoder_decoder):
            with training_attention(bare, plan) as attention:
                assert attention is not None
                try:
                    self.why_padded = why_padded(model, attention, share=self.share)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    self.why_padded = "Memory ran out while padding-free batches were tried."
                if not self.why_padded:
                    self.attention = attention
                    try:
                        yield
                    finally:
                        self.attention = None
                    return
        with training_attention(bare, plan, documents=False):
            yield

    def num_positions(self, rows: Sequence[Any]) -> int:
        """Return how many tokens the model reads for rows in one batch, with padding if any."""
        as_padded = len(rows) * padded(*rows)
        lengths = [n for row in rows for n in getattr(row, "lengths", (padded(row),))]
        if self.attention is None or not self.attention.can_share(max(lengths), sum(lengths)):
            return as_padded
        if self.attention.takes_spans:
            return sum(lengths)
        return min(as_padded, num_positions(lengths))

    def unpadded(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a padded batch as a padding-free one where that is faster and changes no row."""
        if self.attention is None:
            return batch
        mask, positions = batch["attention_mask"], batch.get("position_ids")
        longest = int(mask.sum(1).max() if positions is None else (positions * mask).max() + 1)
        if not self.attention.can_share(longest, int(mask.sum())):
            return batch
        found = unpadded(
            batch,
            share=self.share,
            spans=self.attention.takes_spans,
            rounds=self.rounds and self.has_few_shapes,
        )
        return found if self.attention.takes_spans else faster(batch, found)

    def inputs(self, batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Return the model's inputs, and set the attention's layout; see `laid_out`."""
        return laid_out(batch, self.attention)

    def forget(self) -> None:
        """Have attention read each row as one document again, after a training step."""
        if self.attention is not None:
            self.attention.layout = None
