"""Tinker's datums as rows of a task: shared prefixes, padding-free batches.

Shapes: N tokens of a datum, K targets per token; n tokens of a batch, H hidden size, V vocabulary.
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
from peftkit.forward.row_lengths import context_length
from peftkit.kernels.cross_entropy import ChunkedValues, parts_of, rows_of_chunk
from peftkit.tasks.batches import OnDevice
from peftkit.tasks.tokens import TokenTask
from peftkit_server.limits import DEFAULTS
from peftkit_server.refusals import RequestError
from peftkit_server.tinker.losses import TARGETS, Loss, Settings
from peftkit_server.tinker.wire import num_cells, numbers_of, tensor_of
from peftkit_server.tokens import unknown_token, vocabulary

MAX_DATUMS, MAX_TARGETS = 4096, 128
"""Most datums of a request, and most targets per token, K."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One row.

    Attributes:
        inputs: Inputs of the loss, each (N,) or (N, K); `target_tokens` are shifted already.
        source: Name of the row in errors.
    """

    input_ids: list[int]
    inputs: Mapping[str, Tensor]
    source: str = ""

    @classmethod
    def of(cls, ids: list[int]) -> Datum:
        """Return a row whose targets equal its tokens."""
        return cls(ids, {TARGETS: torch.tensor(ids), "weights": torch.ones(len(ids))})

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.inputs.values())

    @property
    def num_targets(self) -> int:
        """K; 0: the targets are one-dimensional."""
        targets = self.inputs[TARGETS]
        return targets.shape[1] if targets.dim() == 2 else 0


def datums_of(
    messages: Sequence[Any], loss: Loss, model: nn.Module, max_bytes: int = DEFAULTS.tensor_bytes
) -> list[Datum]:
    """Return the validated datums of a request.

    Args:
        max_bytes: Most bytes of their tensors, after sparse tensors are made dense.

    Raises:
        RequestError: There are no datums or too many; or a datum has images, too many tokens,
            tokens outside the vocabulary, or invalid loss inputs.
    """
    if not 0 < len(messages) <= MAX_DATUMS:
        raise RequestError(
            f"the request has {len(messages):,} datums.", fix=f"Send 1 to {MAX_DATUMS:,}."
        )
    size = 0
    for number, message in enumerate(messages):  # all of them, before any tensor is made
        loss.check_names(message.inputs, f"datum {number}")
        size += sum(_num_bytes(name, tensor) for name, tensor in message.inputs.items())
        if size > max_bytes:
            fix = "Send fewer datums, or fewer targets per token."
            raise RequestError(f"the datums take more than {max_bytes:,} bytes.", fix=fix)
    return [_datum_of(each, loss, model, f"datum {n}") for n, each in enumerate(messages)]


def _num_bytes(name: str, message: Any) -> int:
    """Return the bytes of an input's tensor, with the default weights of targets."""
    item_size = torch.int64.itemsize + torch.float32.itemsize if name == TARGETS else 4
    return num_cells(message) * item_size


def _datum_of(message: Any, loss: Loss, model: nn.Module, where: str) -> Datum:
    if any(not chunk.HasField("text") for chunk in message.chunks):
        raise RequestError(
            f"{where} has a chunk that is not encoded text.", fix="Send text tokens only."
        )
    parts = [numbers_of(chunk.text.tokens, torch.int32, where) for chunk in message.chunks]
    ids = torch.cat(parts).long() if parts else torch.empty(0, dtype=torch.long)
    inputs: dict[str, Tensor] = {}
    for name, tensor in message.inputs.items():
        value = tensor_of(tensor, name)
        inputs[name] = value.long() if name == TARGETS else value.float()
    inputs.setdefault("weights", torch.ones(inputs[TARGETS].shape))
    loss.check(inputs, where)
    targets = inputs[TARGETS]
    if len(ids) != len(targets) or not len(ids) or targets.numel() > len(ids) * MAX_TARGETS:
        raise RequestError(
            f"{where}: {TARGETS} do not match the tokens.",
            found=f"There are {len(ids):,} tokens, and targets of the shape {list(targets.shape)}.",
            fix=f"Send one target per token, or up to {MAX_TARGETS}.",
        )
    if targets.dim() == 2 and loss.needs:
        raise RequestError(
            f"{where}: this loss takes one target per token.",
            fix='Only "cross_entropy" takes several.',
        )
    check_tokens(torch.cat([ids, targets.flatten()]), model, where)
    limit = context_length(model.config)
    if limit is not None and len(ids) > limit:
        raise RequestError(
            f"{where} has {len(ids):,} tokens.", found=f"The model's context is {limit:,} tokens."
        )
    return Datum(ids.tolist(), inputs, where)


def check_tokens(ids: Tensor, model: object, where: str) -> None:
    """Raise if a token is not in the model's vocabulary.

    Raises:
        RequestError: A token is outside the vocabulary; the error names it.
    """
    size = vocabulary(model)
    unknown = ids[(ids < 0) | (ids >= size)]
    if len(unknown):
        raise unknown_token(where, int(unknown[0]), size)


