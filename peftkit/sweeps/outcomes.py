"""What became of the members: sweep.json, the table at the end, the report, the best adapter."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peftkit.errors import OutputError, RunError
from peftkit.events import Listener, Notice, Saved, Table
from peftkit.files.disk import read_json, writable_folder, write_json
from peftkit.files.folders import new_folder
from peftkit.report.history import is_run
from peftkit.report.live import REPORT
from peftkit.report.page import write_report
from peftkit.sweeps.members import Member

SWEEP, BEST = "sweep.json", "best"


@dataclass(slots=True)
class Outcome:
    """What became of a member, as sweep.json has it.

    Attributes:
        state: "waiting", "done" or "failed".
        eval_loss: The last one, or None. loss: Of the last step. error: Why it failed.
    """

    name: str
    settings: Mapping[str, Any]
    folder: str
    state: str = "waiting"
    steps: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    seconds: float = 0.0
    error: str = ""

    @property
    def rank(self) -> tuple[bool, float]:
        """What members are sorted by: the eval loss, or the loss where there are no eval rows."""
        value = self.eval_loss if self.eval_loss is not None else self.loss
        return (self.state == "failed" or value is None, math.inf if value is None else value)


def open_sweep(members: Sequence[Member], out: Path, resume: bool) -> dict[str, Outcome]:
    """Return the members' outcomes so far; refuses the folder of another sweep."""
    fresh = {
        m.name: Outcome(m.name, dict(m.settings), str(m.recipe.train.output_dir)) for m in members
    }
    file = out / SWEEP
    if not file.exists():
        if resume:
            raise OutputError(f"there is no sweep to resume in {out}", fix="Leave out --resume.")
        writable_folder(out)
        return fresh
    if not resume:
        raise OutputError(
            f"{out} already holds a sweep",
            fix="Go on with it (--resume), or give another folder (--out DIR).",
        )
    known = {entry["name"]: entry for entry in read_json(file)["members"]}
    asked = {m.name: dict(m.settings) for m in members}
    if asked != {name: entry["settings"] for name, entry in known.items()}:
        raise OutputError(
            f"the sweep in {out} has other members",
            found=", ".join(known),
            fix="Resume it with the settings that it was begun with, or give another folder.",
        )
    for name, entry in known.items():
        if entry["state"] == "done":
            fresh[name] = Outcome(**entry)
    return fresh


def write_outcomes(out: Path, outcomes: Mapping[str, Outcome], best: str | None = None) -> None:
    entries = [asdict(outcome) for outcome in outcomes.values()]
    write_json({"members": entries, "best": best}, out / SWEEP)


def tell_outcomes(out: Path, outcomes: Mapping[str, Outcome], on_event: Listener) -> list[Outcome]:
    """Write the end of the sweep and the report of all, copy the best adapter, tell the table."""
    order = sorted(outcomes.values(), key=lambda outcome: outcome.rank)
    folders = [outcome.folder for outcome in order if is_run(Path(outcome.folder))]
    try:
        on_event(Saved("report", write_report(folders, out / REPORT)))
    except Exception as error:  # a report costs no sweep
        on_event(Notice(f"{REPORT} was not written: {error}"))
    best = order[0]
    if best.state == "failed":
        raise RunError(
            "every member of the sweep failed", found=best.error, fix=f"See {out}/{SWEEP}"
        )
    write_outcomes(out, outcomes, best.name)
    left_out = shutil.ignore_patterns("checkpoints", "metrics.jsonl")
    with new_folder(out / BEST, last="adapter_config.json") as made:
        shutil.copytree(best.folder, made, ignore=left_out, dirs_exist_ok=True)
    keys = list(dict.fromkeys(key for outcome in order for key in outcome.settings))
    rows = tuple(
        (
            outcome.name,
            *(str(outcome.settings.get(key, "")) for key in keys),
            "-" if outcome.eval_loss is None else f"{outcome.eval_loss:.4f}",
            "-" if outcome.loss is None else f"{outcome.loss:.4f}",
            str(outcome.steps),
            f"{outcome.seconds:.0f} s",
            outcome.state,
        )
        for outcome in order
    )
    names = [key.rpartition(".")[2] for key in keys]
    columns = ("member", *names, "eval loss", "loss", "steps", "time", "state")
    on_event(Table("The sweep, best first", columns, rows))
    on_event(Saved("best adapter", out / BEST))
    return order
