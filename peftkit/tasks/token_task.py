"""Tasks whose loss is that of tokens: rows without padding where the model can, chunks of logits.

Shapes: B rows, T tokens, n learnt tokens of the batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from peftkit.data.encode import Style
from peftkit.data.pack import IGNORE, Row, collate, labelled_segments, last_answer, rounded_up
from peftkit.events import Listener, ignore
from peftkit.execution.plan import ExecutionPlan
from peftkit.model.modes import adapters_off
from peftkit.tasks.attention import TrainingAttention, training_attention
from peftkit.tasks.base import Reference, Task
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.isolation import check_causal
from peftkit.tasks.length import exact_length
from peftkit.tasks.loss import (
    accepted,
    head_of,
    perplexity,
    token_log_probs,
    token_loss,
    unwrapped,
)
from peftkit.tasks.unpadding import (
    can_unpad,
    faster,
    laid_out,
    layout_in,
    num_positions,
    unpadded,
)


class TokenTask(Task):
    """A task whose loss is that of each token of a text."""

    predicts_tokens: ClassVar[bool] = True
    is_causal: ClassVar[bool] = False
    """Whether what is computed of a token depends on none after it."""
    _attention: TrainingAttention | None = None
    """While documents are in one row: the model's."""

    def build(self, model: nn.Module) -> None:
        super().build(model)
        self._head = head_of(model, self.model_example(unwrapped(model)))
        pads = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        self._pad_id: int = next(int(token) for token in pads if token is not None)

    def model_example(self, model: Any) -> dict[str, Tensor]:
        """Return what a model that is asked a few tokens needs beside them."""
        return {}

    @property
    def paths(self) -> dict[str, str]:
        """Whether logits are made chunk by chunk, and whether rows are padded."""
        loss = "label rows alone, in chunks" if self._head else "label rows, all logits at once"
        if self._attention is None:
            return {"loss": loss, "rows": "padded"}
        rows = "without padding" + ", common beginnings once" * self.is_causal
        return {"attention": self._attention.kernel, "loss": loss, "rows": rows}

    @contextmanager
    def training(self, model: nn.Module, plan: ExecutionPlan | None = None) -> Iterator[None]:
        """Besides, have documents in one row, without padding, where the model can."""
        with ExitStack() as stack:
            attention = stack.enter_context(training_attention(unwrapped(model), plan))
            if attention and can_unpad(model, attention, share=self.is_causal):
                self._attention = attention
            else:
                stack.close()  # of no use to padded rows
            try:
                yield
            finally:
                self._attention = None

    def forget_layout(self) -> None:
        """Have attention take each row as one document again, after a training step."""
        if self._attention is not None:
            self._attention.layout = None

    def num_positions(self, rows: Sequence[Any]) -> int:
        padded = super().num_positions(rows)
        if self._attention is None:
            return padded
        alone = super().num_positions
        lengths = [n for row in rows for n in getattr(row, "lengths", (alone([row]),))]
        return sum(lengths) if self._attention.takes_spans else min(padded, num_positions(lengths))

    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Return rows as a batch: padded, or in one row if that is faster."""
        batch = self.padded(rows)
        if self._attention is None:
            return batch
        if self._attention.takes_spans:
            return unpadded(batch, share=self.is_causal, spans=True)
        return faster(batch, unpadded(batch, share=self.is_causal))

    @abstractmethod
    def padded(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Return rows as a batch, padded on the right.

        It has target_index (n,), places in the flattened tokens; targets (n,), the tokens to be
        said there; and else what `unpadded` takes and `inputs` reads.
        """

    @abstractmethod
    def inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what the model is called with for a padded batch, as far as it takes that."""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        inputs = self.model_inputs(model, batch)
        loss = token_loss(model, self._head, inputs, batch["target_index"], batch["targets"])
        if not loss.requires_grad:  # no backward pass will ask for the layout again
            self.forget_layout()
        return loss[None]

    def model_inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what the model is called with; attention knows the layout of its documents."""
        given: Mapping[str, Any] = laid_out(batch, self._attention)
        if layout_in(batch) is None:
            given = self.inputs(model, batch)
        return accepted(model, {**given, "use_cache": False})

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return how many tokens a batch teaches; it never waits for the GPU."""
        return batch["targets"].numel()

    @torch.no_grad()
    def metrics(
        self, model: nn.Module, rows: Sequence[Any], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return loss (nats per learnt token) and perplexity."""
        found, num_tokens = self.mean_loss(model, rows, on_event)
        return {**found, "perplexity": perplexity(found["loss"]), "num_tokens": num_tokens}

    def _text(self, ids: Sequence[int]) -> str:
        """Return tokens as text, special ones too."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


class AnswerTask(TokenTask):
    """A task of a decoder that learns answers after their prompts.

    Raises:
        DataError: A chat template or a length that cannot be.
    """

    exact_name: ClassVar[str] = "exact_match"
    """What the share of answers is called that equal what is learnt."""

    def build(self, model: nn.Module) -> None:
        super().build(model)
        self.max_length = exact_length(model, self.tokenizer, self.data.max_length)

    @property
    def style(self) -> Style:
        """How generation has to prompt a model that learnt from the rows encoded so far."""
        assert self._style is not None, "no rows have been encoded"
        return self._style

    def padded(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Return a batch, padded on the right (see `peftkit.data.pack.collate`)."""
        return collate(rows, self._pad_id, self.max_length)

    def inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the tokens alone: a causal model needs no mask of padding."""
        return {"input_ids": batch["input_ids"]}

    def spans(self, row: Any) -> list[tuple[str, str]]:
        return labelled_segments(row, self._text, "learnt")

    def answer_text(self, ids: Sequence[int]) -> str:
        """Return tokens that a model made as text."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def last_answer(self, row: Any) -> tuple[list[int], str]:
        """Return what comes before a document's last learnt answer, and the answer's text."""
        return last_answer(self.tokenizer, row)

    def watched(self, row: Any) -> list[Row]:
        """Return the documents of a row that the model may be asked for the last answer of."""
        return [each for each in row.documents if each.labels[0] == IGNORE and each.num_targets]

    def other_reference(self, row: Any) -> str | None:
        """Return what else the answer to a row is compared with, as exact_match."""
        return None


