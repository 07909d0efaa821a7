"""A run's identity: what must be equal for an exact resume."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from peftkit.config.schema import flat
from peftkit.data.pack import fingerprint
from peftkit.errors import CheckpointError, did_you_mean
from peftkit.settings import TrainConfig

# May change between two halves of a run: no weight depends on them.
FREE = {
    "output_dir",
    "eval_every",
    "save_every",
    "keep_checkpoints",
    "gradient_checkpointing",
    "log_to",
    "eval_before",
    "eval_generate",
    "early_stopping",
    "keep_best",
    "sample_every",
    "sample_prompts",
    "sample_tokens",
}
Identity = Mapping[str, Any]


def identity_of(
    config: TrainConfig,
    train_rows: Sequence[Any],
    eval_rows: Sequence[Any],
    world_size: int,
    given: Identity,
    *,
    sharded: bool = False,
) -> dict[str, Any]:
    """Return everything that the numbers of a run depend on, as plain JSON.

    Args:
        given: What the caller knows besides: base, method, data.
        sharded: Whether the base is spread over the processes, as other sums round otherwise.
    """
    train = {name: value for name, value in config.model_dump().items() if name not in FREE}
    train["shard"] = "base" if sharded else "none"  # as it was settled; where parts lie is free
    rows = {"train": fingerprint(train_rows), "eval": fingerprint(eval_rows)}
    whole = {**given, "train": train, "rows": rows, "num_processes": world_size}
    plain: dict[str, Any] = json.loads(json.dumps(whole, default=str))
    return plain


def check_same_run(saved: Identity, now: Identity, allowed: Sequence[str]) -> list[str]:
    """Return the differences that are allowed.

    Args:
        allowed: Dotted keys; "train" allows all of "train.learning_rate" and the rest.

    Raises:
        CheckpointError: Lists all the differences that are not; or a name in `allowed` is none.
    """
    before, after = flat(saved), flat(now)
    accepted: list[tuple[str, str]] = []
    refused: list[tuple[str, str]] = []
    for key in sorted(before.keys() | after.keys()):
        if key in before and key in after and before[key] == after[key]:
            continue
        line = f"{key}: {_shown(before, key)} -> {_shown(after, key)}"
        is_allowed = any(key == name or key.startswith(f"{name}.") for name in allowed)
        (accepted if is_allowed else refused).append((key, line))
    if refused:
        keys = " ".join(f"--allow-changes {key}" for key, _ in refused)
        raise CheckpointError(
            "cannot resume: this is not the run that was saved",
            found="\n".join(line for _, line in refused),
            fix=f"Undo the change; or go on with it, no longer bit-equal: {keys}\n"
            "Or start a new run with it: peftkit train --from RUN --set KEY=VALUE --out DIR",
        )
    known = before.keys() | after.keys()
    for name in allowed:
        if not any(key == name or key.startswith(f"{name}.") for key in known):
            fix = did_you_mean(name, known) or "Leave it out: nothing differs that needs it."
            raise CheckpointError(f"cannot allow changes of {name!r}: no run has that", fix=fix)
    return [line for _, line in accepted]


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "(not there)"
