"""The settings of a resumed run, checked before the base and the data are loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from peftkit.config.schema import flat
from peftkit.events import ignore
from peftkit.recipe import Recipe
from peftkit.train.checkpoint import UNBOUND, check_same_run
from peftkit.train.checkpoint_files import Checkpoints

SETTLED_LATER = {"data": {"packing"}, "train": {"shard"}, "base": {"store", "placement"}}
"""Settings that follow from base and rows, or that a resume may change."""


def check_settings_of_resume(recipe: Recipe, allow_changes: Sequence[str]) -> None:
    """Compare the settings of a recipe with the newest checkpoint of its folder.

    Raises:
        CheckpointError: There is no checkpoint, or its settings differ; lists them.
    """
    manifest = Checkpoints(recipe.train.output_dir, keep=1).newest_valid(ignore).manifest
    saved, now = dict[str, Any](), dict[str, Any]()
    for section in ("base", "method", "data", "train"):
        config = getattr(recipe, section)
        left_out = SETTLED_LATER.get(section, set()) | (UNBOUND if section == "train" else set())
        values = json.loads(json.dumps(config.model_dump(mode="json"), default=str))
        before = manifest["identity"].get(section, {})
        names = [name for name in values if name in before and name not in left_out]
        now[section] = {name: values[name] for name in names}
        saved[section] = {name: before[name] for name in names}
    keys = flat(now)
    allowed = [
        name
        for name in allow_changes  # `Saver.resume` checks the others
        if any(key == name or key.startswith(f"{name}.") for key in keys)
    ]
    check_same_run(saved, now, allowed)
