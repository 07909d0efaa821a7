"""Compare score and drift of learning rates, anchors and methods.

    python -m benchmarks.forgetting --out runs/forgetting [--part recipes|methods] [--seeds 0 1 2]

Trains SmolLM2-135M on two of the data sets of `benchmarks.defaults`, format (100 rows) and style
(300), for the same number of steps of 8 rows. `recipes` compares learning rates, steps, target
layers, ranks and `task.anchor` for LoRA. `methods` compares methods: the first seed trains each of
a method's learning rates, and the others the lowest one whose score is within two points of the
best. A score is the share of 64 held-out answers that are exactly right. Drift is measured after
training as `train.drift` does: on the base's own answers, and as the rise of the cross entropy on
general texts, both in nats per token. Each run has its own process. Its memory is the peak resident
size of this process.

Finished runs are kept in results.jsonl in the output folder and not repeated. Prints Markdown:
means over the seeds, with their lowest and highest value. `--plot FILE` draws eval loss and drift
at all learning rates.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.defaults import HELD_OUT, LENGTH, NAME, SETS, keeping, make_rows
from benchmarks.forgetting_plot import Point, plot
from benchmarks.report import table
from peftkit.evaluation.drift import Drift
from peftkit.events import EvalDone, Event, RunStarted, StepDone
from peftkit.formats.open_adapter import open_adapter
from peftkit.recipe import Recipe
from peftkit.run import run
from peftkit.settings import DriftConfig

STEPS, ROWS_PER_STEP = 30, 8
TOLERANCE = 0.02
"""Share of exact answers by which a lower learning rate may be worse than the best one."""
LORA = {"type": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"}


@dataclass(frozen=True)
class Variant:
    """The settings of a line in the table."""

    method: Mapping[str, Any] = field(default_factory=lambda: LORA)
    rates: tuple[float, ...] = (1e-3,)
    anchor: float | None = None
    steps: int = STEPS


@dataclass(frozen=True)
class Figures:
    """The results of a run: losses and drift in nats per token, processor seconds, MB."""

    exact: float
    loss: float
    drift: float
    same: float
    text: float
    step_seconds: float
    peak: float
    trained: int


RECIPES = {
    "2e-4": Variant(rates=(2e-4,)),
    "5e-4": Variant(rates=(5e-4,)),
    "1e-3": Variant(),
    "1e-3, a third of the steps": Variant(steps=STEPS // 3),
    "1e-3, three times the steps": Variant(steps=3 * STEPS),
    "1e-3, only `q` and `v`": Variant({**LORA, "targets": ["q", "v"]}),
    "1e-3, rank 4": Variant({**LORA, "rank": 4, "alpha": 8}),
    "1e-3, `anchor: 0.3`": Variant(anchor=0.3),
    "1e-3, `anchor: 1`": Variant(anchor=1.0),
}
METHODS = {
    "lora": Variant(rates=(5e-4, 1e-3, 2e-3)),
    "lora, `anchor: 1`": Variant(rates=(5e-4, 1e-3, 2e-3), anchor=1.0),
    "dora": Variant({**LORA, "type": "dora"}, (5e-4, 1e-3, 2e-3)),
    "vera": Variant({"type": "vera", "rank": 64, "targets": "all-linear"}, (1e-2, 3e-2, 1e-1)),
    "ia3": Variant({"type": "ia3"}, (1e-2, 3e-2, 1e-1)),
    "ln_tuning": Variant({"type": "ln_tuning"}, (3e-3, 1e-2, 3e-2)),
    "bottleneck": Variant({"type": "bottleneck"}, (1e-3, 3e-3, 1e-2)),
    "prompt_tuning": Variant({"type": "prompt_tuning"}, (3e-2, 1e-1, 3e-1)),
    "prefix_tuning": Variant({"type": "prefix_tuning"}, (1e-2, 3e-2, 1e-1)),
}
"""SmolLM2-135M has no biases for bitfit."""


def recipe(files: tuple[Path, Path], out: Path, variant: Variant, rate: float, seed: int) -> Recipe:
    """Return the recipe of a variant."""
    train_file, held_out = map(str, files)
    return Recipe(
        base={"model": NAME},
        method=dict(variant.method),
        task={"type": "causal_lm", "anchor": variant.anchor},
        data={"train": train_file, "eval": held_out, "max_length": LENGTH, "packing": False},
        train={
            "output_dir": out,
            "max_steps": variant.steps,
            "batch_size": ROWS_PER_STEP,
            "learning_rate": rate,
            "seed": seed,
            "eval_every": None,
            "save_every": None,
            "eval_generate": HELD_OUT,
            "drift": {},
            "compile": False,
        },
    )


def measured(trained: Recipe) -> Figures:
    """Train a recipe in this process; return its figures."""
    evals, trainable, clocks, peaks = list[EvalDone](), list[int](), list[float](), list[float]()
    keep = keeping(evals)

    def listen(event: Event) -> None:
        keep(event)
        if isinstance(event, RunStarted):
            trainable.append(event.num_trainable)
        if isinstance(event, StepDone):
            clocks.append(time.process_time())
            peaks.append(peak_megabytes())

    run(trained, overwrite=True, on_event=listen)
    out = Path(trained.train.output_dir)
    opened = open_adapter(out)
    model, tokenizer = opened.base.model, opened.base.tokenizer
    drift = Drift(model, tokenizer, opened.adapter.disabled, DriftConfig(on="text"))
    found = evals[-1].metrics
    return Figures(
        exact=found["exact_match"],
        loss=found["loss"],
        drift=found["drift"],
        same=found["drift_same"],
        text=drift.measure()["drift"],
        step_seconds=(clocks[-1] - clocks[0]) / (len(clocks) - 1),
        peak=peaks[-1],
        trained=trainable[0],
    )


def peak_megabytes() -> float:
    """Return the peak resident size of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1e3


