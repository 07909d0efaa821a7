"""Whether an adapter's settings are those that were saved: a wrong scale would go unnoticed.

`peftkit.json` keeps the method as asked, a copy of what adapter_config.json says of the computing,
and the hash of both. This finds damage and careless edits; it is no signature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peftkit.errors import AdapterError
from peftkit.strict_json import shown

OLDEST_FIELDS: dict[str, Any] = {
    "auto_mapping": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "layers_pattern": None,
    "layers_to_transform": None,
    "modules_to_save": None,
}
WHERE_FIELDS = {
    *("auto_mapping", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform"),
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "revision",
    "target_modules",
}
"""Fields that say where an adapter sits, not what it computes."""


def computing(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that decide what the tensors compute."""
    return {
        name: value
        for name, value in fields.items()
        if name not in WHERE_FIELDS and not (name in OLDEST_FIELDS and value == OLDEST_FIELDS[name])
    }


def settings_digest(*settings: Mapping[str, Any] | None) -> str:
    """Return a hash of settings: the method, what the config says of the computation, the task."""
    there = [setting for setting in settings if setting is not None]
    return hashlib.sha256(json.dumps(there, sort_keys=True).encode()).hexdigest()


def notes_changed(path: Path) -> AdapterError:
    """Return the error for notes whose settings have another hash than was noted."""
    return AdapterError(
        f"{path} was changed after the adapter was saved",
        found="its settings, as rank and alpha, have another sha256 than was noted",
        fix="Restore it; or delete it to load the folder as its adapter_config.json says.",
    )


def check_config(path: Path, fields: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise AdapterError, naming the fields, where a config computes otherwise than was saved.

    Args:
        path: Of the config, for the message.
        fields: All of what it says now.
        saved: What it said of the computation.
    """
    now = computing(fields)
    differing = [
        f"{shown(name)}: {shown(now.get(name))}, and was {shown(saved.get(name))}"
        for name in sorted(now.keys() | saved.keys())
        if (now.get(name) or None) != (saved.get(name) or None)
    ]
    if differing:
        raise AdapterError(
            f"{path} was changed after the adapter was saved",
            found="\n".join(differing),
            fix=f"Restore it; or delete peftkit.json to load it as {path.name} says.",
        )
