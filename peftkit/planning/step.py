"""One training step of a model without data: its memory by category, and its FLOPs.

The model is built with a few blocks, packed weights and the method. Then a forward and a backward
pass of the training code run under a `Counter`.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from peftkit.adapter import Adapter, attach, prepared_for_training
from peftkit.base.heads import ClassHead
from peftkit.base.skeleton import on_meta, packed_skeleton, untraced
from peftkit.execution.plan import Activations, ExecutionPlan
from peftkit.forward.attention import training_attention
from peftkit.forward.blocks import Blocks, input_bytes
from peftkit.forward.loss import Head, accepted, find_head, token_log_probs, token_loss
from peftkit.kernels.cross_entropy import ALIGNMENT, rows_of_chunk
from peftkit.model.modes import begin_training
from peftkit.model.places import head_modules, linear_shape, unwrap_adapter
from peftkit.planning.counter import GPU_ROUNDING, Counter
from peftkit.quant.layers import keep_copies
from peftkit.recipe import Recipe
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.retrieval.embedding import Pooled, pooled

TOKEN_CLASSES = (
    *("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"),
    *("AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForSpeechSeq2Seq"),
)
"""Classes of transformers whose models predict tokens."""
SECONDS = 30
"""Length of an audio clip, unless the model's config has one."""
IMAGE_SIDE = 224
"""Pixels of an image's sides where a config has no size."""


def has_class_head(task: TaskConfig) -> bool:
    """Return whether a task's model has a classification head, which is trained fully."""
    return task.auto_class not in (*TOKEN_CLASSES, "AutoModel")


class FewChunks(Head):
    """A head that computes two chunks of its rows: further chunks reuse the first one's memory.

    Attributes:
        skipped: Number of rows that were not computed.
    """

    skipped = 0
    _room: Tensor | None = None

    def losses(self, rows: Tensor, targets: Tensor, *, equal_weights: bool = False) -> Tensor:
        size = 2 * rows_of_chunk(rows, None, self.vocab_size, self.chunk_bytes)
        self.skipped = max(len(rows) - size, 0)
        self._room = torch.empty_like(rows[size:])  # for the gradients that are not computed
        if rows.requires_grad:
            rows.register_hook(lambda _: setattr(self, "_room", None))
        losses = super().losses(rows[:size], targets[:size], equal_weights=equal_weights)
        return functional.pad(losses, (0, self.skipped))

    def step_of(self, num_rows: int, dtype: torch.dtype) -> None:
        """Compute only the loss and gradient of some rows."""
        width = linear_shape(unwrap_adapter(self.module))[0]
        rows = torch.zeros(num_rows, width, dtype=dtype, requires_grad=True)
        targets = torch.zeros(num_rows, dtype=torch.long)
        super().losses(rows, targets, equal_weights=True).sum().backward()


def loss_of(
    model: Any, task: TaskConfig, dtype: torch.dtype, rows: int, length: int, head: Head | None
) -> Tensor:
    """Return the loss of B rows, each of `texts_per_row` texts of T tokens.

    All tokens are targets. For media tasks only text is built; its tokens represent the media too.

    Args:
        head: The model's output layer, if its loss is over tokens.
    """
    rows *= task.texts_per_row
    inputs = accepted(model, _inputs(model, task, dtype, rows, length))
    if has_class_head(task):
        text = model.config.get_text_config()
        if getattr(text, "pad_token_id", 0) is None:  # set by the tokenizer in a run
            text.pad_token_id = 0
        loss: Tensor = model(**inputs).logits.float().logsumexp(-1).sum()
        return loss
    if task.auto_class == "AutoModel":
        hidden = model(**inputs).last_hidden_state
        vectors = pooled(hidden, torch.ones(rows, length, dtype=torch.long), Pooled("mean", True))
        return (vectors @ vectors.mT).logsumexp(-1).sum()
    tokens = inputs["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"].numel()
    index, targets = torch.arange(tokens), torch.zeros(tokens, dtype=torch.long)
    if task.scores_documents:
        return token_log_probs(model, head, inputs, index, targets).sum()
    return token_loss(model, head, inputs, index, targets)


