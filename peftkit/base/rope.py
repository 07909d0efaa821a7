"""RoPE scaling: `base.rope_scaling` in a model's config, and the matching options of servers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from peftkit.base.purpose import RopeScaling
from peftkit.errors import BaseError, did_you_mean
from peftkit.files.strict_json import Json

STRETCHED = ("linear", "yarn", "llama3", "longrope")
"""Types whose `factor` multiplies the length of rows."""


def scale_rope(config: Any, scaling: RopeScaling, name: str) -> None:
    """Write RoPE scaling, and the maximum length that it allows, into a model's config.

    Args:
        scaling: Fields of transformers' `rope_parameters`; others keep the base's values.
        name: Name of the base, for messages.

    Raises:
        BaseError: The model has no RoPE, or transformers' validation rejects the scaling.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # slow to import

    text = config.get_text_config()
    rope: Any = getattr(text, "rope_parameters", None)
    if not rope or any(isinstance(value, Mapping) for value in rope.values()):
        raise BaseError(
            f"base.rope_scaling is not possible for {name}.",
            found="Its layers have several kinds of RoPE."
            if rope
            else "Its config has no rope_parameters: it has no RoPE.",
            fix="Remove it, or give another base.",
        )
    kind = str(scaling.get("rope_type", scaling.get("type")))
    if kind not in ROPE_INIT_FUNCTIONS:
        raise BaseError(
            f"base.rope_scaling has an unknown rope_type: {kind}.",
            found=did_you_mean(kind, ROPE_INIT_FUNCTIONS),
            fix=f"Use one of: {', '.join(ROPE_INIT_FUNCTIONS)}.",
        )
    before = int(rope.get("original_max_position_embeddings") or text.max_position_embeddings)
    base_values = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    parameters = {
        **base_values,
        **{k: v for k, v in scaling.items() if k != "type"},
        "rope_type": kind,
    }
    if kind in STRETCHED and kind != "linear":
        parameters.setdefault("original_max_position_embeddings", before)
    if kind in STRETCHED and isinstance(factor := parameters.get("factor"), int | float):
        start = parameters.get("original_max_position_embeddings", before)
        text.max_position_embeddings = max(int(factor * start), text.max_position_embeddings)
    text.rope_parameters = parameters
    if problems := _rope_problems(text):
        raise BaseError(
            f"base.rope_scaling is invalid for rope_type: {kind}.",
            found=problems,
            fix="See rope_parameters in transformers' documentation.",
        )


def rope_notice(scaling: RopeScaling) -> str:
    """Return the notice for an adapter file that cannot hold its base's rope scaling."""
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    original = scaling.get("original_max_position_embeddings")
    others: Json = {"rope_parameters": dict(scaling)}
    if original and isinstance(factor, int | float):
        others["max_position_embeddings"] = int(factor * original)
    text = (
        "The adapter was trained on a base with base.rope_scaling, which this file cannot hold. "
        f"For vLLM: --hf-overrides '{json.dumps(others)}'"
    )
    if kind not in ("linear", "yarn") or not isinstance(factor, int | float):
        return f"{text}."
    original_length = f" --yarn-orig-ctx {original}" if kind == "yarn" and original else ""
    return f"{text}; for llama.cpp: --rope-scaling {kind} --rope-scale {factor:g}{original_length}."


def _rope_problems(config: Any) -> str:
    """Return the problems that transformers' validation logs or raises for a config."""
    problems: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: problems.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("transformers.modeling_rope_utils")
    level, propagates = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    log.propagate = False
    try:
        config.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        problems.append(str(error.args[0] if error.args else error))
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates
    return "\n".join(problems)
