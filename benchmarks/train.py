"""Training speed and peak memory next to peers: same rows, same order, same adapter.

    python -m benchmarks.train --peers PEERS/bin/python --rows 160
    python -m benchmarks.train --against trl,unsloth --peers PEERS/bin/python \\
        --unsloth UNSLOTH/bin/python --data mixed --quantize nf4 --json figures.json

PEERS is an environment with trl and peft, UNSLOTH one with unsloth, both with the same torch. All
sides run alternately, each in a separate process; medians over --repeats. If the loss curves differ
by more than the tolerance, the difference is reported instead of a speed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.limits import Limits, Sizes, limits
from benchmarks.orders import make_rows
from benchmarks.report import Spread, disagreement, heading, table, write_json
from benchmarks.workers import WorkerFailed, work

LOSS_TOLERANCE = 0.08
"""Maximum mean difference of the losses relative to the mean loss. Sides draw different initial A.
Peers have adapters in bf16, peftkit in float32, and peers round the update to bf16 before they add
it, which slows their first steps compared with float32 (docs/performance.md)."""

BY_BLOCK = {
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "1",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "1",
}
"""Makes accelerate compile one block of any length for all: the full model takes minutes."""

PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "trl": ("trl", {}),
    "trl-compiled": ("trl", {"compile": True, "environ": BY_BLOCK}),
    "trl-liger": ("trl", {"liger": True}),
    "trl-recompute": ("trl", {"recompute": True}),
    "trl-model-loss": ("trl", {"model_loss": True}),
    "peft": ("peft_loop", {}),
    "peft-fp32": ("peft_loop", {"adapters": "fp32"}),
    "peft-compiled": ("peft_loop", {"compile": True}),
    "peft-recompute": ("peft_loop", {"recompute": True}),
    "unsloth": ("unsloth", {}),
    "unsloth-bf16": ("unsloth", {"adapters": "bf16"}),
    "unsloth-compiled": ("unsloth", {"environ": {"UNSLOTH_CPU_COMPILE": "1"}}),
    "unsloth-recompute": ("unsloth", {"recompute": True}),
}
"""Name -> worker, and its additional settings."""

Runs = dict[str, list[dict[str, Any]]]


def encode(model: str, data: str, num_rows: int, max_length: int) -> list[dict[str, list[int]]]:
    """Return token ids and labels of the first rows."""
    return encoded(model, data, num_rows, max_length)[0]


def encoded(
    model: str, data: str, num_rows: int, max_length: int
) -> tuple[list[dict[str, list[int]]], Any]:
    """Return token ids and labels of the first rows, and their model."""
    from peftkit.base.load import load_base
    from peftkit.settings import DataConfig
    from peftkit.tasks.tokens import CausalLM

    base = load_base(model)
    config = DataConfig(train=data, packing=False, max_length=max_length)
    rows = CausalLM(base.model, base.tokenizer, config).load(data)[:num_rows]
    tokens = [{"input_ids": list(row.input_ids), "labels": list(row.labels)} for row in rows]
    return tokens, base.model


def in_turn(
    job: Mapping[str, Any],
    sides: Mapping[str, tuple[str, str, Mapping[str, Any]]],
    repeats: int,
    folder: Path,
    *,
    seconds: float | None = None,
) -> Runs:
    """Run all sides one after the other, several times; print the progress.

    Args:
        sides: Name -> worker, python, and what to change in the job.
        seconds: Time limit of one run.
    """
    runs: Runs = {side: [] for side in sides}
    for repeat in range(repeats):
        for side, (worker, python, changes) in sides.items():
            facts = work(worker, {**job, **changes}, folder, python=python, seconds=seconds)
            runs[side].append(facts)
            told = facts.get("failed") or f"{facts['seconds']:.1f} s"
            print(f"run {repeat + 1} of {repeats}, {side}: {told}", file=sys.stderr, flush=True)
    return runs


def problems(runs: Runs, tolerance: float = LOSS_TOLERANCE) -> dict[str, str]:
    """Return, by side, why it cannot be compared with peftkit."""
    found = {}
    for side, results in runs.items():
        failed = [result["failed"] for result in results if "failed" in result]
        if failed:
            found[side] = failed[0]
    ours = runs["ours"][0]
    if "ours" in found:
        return found
    for side, results in runs.items():
        if side in found or side == "ours":
            continue
        theirs = results[0]
        if len(ours["losses"]) != len(theirs["losses"]):
            found[side] = f"{len(theirs['losses'])} steps, ours has {len(ours['losses'])}"
        elif ours["num_trainable"] != theirs["num_trainable"]:
            found[side] = f"trains {theirs['num_trainable']} values, ours {ours['num_trainable']}"
        elif not (apart := disagreement(ours["losses"], theirs["losses"])) <= tolerance:
            found[side] = f"the losses differ by {apart:.1%}, more than {tolerance:.0%}"
    return found


def tokens_of_steps(rows: Sequence[Mapping[str, Any]], batch_size: int, *names: str) -> list[int]:
    """Return the tokens of each step, without padding.

    Args:
        names: Fields of a row that hold tokens; input_ids alone by default.
    """
    sizes = [sum(len(row[name]) for name in names or ("input_ids",)) for row in rows]
    return [sum(sizes[start : start + batch_size]) for start in range(0, len(sizes), batch_size)]


def num_beginnings(rows: Sequence[Mapping[str, Any]], batch_size: int) -> int:
    """Return the tokens of batches, with shared prefixes of a batch counted once.

    A causal model has to compute these.
    """
    found = 0
    for start in range(0, len(rows), batch_size):
        texts = [tuple(row["input_ids"]) for row in rows[start : start + batch_size]]
        found += len({text[: n + 1] for text in texts for n in range(len(text))})
    return found


def least_seconds(
    model: Any, rows: Sequence[Mapping[str, Any]], args: argparse.Namespace, limits: Limits
) -> float:
    """Return the seconds that the products of all steps take at the machine's limit.

    Shared prefixes of a batch count once: no side has to compute more.
    """
    num_learnt = sum(label >= 0 for row in rows for label in row["labels"])
    lengths = [len(row["input_ids"]) for row in rows]
    sizes = Sizes.of(model, args.rank)
    flop = sizes.step_flop(lengths, num_beginnings(rows, args.batch_size), num_learnt)
    return flop / getattr(limits, args.dtype)


def summary(
    runs: Runs, step_tokens: Sequence[int], bad: Mapping[str, str], least: float = 0.0
) -> dict[str, dict[str, Any]]:
    """Return each side's figures, except speeds of sides that cannot be compared.

    Args:
        least: Seconds that the products of all steps take at the machine's limit; 0: unknown.
    """
    tokens = sum(step_tokens)
    figures: dict[str, dict[str, Any]] = {}
    for side, results in runs.items():
        if side in bad or "ours" in bad:
            figures[side] = {"problem": bad.get(side, "ours failed")}
            continue
        speed = Spread.of([tokens / result["seconds"] for result in results])
        figures[side] = {
            "tokens_per_second": speed.median,
            "spread": [speed.low, speed.high],
            "steady": median(_steady(result, step_tokens) for result in results),
            "whole_seconds": median(result["whole_seconds"] for result in results),
            "first_step_seconds": median(result["first_step_seconds"] for result in results),
            "peak_bytes": median(result["peak_bytes"] for result in results),
            "losses_apart": disagreement(runs["ours"][0]["losses"], results[0]["losses"]),
        }
        if least:
            figures[side]["share"] = least * figures[side]["steady"] / tokens
    for side, found in figures.items():
        if side != "ours" and "problem" not in found:
            ours = figures["ours"]
            found["speed_of_ours"] = ours["tokens_per_second"] / found["tokens_per_second"]
            found["whole_of_ours"] = found["whole_seconds"] / ours["whole_seconds"]
            found["memory_of_ours"] = ours["peak_bytes"] / found["peak_bytes"]
    return figures


def _steady(result: Mapping[str, Any], step_tokens: Sequence[int]) -> float:
    """Return tokens per second of the later half of the steps, after compilation."""
    half = len(step_tokens) // 2
    return sum(step_tokens[half:]) / sum(result["step_seconds"][half:])


def show(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table; a side that cannot be compared has a reason below it instead of figures."""
    columns = (
        *("", "tokens/s (least-most)", "later half", "of the limit", "whole run"),
        *("first step after", "peak"),
        *("losses apart", "ours: speed", "whole run", "memory"),
    )
    rows, notes = [], []
    for side, found in figures.items():
        if "problem" in found:
            rows.append([side, *["-"] * (len(columns) - 1)])
            notes.append(f"{side}: no speed is reported: {found['problem']}")
            continue
        ratios = [
            f"{found[name]:.2f} x" if name in found else ""
            for name in ("speed_of_ours", "whole_of_ours", "memory_of_ours")
        ]
        speed = Spread(found["tokens_per_second"], *found["spread"])
        rows.append(
            [
                side,
                speed.show(),
                f"{found['steady']:.0f}",
                f"{found['share']:.0%}" if "share" in found else "",
                f"{found['whole_seconds']:.1f} s",
                f"{found['first_step_seconds']:.1f} s",
                f"{found['peak_bytes'] / 1e9:.2f} GB",
                "" if side == "ours" else f"{found['losses_apart']:.2%}",
                *ratios,
            ]
        )
    return "\n".join([table(columns, rows), *notes])


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--against",
        default="trl,peft",
        type=lambda text: [name for name in text.split(",") if name],
        help=f'of {", ".join(PEERS)}; "" for ours alone',
    )
    parser.add_argument("--peers", default=sys.executable, help="python with trl and peft")
    parser.add_argument("--unsloth", help="python with unsloth")
    parser.add_argument(
        "--data", default="orders", help="orders, mixed (lengths as in chat data), or a file"
    )
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--quantize", choices=("none", "nf4"), default="none")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--train", type=json.loads, default={}, help='of our train section: {"seed": 1}'
    )
    parser.add_argument(
        "--cold", action="store_true", help="compile anew in each run, as on a new machine"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the measurements here")
    args = parser.parse_args(words)
    unknown = [name for name in args.against if name not in PEERS]
    if unknown:
        parser.error(f"--against {','.join(unknown)}: known are {', '.join(PEERS)}")
    if "unsloth" in args.against and not args.unsloth:
        parser.error("--against unsloth needs --unsloth UNSLOTH/bin/python")
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Run all sides and print the table."""
    args = arguments(words)
    from peftkit.base.locate import locate

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = args.data in ("orders", "mixed")
        data = str(make_rows(folder, args.rows, args.data)) if own else args.data
        rows, model = encoded(args.model, data, args.rows, args.max_length)
        names = ("dtype", "quantize", "rank", "batch_size", "learning_rate", "device", "cold")
        job = {
            **{key: getattr(args, key) for key in names},
            "source": locate(args.model).source,
            "task": "causal_lm",
            "rows": rows,
        }
        sides: dict[str, Any] = {"ours": ("ours", sys.executable, {"train": args.train})}
        for side in args.against:
            worker, changes = PEERS[side]
            python = args.unsloth if worker == "unsloth" else args.peers
            sides[side] = (worker, python, changes)
        device = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
        before = limits(device)
        try:
            runs = in_turn(job, sides, args.repeats, folder)
        except WorkerFailed as error:
            print(error, file=sys.stderr)
            return 1
    best = before.best(limits(device))
    least = least_seconds(model, rows, args, best)
    return tell(args, rows, runs, least, f"the machine's limit in this run: {best.show()}")


def tell(
    args: argparse.Namespace,
    rows: Sequence[Mapping[str, Any]],
    runs: Runs,
    least: float = 0.0,
    limit: str = "",
) -> int:
    """Print the table, write the JSON; return the exit status.

    Args:
        least: Seconds that the products of all steps take at the machine's limit; 0: unknown.
        limit: Description of the limits.
    """
    lengths = [len(row["input_ids"]) for row in rows]
    bad = problems(runs)
    figures = summary(runs, tokens_of_steps(rows, args.batch_size), bad, least)
    print(heading({side: results[0].get("versions", {}) for side, results in runs.items()}))
    print(
        f"{args.model}, {args.dtype}, quantize {args.quantize}, LoRA r{args.rank} on all linears, "
        f"{len(rows)} rows of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all "
        f"({num_beginnings(rows, args.batch_size)} with what rows of a batch begin with counted "
        f"once), batch {args.batch_size}; medians of {args.repeats} runs in turn; losses may "
        f"differ by {LOSS_TOLERANCE:.0%}\n"
    )
    print(show(figures))
    if limit:
        print(f"{limit}; of it: what the products of the later half take alone")
    for notice in runs["ours"][0].get("notices", ()):
        print(f"ours says: {notice}")
    about = {name: str(value) for name, value in vars(args).items()}
    write_json(args.json, {"settings": about, "figures": figures, "runs": runs})
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
