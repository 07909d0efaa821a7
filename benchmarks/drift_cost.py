"""The time that `train.drift` adds to a run, as a share of its steps.

    OMP_NUM_THREADS=1 python -m benchmarks.drift_cost [--out runs/drift_cost] [--rows style]

Trains SmolLM2-135M for six steps with the default batch size on a data set of `benchmarks.defaults`
and measures drift after three and six of them. The first measurement also generates the answers.
Prints the processor's seconds, which other programs do not change much, of a step and of both
measurements, and their share of a run with STEPS steps and the default `train.eval_every`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from benchmarks.defaults import LENGTH, NAME, SETS, make_rows
from peftkit.evaluation.drift import Drift
from peftkit.events import Event, StepDone
from peftkit.recipe import Recipe
from peftkit.run import run
from peftkit.settings import TrainConfig

STEPS = 200


def measured(name: str, out: Path) -> tuple[float, float, float]:
    """Return the seconds of a step, and of the first and the second measurement."""
    train, held_out = make_rows(name, out)
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:2]))
    seconds, tokens = list[float](), list[int]()
    steps, measure, last = list[float](), Drift.measure, [0.0]

    def timed(drift: Drift) -> dict[str, float]:
        began = time.process_time()
        figures = measure(drift)
        seconds.append(time.process_time() - began)
        return figures

    def listen(event: Event) -> None:
        now = time.process_time()
        if isinstance(event, StepDone):
            tokens.append(event.num_tokens)
            steps.append(now - last[0])
        last[0] = now

    settings = {"output_dir": out / "run", "max_steps": 6, "eval_every": 3, "save_every": None}
    recipe = Recipe(
        base={"model": NAME},
        data={"train": str(train), "eval": str(held_out), "max_length": LENGTH, "packing": False},
        train={**settings, "drift": {}, "compile": False},
    )
    with patch.object(Drift, "measure", timed):
        run(recipe, overwrite=True, on_event=listen)
    print(f"{name}: {tokens[-1] / len(steps):.0f} tokens a step")
    return statistics.median(steps), seconds[0], seconds[1]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/drift_cost"))
    parser.add_argument("--rows", choices=SETS, default="style")
    arguments = parser.parse_args(argv)
    print("load before:", *(f"{value:.1f}" for value in os.getloadavg()))
    step, first, second = measured(arguments.rows, arguments.out)
    every = TrainConfig.model_fields["eval_every"].default
    cost = first + second * (STEPS // every - 1)
    print(f"a step {step:.2f} s; measurements {first:.2f} s (with the answers), {second:.2f} s")
    print(f"{STEPS // every} measurements: {cost / (STEPS * step):.1%} of {STEPS} steps")
    print("load after:", *(f"{value:.1f}" for value in os.getloadavg()))


if __name__ == "__main__":
    main()
