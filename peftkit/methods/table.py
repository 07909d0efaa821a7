"""All methods there are. A new one is a file beside this one and a line in this table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from peftkit.errors import AdapterError, ConfigError, did_you_mean
from peftkit.methods.dora import DoRA
from peftkit.methods.ia3 import IA3
from peftkit.methods.lora import LoRA
from peftkit.methods.norms import LNTuning
from peftkit.methods.protocol import Method
from peftkit.methods.vera import VeRA
from peftkit.strict_json import shown

METHODS: dict[str, type[Method]] = {
    "lora": LoRA,
    "dora": DoRA,
    "ia3": IA3,
    "vera": VeRA,
    "ln_tuning": LNTuning,
}

AnyMethod = Annotated[LoRA | DoRA | IA3 | VeRA | LNTuning, Field(discriminator="type")]


def method_from_peft(fields: Mapping[str, Any]) -> Method:
    """Return the method of a PEFT config.

    Raises:
        AdapterError: No method here reads this kind of adapter.
    """
    fields, peft_type = dict(fields), str(fields.get("peft_type"))
    saved = fields.pop("modules_to_save", None) or []
    if not (isinstance(saved, list) and all(isinstance(name, str) for name in saved)):
        raise AdapterError(
            "the adapter's config is not valid", found=f"modules_to_save: {shown(saved)}"
        )
    dora = bool(fields.get("use_dora")) and peft_type == DoRA.peft_type
    for method in (DoRA,) if dora else METHODS.values():
        if method.peft_type == peft_type:
            try:
                read = method.from_peft(fields)
            except ConfigError as error:
                raise AdapterError("the adapter's config is not valid", found=str(error)) from error
            return read.model_copy(update={"train_fully": tuple(saved)})
    kinds = sorted({method.peft_type for method in METHODS.values()})
    raise AdapterError(
        f"no method reads an adapter of type {shown(peft_type)}",
        found=did_you_mean(peft_type, kinds),
        fix=f"Types read here: {', '.join(kinds)}.",
    )
