"""What tasks have in common whose model has a head of labels, or of numbers.

Shapes: B rows, n targets of the batch, L labels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from peftkit.base.purpose import ClassHead, ProblemType, Purpose
from peftkit.events import Listener, ignore
from peftkit.tasks.loss import accepted
from peftkit.tasks.measure import over_batches
from peftkit.tasks.protocol import Task, TaskConfig


class Classifier(Task):
    """A task whose model's head says something of each target.

    Its batches have `targets`, whose first dimension is n, beside what the model reads.
    """

    progress: ClassVar[str] = "Classifying"
    """What is told while rows are measured."""

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        return batch["targets"].numel()

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return self.loss(self.logits(model, batch), batch["targets"])

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return what the head says of each target (n, L), in fp32."""
        logits: Tensor = model(**accepted(model, {**batch, "use_cache": False})).logits
        return logits.float()

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over the targets."""
        return functional.cross_entropy(logits, targets, reduction="sum")

    @torch.no_grad()
    def metrics(
        self, model: nn.Module, rows: Sequence[Any], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss, and what is measured of all logits and targets together."""
        said, true, seen, loss = list[Tensor](), list[Tensor](), list[Any](), 0.0
        compute = partial(self.logits, model)
        for some, batch, logits in over_batches(
            self, model, rows, self.progress, on_event, compute
        ):
            loss += float(self.loss(logits, batch["targets"]))
            said.append(logits.cpu())
            true.append(batch["targets"].cpu())
            seen += some
        targets = torch.cat(true)
        return {"loss": loss / targets.numel(), **self.measured(torch.cat(said), targets, seen)}

    @abstractmethod
    def measured(self, logits: Tensor, targets: Tensor, rows: Sequence[Any]) -> dict[str, float]:
        """Return metrics of what was said (n, L) and what is true of these rows."""


class ClassifierConfig(TaskConfig):
    """What configs have whose task finds its labels in the data."""

    data_fields: ClassVar[frozenset[str]] = frozenset({"max_length"})

    labels: tuple[str, ...] = ()
    """Names of all labels, in the order of the head's outputs; by default those in data.train."""
    fresh_head: bool = False
    """Make a new head although the base has one."""

    @property
    def problem_type(self) -> ProblemType | None:
        """What the labels are to the model; None: as its base says."""
        return None

    @property
    def purpose(self) -> Purpose:
        head = ClassHead(self.labels, self.problem_type, self.fresh_head)
        return Purpose(self.type, self.auto_class, self.processor, head)
