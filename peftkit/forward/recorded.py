"""Forward and backward passes as CUDA graphs: one launch instead of thousands.

Python launches the kernels of a block in 5 to 15 ms, in which a GPU computes thousands of tokens of
a small model. A replayed graph launches all kernels of a micro-batch's forward and backward pass
together, with the same kernels, addresses and order. Clipping, the optimizer and the sum over
processes stay outside.

A graph has fixed shapes. `BatchLayout.rounds` rounds the numbers of documents, keys and the longest
document, and targets are rounded up here: by ones that the loss ignores. A graph also has fixed
addresses: the batch, the scale of the loss and the gradients are static tensors.

A graph repeats no Python: a number that Python computes in each step would not change. Its
first replay therefore belongs to a later step than its capture, and is compared with the eager
pass of that batch: loss and gradients, with equal random numbers. Where the kernels are
deterministic, the bits are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.events import Fallback
from peftkit.execution import rng
from peftkit.execution.graphs import CapturePool
from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.forward.batch_layout import BatchLayout
from peftkit.forward.loss import Head
from peftkit.forward.noise import LOSS, Figures, blocks_rounded, difference_of
from peftkit.model.blocks import is_sharded, is_streamed

EAGER_STEPS = 2
"""Steps before the first capture: groups of LoRA layers that read several inputs are separated in
them (MAX_MISSES in methods/lora_linear.py), which gives their copies other addresses."""
MAX_GRAPHS = 64
"""Shapes that are captured; later ones run eagerly."""
PARTS_OF_TARGETS, ALIGNMENT = 8, 16
"""The number of targets is a multiple of an eighth of the tokens, and of ALIGNMENT."""
GROUPED_ON_CARD = (9, 10)
"""Major compute capabilities whose bf16 grouped_mm does not synchronise with the host."""
LIBRARIES = ("peftkit", "transformers", "torch", "accelerate")
"""Packages whose hooks do the same in each step."""

Batch = Mapping[str, Tensor]


@dataclass(eq=False)
class _Recorded:
    """A captured pass: the tensors that it reads and writes, and whether a replay was compared.

    Attributes:
        step: Number of the step of the capture.
    """

    batch: dict[str, Tensor]
    graph: Any
    sums: Tensor
    step: int
    is_checked: bool = False


class RecordedPasses:
    """Passes of micro-batches, whose gradients accumulate in the parameters.

    The first pass of a batch's shapes runs eagerly, the second too, after its capture. The next one
    in a later step is a replay that is compared; later ones are replays.

    Args:
        run: Runs a pass with a batch and the scale of its loss; returns the sums of `Task.loss`.
        undo: Drops what a pass that broke off leaves in the model.
        layout: Makes batches of few shapes while passes are recorded.
        ignored: `Task.ignored_targets`.

    Attributes:
        has_captured: Whether graphs may hold memory.
        problem: Why passes run eagerly from now on; "" if they do not.
    """

    def __init__(
        self,
        run: Callable[[Batch, Tensor], Tensor],
        undo: Callable[[], object],
        model: nn.Module,
        blocks: Sequence[nn.Module],
        parameters: Mapping[str, nn.Parameter],
        layout: BatchLayout,
        ignored: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self._run, self._undo, self._device = run, undo, device
        self._model, self._blocks, self._parameters = model, blocks, parameters
        self._layout, self._fills = layout, ignored
        self._pool, self._scale = CapturePool(device), torch.zeros((), device=device)
        self.problem, self._is_reported = "", False
        self._layout.rounds = True
        self._drop()

    def follow(self, *, records: bool) -> None:
        """Drop all graphs, because the plan changes; a resumed run has batches of the same shapes.

        Args:
            records: Whether the new plan records passes.
        """
        self._layout.rounds = records
        self._drop()

    def _drop(self) -> None:
        self._recorded: dict[Any, _Recorded] = {}
        self._num_passes: Counter[Any] = Counter()
        self._grads: list[Tensor] = []
        self._num_steps, self.has_captured = 0, False

    def begin(self) -> None:
        """Set the parameters' gradients to static tensors of zeros, before the passes of a step."""
        if self.problem:
            return
        self._num_steps += 1
        if self._grads:
            torch._foreach_zero_(self._grads)
        else:
            self._grads = [torch.zeros_like(p) for p in self._parameters.values()]
        for parameter, grad in zip(self._parameters.values(), self._grads, strict=True):
            parameter.grad = grad

    def __call__(self, batch: Batch, scale: Tensor) -> Tensor:
        """Run a pass; return the sums of its loss, which the next pass may overwrite."""
        if self.problem or self._num_steps <= EAGER_STEPS:
            return self._run(batch, scale)
        size = batch["input_ids"].numel()
        key = tuple((n, self._shape(n, each, size), each.dtype) for n, each in batch.items())
        recorded = self._recorded.get(key)
        if recorded is None:
            rounded = {n: torch.empty(s, dtype=d, device=self._device) for n, s, d in key}
            self._fill(rounded, batch)
            self._num_passes[key] += 1
            if self._num_passes[key] > 1 and len(self._recorded) < MAX_GRAPHS:
                self._capture(key, rounded)
            return self._run(rounded, scale)
        self._fill(recorded.batch, batch)
        if recorded.step == self._num_steps:
            return self._run(recorded.batch, scale)
        self._scale.copy_(scale)
        if not recorded.is_checked:
            return self._compared(recorded)
        recorded.graph.replay()
        return recorded.sums

    def report(self) -> str:
        """Return the problem as text, at the first call; else ""."""
        is_new, self._is_reported = not self._is_reported, bool(self.problem)
        return unrecorded(self.problem).text if self.problem and is_new else ""

    def _shape(self, name: str, tensor: Tensor, num_tokens: int) -> torch.Size:
        """Return the shape of a batch's entry after rounding: at least one target is ignored."""
        if name not in self._fills:
            return tensor.shape
        step = -(-num_tokens // (PARTS_OF_TARGETS * ALIGNMENT)) * ALIGNMENT
        return torch.Size([(len(tensor) // step + 1) * step, *tensor.shape[1:]])

    def _fill(self, rounded: Batch, batch: Batch) -> None:
        for name, tensor in batch.items():
            if tensor.numel():
                rounded[name][: len(tensor)].copy_(tensor, non_blocking=tensor.is_pinned())
            if name in self._fills:
                rounded[name][len(tensor) :] = self._fills[name]

    def _capture(self, key: Any, batch: dict[str, Tensor]) -> None:
        self.has_captured = True
        try:
            graph, sums = self._pool.capture(partial(self._run, batch, self._scale))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._drop()
            self.problem = f"{str(error).splitlines()[0].rstrip('.')}."
            self._undo()
        else:
            self._recorded[key] = _Recorded(batch, graph, sums, self._num_steps)

    def _compared(self, recorded: _Recorded) -> Tensor:
        """Run a pass eagerly and by its graph; use the graph's numbers if they are right."""
        device, total = self._device, self._grads
        before = [grad.clone() for grad in total]
        start = rng.capture(device)

        def figures(run: Callable[[], Tensor]) -> tuple[Tensor, Figures]:
            rng.restore(start, device)
            torch._foreach_zero_(total)
            sums = run().clone()
            grads = zip(self._parameters, total, strict=True)
            return sums, {LOSS: sums[0], **{name: grad.clone() for name, grad in grads}}

        def replay() -> Tensor:
            recorded.graph.replay()
            return recorded.sums

        run = partial(self._run, recorded.batch, self._scale)
        expected = found = figures(run)
        # NaN, after an overflow, equals nothing: a later batch is compared
        recorded.is_checked = all(bool(each.isfinite().all()) for each in expected[1].values())
        if recorded.is_checked:
            found = figures(replay)
        pairs = found[1].values(), expected[1].values()
        if recorded.is_checked and not all(map(torch.equal, *pairs)):
            end = rng.capture(device)
            with blocks_rounded(self._model, self._blocks):
                problem = difference_of(found[1], expected[1], figures(run)[1])
            rng.restore(end, device)
            if problem:
                self._drop()
                self.problem = f"A replayed pass computes other numbers than the eager: {problem}"
                found = expected
        torch._foreach_copy_(total, list(found[1].values())[1:])
        torch._foreach_add_(total, before)
        return found[0]


def unrecorded(cause: str) -> Fallback:
    """Return the fallback of a run whose passes are not captured."""
    return Fallback(
        path="Training passes run without CUDA graphs",
        cause=cause,
        cost="Python launches each kernel; steps of few tokens take several times as long.",
        fix="A larger train.batch_size keeps the GPU busy.",
    )


def why_not_captured(model: nn.Module) -> str:
    """Return why no pass of a model can be captured as a CUDA graph, or ""."""
    if is_sharded(model) or is_streamed(model):
        return "Its blocks wait for other processes or host memory; no graph captures that."
    if _reads_on_host(model):
        return "The grouped product of its experts reads its sizes on the host."
    return ""


def why_not_recorded(
    model: nn.Module,
    layout: BatchLayout | None,
    head: Head | None,
    ignored: Mapping[str, int] | None,
) -> str:
    """Return why passes of a prepared task and model are not captured, or "".

    Args:
        ignored: `Task.ignored_targets`.
    """
    if ignored is None:
        return "The loss of this task reads values that change between steps in Python."
    if layout is None or not layout.has_few_shapes:
        return "Rows are padded, or their documents in a grid: most batches have other shapes."
    if head is not None and any(p.requires_grad for p in head.module.parameters()):
        return "The head is trained, whose gradient counts each row of a batch."
    if name := _foreign_hook(model):
        return f"{name} is a hook of a module, and a graph does not repeat its Python code."
    return why_not_captured(model)


def _reads_on_host(model: Any) -> bool:
    """Return whether torch reads the rows of each expert on the host (ATen's GroupedBlas.cpp)."""
    if getattr(model.config.get_text_config(), "_experts_implementation", "") != "grouped_mm":
        return False
    if not any(hasattr(module, "is_transposed") for module in model.modules()):
        return False  # dense models of such a class
    major, _ = torch.cuda.get_device_capability(model.device)
    return major not in GROUPED_ON_CARD or model.dtype != torch.bfloat16


def _foreign_hook(model: nn.Module) -> str:
    """Return the name of a hook on a module that none of LIBRARIES defines, or ""."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    for module in model.modules():
        for hook in (hook for name in names for hook in getattr(module, name).values()):
            function = getattr(hook, "func", hook)  # of a partial
            if str(getattr(function, "__module__", "")).partition(".")[0] not in LIBRARIES:
                return str(getattr(function, "__qualname__", type(function).__qualname__))
    return ""
