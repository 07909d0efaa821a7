"""Tinker's datums as rows of a task: common beginnings once, no padding, in batches that fit.

Shapes: N tokens of a datum, K targets of each; n tokens of all rows of a batch, H hidden size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.data.pack import padded, padded_rows
from peftkit.execution.plan import ExecutionPlan
from peftkit.forward.attention import TrainingAttention, training_attention
from peftkit.forward.loss import Head, target_logits, target_rows, unwrapped
from peftkit.forward.probes import can_unpad
from peftkit.inference.engine import context_length
from peftkit.kernels.cross_entropy import ChunkedValues, parts_of, rows_of_chunk
from peftkit.serve.requests import RequestError
from peftkit.serve.tinker.losses import TARGETS, Loss, Settings
from peftkit.serve.tinker.wire import numbers_of, tensor_of
from peftkit.serve.tokens import unknown_token, vocabulary
from peftkit.tasks.batches import OnDevice
from peftkit.tasks.tokens import TokenTask

MAX_DATUMS, MAX_TARGETS = 4096, 128
"""Of a request, and K."""
MAX_BYTES = 1 << 28
"""Of a request's tensors: sparse ones are larger here than they are sent."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One row.

    Attributes:
        inputs: Of the loss, each (N,) or (N, K); `target_tokens` follow the tokens.
        source: Its name in errors.
    """

    input_ids: list[int]
    inputs: Mapping[str, Tensor]
    source: str = ""

    @classmethod
    def of(cls, ids: list[int]) -> Datum:
        """Return a row whose targets are its own tokens."""
        return cls(ids, {TARGETS: torch.tensor(ids), "weights": torch.ones(len(ids))})

    @property
    def num_bytes(self) -> int:
        """Memory of its tensors."""
        return sum(tensor.nbytes for tensor in self.inputs.values())

    @property
    def num_targets(self) -> int:
        """K; 0: one target for each token, without a dimension."""
        targets = self.inputs[TARGETS]
        return targets.shape[1] if targets.dim() == 2 else 0


def datums_of(messages: Sequence[Any], loss: Loss, model: Any) -> list[Datum]:
    """Return the datums of a request.

    Raises:
        RequestError: There are too many or none; one has images, too many tokens, tokens that the
            model does not have, or inputs that the loss cannot use.
    """
    if not 0 < len(messages) <= MAX_DATUMS:
        raise RequestError(
            f"the request has {len(messages):,} datums.", fix=f"Send 1 to {MAX_DATUMS:,} at once."
        )
    rows: list[Datum] = []
    size = 0
    for number, message in enumerate(messages):
        rows.append(_datum_of(message, loss, model, f"datum {number}"))
        size += rows[-1].num_bytes
        if size > MAX_BYTES:
            fix = "Send fewer datums, or fewer targets of each token."
            raise RequestError(f"the datums take more than {MAX_BYTES:,} bytes.", fix=fix)
    return rows


def _datum_of(message: Any, loss: Loss, model: Any, where: str) -> Datum:
    if any(not chunk.HasField("text") for chunk in message.chunks):
        raise RequestError(
            f"{where} has a chunk that is no encoded text.", fix="Train on tokens alone here."
        )
    parts = [numbers_of(chunk.text.tokens, torch.int32, where) for chunk in message.chunks]
    ids = torch.cat(parts).long() if parts else torch.empty(0, dtype=torch.long)
    inputs: dict[str, Tensor] = {}
    for name, tensor in message.inputs.items():
        value = tensor_of(tensor, name)
        inputs[name] = value.long() if name == TARGETS else value.float()
    if TARGETS in inputs:
        inputs.setdefault("weights", torch.ones(inputs[TARGETS].shape))
    loss.check(inputs, where)
    targets = inputs[TARGETS]
    if len(ids) != len(targets) or not len(ids) or targets.numel() > len(ids) * MAX_TARGETS:
        raise RequestError(
            f"{where}: {TARGETS} are not those of its tokens.",
            found=f"There are {len(ids):,} tokens, and targets of the shape {list(targets.shape)}.",
            fix=f"Give each token one target, or up to {MAX_TARGETS}.",
        )
    if targets.dim() == 2 and loss.needs:
        raise RequestError(
            f"{where}: this loss takes one target for each token.",
            fix='Several are for "cross_entropy".',
        )
    check_tokens(torch.cat([ids, targets.flatten()]), model, where)
    limit = context_length(model)
    if limit is not None and len(ids) > limit:
        raise RequestError(
            f"{where} has {len(ids):,} tokens.", found=f"The model reads at most {limit:,}."
        )
    return Datum(ids.tolist(), inputs, where)


def check_tokens(ids: Tensor, model: Any, where: str) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        RequestError: There is one.
    """
    size = vocabulary(model)
    wrong = ids[(ids < 0) | (ids >= size)]
    if len(wrong):
        raise unknown_token(where, int(wrong[0]), size)


