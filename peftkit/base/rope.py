"""Rotary positions of a base scaled to longer rows: YaRN and what else transformers knows."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from peftkit.errors import BaseError, did_you_mean

RopeScaling = Mapping[str, Any]
"""Fields of a config's `rope_parameters`: rope_type, factor, ..."""
STRETCHED = ("linear", "yarn", "llama3", "longrope")
"""Types of which `factor` says how much longer rows may be than they were."""


def scale_rope(config: Any, asked: RopeScaling, name: str) -> None:
    """Write the scaling of rotary positions into a model's config, with the length it allows.

    Args:
        asked: As transformers' `rope_parameters`; what it leaves open is as the base has it.
        name: Of the base, for messages.

    Raises:
        BaseError: The model has no such positions, or transformers' own check finds something.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # not to read a recipe

    text = config.get_text_config()
    own: Any = getattr(text, "rope_parameters", None)
    if not own or any(isinstance(value, Mapping) for value in own.values()):
        raise BaseError(
            f"base.rope_scaling does not go with {name}.",
            found="Its layers have rotary positions of several kinds."
            if own
            else "Its config has no rope_parameters: its positions are no rotary ones.",
            fix="Leave it out, or give another base.",
        )
    kind = str(asked.get("rope_type", asked.get("type")))
    if kind not in ROPE_INIT_FUNCTIONS:
        raise BaseError(
            f"base.rope_scaling names no rope_type that transformers knows: {kind}.",
            found=did_you_mean(kind, ROPE_INIT_FUNCTIONS),
            fix=f"Known are: {', '.join(ROPE_INIT_FUNCTIONS)}.",
        )
    before = int(own.get("original_max_position_embeddings") or text.max_position_embeddings)
    kept = {key: own[key] for key in ("rope_theta", "partial_rotary_factor") if key in own}
    made = {**kept, **{k: v for k, v in asked.items() if k != "type"}, "rope_type": kind}
    if kind in STRETCHED and kind != "linear":
        made.setdefault("original_max_position_embeddings", before)
    if kind in STRETCHED and isinstance(factor := made.get("factor"), int | float):
        start = made.get("original_max_position_embeddings", before)
        text.max_position_embeddings = max(int(factor * start), text.max_position_embeddings)
    text.rope_parameters = made
    if found := _problems(text):
        raise BaseError(
            f"base.rope_scaling is not what rope_type: {kind} takes.",
            found=found,
            fix="See rope_parameters in transformers' documentation.",
        )


def rope_told(asked: RopeScaling) -> str:
    """Return what to say of an adapter whose file has no place for its base's scaling."""
    kind, factor = asked.get("rope_type", asked.get("type")), asked.get("factor")
    original = asked.get("original_max_position_embeddings")
    others: dict[str, Any] = {"rope_parameters": dict(asked)}
    if original and isinstance(factor, int | float):
        others["max_position_embeddings"] = int(factor * original)
    text = (
        "The adapter was trained over a base with base.rope_scaling, which has no place in this "
        f"file. For vLLM: --hf-overrides '{json.dumps(others)}'"
    )
    if kind not in ("linear", "yarn") or not isinstance(factor, int | float):
        return f"{text}."
    told = f" --yarn-orig-ctx {original}" if kind == "yarn" and original else ""
    return f"{text}; for llama.cpp: --rope-scaling {kind} --rope-scale {factor:g}{told}."


def _problems(config: Any) -> str:
    """Return what transformers' validation says of a config, which it tells in two ways."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("transformers.modeling_rope_utils")
    level, propagates = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    log.propagate = False
    try:
        config.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        said.append(str(error.args[0] if error.args else error))
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates
    return "\n".join(said)
