"""All methods. A new one is a file in this folder and a line in METHODS and in FORMATS.

One of another package is an entry point of the group peftkit.methods, its config, and one of the
same name in peftkit.method_formats, its `PeftFormat`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from peftkit.config.lazy import LazyTable
from peftkit.errors import AdapterError, ConfigError, did_you_mean
from peftkit.files.strict_json import shown
from peftkit.methods.base import Method

if TYPE_CHECKING:
    from peftkit.methods.peft_format import PeftFormat

METHODS = LazyTable[Method](
    {
        "lora": "peftkit.methods.lora:LoRA",
        "dora": "peftkit.methods.dora:DoRA",
        "ia3": "peftkit.methods.ia3:IA3",
        "vera": "peftkit.methods.vera:VeRA",
        "ln_tuning": "peftkit.methods.own_parameters:LNTuning",
        "bitfit": "peftkit.methods.own_parameters:BitFit",
        "bottleneck": "peftkit.methods.bottleneck:Bottleneck",
        "prompt_tuning": "peftkit.methods.prompt:PromptTuning",
        "prefix_tuning": "peftkit.methods.prefix:PrefixTuning",
    },
    "peftkit.methods",
)

FORMATS: LazyTable[PeftFormat[Any]] = LazyTable(
    {
        "lora": "peftkit.methods.lora_format:LoRAFormat",
        "dora": "peftkit.methods.dora:DoRAFormat",
        "ia3": "peftkit.methods.ia3:IA3Format",
        "vera": "peftkit.methods.vera:VeRAFormat",
        "ln_tuning": "peftkit.methods.own_parameters:LNTuningFormat",
        "bitfit": "peftkit.methods.own_parameters:BitFitFormat",
        "bottleneck": "peftkit.methods.bottleneck:BottleneckFormat",
        "prompt_tuning": "peftkit.methods.prompt:PromptTuningFormat",
        "prefix_tuning": "peftkit.methods.prefix:PrefixTuningFormat",
    },
    "peftkit.method_formats",
)

_WRITTEN_AS_LORA = ("lora", "dora", "bitfit")
"""Methods of PEFT's type LORA; of all others the type is the name in capitals."""


def _typed(value: object) -> Any:
    """Default `type` to lora when `start_from` is given: the method is then the adapter's."""
    if isinstance(value, dict) and "start_from" in value:
        return {"type": "lora", **value}
    return value


AnyMethod = Annotated[Method, METHODS, BeforeValidator(_typed)]

SHARED_FIELDS = {"train_fully": "modules_to_save", "token_rows": "trainable_token_indices"}
"""Fields that every method has, and their names in PEFT's configs."""


def format_of(method: Method) -> PeftFormat[Any]:
    """Return the file format of a method's adapters.

    Raises:
        AdapterError: It has none, or an adapter saved in it could not be loaded.
    """
    for table, group in ((METHODS, "peftkit.methods"), (FORMATS, "peftkit.method_formats")):
        if method.type not in table:
            raise AdapterError(
                f"adapters of the method {method.type!r} cannot be saved",
                found=f"There is no {method.type!r} in {group}.",
                fix=f"Register it in its package: an entry point of the group {group} with the "
                f"name {method.type}.",
            )
    return FORMATS[method.type]()


def method_from_peft(fields: Mapping[str, object]) -> Method:
    """Return the method of a PEFT config.

    Raises:
        AdapterError: No method here reads this kind of adapter.
    """
    fields, peft_type = dict(fields), str(fields.get("peft_type"))
    shared = {name: fields.pop(theirs, None) or () for name, theirs in SHARED_FIELDS.items()}
    names = _WRITTEN_AS_LORA if peft_type == "LORA" else (peft_type.lower(),)
    for form in (FORMATS[name]() for name in names if name in FORMATS):
        if form.describes(fields):
            try:
                method = form.read(fields)
                return type(method)(**dict(method) | shared)
            except ConfigError as error:
                raise AdapterError("the adapter's config is not valid", found=str(error)) from error
    readable = sorted({"LORA" if name in _WRITTEN_AS_LORA else name.upper() for name in FORMATS})
    raise AdapterError(
        f"no method reads an adapter of type {shown(peft_type)}",
        found=did_you_mean(peft_type, readable),
        fix=f"Types read here: {', '.join(readable)}.",
    )
