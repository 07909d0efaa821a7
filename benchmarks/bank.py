"""The cost of serving many adapters together: an adapter bank compared with PEFT.

    python -m benchmarks.bank                   # SmolLM2-135M, 8 adapters, 100 resident
    python -m benchmarks.bank --dtype fp32 --repeats 5

Generates alternately with one adapter for all rows and with a different one for each row, from the
same adapter files; then times switches and loads many adapters. If a mixed batch gives other logits
than each adapter alone, no speed is reported and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import GenerationConfig

from benchmarks.limits import Sizes, limits
from peftkit.adapter import attach
from peftkit.base.load import Base, load_base
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.inference.bank import AdapterBank
from peftkit.methods.lora import LoRA

TOLERANCES = {"fp32": 1e-4, "bf16": 0.05}
"""Maximum difference of logits relative to their norm: the order of sums differs, with 24 and 8
bits of mantissa."""

Using = Callable[[], AbstractContextManager[object]]


def make_adapters(base: Base, number: int, rank: int, folder: Path) -> dict[str, Path]:
    """Write adapters with random updates on all linear layers."""
    paths = {}
    for seed in range(number):
        adapter = attach(base.model, LoRA(rank=rank, alpha=2 * rank), seed=seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in adapter.modules.values():
                module.lora_B.copy_(0.05 * torch.randn(module.lora_B.shape, generator=generator))
        paths[f"a{seed}"] = save_adapter(adapter, folder / f"a{seed}", Provenance())
        adapter.detach()
    return paths


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    """Return the logits of the last tokens, in float32."""
    return model(input_ids=ids, use_cache=False, **kwargs).logits[:, -1].float()


def disagreement(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm."""
    return float((found - expected).norm() / expected.norm())


@torch.no_grad()
def seconds(model: Any, ids: Tensor, new_tokens: int, using: Using, **kwargs: Any) -> float:
    """Return the time for generating exactly this many tokens."""
    config = GenerationConfig(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    start = perf_counter()
    with using():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            **kwargs,
        )
    return perf_counter() - start


def microseconds(switch: Callable[[str], object], names: Sequence[str], number: int = 50) -> float:
    """Return the median time of a switch."""
    times = []
    for index in range(number):
        start = perf_counter()
        switch(names[index % len(names)])
        times.append(perf_counter() - start)
    return 1e6 * median(times)


def resident_bytes() -> int:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def use(bank: AdapterBank, name: str) -> None:
    """Switch and back."""
    with bank.use(name):
        pass


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapters", type=int, default=8, help="in a mixed batch, a row for each")
    parser.add_argument("--resident", type=int, default=100)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=tuple(TOLERANCES), default="bf16")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return measure(args, Path(folder))


def measure(args: argparse.Namespace, folder: Path) -> int:
    """Check, measure, print."""
    base = load_base(args.model, dtype=args.dtype)
    paths = make_adapters(base, args.adapters, args.rank, folder)
    names = list(paths)
    theirs_base = load_base(args.model, dtype=args.dtype).model
    theirs = peft.PeftModel.from_pretrained(theirs_base, str(paths[names[0]]), names[0])
    for name in names[1:]:
        theirs.load_adapter(str(paths[name]), name)
    theirs.eval()
    bank = AdapterBank(base, paths)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 10_000, (len(names), args.prompt_tokens), generator=generator)
    if not agree(args, bank, theirs, ids):
        return 1
    runs = time_batches(args, bank, theirs, ids)
    report(args, runs, ids)
    report_share(args, bank, min(runs["mixed"]), ids)
    report_switches(bank, theirs, names)
    report_memory(bank, paths, args.resident)
    return 0


def agree(args: argparse.Namespace, bank: AdapterBank, theirs: Any, ids: Tensor) -> bool:
    """Compare a mixed batch with each adapter alone, and with PEFT's."""
    names = list(bank.names)
    with bank.use(names):
        mixed = logits(bank.base.model, ids)
    alone = []
    for row, name in enumerate(names):
        with bank.use(name):
            alone.append(logits(bank.base.model, ids[row : row + 1]))
    apart = disagreement(mixed, torch.cat(alone))
    from_theirs = disagreement(mixed, logits(theirs, ids, adapter_names=names))
    effect = disagreement(mixed, logits(bank.base.model, ids))
    print(
        f"logits: the adapters move them by {effect:.2f}; mixed against alone {apart:.1e}, "
        f"against PEFT's mixed {from_theirs:.1e}"
    )
    if max(apart, from_theirs) > TOLERANCES[args.dtype]:
        print(f"that is more than {TOLERANCES[args.dtype]}: no speed is reported")
        return False
    return True


