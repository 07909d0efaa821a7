"""A task's loss of rows without data: what goes into the model, and what is made of its output.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from peftkit.kernels.cross_entropy import rows_of_chunk
from peftkit.model.places import linear_shape, unwrap_adapter
from peftkit.tasks.loss import Head, accepted, find_head, token_log_probs, token_loss
from peftkit.tasks.pooling import Pooled, pooled
from peftkit.tasks.protocol import TaskConfig

TOKEN_CLASSES = (
    *("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"),
    *("AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForSpeechSeq2Seq"),
)
"""Of transformers, whose models say tokens."""
SECONDS = 30
"""Of a sound, where nothing says how long they are."""


def is_of_classes(task: TaskConfig) -> bool:
    """Tell whether a task's model has a head of classes, which is trained whole."""
    return task.auto_class not in (*TOKEN_CLASSES, "AutoModel")


class FewChunks(Head):
    """A head that computes two chunks of its rows: further ones reuse the memory of the first.

    Attributes:
        skipped: Rows that were not computed.
    """

    skipped = 0
    _room: Tensor | None = None

    def losses(self, rows: Tensor, targets: Tensor, *, alike: bool = False) -> Tensor:
        some = 2 * rows_of_chunk(rows, None, self.vocab_size, self.chunk_bytes)
        self.skipped = max(len(rows) - some, 0)
        self._room = torch.empty_like(rows[some:])  # for the gradients that are not made
        if rows.requires_grad:
            rows.register_hook(self._leave)
        found = super().losses(rows[:some], targets[:some], alike=alike)
        return functional.pad(found, (0, self.skipped))

    def _leave(self, gradient: Tensor) -> None:
        self._room = None

    def step_of(self, num_rows: int, dtype: torch.dtype) -> None:
        """Compute loss and gradient of some rows, and nothing else."""
        width = linear_shape(unwrap_adapter(self.module))[0]
        rows = torch.zeros(num_rows, width, dtype=dtype, requires_grad=True)
        super().losses(rows, torch.zeros(num_rows, dtype=torch.long), alike=True).sum().backward()


def loss_of(
    model: Any, task: TaskConfig, dtype: torch.dtype, rows: int, length: int, head: Head | None
) -> Tensor:
    """Return the loss of B rows, each of so many texts of T tokens as the task's rows have.

    All tokens are learnt; of media and text the text alone is there, whose tokens stand for the
    media too.

    Args:
        head: The model's, if its loss is one of tokens.
    """
    rows *= task.texts_per_row
    inputs = accepted(model, _inputs(model, task, dtype, rows, length))
    if is_of_classes(task):
        text = model.config.get_text_config()
        if getattr(text, "pad_token_id", 0) is None:  # a tokenizer would say it
            text.pad_token_id = 0
        loss: Tensor = model(**inputs).logits.float().logsumexp(-1).sum()
        return loss
    if task.auto_class == "AutoModel":
        hidden = model(**inputs).last_hidden_state
        vectors = pooled(hidden, torch.ones(rows, length, dtype=torch.long), Pooled("mean", True))
        return (vectors @ vectors.mT).logsumexp(-1).sum()
    tokens = inputs["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"].numel()
    index, targets = torch.arange(tokens), torch.zeros(tokens, dtype=torch.long)
    if task.type in ("preference", "grpo"):
        return token_log_probs(model, head, inputs, index, targets).sum()
    return token_loss(model, head, inputs, index, targets)


def _inputs(
    model: Any, task: TaskConfig, dtype: torch.dtype, rows: int, length: int
) -> dict[str, Any]:
    config = model.config
    if task.processor == "image_processor":
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.zeros(rows, channels, size, size, dtype=dtype)}
    ids = torch.zeros(rows, length, dtype=torch.long)
    if task.processor in ("audio", "feature_extractor"):
        told = {"decoder_input_ids": ids, "use_cache": False}
        return {**_heard(model, dtype, rows), **(told if config.is_encoder_decoder else {})}
    if not config.is_encoder_decoder:
        return {"input_ids": ids, "use_cache": False}
    half = torch.zeros(rows, min(length, getattr(task, "max_target_length", length))).long()
    return {"input_ids": ids, "decoder_input_ids": half, "use_cache": False}


def _heard(model: Any, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    """Return what is heard of sounds of 30 s: samples, or 100 frames of mel bins a second."""
    if model.main_input_name == "input_values":
        return {"input_values": torch.zeros(rows, SECONDS * 16_000, dtype=dtype)}
    config = model.config
    if pair := getattr(config, "feature_projection_input_dim", None):  # two frames in one
        shape: tuple[int, ...] = (SECONDS * 50, pair)
    elif positions := getattr(config, "max_source_positions", None):  # Whisper's own 30 s
        shape = (config.num_mel_bins, 2 * positions)
    else:
        shape = (SECONDS * 100, getattr(config, "encoder_config", config).num_mel_bins)
    return {"input_features": torch.zeros(rows, *shape, dtype=dtype)}


def counted_head(model: Any, chunk_bytes: int) -> FewChunks | None:
    """Return a model's head as a step without data computes it; None: it has none."""
    module = find_head(model)
    if module is None:
        return None
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return FewChunks(module, 1.0, None if cap is None else float(cap), chunk_bytes)
