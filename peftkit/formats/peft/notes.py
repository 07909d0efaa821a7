"""peftkit.json: the metadata of an adapter that PEFT's config cannot hold.

It holds the user's method, a copy of the config's fields that affect the computation, the base and
its loading settings, the prompt style, the task, and hashes of the tensors and of these settings.
The hashes detect damage and careless edits; they are not a signature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from peftkit.config.schema import from_dict
from peftkit.data.style import Style
from peftkit.errors import AdapterError, PeftkitError
from peftkit.files.disk import sha256_of, write_json
from peftkit.files.strict_json import Json, JsonMap, shown
from peftkit.formats.folders import START
from peftkit.formats.guard import read_json
from peftkit.methods.base import Method
from peftkit.methods.table import METHODS

OLDEST_FIELDS: Json = {
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
"""Fields on the base and the targets, which do not affect the computation of the tensors."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of an adapter and its training settings.

    Attributes:
        base: Short name, hub id or path of the base. revision: Its commit, if pinned.
        hub_id: The base's id on the hub, if it is published.
        fingerprint: Fingerprint of the base's weights; other weights are refused.
        trunk: Fingerprint without any head, for adapters of other tasks over the same base.
        loading: dtype, quantize and double_quant of the base in training.
        prompt_style: Format of the prompts; None if unknown.
        task_type: PEFT's name of the task.
        task: The recipe's `task` section with its labels; None if unknown.
        plan: Execution plan of the run (`ExecutionPlan.as_dict`); None if unknown.
    """

    base: str | None = None
    hub_id: str | None = None
    revision: str | None = None
    fingerprint: str | None = None
    trunk: str | None = None
    loading: JsonMap = field(default_factory=dict)
    prompt_style: Style | None = None
    task_type: str | None = "CAUSAL_LM"
    task: JsonMap | None = None
    plan: JsonMap | None = None


def write_notes(
    path: Path, tensors: Path, method: Method, fields: Mapping[str, object], origin: Provenance
) -> None:
    """Write peftkit.json, after the other files of the adapter.

    Args:
        tensors: The tensor file. fields: The config.
    """
    spec, config = method.model_dump(mode="json"), computing(fields)
    settings = settings_digest(spec, config, origin.task)
    names = ("hub_id", "revision", "fingerprint", "trunk")
    base = {name: getattr(origin, name) for name in names}
    base |= {"name": origin.base, "loading": dict(origin.loading)}
    style = asdict(origin.prompt_style) if origin.prompt_style else None
    digests = {tensors.name: sha256_of(tensors), "settings": settings}
    digests["origin"] = settings_digest(computing_origin(base, style))
    start = tensors.with_name(START)
    if start.is_file():
        digests[START] = sha256_of(start)
    notes = {
        "version": 1,
        "sha256": digests,
        "method": spec,
        "config": config,
        "base": base,
        "prompt_style": style,
        "task": origin.task,
        **({"plan": dict(origin.plan)} if origin.plan else {}),
    }
    write_json(notes, path)


def read_notes(
    path: Path, tensors: Path, config: Path, fields: JsonMap
) -> tuple[Method, Provenance]:
    """Read peftkit.json, and compare the adapter's other files with it.

    Args:
        tensors, config: The adapter's other files. fields: The content of the config.

    Raises:
        AdapterError: The file is invalid, or the tensors or settings differ from the saved ones.
    """
    notes = read_json(path)
    try:
        spec, base, saved = notes["method"], notes["base"], dict(notes["config"])
        digests = dict(notes["sha256"])
        digest, settings = digests[tensors.name], digests["settings"]
        computed = settings_digest(computing_origin(base, notes["prompt_style"]))
        if spec["type"] not in METHODS:
            raise AdapterError(
                f"{path} has the method {shown(spec['type'])}, which is not installed",
                found=f"Methods: {', '.join(METHODS)}.",
                fix="Install the package that defines the method (entry point peftkit.methods).",
            )
        method = from_dict(METHODS[spec["type"]], spec, str(path))
        style = notes["prompt_style"]
        origin = Provenance(
            base=base["name"],
            hub_id=base["hub_id"],
            revision=base["revision"],
            fingerprint=base["fingerprint"],
            trunk=base.get("trunk"),
            loading=base["loading"],
            prompt_style=Style(**style) if style else None,
            task_type=fields.get("task_type"),
            task=notes.get("task"),
            plan=notes.get("plan"),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, PeftkitError):
            raise
        raise AdapterError(
            f"{path} was not written by peftkit",
            found=f"{error} is missing or of the wrong type",
            fix="Restore it, or delete it to load the folder as a plain PEFT adapter.",
        ) from error
    changed = ""
    if settings_digest(spec, saved, origin.task) != settings:
        changed = "settings, such as rank and alpha,"
    elif digests.get("origin", computed) != computed:  # absent in files of earlier versions
        changed = "prompt style, and of how the base is loaded,"
    if changed:
        raise AdapterError(
            f"{path} was changed after the adapter was saved",
            found=f"the sha256 of its {changed} differs from the recorded one",
            fix="Restore it; or delete it to load the folder with its adapter_config.json only.",
        )
    check_config(config, fields, saved)
    start = tensors.with_name(START)
    recorded = [(tensors, digest, "delete peftkit.json to load it as a plain PEFT adapter")]
    if START in digests and start.is_file():
        instead = "delete it to compare the adapter with the bare base"
        recorded.append((start, digests[START], instead))
    for file, expected, instead in recorded:
        if sha256_of(file) != expected:
            raise AdapterError(
                f"{file} is not the file that was saved",
                found=f"its sha256 differs from the one in {path.name}",
                fix=f"Get it again; or {instead}.",
            )
    return method, origin


def computing(fields: Mapping[str, object]) -> Json:
    """Return the fields of a config that affect what the tensors compute."""
    return {
        name: value
        for name, value in fields.items()
        if name not in WHERE_FIELDS and not (name in OLDEST_FIELDS and value == OLDEST_FIELDS[name])
    }


def computing_origin(base: Mapping[str, object], style: object) -> Json:
    """Return the settings of prompts and comparisons, without the base's name, which may change."""
    names = ("fingerprint", "trunk", "loading")
    return {"prompt_style": style, **{name: base.get(name) for name in names}}


def settings_digest(*settings: Mapping[str, object] | None) -> str:
    """Return a hash of settings: the method, the config's `computing` fields, the task."""
    there = [setting for setting in settings if setting is not None]
    return hashlib.sha256(json.dumps(there, sort_keys=True).encode()).hexdigest()


def check_config(path: Path, fields: Mapping[str, object], saved: Mapping[str, object]) -> None:
    """Raise AdapterError, naming the fields, if a config differs from the saved one.

    Args:
        path: Path of the config, for the message.
        fields: The current content.
        saved: The `computing` fields at the time of saving.
    """
    now = computing(fields)
    differing = [
        f"{shown(name)}: {shown(now.get(name))}, but {shown(saved.get(name))} was saved"
        for name in sorted(now.keys() | saved.keys())
        if (now.get(name) or None) != (saved.get(name) or None)
    ]
    if differing:
        raise AdapterError(
            f"{path} was changed after the adapter was saved",
            found="\n".join(differing),
            fix=f"Restore it; or delete peftkit.json to load it with the settings in {path.name}.",
        )
