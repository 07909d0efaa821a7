"""Compare the memory of a step in `peftkit plan` with measurements of the CPU's allocator.

    python -m benchmarks.plan

The measured step is `Step` on a model with random weights: the forward and backward passes
and the optimizer. Weights, adapters and optimizer state are measured on the live tensors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from benchmarks import shapes
from benchmarks.report import heading, table, versions
from peftkit.adapter import attach, prepared_for_training
from peftkit.data.pack import Row
from peftkit.execution.plan import Activations
from peftkit.execution.signals import StopRequest
from peftkit.methods.lora import LoRA
from peftkit.planning.step_estimator import StepEstimator
from peftkit.quant.layers import keep_copies, packed_tensors
from peftkit.quant.quantize import quantize_model
from peftkit.recipe import Recipe
from peftkit.settings import BaseConfig, DataConfig, TrainConfig
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.tokens import CausalLM, CausalLMConfig
from peftkit.train.optim import STATE_BYTES
from peftkit.train.start import new_run
from peftkit.train.step import Step, trainable_parameters

FAMILIES = ("smollm2-135m", "gpt2", "gpt_neox", "gemma2", "qwen3_moe")
LAYERS = 6
"""Blocks of each model; a plan builds two or three."""
LENGTHS = (128, 512, 1024)
WAYS: tuple[Activations, ...] = ("keep", "recompute")


def config_of(family: str) -> Any:
    """Return the config of a family's shape, of LAYERS blocks."""
    shape = shapes.SHAPES[family]
    name = "n_layer" if shape.config == "GPT2Config" else "num_hidden_layers"
    return shape.make_config(**{name: LAYERS})


def reckoner_of(
    config: Any,
    quantize: str,
    task: TaskConfig | None = None,
    *,
    on_gpu: bool = False,
    free: int | None = None,
    dtype: str = "bf16",
) -> StepEstimator:
    """Return the settings of a model's plans: LoRA of rank 16.

    Args:
        free: Main memory in bytes, where a CPU may keep packed weights unpacked as well.
    """
    recipe = Recipe.model_construct(
        base=BaseConfig.model_construct(model="x", quantize=quantize, dtype=dtype),
        task=task or CausalLMConfig(),
        method=LoRA(rank=16),
    )
    return StepEstimator(recipe, config, "cuda" if on_gpu else "cpu", free)


def planned(steps: StepEstimator, way: Activations, length: int) -> int:
    """Return the planned peak of a step of one row."""
    state = STATE_BYTES["adamw"] * steps.num_trained
    return sum(steps.count(1, length, way).peak.values()) + state


class Measured:
    """A model with random weights whose steps are measured.

    Args:
        kept: Keep packed weights unpacked as well, as a CPU with much memory does.
    """

    def __init__(
        self,
        config: Any,
        quantize: str,
        *,
        device: str = "cpu",
        kept: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.model = made.eval().requires_grad_(False).to(device)
        if quantize != "none":
            quantize_model(self.model, quantize)
        if kept:
            keep_copies(self.model, sys.maxsize)
        attach(self.model, LoRA(rank=16))
        self._hold(device)

    @classmethod
    def around(cls, model: Any, device: torch.device | str) -> Measured:
        """Return a function that measures steps of a model with an adapter on a device."""
        measured = cls.__new__(cls)
        measured.model = model
        measured._hold(device)
        return measured

    def _hold(self, device: torch.device | str) -> None:
        data = DataConfig(train="", packing=False, max_length=max(LENGTHS))
        self.task = CausalLM(self.model, shapes.tokenizer(), data)
        self.parameters = trainable_parameters(self.model)
        self.device = torch.device(device)

    @contextmanager
    def steps(self, way: Activations, length: int) -> Iterator[Callable[[], object]]:
        """Yield a function that takes a step of a row, after a first call."""
        config = TrainConfig(
            gradient_checkpointing=way != "keep", compile=False, tokens_per_batch=None
        )
        ids = tuple(n % 1000 + 5 for n in range(length))
        row = Row(ids, (-100, *ids[1:]), (length,), "row 1")
        run = new_run(self.model, self.task, [row], [], config, stop=StopRequest())
        step = Step(run)
        self.optimizer, take = step.optimizer, partial(step, [row], 1e-4)
        step.use(replace(step.plan, activations=way))
        self.model.train()
        try:
            with (
                prepared_for_training(self.model, step.plan),
                self.task.training(self.model),
            ):
                take()
                yield take
        finally:
            step.blocks.restore()

    def peak(self, way: Activations, length: int) -> int:
        """Return the bytes of the weights, and the peak bytes that a step allocates."""
        with self.steps(way, length) as step:
            held = _bytes_of(self.model) + _bytes_of(self.optimizer)
            with profile(
                activities=[ProfilerActivity.CPU], acc_events=True, profile_memory=True
            ) as seen:
                step()
        return held + _most(seen)


def _bytes_of(holder: Any) -> int:
    """Return the bytes of a model's parameters and buffers, or of an optimizer's state."""
    if isinstance(holder, torch.nn.Module):
        copies = [packing.unpacked for _, _, packing in packed_tensors(holder)]
        tensors = [*holder.parameters(), *holder.buffers(), *(c for c in copies if c is not None)]
    else:
        tensors = [t for s in holder.state.values() for t in s.values() if torch.is_tensor(t)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _most(seen: Any) -> int:
    """Return the peak of additional allocated bytes."""
    events = [
        (event.start_ns(), event.nbytes())
        for event in seen.profiler.kineto_results.events()
        if event.name() == "[memory]" and "CPU" in str(event.device_type())
    ]
    live = most = 0
    for _, num_bytes in sorted(events, key=lambda event: event[0]):
        live += num_bytes
        most = max(most, live)
    return most


def main() -> None:
    """Print planned and measured peaks of every family, quantization, mode and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--quantize", default="none,nf4")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows, worst = [], 0.0
    for family in asked.families.split(","):
        for quantize in asked.quantize.split(","):
            config = config_of(family)
            steps, measured = reckoner_of(config, quantize), Measured(config, quantize)
            for way in WAYS:
                for length in LENGTHS:
                    told, found = planned(steps, way, length), measured.peak(way, length)
                    off = told / found - 1
                    worst = max(worst, abs(off))
                    cells = (f"{told / 1e6:,.1f}", f"{found / 1e6:,.1f}", f"{100 * off:+.1f} %")
                    rows.append((family, quantize, way, str(length), *cells))
                    print(*rows[-1], flush=True)
    columns = ("model", "quantize", "activations", "tokens", "planned MB", "measured MB", "off")
    print(heading({"here": versions()}))
    print(table(columns, rows))
    print(f"Furthest apart: {100 * worst:.1f} %.")


if __name__ == "__main__":
    main()
