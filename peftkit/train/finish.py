"""The end of a run after its adapter is saved: uploads, and the record that it is finished."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peftkit.data.records import sources_of
from peftkit.errors import CheckpointError, PeftkitError
from peftkit.events import Listener, Notice, Saved, plain
from peftkit.execution.environment import is_main_process
from peftkit.execution.state import Result
from peftkit.files.disk import read_json, sha256_of, write_json
from peftkit.formats.folders import FINISHED, TENSORS
from peftkit.recipe import Recipe
from peftkit.train.checkpoint import UNBOUND

FREE = {"train": UNBOUND, "base": {"store", "placement"}}
"""Settings by section that a resumed run may change: weights do not depend on them."""
MAX_BYTES = 1 << 20
HASHED_BYTES = 1 << 30
"""Largest file whose content is compared; of larger ones, size and time."""


def bound_settings(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the settings of a recipe that determine its weights, as plain JSON by section."""
    settings = {}
    for section in type(recipe).model_fields:
        values = getattr(recipe, section).model_dump(mode="json")
        plain = json.loads(json.dumps(values, default=str))
        free = FREE.get(section, ())
        settings[section] = {name: plain[name] for name in plain if name not in free}
    return settings


def inputs_of(recipe: Recipe) -> dict[str, str]:
    """Return a digest of each local file and folder that the bound settings name."""
    texts = set(_texts(bound_settings(recipe)))
    paths = {*texts, *(text.rpartition(":")[0] for text in texts)}  # FILE.py:NAME
    rows = {source.path for source in sources_of(recipe.data)} | {str(recipe.data.eval)}
    found = {path: Path(path).expanduser() for path in paths | rows if path and "\0" not in path}
    return {
        path: _digest(place, is_deep=path in rows)
        for path, place in sorted(found.items())
        if os.path.exists(place)
    }


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _digest(path: Path, *, is_deep: bool) -> str:
    if path.is_file() and path.stat().st_size <= HASHED_BYTES:
        return sha256_of(path)
    files = [path] if path.is_file() else path.rglob("*") if is_deep else path.iterdir()
    stamps = [(str(f), s.st_size, s.st_mtime_ns) for f in files if f.is_file() and (s := f.stat())]
    return hashlib.sha256(repr(sorted(stamps)).encode("utf-8", "surrogatepass")).hexdigest()


def check_target(recipe: Recipe) -> None:
    """Check before a run that its upload can be written and replaces no other run.

    Raises:
        PeftkitError: The URL cannot be written to, or holds another run.
    """
    if recipe.train.upload and is_main_process():
        from peftkit.formats.upload import check_upload

        check_upload(recipe.train.upload, bound_settings(recipe))


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
        "inputs": inputs_of(recipe),
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

    The record counts only if the adapter in the folder is the one that the run saved, if it was
    uploaded to where the recipe says now, and if the files that the recipe names have not changed.
    """
    folder = recipe.train.output_dir
    if not (folder / FINISHED).is_file() or not (folder / TENSORS).is_file():
        return None
    try:
        record = read_json(folder / FINISHED, max_bytes=MAX_BYTES, error=CheckpointError)
        is_same = record["settings"] == bound_settings(recipe)
        is_same = is_same and record["inputs"] == inputs_of(recipe)
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
