"""Where PEFT reads a file differently from what it says, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from peftkit.adapter import Adapter
from peftkit.methods.table import format_of
from peftkit.model.places import is_transposed

_IMPLIED = dict.fromkeys(("SEQ_CLS", "TOKEN_CLS"), ("classifier", "score"))
"""task_type -> modules that PEFT adds to `modules_to_save` by itself."""
_MAMBA = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
_REFUSED = "out_proj"


def with_implied_heads(fields: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    """Return a config with the heads in `modules_to_save` that its task implies and its file holds.

    Older PEFT wrote null there (peft_model.py: PeftModelForSequenceClassification).
    """
    named = fields.get("modules_to_save") or []
    if not isinstance(named, list):
        return fields
    weight = r"(^|\.){}(\.\w+)*\.weight$"
    missing = [
        head
        for head in _IMPLIED.get(str(fields.get("task_type")), ())
        if head not in named
        and any(re.search(weight.format(head), n) and ".lora_" not in n for n in tensors)
    ]
    return {**fields, "modules_to_save": [*named, *missing]} if missing else fields


def refused_by_peft(adapter: Adapter) -> str:
    """Return why PEFT will not load an adapter saved here, if that is known; else "".

    PEFT 0.21 refuses LoRA on out_proj by the model's type (tuners_utils.py), and reads stacks of
    experts as (experts, out, in) unless the module has the attribute is_transposed (Llama 4's has
    not). peftkit computes what the model computes.
    """
    if format_of(adapter.method).peft_type != "LORA":
        return ""
    kind = getattr(getattr(adapter.model, "config", None), "model_type", "")
    reason = ""
    if kind in _MAMBA and any(path.rpartition(".")[2] == _REFUSED for path in adapter.own):
        reason = f"it takes no LoRA on {_REFUSED} in models of type {kind}"
    for path, module in adapter.own.items():
        experts = module.base
        if module.stacked and is_transposed(experts) and not hasattr(experts, "is_transposed"):
            reason = f"it takes the rows of the stacks in {path} for columns"
    if not reason:
        return ""
    return (
        f"PEFT does not load this adapter: {reason}. peftkit loads and merges it; for PEFT, leave "
        "these out of the targets."
    )
