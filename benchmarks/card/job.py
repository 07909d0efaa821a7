"""Shared code of the parts of benchmarks.card: the job, random models, comparisons."""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks import shapes
from peftkit.adapter import attach
from peftkit.data.pack import Row
from peftkit.events import Event, Notice, RunStarted, StepDone
from peftkit.execution.out_of_memory import release_memory
from peftkit.kernels.device import GPUS, gpu_of
from peftkit.methods.lora import LoRA
from peftkit.quant.quantize import quantize_model
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.tokens import CausalLM
from peftkit.train.loop import fit

LIMITS = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Maximum difference relative to the largest value: float32 products may round to TF32's 10 bits,
and the others round a few times to 10 and to 7 bits."""

Line = Sequence[str]
"""A row of a part's table; "NO" marks a bad result."""


@dataclass(frozen=True, slots=True)
class Job:
    """The settings of the parts.

    Attributes:
        model: Name of a shape. layers: Blocks of small models.
        length: Tokens of the longest row of small models.
        large, large_layers, large_lengths: Shape, blocks and lengths of rows of the part `large`.
        caps: GB of the part `caps`.
        folder: For files of the parts: the checkpoint, rows, reports of tests.
        checkpoint: Folder of a model of the shape `large`; None: one of random weights is written.
        rows: Lines of JSON with input_ids for runs from the checkpoint; None: random ones.
        peers, unsloth: Pythons of environments with trl, peft and liger-kernel, and with unsloth.
        sides: Sides of the part `peers`; empty: all.
        fixed: Whether all rows of runs from the checkpoint have the first of `large_lengths`.
        repeats: Runs of each side of the part `peers`.
        batch_size, num_steps: Of runs from the checkpoint.
        contexts, answer_rows, new_tokens: Tokens of prompts, concurrent answers and tokens of an
            answer of the part `growth`; the part `split` has these contexts and rows.
        probe_size: Rows and columns of the matrices whose products and copies are timed.
        product_size: Rows and columns of the packed weights of the part `products`.
    """

    device: torch.device
    model: str
    layers: int
    length: int
    large: str = "llama-3.1-8b"
    large_layers: int | None = None
    large_lengths: tuple[int, ...] = (1024, 4096, 16384)
    caps: tuple[float, ...] = (24, 16, 12, 8, 6)
    folder: Path = Path("card")
    checkpoint: Path | None = None
    rows: Path | None = None
    peers: str = sys.executable
    unsloth: str | None = None
    sides: tuple[str, ...] = ()
    fixed: bool = False
    repeats: int = 3
    batch_size: int = 8
    num_steps: int = 8
    contexts: tuple[int, ...] = (512, 8192, 32768)
    answer_rows: tuple[int, ...] = (1, 8, 64)
    new_tokens: int = 300
    probe_size: int = 8192
    product_size: int = 4096

    @property
    def device_name(self) -> str:
        """Return the card's name, or "cpu"."""
        gpu = gpu_of(self.device)
        return self.device.type if gpu is None else gpu.name(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype with the fastest products: bf16, or fp16 on old cards."""
        gpu = gpu_of(self.device)
        return torch.bfloat16 if gpu is None else gpu.fast_dtype()


def made(
    job: Job,
    device: torch.device | str,
    quantize: str = "none",
    dtype: torch.dtype = torch.float32,
    *,
    rank: int = 8,
) -> Any:
    """Return a small model with random weights and a LoRA; the same on every device."""
    torch.manual_seed(0)
    model = shapes.build(shapes.SHAPES[job.model], num_hidden_layers=job.layers).to(dtype)
    model.requires_grad_(False).to(device)
    if quantize != "none":
        quantize_model(model, quantize, compute_dtype=dtype)
    attach(model, LoRA(rank=rank))
    return model


def made_large(job: Job, quantize: str = "nf4") -> Any:
    """Return a model of a released shape, each block quantised when it is complete."""

    def packed(block: Any) -> None:
        block.requires_grad_(False)
        quantize_model(block, quantize, compute_dtype=job.dtype)

    changes = {} if job.large_layers is None else {"num_hidden_layers": job.large_layers}
    shape = shapes.SHAPES[job.large]
    model = shapes.build(
        shape, dtype=job.dtype, device=job.device, each_block=packed, **changes
    ).requires_grad_(False)
    attach(model, LoRA(rank=16))
    return model


def random_rows(lengths: Sequence[int], vocab: int = 300) -> list[Row]:
    """Return rows of these lengths."""
    generator, rows = torch.Generator().manual_seed(1), []
    for number, size in enumerate(lengths):
        ids = tuple(torch.randint(5, vocab, (size,), generator=generator).tolist())
        rows.append(Row(ids, (-100, *ids[1:]), (size,), f"row {number + 1}"))
    return rows


def rows_of(job: Job, count: int = 8) -> list[Row]:
    """Return rows of several lengths."""
    return random_rows([max(job.length * (number % 4 + 1) // 4, 8) for number in range(count)])


def apart(values: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    values, expected = (x.detach().cpu().double() for x in (values, expected))
    return float((values - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def relative_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two curves; infinity of unequal lengths."""
    if len(losses) != len(expected):
        return float("inf")
    return max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))


