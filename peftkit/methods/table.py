"""All methods there are. A new one is a file beside this one and a line in this table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from peftkit.errors import AdapterError, ConfigError, did_you_mean
from peftkit.files.strict_json import shown
from peftkit.methods.bottleneck import Bottleneck, BottleneckFormat
from peftkit.methods.ia3 import IA3, IA3Format
from peftkit.methods.lora import DoRA, LoRA
from peftkit.methods.lora_format import DoRAFormat, LoRAFormat
from peftkit.methods.own_parameters import BitFit, BitFitFormat, LNTuning, LNTuningFormat
from peftkit.methods.peft_format import PeftFormat
from peftkit.methods.prefix import PrefixTuning, PrefixTuningFormat
from peftkit.methods.prompt import PromptTuning, PromptTuningFormat
from peftkit.methods.protocol import Method
from peftkit.methods.vera import VeRA, VeRAFormat

METHODS: dict[str, type[Method]] = {
    "lora": LoRA,
    "dora": DoRA,
    "ia3": IA3,
    "vera": VeRA,
    "ln_tuning": LNTuning,
    "bitfit": BitFit,
    "bottleneck": Bottleneck,
    "prompt_tuning": PromptTuning,
    "prefix_tuning": PrefixTuning,
}

FORMATS: dict[str, PeftFormat[Any]] = {
    "lora": LoRAFormat(),
    "dora": DoRAFormat(),
    "ia3": IA3Format(),
    "vera": VeRAFormat(),
    "ln_tuning": LNTuningFormat(),
    "bitfit": BitFitFormat(),
    "bottleneck": BottleneckFormat(),
    "prompt_tuning": PromptTuningFormat(),
    "prefix_tuning": PrefixTuningFormat(),
}


def _typed(value: object) -> Any:
    """Let a method that goes on with an adapter leave its type to that."""
    if isinstance(value, dict) and "start_from" in value:
        return {"type": LoRA.model_fields["type"].default, **value}
    return value


AnyMethod = Annotated[
    LoRA | DoRA | IA3 | VeRA | LNTuning | BitFit | Bottleneck | PromptTuning | PrefixTuning,
    Field(discriminator="type"),
    BeforeValidator(_typed),
]

BESIDE = {"train_fully": "modules_to_save", "token_rows": "trainable_token_indices"}
"""Fields of all methods, and their names in PEFT's configs."""


def format_of(method: Method) -> PeftFormat[Any]:
    """Return how adapters of a method are kept in PEFT's files."""
    return FORMATS[method.type]


def method_from_peft(fields: Mapping[str, Any]) -> Method:
    """Return the method of a PEFT config.

    Raises:
        AdapterError: No method here reads this kind of adapter.
    """
    fields, peft_type = dict(fields), str(fields.get("peft_type"))
    beside = {name: fields.pop(theirs, None) or () for name, theirs in BESIDE.items()}
    found = next((form for form in FORMATS.values() if form.describes(fields)), None)
    if found is not None:
        try:
            read = found.read(fields)
            return type(read)(**dict(read) | beside)
        except ConfigError as error:
            raise AdapterError("the adapter's config is not valid", found=str(error)) from error
    known = sorted({form.peft_type for form in FORMATS.values()})
    raise AdapterError(
        f"no method reads an adapter of type {shown(peft_type)}",
        found=did_you_mean(peft_type, known),
        fix=f"Types read here: {', '.join(known)}.",
    )
