"""Which run a folder holds: the identity that a resume must share, and the record of its end.

The settings are compared before the base is loaded. `--resume auto` starts, resumes or returns the
result of a finished run; `finish` uploads the adapter and records that nothing is left.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peftkit.config.schema import flat
from peftkit.data.records import sources_of
from peftkit.data.rows.lazy import fingerprint
from peftkit.errors import CheckpointError, PeftkitError, did_you_mean
from peftkit.events import Listener, Notice, Saved, ignore, plain
from peftkit.execution.environment import is_main_process
from peftkit.execution.state import Result
from peftkit.files.disk import read_json, sha256_of, write_json
from peftkit.files.strict_json import Json, JsonMap
from peftkit.formats.folders import FINISHED, TENSORS
from peftkit.model.blocks import is_sharded
from peftkit.recipe import Recipe
from peftkit.tasks.run_hooks import Run
from peftkit.train.checkpoint_files import Checkpoints

UNBOUND = {
    "output_dir",
    "eval_every",
    "save_every",
    "keep_checkpoints",
    "gradient_checkpointing",
    "record",
    *("log_to", "trackers", "upload", "proof"),
    "eval_before",
    "eval_generate",
    "early_stopping",
    "keep_best",
    "best_metric",
    "drift",
    "sample_every",
    "sample_prompts",
    "sample_tokens",
}
"""Settings that a resumed run may change: weights do not depend on them."""
Identity = JsonMap


def identity_of(run: Run, identity: Identity) -> dict[str, object]:
    """Return all values that determine the weights of a run, as plain JSON.

    Args:
        identity: The caller's values: base, method, data.
    """
    train = run.config.model_dump(exclude=UNBOUND)
    # a sharded base sums in another order; the location of its shards has no effect
    train["shard"] = "base" if is_sharded(run.model) else "none"
    rows = {"train": fingerprint(run.rows), "eval": fingerprint(run.eval_rows)}
    num_processes = run.world.world_size
    whole = {**identity, "train": train, "rows": rows, "num_processes": num_processes}
    plain: Json = json.loads(json.dumps(whole, default=str))
    return plain


def check_same_run(saved: Identity, now: Identity, allowed: Sequence[str]) -> list[str]:
    """Return the differences between two identities that are allowed.

    Args:
        allowed: Dotted keys; "train" allows all of "train.learning_rate" and the rest.

    Raises:
        CheckpointError: Lists all other differences; or an allowed key does not exist.
    """
    before, after = flat(saved), flat(now)
    before.pop("train.context_parallel", None)  # saved by earlier versions
    accepted: list[tuple[str, str]] = []
    refused: list[tuple[str, str]] = []
    for key in sorted(before.keys() | after.keys()):
        if key in before and key in after and before[key] == after[key]:
            continue
        texts = [json.dumps(v[key]) if key in v else "(missing)" for v in (before, after)]
        line = f"{key}: {' -> '.join(texts)}"
        is_allowed = any(key == name or key.startswith(f"{name}.") for name in allowed)
        (accepted if is_allowed else refused).append((key, line))
    if refused:
        flags = " ".join(f"--allow-changes {key}" for key, _ in refused)
        raise CheckpointError(
            "cannot resume: this is not the run that was saved",
            found="\n".join(line for _, line in refused),
            fix=f"Undo the change, or allow it, no longer bit-equal: {flags}\n"
            "Or start a new run with it: peftkit train --from RUN --set KEY=VALUE --out DIR",
        )
    keys = before.keys() | after.keys()
    for name in allowed:
        if not any(key == name or key.startswith(f"{name}.") for key in keys):
            fix = did_you_mean(name, keys) or "Leave it out."
            raise CheckpointError(f"cannot allow changes of {name!r}: no such setting", fix=fix)
    return [line for _, line in accepted]


FREE = {"train": UNBOUND, "base": {"store", "placement"}}
"""Settings by section that a resumed run may change: weights do not depend on them."""
MAX_BYTES = 1 << 20
HASHED_BYTES = 1 << 30
"""Largest file whose content is compared; of larger ones, size and time."""


def bound_settings(recipe: Recipe) -> dict[str, dict[str, object]]:
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


def _texts(value: object) -> Iterator[str]:
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


def _result(values: JsonMap, checkpoints: Path) -> Result:
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