def _inputs(
    model: Any, task: TaskConfig, dtype: torch.dtype, rows: int, length: int
) -> dict[str, object]:
    config = model.config
    if task.processor == "image_processor":
        config = getattr(config, "vision_config", config)
        size = getattr(config, "image_size", IMAGE_SIDE)
        size = size if isinstance(size, int) else size[0]
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.zeros(rows, channels, size, size, dtype=dtype)}
    ids = torch.zeros(rows, length, dtype=torch.long)
    if task.processor in ("audio", "feature_extractor"):
        decoder = {"decoder_input_ids": ids, "use_cache": False}
        return {**_audio(model, dtype, rows), **(decoder if config.is_encoder_decoder else {})}
    if not config.is_encoder_decoder:
        return {"input_ids": ids, "use_cache": False}
    half = torch.zeros(rows, min(length, getattr(task, "max_target_length", length))).long()
    return {"input_ids": ids, "decoder_input_ids": half, "use_cache": False}


def _audio(model: Any, dtype: torch.dtype, rows: int) -> dict[str, object]:
    """Return the input of SECONDS of audio: samples, or 100 frames of mel bins per second."""
    if model.main_input_name == "input_values":
        return {"input_values": torch.zeros(rows, SECONDS * 16_000, dtype=dtype)}
    config = model.config
    if pair := getattr(config, "feature_projection_input_dim", None):  # two frames in one
        shape: tuple[int, ...] = (SECONDS * 50, pair)
    elif positions := getattr(config, "max_source_positions", None):  # Whisper: 30 s
        shape = (config.num_mel_bins, 2 * positions)
    else:
        shape = (SECONDS * 100, getattr(config, "encoder_config", config).num_mel_bins)
    return {"input_features": torch.zeros(rows, *shape, dtype=dtype)}


def counted_head(model: Any, chunk_bytes: int) -> FewChunks | None:
    """Return the head of a model for a count; None if it has none."""
    module = find_head(model)
    if module is None:
        return None
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return FewChunks(module, 1.0, None if cap is None else float(cap), chunk_bytes)


@dataclass(frozen=True, slots=True)
class StepCount:
    """The memory and the FLOPs of one step.

    Attributes:
        peak: Bytes at the peak by category: weights, adapters, gradients, activations.
        flops: FLOPs of the forward and the backward pass.
        block_input: Bytes of the hidden states that enter one block.
    """

    peak: Mapping[str, int]
    flops: int
    block_input: int

    @property
    def without_weights(self) -> int:
        """Bytes that depend on the rows: activations and gradients."""
        return self.peak.get("activations", 0) + self.peak.get("gradients", 0)