def verdict(is_well: bool) -> str:
    """Return the text of the last column."""
    return "yes" if is_well else "NO"


def judged(difference: float, limit: float) -> tuple[str, str]:
    """Return a difference and whether it is within a limit; NaN is outside."""
    return f"{difference:.2g}", verdict(difference <= limit)


@dataclass(slots=True)
class Heard:
    """The recorded events of a run."""

    losses: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    peak: int = 0
    notices: list[str] = field(default_factory=list)
    plan: str = ""
    paths: str = ""
    gradients: list[Tensor] = field(default_factory=list)

    def keep_gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep the gradients of the last step, as a hook of optimizers before their steps."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self.gradients = [p.grad.float().cpu() for p in parameters if p.grad is not None]

    def __call__(self, event: Event) -> None:
        """Listen."""
        if isinstance(event, StepDone):
            self.losses.append(event.loss)
            self.speeds.append(event.tokens_per_second)
            self.peak = max(self.peak, event.peak_bytes)
        elif isinstance(event, Notice):
            self.notices.append(event.text)
        elif isinstance(event, RunStarted):
            self.plan, self.paths = event.plan, event.paths


def train(model: Any, rows: Sequence[Row], **settings: Any) -> Heard:
    """Train a few steps."""
    longest = max(len(row.input_ids) for row in rows)
    data = DataConfig(train="", packing=False, max_length=longest)
    heard = Heard()
    hook = register_optimizer_step_pre_hook(heard.keep_gradients)
    with tempfile.TemporaryDirectory() as folder:
        given = {"max_steps": 3, "batch_size": 4, "compile": False, "eval_every": None, **settings}
        config = TrainConfig(output_dir=Path(folder), save_every=None, **given)
        task = CausalLM(model, shapes.tokenizer(), data)
        try:
            fit(model, task, rows, (), config, on_event=heard)
        finally:
            hook.remove()
    return heard


def used_bytes(job: Job) -> int:
    """Return the card's memory in use without torch's cache; 0 on a CPU."""
    gpu = gpu_of(job.device)
    return 0 if gpu is None else gpu.used(job.device)


@contextmanager
def capped(device: torch.device, num_bytes: float | None) -> Iterator[None]:
    """Let a CUDA card have this many bytes within the context, for torch and for plans."""
    gpu = gpu_of(device)
    if num_bytes is None or gpu is None:
        yield
        return
    whole = gpu.total(device)
    torch.cuda.set_per_process_memory_fraction(min(num_bytes / whole, 1.0), device)
    # plans read the total and the used memory, which the fraction does not change
    smaller = replace(
        gpu,
        total=lambda _: min(int(num_bytes), whole),
        used=lambda _: min(gpu.used(device), int(num_bytes)),
    )
    try:
        with mock.patch.dict(GPUS, {device.type: smaller}):
            yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@contextmanager
def left_clean() -> Iterator[None]:
    """Free memory after the context."""
    try:
        yield
    finally:
        gc.collect()
        release_memory()


Part = Callable[[Job], Iterator[Line]]
