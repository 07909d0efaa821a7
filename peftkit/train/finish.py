"""The end of a run after its adapter is saved: uploads, and the record that it is finished."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peftkit.errors import CheckpointError, PeftkitError
from peftkit.events import Listener, Notice, Saved, plain
from peftkit.execution.environment import is_main_process
from peftkit.execution.state import Result
from peftkit.files.disk import read_json, sha256_of, write_json
from peftkit.formats.folders import FINISHED, TENSORS
from peftkit.recipe import Recipe
from peftkit.train.checkpoint import UNBOUND

SETTLED_LATER = {"data": {"packing"}, "train": {"shard"}, "base": {"store", "placement"}}
"""Settings that follow from base and rows, or that a resume may change."""
MAX_BYTES = 1 << 20


def bound_settings(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the settings of a recipe that a resumed run must share, as plain JSON by section."""
    settings = {}
    for section in ("base", "method", "data", "train"):
        values = getattr(recipe, section).model_dump(mode="json")
        left_out = SETTLED_LATER.get(section, set()) | (UNBOUND if section == "train" else set())
        plain = json.loads(json.dumps(values, default=str))
        settings[section] = {name: plain[name] for name in plain if name not in left_out}
    return settings


def finish(recipe: Recipe, result: Result, on_event: Listener) -> None:
    """Send the saved adapter to trackers and to `train.upload`; then record that nothing is left.

    Only the main process does it.

    Raises:
        RunError: The upload failed. The run is not finished, and `--resume auto` uploads again.
    """
    if not result.is_main:
        return
    folder = recipe.train.output_dir
    if recipe.train.log_to or recipe.train.trackers:
        from peftkit.train.trackers import log_adapter, trackers_of

        log_adapter(folder, trackers_of(recipe.train), lambda text: on_event(Notice(text)))
    record = {
        "result": plain(asdict(result)),
        "settings": bound_settings(recipe),
        "adapter": sha256_of(folder / TENSORS),
        "upload": recipe.train.upload,
    }
    record["result"].update(checkpoint=result.checkpoint.name)
    if (best := result.best_checkpoint) is not None:
        record["result"].update(best_checkpoint=best.name)
    if recipe.train.upload:
        from peftkit.formats.upload import upload_run

        upload_run(folder, recipe.train.upload, record, on_event)
        on_event(Saved("upload", Path(recipe.train.upload)))
    write_json(record, folder / FINISHED)


def read_finished(recipe: Recipe) -> Result | None:
    """Return the result of a finished run of this recipe; None if it is not finished.

    The record counts only if the adapter in the folder is the one that the run saved, and if it was
    uploaded to where the recipe says now.
    """
    folder = recipe.train.output_dir
    if not (folder / FINISHED).is_file() or not (folder / TENSORS).is_file():
        return None
    try:
        record = read_json(folder / FINISHED, max_bytes=MAX_BYTES, error=CheckpointError)
        is_same = record["settings"] == bound_settings(recipe)
        is_uploaded = recipe.train.upload in (None, record["upload"])
        if not (is_same and is_uploaded) or record["adapter"] != sha256_of(folder / TENSORS):
            return None
        return _result(record["result"], folder / "checkpoints")
    except (PeftkitError, KeyError, TypeError, AttributeError):  # damaged: the run resumes instead
        return None


def _result(values: Mapping[str, Any], checkpoints: Path) -> Result:
    metrics = {name: math.nan if v is None else v for name, v in values["metrics"].items()}
    best = values["best_checkpoint"]
    return Result(
        step=int(values["step"]),
        seconds=float(values["seconds"]),
        metrics=metrics,
        checkpoint=checkpoints / values["checkpoint"],
        best_step=values["best_step"],
        best_checkpoint=None if best is None else checkpoints / best,
        is_main=is_main_process(),
    )
