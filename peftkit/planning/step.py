"""One training step of a model without data: its memory by category, its FLOPs.

The model is built with a few of its blocks, its weights as packed as they will be, the method on
it; then a forward and a backward pass of the code that trains run under a `Counter`.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftkit.adapter import Adapter, attach
from peftkit.base.class_head import head_of_classes
from peftkit.base.purpose import Purpose
from peftkit.base.shapes import on_meta, untraced
from peftkit.execution.strategies import Activations
from peftkit.kernels import cross_entropy, stacked
from peftkit.kernels.packing import keep_copies
from peftkit.methods import grouping
from peftkit.methods.lora_groups import SeparateWeightGroup
from peftkit.methods.protocol import Method
from peftkit.model.norms import fused_norms
from peftkit.model.places import is_conv1d
from peftkit.model.training import prepared_for_training
from peftkit.planning.counter import GPU_ROUNDING, Counter
from peftkit.planning.step_loss import is_of_classes, loss_of
from peftkit.quant.layers import empty_packed
from peftkit.quant.quantize import Job, install_packed, quantizable, tower_paths
from peftkit.tasks.attention import training_attention
from peftkit.tasks.protocol import TaskConfig
from peftkit.train.memory import blocks
from peftkit.train.memory.blocks import Blocks


@dataclass(frozen=True, slots=True)
class StepCount:
    """What one step of a model takes.

    Attributes:
        peak: Bytes by category at their most: weights, adapters, gradients, activations.
        flops: Of the forward and the backward pass.
        block_input: Bytes of the hidden states that enter one block.
    """

    peak: Mapping[str, int]
    flops: int
    block_input: int

    @property
    def beside_weights(self) -> int:
        """Bytes of what depends on the rows: activations and gradients."""
        return self.peak.get("activations", 0) + self.peak.get("gradients", 0)


@dataclass(frozen=True, slots=True)
class Setup:
    """What is trained, and how it is held.

    Attributes:
        config: The model's; with as many blocks as are to be built.
        on_gpu: Whether the step takes a GPU's paths.
        kept: Whether packed weights are kept unpacked as well, as CPUs with much memory do.
        grouped: As train.group_layers.
    """

    config: Any
    task: TaskConfig
    method: Method
    quantize: str
    double_quant: bool
    dtype: torch.dtype
    on_gpu: bool
    quantize_towers: bool = False
    kept: bool = False
    grouped: bool = True


class DatalessStep:
    """A model without data that steps can be counted of."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.counter = Counter(GPU_ROUNDING if setup.on_gpu else 1)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._counting():
            self.model = _materialised(packed_model(setup))
            if setup.kept:
                keep_copies(self.model, sys.maxsize)
            with self.counter.during("adapters"):
                self.adapter = with_method(self.model, setup)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.model.train()
        self.num_blocks = len(Blocks(self.model).blocks)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        with warnings.catch_warnings(), untraced(), self._mode, self.counter:
            warnings.simplefilter("ignore")
            with _as_on_a_gpu() if self.setup.on_gpu else _one_part_of_each_chunk():
                yield

    def count(self, rows: int, length: int, activations: Activations) -> StepCount:
        """Count a step of B rows of T tokens, all of them learnt."""
        held, seen = Blocks(self.model), _Widest()
        hooks = [block.register_forward_pre_hook(seen, with_kwargs=True) for block in held.blocks]
        hooks += [
            p.register_post_accumulate_grad_hook(lambda p: self._is_gradient(p.grad))
            for p in self.trained
        ]
        try:
            held.set_activations(activations)
            with ExitStack() as stack:
                stack.enter_context(self._counting())
                with self.counter.during("weights"):  # frozen ones may be laid out anew
                    layout = prepared_for_training(self.model, wanted=self.setup.grouped)
                    stack.enter_context(layout)
                if self.setup.on_gpu:
                    stack.enter_context(fused_norms(self.model, ("cpu",)))  # as they are there
                else:
                    stack.enter_context(training_attention(self.model))
                self.counter.restart()
                self._step(rows, length)
                found, flops = dict(self.counter.at_peak), self.counter.flops
        finally:
            for hook in hooks:
                hook.remove()
            held.restore()
            for parameter in self.trained:
                parameter.grad = None
        return StepCount(found, flops, seen.num_bytes)

    def _step(self, rows: int, length: int) -> None:
        for parameter in self.trained:
            parameter.grad = None
        with self.counter.during("activations"):
            task, dtype = self.setup.task, self.setup.dtype
            loss_of(self.model, task, dtype, rows, length).backward()

    def _is_gradient(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.counter.move(gradient, "gradients")


PATHS_OF_A_GPU: tuple[tuple[Any, str, Any], ...] = (
    (cross_entropy, "CHUNK_BYTES", {}),  # the loss is cut into larger chunks
    (cross_entropy, "WIDE_BYTES", {}),
    (grouping, "_kind_for", lambda device: SeparateWeightGroup),  # LoRA stands beside its base
    (blocks, "_on_gpu", lambda args: True),  # a recomputed block keeps no unpacked weights
    (stacked, "DENSE_COLUMNS", 0),  # experts' updates are grouped products
)
"""What code asks of a tensor's device: tensors without data are the CPU's."""


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    before = [getattr(module, name) for module, name, _ in PATHS_OF_A_GPU]
    try:
        for module, name, value in PATHS_OF_A_GPU:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(PATHS_OF_A_GPU, before, strict=True):
            setattr(module, name, value)


@contextmanager
def _one_part_of_each_chunk() -> Iterator[None]:
    """Let a chunk's loss be counted of its first part: all others reuse the same memory."""
    whole = cross_entropy.losses_and_gradient

    def part(logits: Tensor, targets: Tensor) -> Tensor:
        rows = max(1, cross_entropy.WIDE_BYTES["cpu"] // (4 * logits.shape[1]))
        losses = whole(logits[:rows], targets[:rows])
        return losses if len(losses) == len(logits) else losses[:1].expand(len(logits))

    cross_entropy.losses_and_gradient = part
    try:
        yield
    finally:
        cross_entropy.losses_and_gradient = whole


class _Widest:
    """A hook on blocks that sees how much enters them."""

    num_bytes = 0

    def __call__(self, block: nn.Module, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        hidden = next((x for x in (*args, *more.values()) if isinstance(x, Tensor)), None)
        if hidden is not None:
            self.num_bytes = max(self.num_bytes, hidden.numel() * hidden.element_size())


def plain_purpose(task: TaskConfig) -> Purpose:
    """Return what a task's model is for, before its data say the labels."""
    return Purpose(task.type, task.auto_class, task.processor)


def skeleton_of(setup: Setup) -> Any:
    """Build the bare model on the meta device, its weights tied and frozen."""
    model: Any = on_meta(setup.config, plain_purpose(setup.task), setup.dtype)
    model.tie_weights()
    return model.requires_grad_(False)


def with_method(model: Any, setup: Setup) -> Adapter:
    """Put the method on a model, and have the head of a task of classes trained whole."""
    head = head_of_classes(model) if is_of_classes(setup.task) else ()
    whole = tuple(dict.fromkeys((*setup.method.train_fully, *head)))
    return attach(model, setup.method.model_copy(update={"train_fully": whole}), fresh=False)


def packed_shapes(model: Any, setup: Setup) -> list[tuple[Job, torch.Size]]:
    """Return every weight that will be packed, and the shape that it has then."""
    if setup.quantize == "none":
        return []
    head = head_of_classes(model) if is_of_classes(setup.task) else ()
    towers = () if setup.quantize_towers else tower_paths(model)
    found = []
    for job in quantizable(model, keep=(*head, *towers)):
        shape = job[1]._parameters[job[2]].shape  # type: ignore[union-attr]
        turned = job[2] == "weight" and is_conv1d(job[1])
        found.append((job, torch.Size(reversed(shape)) if turned else shape))
    return found


def packed_model(setup: Setup) -> Any:
    """Build the model on the meta device, its weights packed as they will be, without data.

    To be called within FakeTensorMode and under a Counter: a packed layer is called once.
    """
    model = skeleton_of(setup)
    jobs, packings = [], {}
    made: dict[tuple[int, str], nn.Parameter] = {}
    for job, shape in packed_shapes(model, setup):
        jobs.append(job)
        key = (id(job[1]), job[2])
        if key not in made:
            packed, packing = empty_packed(
                shape, setup.quantize, setup.dtype, double_quant=setup.double_quant
            )
            made[key] = nn.Parameter(packed, requires_grad=False)
            packings[id(made[key])] = packing
    for _, module, name in jobs:
        module._parameters[name] = made[id(module), name]
    install_packed(model, jobs, packings, torch.device("cpu"))
    return model


def _materialised(model: Any) -> Any:
    """Give a model on the meta device tensors without data."""
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and tensor.device.type == "meta":
                new = torch.empty_like(tensor, device="cpu")
                module._parameters[name] = nn.Parameter(new, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.tie_weights()
    return model
