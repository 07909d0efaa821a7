"""All runs below a folder, the newest first."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from peftkit.errors import DataError
from peftkit.report.history import METRICS, History, read_history
from peftkit.report.sections import differing

MAX_DEPTH = 4
SKIPPED = {"checkpoints", "node_modules", "__pycache__"}


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in few words.

    Attributes:
        loss: Of the last steps, smoothed. best_eval_loss, best_step: The lowest, and where.
        changed: When it last wrote, in seconds since 1970.
        differs: Its settings in which not all runs of the table agree.
    """

    run: str
    state: str
    step: int
    num_steps: int
    loss: float | None
    eval_loss: float | None
    best_eval_loss: float | None
    best_step: int | None
    seconds: float
    changed: float
    differs: dict[str, str] = field(default_factory=dict)


def list_runs(folder: str | Path = "runs") -> list[RunRow]:
    """Return the runs at or below a folder, up to four levels deep, the newest first.

    Raises:
        DataError: There is no such folder, or no run in it.
    """
    top = Path(folder)
    if not top.is_dir():
        raise DataError(f"there is no folder '{top}'", fix="Name the folder that your runs are in.")
    runs = sorted(map(read_history, _folders(top)), key=lambda run: -run.changed)
    if not runs:
        raise DataError(
            f"there are no runs in '{top}'", found=f"No folder in it holds a {METRICS}."
        )
    differs = differing([run.facts.recipe for run in runs])
    return [row_of(run, settings) for run, settings in zip(runs, differs, strict=True)]


def _folders(top: Path) -> list[Path]:
    found = []
    for place, names, files in os.walk(top):
        deep = len(Path(place).relative_to(top).parts) >= MAX_DEPTH
        names[:] = [n for n in names if not (deep or n in SKIPPED or n.startswith("."))]
        if METRICS in files:
            found.append(Path(place))
    return found


def row_of(run: History, differs: dict[str, str] | None = None) -> RunRow:
    """Return a run in few words."""
    loss, evals = run.curves["loss"].smoothed().values, run.eval_loss
    best_step, best = evals.best() or (None, None)
    return RunRow(
        run=run.name,
        state=run.state(),
        step=run.step,
        num_steps=run.num_steps,
        loss=loss[-1] if loss else None,
        eval_loss=evals.values[-1] if evals else None,
        best_eval_loss=best,
        best_step=best_step,
        seconds=run.seconds,
        changed=run.changed,
        differs=differs or {},
    )