class DatumTask(TokenTask):
    """Task of datums, for models that train for one request at a time.

    It probes the model's attention once, and reuses the result in later `training` contexts.
    """

    def __init__(self, model: nn.Module, tokenizer: object) -> None:
        # without TokenTask's data settings: requests contain encoded rows
        self.tokenizer = tokenizer
        self._limit = context_length(unwrapped(model).config)
        self._probed_attention: TrainingAttention | None = None
        self._unpads: bool | None = None
        self.build(model)

    @contextmanager
    def training(self, model: nn.Module, plan: ExecutionPlan | None = None) -> Iterator[None]:
        if self._unpads is None:
            with training_attention(model, plan) as self._probed_attention:
                assert self._probed_attention is not None
                self._unpads = can_unpad(model, self._probed_attention, share=True)
        previous = self._probed_attention
        with training_attention(
            model, plan, documents=self._unpads, previous=previous
        ) as attention:
            self.layout.attention = attention if self._unpads else None
            if self._unpads and previous is not None and previous.mixers is not None:
                previous.mixers.install()
            try:
                yield
            finally:
                self.layout.attention = None

    def collate(self, rows: Sequence[Datum]) -> dict[str, Tensor]:
        """Return a batch; its `target_index` holds the position of each token."""
        width = padded(*rows)
        if self._limit is not None:
            width = max(min(width, self._limit), max(len(row.input_ids) for row in rows))
        ids, mask = padded_rows([row.input_ids for row in rows], self.pad_id, width)
        index = mask.flatten().nonzero().flatten()
        batch = {"input_ids": ids, "attention_mask": mask, "target_index": index}
        return self.layout.unpadded(batch)

    def losses(
        self,
        model: nn.Module,
        head: Head | None,
        rows: Sequence[Datum],
        loss: Loss,
        settings: Settings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of losses, and the log-probabilities and losses of all targets.

        The last two have the shape (n,) or (n, K), and no gradient.

        Args:
            head: The model's head with its adapter; None: the head is not separable.
            rows: Rows with the same K.
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
        with self.model_inputs(model, batch) as model_inputs:
            if head is None:
                logits = target_logits(model, model_inputs, index)
                wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
                log_probs = wide.gather(1, targets.view(len(targets), -1)).view(targets.shape)
            else:
                hidden = target_rows(model, model_inputs, index)
                if targets.dim() == 2:
                    values, log_probs = several_targets(head, hidden, targets, inputs["weights"])
                    return values.sum(), log_probs, -log_probs * inputs["weights"]
                log_probs = _log_probs(head, hidden, targets, loss.is_learnt(inputs))
        losses = loss.of_tokens(log_probs, inputs, settings)
        return losses.sum(), log_probs.detach(), losses.detach()


def _log_probs(head: Head, hidden: Tensor, targets: Tensor, has_gradient: Tensor) -> Tensor:
    """Return log p(target) (n,); only targets in `has_gradient` (n,) have a gradient."""
    if not torch.is_grad_enabled() or bool(has_gradient.all()):
        return -head.losses(hidden, targets)
    trained, others = has_gradient.nonzero().flatten(), (~has_gradient).nonzero().flatten()
    with torch.no_grad():
        rest = -head.losses(hidden[others], targets[others])
    out = torch.zeros(len(targets), dtype=rest.dtype, device=rest.device)
    out = out.index_copy(0, others, rest)
    return out.index_copy(0, trained, -head.losses(hidden[trained], targets[trained]))


def several_targets(
    head: Head, hidden: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return -sum of w log p over the targets of each token (n,), and log p (n, K).

    Only the first has a gradient. The logits of a token are computed once for all its targets.

    Args:
        hidden: (n, H).
        targets, weights: (n, K).
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    log_probs = torch.empty(targets.shape, dtype=dtype, device=hidden.device)

    def measure(logits: Tensor, part: slice) -> Tensor:
        values = [
            _values_of_chunk(*chunk)
            for chunk in parts_of(logits, targets[part], weights[part], log_probs[part])
        ]
        return torch.cat(values)

    trainable = [p for p in head.module.parameters() if p.requires_grad]
    rows = rows_of_chunk(hidden, None, head.vocab_size, head.chunk_bytes)
    values: Tensor = ChunkedValues.apply(hidden, head, measure, rows, True, *trainable)
    return values, log_probs


@torch.no_grad()
def _values_of_chunk(logits: Tensor, targets: Tensor, weights: Tensor, log_probs: Tensor) -> Tensor:
    """Return values (C,); fill `log_probs`; replace logits (C, V) by the gradient of the sum."""
    wide = logits.to(log_probs.dtype).log_softmax(-1)
    log_probs.copy_(wide.gather(1, targets))
    gradient = wide.exp_().mul_(weights.sum(1, keepdim=True))
    logits.copy_(gradient.scatter_add_(1, targets, -weights))
    return -(weights * log_probs).sum(1)
