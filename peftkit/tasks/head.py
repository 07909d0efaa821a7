"""A model's head as a function of hidden rows, so that its logits can be made chunk by chunk.

What a model does to its logits after the head is known here by the settings of its config, and is
not trusted: the function is compared with the model itself once, and is not used where it differs.

Shapes: C rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from peftkit.execution.plan import plan_of
from peftkit.kernels.cross_entropy import LossChunks, chunked_cross_entropy, chunked_log_probs
from peftkit.model.places import is_linear, linear_shape, unwrap_adapter
from peftkit.tasks.attention import TrainingAttention, training_attention
from peftkit.tasks.loss import accepted, find_head, target_logits, target_rows, unwrapped
from peftkit.tasks.protocol import Task
from peftkit.tasks.unpadding import (
    can_unpad,
    faster,
    laid_out,
    layout_in,
    num_positions,
    unpadded,
)

TOLERANCE = 2e-3
"""Of the largest logit: the same rows in a product of another shape."""


class Head:
    """(C, H) hidden rows to (C, V) logits.

    Attributes:
        module: The output layer, with whatever adapter is on it.
        scale: Logits are multiplied by it (Cohere), or by one over it (Granite).
        cap: Logits are cap * tanh(logits / cap) (Gemma 2).
        chunks: How much of them is there at once.
    """

    def __init__(
        self, module: nn.Module, scale: float, cap: float | None, chunks: LossChunks
    ) -> None:
        self.module, self.scale, self.cap, self.chunks = module, scale, cap, chunks

    def __call__(self, rows: Tensor) -> Tensor:
        # not [0], whose gradient would be a second array of all logits, filled with zeros first
        logits: Tensor = self.module(rows[None]).flatten(0, 1)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    @property
    def vocab_size(self) -> int:
        """V."""
        return linear_shape(unwrap_adapter(self.module))[1]

    @property
    def trainable(self) -> list[Tensor]:
        """Tensors of the head that get gradients."""
        return [p for p in self.module.parameters() if p.requires_grad]


class TokenTask(Task):
    """A task whose loss is that of each token of a text."""

    predicts_tokens: ClassVar[bool] = True
    is_causal: ClassVar[bool] = False
    """Whether what is computed of a token depends on none after it."""
    _head: Head | None
    _attention: TrainingAttention | None = None
    """While documents are in one row: the model's."""

    @property
    def paths(self) -> dict[str, str]:
        """Whether logits are made chunk by chunk, and whether rows are padded."""
        loss = "label rows alone, in chunks" if self._head else "label rows, all logits at once"
        if self._attention is None:
            return {"loss": loss, "rows": "padded"}
        rows = "without padding" + ", common beginnings once" * self.is_causal
        return {"attention": self._attention.kernel, "loss": loss, "rows": rows}

    @contextmanager
    def training(self, model: nn.Module) -> Iterator[None]:
        """Besides, have documents in one row, without padding, where the model can."""
        with ExitStack() as stack:
            bare = unwrapped(model)
            attention = stack.enter_context(training_attention(bare, on_gpu=True))
            if attention and can_unpad(model, attention, share=self.is_causal):
                self._attention = attention
            elif bare.device.type != "cpu":
                stack.close()  # of no use to padded rows
            try:
                yield
            finally:
                self._attention = None

    def forget_layout(self) -> None:
        """Have attention take each row as one document again, after a training step."""
        if self._attention is not None:
            self._attention.layout = ()

    @contextmanager
    def training_with(self, other: TokenTask) -> Iterator[None]:
        """Use the attention of another task on the same model, which is in its `training`."""
        self._attention = other._attention
        try:
            yield
        finally:
            self._attention = None

    def num_positions(self, rows: Sequence[Any]) -> int:
        """Return how many positions rows take that go through the model at once."""
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

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross entropy summed over the learnt tokens of a batch, in fp32."""
        inputs = self.model_inputs(model, batch)
        loss = token_loss(model, self._head, inputs, batch["target_index"], batch["targets"])
        if not loss.requires_grad and self._attention:  # there is no backward pass that asks again
            self._attention.layout = ()
        return loss

    def model_inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what the model is called with; attention knows the layout of its documents."""
        given: Mapping[str, Any] = laid_out(batch, self._attention)
        if not layout_in(batch):
            given = self.inputs(model, batch)
        return accepted(model, {**given, "use_cache": False})

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return how many tokens a batch teaches; it never waits for the GPU."""
        return batch["targets"].numel()

    def joined(
        self, parts: Sequence[Sequence[Any]]
    ) -> tuple[dict[str, Tensor], list[int], list[int]]:
        """Return the rows of several adapters as one batch, each adapter's in one piece.

        Returns:
            The batch; of each part how many targets it has, and how many tokens in one row.
        """
        batch = self.padded([row for part in parts for row in part])
        sizes = torch.tensor([len(part) for part in parts])
        part_of = torch.repeat_interleave(torch.arange(len(parts)), sizes)  # (B,)
        width = batch.get("decoder_input_ids", batch["input_ids"]).shape[1]
        targets = part_of[batch["target_index"] // width].bincount(minlength=len(parts))
        tokens = torch.zeros(len(parts))
        if self._attention is not None and self.is_causal:
            spans = self._attention.takes_spans
            in_one_row = unpadded(batch, share=True, spans=spans, owners=part_of)
            tokens = in_one_row.pop("owner_tokens")
            batch = in_one_row if spans else faster(batch, in_one_row)
        return batch, targets.tolist(), tokens.long().tolist()

    def loss_sums(
        self, model: nn.Module, batch: Mapping[str, Tensor], num_targets: Sequence[int]
    ) -> list[Tensor]:
        """Return the loss of each part of a batch of `joined`, summed over its targets, in fp32."""
        inputs = self.model_inputs(model, batch)
        return token_losses(
            model, self._head, inputs, batch["target_index"], batch["targets"], num_targets
        )


def head_of(model: nn.Module) -> Head | None:
    """Return a model's head, or None where it cannot be had apart from the model.

    Runs the model on a few tokens, without gradients, in the mode it is in.
    """
    whole: Any = unwrapped(model)
    module = find_head(whole)
    if module is None or not is_linear(unwrap_adapter(module)):
        return None
    config = whole.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    head = Head(module, scale, None if cap is None else float(cap), plan_of(whole).loss_chunks)
    return head if _is_the_models_own(whole, head) else None


def token_loss(
    model: nn.Module,
    head: Head | None,
    inputs: Mapping[str, Any],
    target_index: Tensor,
    targets: Tensor,
) -> Tensor:
    """Return the sum of -log p(target), in fp32; chunk by chunk where its logits are large.

    Args:
        head: The model's own, or None: all logits at once.
        inputs, target_index, targets: As in `peftkit.tasks.loss.cross_entropy_sum`.
    """
    (loss,) = token_losses(model, head, inputs, target_index, targets, [len(targets)])
    return loss


def token_losses(
    model: nn.Module,
    head: Head | None,
    inputs: Mapping[str, Any],
    target_index: Tensor,
    targets: Tensor,
    sizes: Sequence[int],
) -> list[Tensor]:
    """Return what `token_loss` does, of each of several pieces of the targets."""
    if head is None:
        logits = target_logits(model, inputs, target_index).float()
        pairs = zip(logits.split(list(sizes)), targets.split(list(sizes)), strict=True)
        return [functional.cross_entropy(some, those, reduction="sum") for some, those in pairs]
    rows = target_rows(model, inputs, target_index)
    sums = chunked_cross_entropy(
        rows,
        targets,
        head,
        trainable=head.trainable,
        vocab_size=head.vocab_size,
        sizes=sizes,
        chunks=head.chunks,
    )
    return list(sums)


def token_log_probs(
    model: nn.Module,
    head: Head | None,
    inputs: Mapping[str, Any],
    target_index: Tensor,
    targets: Tensor,
) -> Tensor:
    """Return log p(target) of each target (n,), in fp32; see `token_loss`."""
    if head is None:
        logits = target_logits(model, inputs, target_index)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return -functional.cross_entropy(wide, targets, reduction="none")
    return chunked_log_probs(
        target_rows(model, inputs, target_index),
        targets,
        head,
        trainable=head.trainable,
        vocab_size=head.vocab_size,
        chunks=head.chunks,
    )


@torch.no_grad()
def _is_the_models_own(model: Any, head: Head) -> bool:
    seen: list[Tensor] = []
    hook = head.module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ids = torch.arange(3, 11, device=model.get_input_embeddings().weight.device)[None]
    try:
        inputs = {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
        logits = model(**accepted(model, inputs)).logits
    finally:
        hook.remove()
    if len(seen) != 1 or seen[0].shape[:-1] != ids.shape:
        return False
    ours = head(seen[0][0])
    error = (ours.float() - logits[0].float()).abs().max()
    # written so that NaN is no success
    return ours.shape == logits[0].shape and bool(error <= TOLERANCE * logits.float().abs().max())
