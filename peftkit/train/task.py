"""What the training loop asks of a task; peftkit.tasks has those that there are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn


class Task(Protocol):
    """How rows become batches, and batches a loss.

    A row may say its `source` ("train.jsonl:7"), its `input_ids` and, where an encoder reads these,
    its `num_decoder_tokens`. Several rows have together as many targets as they have one by one,
    and a summed loss that is the sum of theirs.
    """

    @property
    def predicts_tokens(self) -> bool:
        """Whether the loss is that of each token of a text: its exp is then a perplexity."""

    @property
    def paths(self) -> Mapping[str, str]:
        """Chosen execution paths, for the run header."""

    def training(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which the model is trained, with its fastest attention."""

    @abstractmethod
    def collate(self, rows: Sequence[Any]) -> Mapping[str, Tensor]:
        """Return rows as a batch, on the CPU."""

    def num_positions(self, rows: Sequence[Any]) -> int:
        """Return how many tokens the model reads for these rows collated, padding included."""

    @abstractmethod
    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number that the summed loss is divided by; must not wait for the GPU."""

    @abstractmethod
    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss summed over the targets of a batch, in fp32."""
