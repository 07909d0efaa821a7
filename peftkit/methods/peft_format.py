"""A method's adapters in PEFT's files: adapter_config.json and named tensors."""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Mapping
from typing import ClassVar, Generic, TypeVar

from torch import Tensor, nn

from peftkit.errors import AdapterError
from peftkit.files.strict_json import Json, JsonMap, shown
from peftkit.methods.base import AdapterModule, Method, Modules

M = TypeVar("M", bound=Method)


_COMMON = (
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path",
    "revision", "inference_mode", "runtime_config",
)  # fmt: skip
"""Fields of all configs that do not change an adapter's output."""
MAGNITUDE = "lora_magnitude_vector"
"""Name of DoRA's row norms."""
PROMPT = "prompt_embeddings"
"""Name of the tensor of methods that act on the input."""
TARGETS = ("target_modules", "exclude_modules")
LAYERS = ("layers_to_transform", "layers_pattern")
"""Fields that select the adapted modules, which the tensor names also determine."""


class PeftFormat(ABC, Generic[M]):
    """A method's adapters in PEFT's files: adapter_config.json and named tensors."""

    peft_type: ClassVar[str]
    """Name of the method in PEFT."""
    method_class: type[M]
    settings: ClassVar[Mapping[str, str]] = {}
    """Fields that the config stores unchanged: name in the method to name in PEFT. Missing fields
    have the method's default, which is also PEFT's."""
    known_fields: ClassVar[Collection[str]]
    """Further fields that are read, or that do not change the output."""
    absent_fields: ClassVar[Collection[str]] = ()
    """Fields of PEFT's LoRA config that this method's config lacks."""
    subset_fields: ClassVar[Collection[str]] = ()
    """Fields that list a subset of the targets; see `subset_of`."""
    shared_prefix: ClassVar[str] = "base_model."
    """Prefix of `Method.shared_names` in the tensor file."""

    def describes(self, fields: Mapping[str, object]) -> bool:
        """Return whether a config describes this method."""
        return fields.get("peft_type") == self.peft_type

    def read(self, fields: Mapping[str, object]) -> M:
        """Return the method that a config describes.

        Raises:
            AdapterError: Fields are set that would change the output and are not supported; lists
                all of them.
        """
        unsupported = [
            f"{shown(name)}: {shown(value)}"
            for name, value in fields.items()
            if name not in (*_COMMON, *self.known_fields, *self.settings.values())
            and value not in (None, False, [], {})
            and (name, value) != ("bias", "none")
        ]
        if unsupported:
            raise AdapterError(
                f"this {self.peft_type} adapter uses features that peftkit does not read",
                found="; ".join(sorted(unsupported)),
                fix="Loading it without them would change its output. Merge it with the tool that "
                "saved it, or save it again without these.",
            )
        return self.method(fields)

    def method(self, fields: JsonMap) -> M:
        """Return the method of a config whose fields are all supported."""
        values = {
            ours: fields[theirs] for ours, theirs in self.settings.items() if theirs in fields
        }
        return self.method_class(**values)

    def fields(self, method: M, model: nn.Module, modules: Modules) -> Json:
        """Return the method's fields of adapter_config.json."""
        return {theirs: getattr(method, ours) for ours, theirs in self.settings.items()}

    def subset_of(self, module: AdapterModule) -> str:
        """Return the field of `subset_fields` that lists this module, or ""."""
        return ""

    def to_file(
        self, state: Mapping[str, Tensor], model: nn.Module, modules: Modules
    ) -> Mapping[str, Tensor]:
        """Convert the tensors of `Adapter.state()` to the tensors of the file."""
        return state

    def from_file(
        self, fields: Mapping[str, object], tensors: Mapping[str, Tensor]
    ) -> tuple[JsonMap, Mapping[str, Tensor]]:
        """Undo `to_file`: return the config, and the tensors for `Adapter.load_state`.

        Raises:
            AdapterError: There are tensors that this method does not compute.
        """
        return fields, tensors

    def with_missing(
        self, fields: Mapping[str, object], modules: Modules, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Add the tensors that PEFT computes from the base when it loads a file."""
        return tensors
