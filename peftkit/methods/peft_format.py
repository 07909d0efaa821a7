"""What a method's adapters look like in PEFT's files: adapter_config.json and named tensors.

Each method has one `PeftFormat` beside it (`FORMATS` in table.py), so that the method itself says
where it sits, what it computes and how it merges, and nothing of files.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn

from peftkit.errors import AdapterError
from peftkit.files.strict_json import shown
from peftkit.methods.protocol import AdapterModule, Method

M = TypeVar("M", bound=Method)

_COMMON = (
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path",
    "revision", "inference_mode", "runtime_config",
)  # fmt: skip
"""Fields of every config that do not change what an adapter computes."""
PROMPT = "prompt_embeddings"
"""Tensor of methods that act on the input."""
TARGETS = ("target_modules", "exclude_modules")
LAYERS = ("layers_to_transform", "layers_pattern")
"""Fields that say which modules are adapted; the tensor names say it too."""


class PeftFormat(ABC, Generic[M]):
    """One method's part of PEFT's file format."""

    peft_type: ClassVar[str]
    """PEFT's name of the method."""
    method_class: type[M]
    settings: ClassVar[Mapping[str, str]] = {}
    """Fields of the method that its config holds as they are: our name to PEFT's. Where a config
    leaves one out it has our default, which is PEFT's too."""
    known_fields: ClassVar[Collection[str]]
    """Further fields that are read, or that do not change what the adapter computes."""
    absent_fields: ClassVar[Collection[str]] = ()
    """Fields of PEFT's LoRA config that this method's config does not have."""
    subset_fields: ClassVar[Collection[str]] = ()
    """Fields that list a part of the targets; see `subset_of`."""
    shared_prefix: ClassVar[str] = "base_model."
    """Prefix of `Method.shared_names` in the tensor file."""

    def describes(self, fields: Mapping[str, Any]) -> bool:
        """Tell whether a config is one of this method."""
        return fields.get("peft_type") == self.peft_type

    def read(self, fields: Mapping[str, Any]) -> M:
        """Return the method that a config describes.

        Raises:
            AdapterError: A field is set that would change the output and is not read here; lists
                all of them.
        """
        bad = [
            f"{shown(name)}: {shown(value)}"
            for name, value in fields.items()
            if name not in (*_COMMON, *self.known_fields, *self.settings.values())
            and value not in (None, False, [], {})
            and (name, value) != ("bias", "none")
        ]
        if bad:
            raise AdapterError(
                f"this {self.peft_type} adapter uses features that peftkit does not read",
                found="; ".join(sorted(bad)),
                fix="Loading it without them would change its output. Merge it with the tool that "
                "made it, or save it again without these.",
            )
        return self.method(fields)

    def method(self, fields: Mapping[str, Any]) -> M:
        """Return the method of a config whose fields are all known."""
        held = {own: fields[theirs] for own, theirs in self.settings.items() if theirs in fields}
        return self.method_class(**held)

    def fields(
        self, method: M, model: nn.Module, modules: Mapping[str, AdapterModule]
    ) -> dict[str, Any]:
        """Return the method's own fields of adapter_config.json."""
        return {theirs: getattr(method, own) for own, theirs in self.settings.items()}

    def subset_of(self, module: AdapterModule) -> str:
        """Return which of `subset_fields` lists this module, or ""."""
        return ""

    def to_file(
        self, state: Mapping[str, Tensor], model: nn.Module, modules: Mapping[str, AdapterModule]
    ) -> Mapping[str, Tensor]:
        """Return the tensors of a file for those of `Adapter.state()`."""
        return state

    def from_file(
        self, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Return a file's config and tensors with what `to_file` did undone.

        Raises:
            AdapterError: The tensors are more than this method computes.
        """
        return fields, tensors

    def with_missing(
        self,
        fields: Mapping[str, Any],
        modules: Mapping[str, AdapterModule],
        tensors: Mapping[str, Tensor],
    ) -> Mapping[str, Tensor]:
        """Complete a file's tensors by those that PEFT computes from the base when it loads."""
        return tensors