class DatumTask(TokenTask):
    """Datums of a model that is trained for a moment at a time.

    What is found out about the model is kept, so that training begins at once the next time.
    """

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        # a task of files has more: these rows come ready, from requests
        self.tokenizer = tokenizer
        self._limit = context_length(unwrapped(model))
        self._known: TrainingAttention | None = None
        self._unpads: bool | None = None
        self.build(model)

    @property
    def head(self) -> Head | None:
        """The base's head, without an adapter."""
        return self._head

    @contextmanager
    def training(self, model: nn.Module, plan: ExecutionPlan | None = None) -> Iterator[None]:
        how: dict[str, Any] = {"documents": self._unpads is not False, "previous": self._known}
        with training_attention(model, plan, **how) as self._known:
            if self._unpads is None:
                known = self._known
                self._unpads = known is not None and can_unpad(model, known, share=True)
            self._attention = self._known if self._unpads else None
            try:
                yield
            finally:
                self._attention = None

    def collate(self, rows: Sequence[Datum]) -> dict[str, Tensor]:
        """Return a batch: `target_index` has the place of each token."""
        width = padded(*rows)
        if self._limit is not None:
            width = max(min(width, self._limit), max(len(row.input_ids) for row in rows))
        ids, mask = padded_rows([row.input_ids for row in rows], self._pad_id, width)
        index = mask.flatten().nonzero().flatten()
        batch = {"input_ids": ids, "attention_mask": mask, "target_index": index}
        return self.without_padding(batch)

    def losses(
        self,
        model: nn.Module,
        head: Head | None,
        rows: Sequence[Datum],
        loss: Loss,
        settings: Settings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of losses; log-probabilities and losses of all targets, without gradients.

        Args:
            head: The model's, with its adapter; None: it cannot be had apart.
            rows: Of one K; the last two are of the shape (n,) or (n, K).
        """
        device = unwrapped(model).device
        inputs = {
            name: torch.cat([row.inputs[name] for row in rows]).to(device)
            for name in rows[0].inputs
        }
        lengths = torch.tensor([len(row.input_ids) for row in rows])
        inputs["datum"] = torch.arange(len(rows)).repeat_interleave(lengths).to(device)
        batch = OnDevice(self.collate(rows), device)
        targets, index = inputs[TARGETS], batch["target_index"]
        with self.model_inputs(model, batch) as read:
            if head is None:
                logits = target_logits(model, read, index)
                wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
                log_probs = wide.gather(1, targets.view(len(targets), -1)).view(targets.shape)
            else:
                hidden = target_rows(model, read, index)
                if targets.dim() == 2:
                    values, log_probs = several_targets(head, hidden, targets, inputs["weights"])
                    return values.sum(), log_probs, -log_probs * inputs["weights"]
                log_probs = _log_probs(head, hidden, targets, loss.is_learnt(inputs))
        losses = loss.of_tokens(log_probs, inputs, settings)
        return losses.sum(), log_probs.detach(), losses.detach()


def _log_probs(head: Head, hidden: Tensor, targets: Tensor, is_learnt: Tensor) -> Tensor:
    """Return log p(target) (n,); a gradient of what is not learnt is not computed."""
    if not torch.is_grad_enabled() or bool(is_learnt.all()):
        return -head.losses(hidden, targets)
    learnt, others = is_learnt.nonzero().flatten(), (~is_learnt).nonzero().flatten()
    with torch.no_grad():
        rest = -head.losses(hidden[others], targets[others])
    out = torch.zeros(len(targets), dtype=rest.dtype, device=rest.device)
    out = out.index_copy(0, others, rest)
    return out.index_copy(0, learnt, -head.losses(hidden[learnt], targets[learnt]))


def several_targets(
    head: Head, hidden: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return -sum of w log p over the targets of each token (n,), and log p (n, K).

    Only the first has a gradient. Each token's logits are made once.

    Args:
        hidden: (n, H).
        targets, weights: (n, K).
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    log_probs = torch.empty(targets.shape, dtype=dtype, device=hidden.device)

    def measure(logits: Tensor, part: slice) -> Tensor:
        values = [
            _of_part(*each)
            for each in parts_of(logits, targets[part], weights[part], log_probs[part])
        ]
        return torch.cat(values)

    trainable = [p for p in head.module.parameters() if p.requires_grad]
    rows = rows_of_chunk(hidden, None, head.vocab_size, head.chunk_bytes)
    values: Tensor = ChunkedValues.apply(hidden, head, measure, rows, True, *trainable)
    return values, log_probs


@torch.no_grad()
def _of_part(logits: Tensor, targets: Tensor, weights: Tensor, log_probs: Tensor) -> Tensor:
    """Return values (C,); logits (C, V) become the gradient of their sum, `log_probs` is filled."""
    wide = logits.to(log_probs.dtype).log_softmax(-1)
    log_probs.copy_(wide.gather(1, targets))
    gradient = wide.exp_().mul_(weights.sum(1, keepdim=True))
    logits.copy_(gradient.scatter_add_(1, targets, -weights))
    return -(weights * log_probs).sum(1)