def time_batches(
    args: argparse.Namespace, bank: AdapterBank, theirs: Any, ids: Tensor
) -> dict[str, list[float]]:
    """Return the seconds of each kind of generation, run alternately."""
    names, model = list(bank.names), bank.base.model
    theirs.set_adapter(names[0])
    ways: dict[str, tuple[Any, Using, dict[str, Any]]] = {
        "base": (model, nullcontext, {}),
        "one": (model, lambda: bank.use(names[0]), {}),
        "mixed": (model, lambda: bank.use(names), {}),
        "PEFT one": (theirs, nullcontext, {}),
        "PEFT mixed": (theirs, nullcontext, {"adapter_names": names}),
    }
    runs: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(args.repeats + 1):  # the first is a warm-up
        for way, (model, using, kwargs) in ways.items():
            took = seconds(model, ids, args.new_tokens, using, **kwargs)
            if repeat:
                runs[way].append(took)
    return runs


def report(args: argparse.Namespace, runs: dict[str, list[float]], ids: Tensor) -> None:
    """Print the table of speeds: the fastest of the runs, because other programs may slow some."""
    tokens = len(ids) * args.new_tokens
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{args.model} in {args.dtype}, {len(ids)} rows, rank {args.rank}, ", end="")
    print(f"prompts of {ids.shape[1]}, {args.new_tokens} new tokens")
    speeds = {way: tokens / min(times) for way, times in runs.items()}
    for way, times in runs.items():
        print(f"{way:11} {speeds[way]:6.0f} tokens/s, median {tokens / median(times):.0f}")
    print(f"mixed / one: {speeds['mixed'] / speeds['one']:.2f}; ", end="")
    print(f"PEFT's: {speeds['PEFT mixed'] / speeds['PEFT one']:.2f}; ", end="")
    print(f"mixed / PEFT's mixed: {speeds['mixed'] / speeds['PEFT mixed']:.2f}")


def report_share(args: argparse.Namespace, bank: AdapterBank, seconds: float, ids: Tensor) -> None:
    """Print the time of a mixed batch at the machine's limits, as a share of its measured time."""
    best, sizes = limits(), Sizes.of(bank.base.model, args.rank)
    prompts, num_new = [ids.shape[1]] * len(ids), len(ids) * args.new_tokens
    least = sizes.answer_seconds(prompts, num_new, len(ids), best, args.dtype)
    print(
        f"the machine's limit in this run: {best.show()}; mixed is at {least / seconds:.0%} of it"
    )


def report_switches(bank: AdapterBank, theirs: Any, names: Sequence[str]) -> None:
    """Print the times of a switch."""
    ours = microseconds(lambda name: use(bank, name), names)
    print(f"switch and back: {ours:.0f} us; ", end="")
    print(f"PEFT's set_adapter: {microseconds(theirs.set_adapter, names):.0f} us")


def report_memory(bank: AdapterBank, paths: dict[str, Path], number: int) -> None:
    """Load many adapters; print the memory of each, counted and measured."""
    folders = list(paths.values())
    before = resident_bytes()
    start = perf_counter()
    for index in range(len(bank.names), number):
        bank.add(f"more{index}", folders[index % len(folders)])
    added = number - len(folders)
    took = perf_counter() - start
    grown = (resident_bytes() - before) / added
    size = (folders[0] / "adapter_model.safetensors").stat().st_size
    print(
        f"{len(bank.names)} resident: {bank.num_bytes(bank.names[-1]) / 1e6:.2f} MB each, ", end=""
    )
    print(f"{grown / 1e6:.2f} MB by the process; the file has {size / 1e6:.2f} MB; ", end="")
    print(f"{1e3 * took / added:.0f} ms to add one")
    print(
        f"switch among {len(bank.names)}: {microseconds(lambda n: use(bank, n), bank.names):.0f} us"
    )


if __name__ == "__main__":
    raise SystemExit(main())