class Results:
    """Finished runs, in a file with one line each."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found = dict[str, Figures]()
        if file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._found[entry["run"]] = Figures(**entry["figures"])

    def of(self, trained: Recipe) -> Figures:
        """Return the figures of a recipe, trained in a process of its own if it is new."""
        parts = trained.model_dump(mode="json", exclude={"data", "train"})
        train = trained.train
        numbers = [train.max_steps, train.learning_rate, train.seed]
        key = json.dumps([Path(str(trained.data.train)).parent.name, numbers, parts])
        if key not in self._found:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                self._found[key] = figures = pool.submit(measured, trained).result()
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"run": key, "figures": asdict(figures)}) + "\n")
        return self._found[key]


@dataclass(frozen=True)
class Line:
    """A line of the table: the runs of a variant with different seeds."""

    rows: str
    label: str
    rate: float
    runs: Sequence[Figures]

    def show(self, name: str, form: str) -> str:
        """Return the mean of a figure, and its range if there are several seeds."""
        values = [getattr(figures, name) for figures in self.runs]
        shown = [format(value, form) for value in (mean(values), min(values), max(values))]
        return shown[0] if len(values) == 1 else f"{shown[0]} ({shown[1]} to {shown[2]})"

    @property
    def cells(self) -> list[str]:
        """The cells of the table."""
        return [
            self.rows,
            self.label,
            f"{self.rate:g}",
            f"{self.runs[0].trained:,}",
            self.show("exact", ".0%"),
            self.show("loss", ".3f"),
            self.show("drift", ".3f"),
            self.show("same", ".0%"),
            self.show("text", "+.3f"),
            f"{mean(run.step_seconds for run in self.runs):.1f}",
            f"{mean(run.peak for run in self.runs):,.0f}",
        ]


COLUMNS = (
    "rows",
    "trained",
    "learning rate",
    "parameters",
    "exactly right",
    "eval loss",
    "drift",
    "same token",
    "text",
    "s a step",
    "MB",
)


class Comparison:
    """Variants trained on one data set.

    Attributes:
        curves: Label -> drift and eval loss at each learning rate, of the first seed.
    """

    def __init__(self, name: str, out: Path, seeds: Sequence[int]) -> None:
        self._name, self._out, self._seeds = name, out, seeds
        self._files = make_rows(name, out / name)
        self._results = Results(out / "results.jsonl")
        self.curves = dict[str, list[Point]]()

    def line(self, label: str, variant: Variant) -> Line:
        """Return the line of a variant, after the training of what is missing."""
        first = [self._figures(variant, rate, self._seeds[0]) for rate in variant.rates]
        self.curves[label] = [Point(figures.drift, figures.loss) for figures in first]
        best = max(figures.exact for figures in first)
        rate = next(
            rate
            for rate, figures in zip(variant.rates, first, strict=True)
            if figures.exact >= best - TOLERANCE
        )
        runs = [self._figures(variant, rate, seed) for seed in self._seeds]
        return Line(f"{self._name}, {SETS[self._name][1]}", label, rate, runs)

    def _figures(self, variant: Variant, rate: float, seed: int) -> Figures:
        out = self._out / self._name / "run"
        return self._results.of(recipe(self._files, out, variant, rate, seed))


def main(argv: Sequence[str] | None = None) -> None:
    """Train them all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/forgetting"))
    parser.add_argument("--part", choices=("recipes", "methods"), default="recipes")
    parser.add_argument("--rows", nargs="*", choices=SETS, default=["format"])
    parser.add_argument("--only", nargs="*", help="Labels of variants; default: all.")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--plot", type=Path, help="SVG file of the last rows' curves.")
    arguments = parser.parse_args(argv)
    variants = RECIPES if arguments.part == "recipes" else METHODS
    if arguments.only:
        variants = {label: variants[label] for label in arguments.only}
    found = list[Line]()
    for name in arguments.rows:
        comparison = Comparison(name, arguments.out, arguments.seeds)
        for label, variant in variants.items():
            found.append(comparison.line(label, variant))
            print(*found[-1].cells, sep="  ", flush=True)
        if arguments.plot is not None:
            arguments.plot.write_text(plot(comparison.curves), encoding="utf-8")
    print(table(COLUMNS, [line.cells for line in found]))


if __name__ == "__main__":
    main()