class AnswerConfig(TaskConfig):
    """What configs have whose adapters go on from a prompt."""

    task_type: ClassVar[str] = "CAUSAL_LM"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    command: ClassVar[str] = "peftkit chat {folder}"
    generates: ClassVar[bool] = True
    writes_text: ClassVar[bool] = True


class DocumentTask(AnswerTask):
    """A task whose rows are documents to compare: how likely each answer is decides the loss.

    Raises:
        BaseError: The model is not causal.
    """

    predicts_tokens: ClassVar[bool] = False
    is_causal: ClassVar[bool] = True
    reference: Reference
    """The model before training; by default the base without an adapter."""

    def build(self, model: nn.Module) -> None:
        check_causal(model)
        super().build(model)
        self.reference = Reference(partial(adapters_off, model))

    def compare_with(self, reference: Reference) -> None:
        self.reference = reference

    def positions(self, lengths: Sequence[int], shared: int = 0) -> int:
        """Return how many positions documents take that go through the model at once.

        Args:
            shared: Tokens that several begin with, beyond the first time.
        """
        padded = len(lengths) * rounded_up(max(lengths))
        if self._attention is None:
            return padded
        if self._attention.takes_spans:
            return sum(lengths) - shared
        return min(padded, num_positions(lengths) - shared)

    def padded(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Return documents as a batch, padded on the right; document (n,): whose a token is."""
        batch = super().padded(rows)
        return {**batch, "document": batch["target_index"] // batch["input_ids"].shape[1]}

    def token_log_probs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probability of each answer token (n,), in fp32."""
        inputs = self.model_inputs(model, batch)
        found = token_log_probs(model, self._head, inputs, batch["target_index"], batch["targets"])
        if not found.requires_grad:  # no backward pass will ask again
            self.forget_layout()
        return found

    @abstractmethod
    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor: ...

    def metrics(
        self, model: nn.Module, rows: Sequence[Any], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        return self.mean_loss(model, rows, on_event)[0]