class DatalessStep:
    """A model without data whose training steps are counted.

    Args:
        config: The model's config, with the number of blocks to build.
        plan: The execution plan of the step, on this machine or another.
        dtype: The compute dtype.
        keeps_copies: Whether dequantised copies of packed weights are kept.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: Any,
        plan: ExecutionPlan,
        dtype: torch.dtype,
        *,
        keeps_copies: bool = False,
    ) -> None:
        self.task, self.plan, self.dtype = recipe.task, plan, dtype
        self.counter = Counter(GPU_ROUNDING if plan.on_gpu else 1)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._counting():
            self.model = _materialised(packed_model(recipe, config, dtype))
            if keeps_copies:
                keep_copies(self.model, sys.maxsize)
            with self.counter.during("adapters"):
                with_method(self.model, recipe)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        begin_training(self.model)
        self.num_blocks = len(Blocks(self.model).blocks)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        with warnings.catch_warnings(), untraced(), self._mode, self.counter:
            warnings.simplefilter("ignore")
            yield

    def count(
        self, rows: int, length: int, activations: Activations, *, tiles: bool = True
    ) -> StepCount:
        """Count a step of B rows of T target tokens.

        Args:
            tiles: Whether long rows are computed in tiles, as a run does if memory requires it.
        """
        plan, blocks = self.plan, Blocks(self.model, self.plan)
        inputs = [0]

        def enter(block: nn.Module, args: tuple[object, ...], more: dict[str, object]) -> None:
            inputs.append(input_bytes(args, more))

        hooks = [b.register_forward_pre_hook(enter, with_kwargs=True) for b in blocks.blocks]
        hooks += [
            p.register_post_accumulate_grad_hook(lambda p: self._is_gradient(p.grad))
            for p in self.trained
        ]
        try:
            blocks.set_activations(activations, tiles=tiles)
            with ExitStack() as stack:
                stack.enter_context(self._counting())
                with self.counter.during("weights"):  # fused modules may rearrange frozen weights
                    stack.enter_context(prepared_for_training(self.model, plan))
                stack.enter_context(training_attention(self.model, plan, documents=False))
                self.counter.restart()
                self._step(rows, length)
                peak, flops = dict(self.counter.at_peak), self.counter.flops
        finally:
            for hook in hooks:
                hook.remove()
            blocks.restore()
            for parameter in self.trained:
                parameter.grad = None
        return StepCount(peak, flops, max(inputs))

    def _step(self, rows: int, length: int) -> None:
        for parameter in self.trained:
            parameter.grad = None
        with self.counter.during("activations"):
            task = self.task
            classifies = has_class_head(task)
            head = None if classifies else counted_head(self.model, self.plan.chunk_bytes)
            loss_of(self.model, task, self.dtype, rows, length, head).backward()
        if head is not None and head.skipped:
            self.counter.flops += round(head.skipped * self._flops_of_a_row(head))

    def _flops_of_a_row(self, head: FewChunks) -> float:
        """Return the FLOPs of a row's loss and gradient in the head."""
        before = self.counter.flops
        head.step_of(ALIGNMENT, self.dtype)
        flops, self.counter.flops = self.counter.flops - before, before
        return flops / ALIGNMENT

    def _is_gradient(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.counter.move(gradient, "gradients")


def skeleton_of(recipe: Recipe, config: object, dtype: torch.dtype) -> Any:
    """Build the bare model on the meta device, its weights tied and frozen."""
    model: Any = on_meta(config, recipe.task.plain_purpose, dtype)
    model.tie_weights()
    return model.requires_grad_(False)


def with_method(model: nn.Module, recipe: Recipe) -> Adapter:
    """Attach the method to a model; a classification head is trained fully."""
    head = head_modules(model) if has_class_head(recipe.task) else ()
    fully = tuple(dict.fromkeys((*recipe.method.train_fully, *head)))
    return attach(model, recipe.method.model_copy(update={"train_fully": fully}), fresh=False)


def packed_model(recipe: Recipe, config: object, dtype: torch.dtype) -> Any:
    """Build the packed model without data.

    Call it within FakeTensorMode and a Counter, since some packed layers run once.
    """
    purpose = recipe.task.plain_purpose
    if has_class_head(recipe.task):
        purpose = replace(purpose, head=ClassHead((), None))
    model: Any = packed_skeleton(config, recipe.base, purpose, dtype, counted=True)
    return model.requires_grad_(False)


def _materialised(model: nn.Module) -> Any:
    """Replace a model's meta tensors by tensors of the active FakeTensorMode, with their ties."""
    new: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and tensor.device.type == "meta":
                if id(tensor) not in new:
                    empty = torch.empty_like(tensor, device="cpu")
                    new[id(tensor)] = nn.Parameter(empty, requires_grad=False)
                module._parameters[name] = new[id(tensor)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    return model
