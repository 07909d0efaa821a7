"""Profile a training step: self time of torch's operators, by kind.

    python -m benchmarks.profile
    python -m benchmarks.profile --side peft --json figures.json

SmolLM2 on the orders, after warm-up steps. On a GPU, times are device times. Profiling adds time,
mostly to small operators, so shares are more reliable than milliseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.orders import make_rows
from benchmarks.report import heading, table, versions, write_json
from benchmarks.train import encode
from benchmarks.workers.meter import device_of

WITHIN = {
    "optimizer": ("optimizer.step", "_fused_adam", "clip_grad", "total_norm", "_foreach"),
    "attention": (
        "scaled_dot_product",
        "flash_attention",
        "groupedattention",
        "efficient_attention",
    ),
    "loss": ("crossentropy", "cross_entropy", "log_softmax", "nll_loss"),
    "dequantise": ("packed", "dequant"),
}
"""Operators with these parts in their names, and the operators that they call, by kind."""
OWN = {
    "attention": ("aten::bmm", "aten::baddbmm", "aten::_softmax"),
    "matmul": ("aten::mm", "aten::addmm", "linear", "_grouped_mm"),
    "compiled": ("cpp_fused", "triton_"),
    "copy": ("aten::copy_", "aten::cat", "aten::clone", "aten::index", "aten::_to_copy"),
    "memory": ("aten::empty", "aten::resize", "aten::fill_", "aten::zero_"),
    "pointwise": (
        *("aten::mul", "aten::add", "aten::sub", "aten::div", "aten::neg", "aten::silu"),
        *("aten::gelu", "aten::pow", "aten::rsqrt", "aten::mean", "aten::sum", "aten::tanh"),
        *("aten::sigmoid", "aten::where", "aten::masked", "aten::native_layer_norm", "aten::cos"),
        *("aten::sin", "aten::threshold", "aten::relu"),
    ),
}
"""Otherwise its own name decides. Batched products belong to attention, in models without
experts."""


def kind_of(names: Sequence[str]) -> str:
    """Return the kind of an operator.

    Args:
        names: Its name, then the names of its callers, innermost first.
    """
    lowered = [name.lower() for name in names]
    for kind, signs in WITHIN.items():
        if any(sign in name for name in lowered for sign in signs):
            return kind
    own = (kind for kind, signs in OWN.items() if any(sign in lowered[0] for sign in signs))
    return next(own, "other")


def shares(events: Iterable[Any], device_time: bool) -> dict[str, float]:
    """Return the microseconds of each kind, largest first."""
    found: Counter[str] = Counter()
    for event in events:
        names, parent = [event.name], event.cpu_parent
        while parent is not None:
            names.append(parent.name)
            parent = parent.cpu_parent
        own = event.self_device_time_total if device_time else event.self_cpu_time_total
        found[kind_of(names)] += own
    return dict(found.most_common())


def trained(args: argparse.Namespace, folder: Path) -> tuple[Any, float]:
    """Train; return the profile of the steps after the warm-up, and the seconds that each took."""
    device = device_of({"device": args.device})
    steps = args.warmup + args.steps
    data = str(make_rows(folder, steps * args.batch_size))
    rows = encode(args.model, data, steps * args.batch_size, 512)
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    watched = profile(activities=activities)
    seen: list[float] = []

    def listen(event: Any) -> None:
        if not isinstance(event, torch.Tensor) and type(event).__name__ != "StepDone":
            return
        seen.append(time.perf_counter())
        if len(seen) == args.warmup:
            watched.start()
        elif len(seen) == steps:
            watched.stop()

    _training(args, rows, device, folder, listen)()
    return watched, (seen[-1] - seen[args.warmup - 1]) / args.steps


def _training(
    args: argparse.Namespace,
    rows: list[dict[str, list[int]]],
    device: torch.device,
    folder: Path,
    listen: Callable[[Any], None],
) -> Callable[[], object]:
    from benchmarks.workers import ours, peft_loop
    from peftkit.base.locate import locate

    names = ("dtype", "quantize", "rank", "batch_size", "train")
    job = {
        **{name: getattr(args, name) for name in names},
        "source": locate(args.model).source,
        "task": "causal_lm",
        "rows": rows,
        "learning_rate": 2e-4,
        "output": str(folder / "run"),
    }
    side = {"ours": ours, "peft": peft_loop}[args.side]
    _, train = side.prepare(job, device, listen)
    return train


def main(words: Sequence[str] | None = None) -> int:
    """Profile and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=("ours", "peft"), default="ours")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--quantize", choices=("none", "nf4"), default="none")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--warmup", type=int, default=3, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=5, help="steps that are counted")
    parser.add_argument(
        "--train", type=json.loads, default={}, help='of our train section: {"seed": 1}'
    )
    parser.add_argument("--top", type=int, default=12, help="operators to list")
    parser.add_argument("--json", type=Path, help="write the measurements here")
    args = parser.parse_args(words)
    if args.warmup < 1:
        parser.error("--warmup: at least one step must precede the measured steps")
    with tempfile.TemporaryDirectory() as folder:
        watched, seconds = trained(args, Path(folder))
    on_device = torch.cuda.is_available() and args.device != "cpu"
    kinds = shares(watched.events(), on_device)
    total = sum(kinds.values())
    print(heading({args.side: versions()}))
    print(f"{args.model}, {args.side}, {args.dtype}, quantize {args.quantize}, batch of ", end="")
    print(f"{args.batch_size} orders; {1e3 * seconds:.0f} ms a step while being watched\n")
    lines = [
        [kind, f"{own / total:.1%}", f"{own / 1e3 / args.steps:.1f} ms"]
        for kind, own in kinds.items()
    ]
    print(table(("kind", "share of self time", "in a step"), lines))
    order = "self_device_time_total" if on_device else "self_cpu_time_total"
    averages = sorted(watched.key_averages(), key=lambda e: getattr(e, order), reverse=True)
    top = [
        [e.key[:60], str(e.count // args.steps), f"{getattr(e, order) / 1e3 / args.steps:.1f} ms"]
        for e in averages[: args.top]
    ]
    print("\n" + table(("operator", "calls in a step", "self time"), top))
    write_json(args.json, {"milliseconds": 1e3 * seconds, "kinds": kinds, "top": top})
    return 0


if __name__ == "__main__":
    sys.exit(main())
