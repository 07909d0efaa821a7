"""A resume with other settings is refused before base and data are loaded for it."""

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
    """Compare a recipe with the newest checkpoint of its folder, as far as the recipe alone says.

    Raises:
        CheckpointError: There is none, or it has other settings; lists them.
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
        for name in allow_changes  # those of rows are looked at when there are rows
        if any(key == name or key.startswith(f"{name}.") for key in keys)
    ]
    check_same_run(saved, now, allowed)
