"""The first hour with a GPU: what each part of the code does on this card, as one Markdown page.

    python -m benchmarks.card
    python -m benchmarks.card --parts operators,memory --out card.md

Every part proves something without any peer and on any card: kernels against their definitions on
the CPU, a training run against the CPU's, activations kept against recomputed and offloaded ones,
runs under caps of memory, compiled blocks against plain ones. A part that fails says how, and the
others go on. Random weights and tokens. Speed is benchmarks.gpu's business.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import shapes
from benchmarks.report import table, versions
from peftkit.adapter import attach
from peftkit.data.pack import Row
from peftkit.events import Event, Notice, RunStarted, StepDone
from peftkit.execution.environment import as_current, free_now
from peftkit.execution.out_of_memory import release_memory
from peftkit.execution.plan import Activations, ExecutionPlan
from peftkit.kernels.cross_entropy import chunked_cross_entropy, reference_cross_entropy
from peftkit.kernels.device import gpu_of
from peftkit.kernels.fused import RMSNorm
from peftkit.methods.lora import LoRA
from peftkit.quant.layers import pack
from peftkit.quant.quantize import quantize_model
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.tokens import CausalLM
from peftkit.train.blocks import Blocks
from peftkit.train.loop import fit

LOSS_CLOSE, GRADIENT_CLOSE = 2e-3, 2e-3
"""Relative: other kernels sum in another order; float32 products may round to TF32's 10 bits."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the parts work with: a device, a model's shape, tokens of a row."""

    device: torch.device
    model: str
    layers: int
    length: int


def made(job: Job, device: torch.device | str, quantize: str = "none") -> Any:
    """Return a model with random weights and a LoRA; the same on every device."""
    torch.manual_seed(0)
    model = shapes.build(shapes.SHAPES[job.model], num_hidden_layers=job.layers).float()
    model.requires_grad_(False).to(device)
    if quantize != "none":
        quantize_model(model, quantize, compute_dtype=torch.float32)
    attach(model, LoRA(rank=8))
    return model


def rows_of(job: Job, count: int = 8) -> list[Row]:
    """Return rows of several lengths."""
    generator, found = torch.Generator().manual_seed(1), []
    for number in range(count):
        size = max(job.length * (number % 4 + 1) // 4, 8)
        ids = tuple(torch.randint(5, 300, (size,), generator=generator).tolist())
        found.append(Row(ids, (-100, *ids[1:]), (size,), f"row {number + 1}"))
    return found


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    difference = (found.detach().cpu().double() - expected.detach().cpu().double()).abs().max()
    return float(difference / expected.detach().cpu().double().abs().max().clamp(min=1e-30))


def environment(job: Job) -> Iterator[Sequence[str]]:
    """What is here, and what follows from it."""
    gpu, here = gpu_of(job.device), free_now(job.device)
    yield "what", "is"
    yield "device", str(job.device) if gpu is None else gpu.name(job.device)
    yield "free for tensors", f"{here.usable / 1e9:.1f} GB"
    plan = ExecutionPlan(device=job.device)
    yield "LoRA layers grouped, kernels fused", f"{plan.lora_grouped}, {plan.fused_kernels}"
    yield from versions().items()


def operators(job: Job) -> Iterator[Sequence[str]]:
    """Each kernel against its definition on the CPU, both ways where it has a gradient."""
    yield "operator", "largest difference", "well"

    def line(name: str, difference: float, limit: float = GRADIENT_CLOSE) -> Sequence[str]:
        return name, f"{difference:.2g}", "yes" if difference <= limit else "NO"

    generator = torch.Generator().manual_seed(0)
    for kind in ("nf4", "fp4", "int8"):
        weight = torch.randn(256, 512, generator=generator)
        here, packing = pack(weight.to(job.device), kind)
        there, other = pack(weight, kind)
        same = torch.equal(here.cpu(), there.cpu())
        yield line(f"{kind}: bits", 0.0 if same else 1.0, 0.0)
        yield line(f"{kind}: unpacked", apart(packing(here), other(there)))
    for name, run in (("RMSNorm", _norm), ("loss in chunks", _loss)):
        own, back = run(job.device)
        expected, wanted = run(torch.device("cpu"))
        yield line(name, apart(own, expected))
        yield line(f"{name}, gradient", apart(back, wanted))


def _norm(device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 256), torch.rand(256)
    x = x.to(device).requires_grad_()
    found = RMSNorm.apply(x, weight.to(device), 1e-6)
    (gradient,) = torch.autograd.grad(found.square().sum(), x)
    return found, gradient


def _loss(device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(128, 1000, bias=False).requires_grad_(False).to(device)
    hidden = torch.randn(600, 128).to(device).requires_grad_()
    targets = (torch.arange(600) % 1000).to(device)
    if device.type == "cpu":
        loss = reference_cross_entropy(hidden, targets, head)
    else:
        size = ExecutionPlan(device=device).chunk_bytes
        loss = chunked_cross_entropy(hidden, targets, head, chunk_rows=100, chunk_bytes=size)
    (gradient,) = torch.autograd.grad(loss.sum(), hidden)
    return loss, gradient


def activations(job: Job) -> Iterator[Sequence[str]]:
    """Gradients where activations are kept, recomputed and offloaded; bytes after each."""
    yield "kept of activations", "base", "largest difference", "peak MB", "MB after", "well"
    gpu = gpu_of(job.device)
    for quantize in ("none", "nf4"):
        model = made(job, job.device, quantize).train()
        kept: list[Tensor] = []
        modes: tuple[Activations, ...] = ("keep", "recompute", "offload")
        for mode in modes:
            blocks = Blocks(model)
            blocks.set_activations(mode)
            model.zero_grad(set_to_none=True)
            if gpu is not None:
                gpu.restart(job.device)
            ids = torch.arange(job.length, device=job.device)[None] % 300
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            found = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
            blocks.restore()
            kept = kept or found
            worst = max(apart(a, b) for a, b in zip(found, kept, strict=True))
            peak = 0 if gpu is None else gpu.peak(job.device)
            after = 0 if gpu is None else gpu.used(job.device)
            well = "yes" if worst <= GRADIENT_CLOSE else "NO"
            sizes = (f"{peak / 1e6:.1f}", f"{after / 1e6:.1f}")
            yield mode, quantize, f"{worst:.2g}", *sizes, well


def _trained(job: Job, device: torch.device, quantize: str, **settings: Any) -> Any:
    """Return losses, what was told, and the plan of a short run."""
    model = made(job, device, quantize)
    data = DataConfig(train="", packing=False, max_length=job.length)
    task, rows = CausalLM(model, shapes.tokenizer(), data), rows_of(job)
    heard: dict[str, list[Any]] = {"losses": [], "notices": [], "plan": []}

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            heard["losses"].append(event.loss)
        elif isinstance(event, Notice):
            heard["notices"].append(event.text)
        elif isinstance(event, RunStarted):
            heard["plan"].append(event.plan)

    with tempfile.TemporaryDirectory() as folder:
        given = {"max_steps": 3, "batch_size": 4, "compile": False, "eval_every": None, **settings}
        config = TrainConfig(output_dir=Path(folder), **given)
        fit(model, task, rows, (), config, on_event=listen)
    return heard


def losses_on_cpu(job: Job, quantize: str) -> list[float]:
    """Return the losses that a short run has on the CPU."""
    return list(_trained(job, torch.device("cpu"), quantize)["losses"])


def training(job: Job) -> Iterator[Sequence[str]]:
    """A short run here and on the CPU: the same losses."""
    yield "base", "losses here", "on the CPU", "well"
    for quantize in ("none", "nf4", "int8"):
        here = _trained(job, job.device, quantize)["losses"]
        there = losses_on_cpu(job, quantize)
        worst = max(abs(a - b) / b for a, b in zip(here, there, strict=True))
        shown = [" ".join(f"{loss:.4f}" for loss in losses) for losses in (here, there)]
        yield quantize, *shown, "yes" if worst <= LOSS_CLOSE else "NO"


def memory(job: Job) -> Iterator[Sequence[str]]:
    """The same run under smaller and smaller caps: how it ends, and what is left behind."""
    yield "cap MB", "plan", "told", "retries", "MB after", "ended"
    gpu = gpu_of(job.device)
    if job.device.type != "cuda" or gpu is None:
        yield "-", "only CUDA's memory can be capped", "", "", "", "-"
        return
    gpu.restart(job.device)
    _trained(job, job.device, "none", gradient_checkpointing=False)
    peak, total = gpu.peak(job.device), gpu.total(job.device)
    release_memory()
    for share in (1.2, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        torch.cuda.set_per_process_memory_fraction(min(share * peak / total, 1.0), job.device)
        told, ended, plan = "", "well", ""
        try:
            heard = _trained(job, job.device, "none", memory=max(share * peak / 1e9, 1e-6))
            told, plan = " ".join(heard["notices"])[:60], heard["plan"][-1]
        except Exception as error:
            ended = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        release_memory()
        torch.cuda.set_per_process_memory_fraction(1.0, job.device)
        facts = (f"{gpu.retries(job.device)}", f"{gpu.used(job.device) / 1e6:.1f}")
        yield f"{share * peak / 1e6:.1f}", plan, told, *facts, ended


def compiled(job: Job) -> Iterator[Sequence[str]]:
    """Compiled blocks against plain ones: the same losses."""
    yield "blocks", "losses", "told", "well"
    plain = _trained(job, job.device, "none")
    other = _trained(job, job.device, "none", compile="auto" if job.device.type == "cpu" else True)
    worst = max(abs(a - b) / b for a, b in zip(other["losses"], plain["losses"], strict=True))
    for name, heard in (("plain", plain), ("compiled", other)):
        losses = " ".join(f"{loss:.4f}" for loss in heard["losses"])
        yield name, losses, " ".join(heard["notices"])[:60], "yes" if worst <= LOSS_CLOSE else "NO"


PARTS: dict[str, Callable[[Job], Iterator[Sequence[str]]]] = {
    "environment": environment,
    "operators": operators,
    "activations": activations,
    "training": training,
    "memory": memory,
    "compiled": compiled,
}


@contextmanager
def _left_clean() -> Iterator[None]:
    try:
        yield
    finally:
        gc.collect()
        release_memory()


def page(job: Job, parts: Sequence[str]) -> tuple[str, bool]:
    """Return what the parts found, in Markdown, and whether all of it is well."""
    told, is_well = ["# What this card does"], True
    for name in parts:
        part = PARTS[name]
        rows: list[Sequence[str]] = []
        told += [f"## {name}", str(part.__doc__)]
        with _left_clean():
            try:
                rows += part(copy.copy(job))
            except Exception:
                is_well = False
                told.append(f"```\n{traceback.format_exc(limit=-3)}```")
        if rows:
            is_well &= not any(cell == "NO" for row in rows for cell in row)
            told.append(table(rows[0], rows[1:]))
        print("\n\n".join(told[-3:]), flush=True)
    return "\n\n".join(told) + "\n", is_well


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; exits 1 if something is not well, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--model", default="smollm2-135m", choices=sorted(shapes.SHAPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("card.md"), help="the page to send home")
    args = parser.parse_args(argv)
    unknown = set(args.parts.split(",")) - PARTS.keys()
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here.", file=sys.stderr)
        return 2
    device = as_current(torch.device(args.device))
    told, is_well = page(Job(device, args.model, args.layers, args.length), args.parts.split(","))
    args.out.write_text(told, encoding="utf-8")
    print(f"\nwritten: {args.out}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
