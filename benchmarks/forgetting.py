"""What a run changes beside its task: score and drift by learning rate, anchor and method.

    python -m benchmarks.forgetting --out runs/forgetting [--part recipes|methods] [--seeds 0 1 2]

Trains SmolLM2-135M on two of the data sets of `benchmarks.defaults`, format (100 rows) and style
(300), for the same number of steps. `recipes` compares learning rates, target layers and
`task.anchor` for LoRA; `methods` compares methods, each at the learning rate that its line names.
A score is the share of 64 held-out answers that are exactly right. Drift is measured after training
as `train.drift` does: on the base's own answers, and as the rise of the cross entropy on general
texts, both in nats per token. Prints Markdown: means over the seeds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.defaults import HELD_OUT, LENGTH, NAME, SETS, keeping, make_rows
from benchmarks.report import table
from peftkit.evaluation.drift import Drift
from peftkit.events import EvalDone
from peftkit.formats.open_adapter import open_adapter
from peftkit.recipe import Recipe
from peftkit.run import run
from peftkit.settings import DriftConfig

STEPS = 30
LORA = {"type": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"}
Variant = tuple[Mapping[str, Any], float, float | None]
"""Method, learning rate, anchor."""
RECIPES: dict[str, Variant] = {
    "2e-4": (LORA, 2e-4, None),
    "1e-3": (LORA, 1e-3, None),
    "1e-3, q and v alone": ({**LORA, "targets": ["q", "v"]}, 1e-3, None),
    "1e-3, rank 4": ({**LORA, "rank": 4, "alpha": 8}, 1e-3, None),
    "1e-3, anchor 0.3": (LORA, 1e-3, 0.3),
    "1e-3, anchor 1": (LORA, 1e-3, 1.0),
}
METHODS: dict[str, Variant] = {
    "lora": (LORA, 5e-4, None),
    "dora": ({**LORA, "type": "dora"}, 5e-4, None),
    "ia3": ({"type": "ia3"}, 2e-2, None),
    "vera": ({"type": "vera", "rank": 64, "targets": "all-linear"}, 1e-2, None),
    "bottleneck": ({"type": "bottleneck"}, 1e-3, None),
    "ln_tuning": ({"type": "ln_tuning"}, 5e-3, None),
    "prompt_tuning": ({"type": "prompt_tuning"}, 3e-2, None),
    "prefix_tuning": ({"type": "prefix_tuning"}, 1e-2, None),
}
"""SmolLM2-135M has no biases for bitfit."""
COLUMNS = (
    "rows",
    "recipe",
    "exactly right",
    "eval loss",
    "drift",
    "same token",
    "text",
    "s a step",
)


def recipe(files: tuple[Path, Path], out: Path, variant: Variant, seed: int) -> Recipe:
    """Return the recipe of a variant."""
    method, rate, anchor = variant
    train_file, held_out = map(str, files)
    return Recipe(
        base={"model": NAME},
        method=dict(method),
        task={"type": "causal_lm", "anchor": anchor},
        data={"train": train_file, "eval": held_out, "max_length": LENGTH, "packing": False},
        train={
            "output_dir": out,
            "max_steps": STEPS,
            "batch_size": 8,
            "learning_rate": rate,
            "seed": seed,
            "eval_every": None,
            "save_every": None,
            "eval_generate": HELD_OUT,
            "drift": {},
            "compile": False,
        },
    )


def measured(files: tuple[Path, Path], out: Path, variant: Variant, seed: int) -> list[float]:
    """Train one variant; return the figures of a line."""
    evals = list[EvalDone]()
    done = run(recipe(files, out, variant, seed), overwrite=True, on_event=keeping(evals))
    figures = evals[-1].metrics
    opened = open_adapter(out)
    model, tokenizer = opened.base.model, opened.base.tokenizer
    drift = Drift(model, tokenizer, opened.adapter.disabled, DriftConfig(on="text"))
    names = ("exact_match", "loss", "drift", "drift_same")
    return [*(figures[n] for n in names), drift.measure()["drift"], done.seconds / done.step]


def lines(
    name: str, variants: Mapping[str, Variant], out: Path, seeds: Sequence[int]
) -> Iterator[tuple[str, ...]]:
    """Yield a line of the table for each variant."""
    files = make_rows(name, out / name)
    for label, variant in variants.items():
        results = []
        for seed in seeds:
            results.append(measured(files, out / name / "run", variant, seed))
            gc.collect()
        exact, loss, drift, same, text, seconds = map(statistics.mean, zip(*results, strict=True))
        yield (
            f"{name}, {SETS[name][1]}",
            label if variants is RECIPES else f"{label}, {variant[1]:g}",
            f"{exact:.0%}",
            f"{loss:.3f}",
            f"{drift:.3f}",
            f"{same:.0%}",
            f"{text:+.3f}",
            f"{seconds:.1f}",
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Train them all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/forgetting"))
    parser.add_argument("--part", choices=("recipes", "methods"), default="recipes")
    parser.add_argument("--rows", nargs="*", choices=SETS, default=["format", "style"])
    parser.add_argument("--only", nargs="*", help="Labels of variants; default: all.")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    arguments = parser.parse_args(argv)
    variants = RECIPES if arguments.part == "recipes" else METHODS
    if arguments.only:
        variants = {label: variants[label] for label in arguments.only}
    rows = list[tuple[str, ...]]()
    for name in arguments.rows:
        for line in lines(name, variants, arguments.out, arguments.seeds):
            rows.append(line)
            print(*line, sep="  ", flush=True)
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    main()
