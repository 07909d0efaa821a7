"""Training speed of several architectures compared with a minimal PEFT loop.

    python -m benchmarks.families
    python -m benchmarks.families --families gpt2,bert --json figures.json
    python -m benchmarks.families --families qwen3_5,lfm2 --lengths mixed --clock cpu

Shapes of about 100M parameters; hybrids have 8 layers (shapes.HYBRIDS) and no adapted experts. Both
sides use the same random weights, rows of the same varying lengths, half of each masked (BERT: 15 %
hidden; T5: a source and its target), and LoRA on the same layers. The loop runs with adapters in
bf16 and in float32; the faster one counts. If losses differ by more than the tolerance of
benchmarks.train, no speed is reported and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import shapes
from benchmarks.report import heading, table, write_json
from benchmarks.train import PEERS, Runs, in_turn, problems, summary, tokens_of_steps
from benchmarks.workers import WorkerFailed

Rows = list[dict[str, list[int]]]
MASK, FIRST_WORD = 2, 5
"""Of shapes.tokenizer()."""
LENGTHS = {"even": (64, 192), "mixed": (24, 512)}
WITHOUT_EXPERTS = "qwen3_moe-attention"
"""The same model without adapted experts: PEFT computes each expert's full update, which is
slow."""


def make_rows(
    task: str, number: int, shortest: int = 64, longest: int = 192, *, mixed: bool = False
) -> Rows:
    """Return rows of few different words, which a model can learn.

    Args:
        mixed: Whether lengths are log-normal: then half of a batch of 8 is padding.
    """
    rng = random.Random(0)
    rows = []
    for _ in range(number):
        drawn = int(rng.lognormvariate(5.0, 0.6)) if mixed else rng.randint(shortest, longest)
        size = min(longest, max(shortest, drawn))
        ids = [FIRST_WORD + min(40, int(rng.expovariate(0.2))) for _ in range(size)]
        if task == "seq2seq":
            rows.append({"input_ids": ids, "labels": ids[: size // 2]})
        elif task == "masked_lm":
            hidden = set(rng.sample(range(size), max(1, size * 15 // 100)))
            labels = [token if place in hidden else -100 for place, token in enumerate(ids)]
            given = [MASK if place in hidden else token for place, token in enumerate(ids)]
            rows.append({"input_ids": given, "labels": labels})
        else:
            half = size // 2
            rows.append({"input_ids": ids, "labels": [-100] * half + ids[half:]})
    return rows


def make_job(family: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return a family's job; both sides adapt the layers of our role all-linear."""
    from peftkit.methods.lora import LoRA

    name = family.removesuffix("-attention")
    shape = shapes.SHAPES[name]
    method = {"targets": ["attention"]} if family == WITHOUT_EXPERTS else {}
    model = shapes.build(shape, device="meta", **args.sizes)
    if name in shapes.HYBRIDS:
        method = {"targets": _without_experts(model)}
    sites = LoRA(**method).sites(model)
    stacks = sorted(f"{site.path}.{site.parameter}" for site in sites if site.parameter)
    return {
        "shape": name,
        "sizes": args.sizes,
        "task": shape.task,
        "method": method,
        "target_modules": sorted({site.path for site in sites if not site.parameter}),
        "target_parameters": stacks or None,
        "rows": make_rows(
            shape.task, args.rows, *LENGTHS[args.lengths], mixed=args.lengths == "mixed"
        ),
        "clock": args.clock,
        "dtype": "bf16",
        "quantize": "none",
        "rank": args.rank,
        "device": args.device,
        "batch_size": args.batch_size,
        "learning_rate": args.learning_rate,
    }


def _without_experts(model: Any) -> list[str]:
    """Return all layers that both sides adapt: no experts, and none that PEFT refuses."""
    from peftkit.formats.peft.targets import MAMBA, REFUSED
    from peftkit.methods.lora import LoRA

    refused = REFUSED if model.config.model_type in MAMBA else None
    paths = [site.path for site in LoRA().sites(model) if site.parameter is None]
    return sorted(path for path in paths if path.rpartition(".")[2] != refused)


def measure(family: str, args: argparse.Namespace, folder: Path) -> tuple[Runs, dict[str, Any]]:
    """Run a family's sides in turn; return the runs, and each side's figures."""
    job = make_job(family, args)
    sides: dict[str, Any] = {"ours": ("ours", sys.executable, {"train": args.train})}
    for side in ("peft", "peft-fp32"):
        worker, changes = PEERS[side]
        sides[side] = (worker, args.peers, changes)
    print(family, file=sys.stderr)
    runs = in_turn(job, sides, args.repeats, folder)
    names = ("input_ids", "labels") if job["task"] == "seq2seq" else ("input_ids",)
    step_tokens = tokens_of_steps(job["rows"], args.batch_size, *names)
    return runs, summary(runs, step_tokens, problems(runs))


def line(family: str, figures: dict[str, dict[str, Any]]) -> list[str]:
    """Return a family's row of the table: peftkit compared with the faster loop."""
    loops = [figures[side] for side in ("peft", "peft-fp32") if "problem" not in figures[side]]
    problem = figures["ours"].get("problem") or next(
        (found["problem"] for found in figures.values() if "problem" in found), ""
    )
    if not loops:
        return [family, *["-"] * 6, problem]
    ours = figures["ours"]
    best = max(loops, key=lambda found: found["tokens_per_second"])
    return [
        family,
        f"{ours['tokens_per_second']:.0f}",
        f"{best['tokens_per_second']:.0f}",
        f"{best['speed_of_ours']:.2f} x",
        f"{ours['steady'] / best['steady']:.2f} x",
        f"{best['memory_of_ours']:.2f} x",
        f"{best['losses_apart']:.2%}",
        problem,
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Measure all families and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*shapes.FAMILIES, WITHOUT_EXPERTS]
    parser.add_argument("--families", default=",".join(names), help=f"and {[*shapes.HYBRIDS]}")
    parser.add_argument("--lengths", choices=("even", "mixed"), default="even")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--peers", default=sys.executable, help="python with peft")
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--train", type=json.loads, default={}, help='of our train section: {"compile": true}'
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.set_defaults(sizes={})
    args = parser.parse_args(words)
    names += shapes.HYBRIDS
    if unknown := set(args.families.split(",")) - set(names):
        parser.error(f"--families {','.join(sorted(unknown))}: known are {', '.join(names)}")
    found: dict[str, Any] = {}
    lines, runs = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for family in args.families.split(","):
            try:
                runs, found[family] = measure(family, args, Path(folder))
                lines.append(line(family, found[family]))
            except WorkerFailed as error:
                print(error, file=sys.stderr)
                found[family] = {"ours": {"problem": "a worker failed"}}
                lines.append([family, *["-"] * 6, "a worker failed, see above"])
    shortest, longest = LENGTHS[args.lengths]
    print(heading({side: results[0].get("versions", {}) for side, results in runs.items()}))
    print(
        f"LoRA r{args.rank}, bf16, {args.rows} rows of {shortest} to {longest} tokens, "
        f"batch {args.batch_size}, {'CPU time, ' * (args.clock == 'cpu')}"
        f"medians of {args.repeats} runs in turn\n"
    )
    columns = ("", "ours tokens/s", "PEFT loop", "speed", "later half", "memory", "losses", "")
    print(table(columns, lines))
    write_json(args.json, {"settings": {**vars(args), "json": str(args.json)}, "figures": found})
    return int(any("problem" in side for sides in found.values() for side in sides.values()))


if __name__ == "__main__":
    raise SystemExit(main())
