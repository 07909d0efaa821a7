"""Resume a run: its settings, checked before the base is loaded, and `--resume auto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peftkit.config.schema import flat
from peftkit.events import Listener, Notice, ignore
from peftkit.execution.environment import is_main_process
from peftkit.execution.state import Result
from peftkit.recipe import Recipe
from peftkit.train.checkpoint import check_same_run
from peftkit.train.checkpoint_files import Checkpoints
from peftkit.train.finish import bound_settings, read_finished

SETTLED_LATER = {"data": {"packing"}, "train": {"shard"}}
"""Settings that follow from base and rows, like all of the task's."""


def finished_or_resume(
    recipe: Recipe, changes: Sequence[str], overwrite: bool, on_event: Listener
) -> tuple[Result | None, bool, Sequence[str]]:
    """Return what `resume="auto"` does: the result of a finished run, or None and how to start.

    The second value is whether the run resumes, the third the changes that are allowed then.

    A run is finished if `finished.json` has the recipe's settings, the digests of the files that
    they name and the hash of the adapter in the folder, and no checkpoint is newer. Otherwise it
    resumes, which compares identities with those of its rows. All processes of a run decide alike,
    because none writes to the folder before all have compared their decisions.
    """
    folder = recipe.train.output_dir
    steps = Checkpoints(folder).steps()
    if overwrite:
        return None, True, changes  # `prepare_output` refuses the combination
    result = read_finished(recipe)
    if result is None or (steps and steps[-1] > result.step):
        return None, bool(steps), changes if steps else ()
    if is_main_process():
        text = f"The run in {folder} is finished, after {result.step:,} steps."
        on_event(Notice(f"{text} Nothing is left to do."))
    return result, False, ()


def check_settings_of_resume(recipe: Recipe, allow_changes: Sequence[str]) -> None:
    """Compare the settings of a recipe with the newest checkpoint of its folder.

    Raises:
        CheckpointError: There is no checkpoint, or its settings differ; lists them.
    """
    manifest = Checkpoints(recipe.train.output_dir, keep=1).newest_valid(ignore).manifest
    saved, now = dict[str, Any](), dict[str, Any]()
    for section, values in bound_settings(recipe).items():
        if section == "task":
            continue
        before = manifest["identity"].get(section, {})
        names = [n for n in values if n in before and n not in SETTLED_LATER.get(section, ())]
        now[section] = {name: values[name] for name in names}
        saved[section] = {name: before[name] for name in names}
    keys = flat(now)
    allowed = [
        name
        for name in allow_changes  # `Saver.resume` checks the others
        if any(key == name or key.startswith(f"{name}.") for key in keys)
    ]
    check_same_run(saved, now, allowed)
