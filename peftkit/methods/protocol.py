"""The seam between methods and everything else.

A method is a frozen config that says *where* it sits (`targets`) and *what* it puts there (`wrap`).
Freezing, saving, loading, disabling and merging are derived from the two, once, for all methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from peftkit.config import Config
from peftkit.errors import AdapterError
from peftkit.strict_json import shown
from peftkit.targets import Site

ADAPTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class AdapterModule(nn.Module, ABC):
    """A frozen module plus the small trainable tensors that a method puts beside it.

    Its own parameters are what is trained and what is saved; nothing else of the model is.

    Attributes:
        base: The frozen module, untouched: switching the adapter off gives it back to the bit.
        enabled: False while `Adapter.disabled()` holds.
    """

    def __init__(self, base: nn.Module, site: Site) -> None:
        super().__init__()
        self.base = base
        self.site = site
        self.enabled = True

    @property
    def weight(self) -> Tensor:
        """The base's weight: models that look at their layers' weights see what was there."""
        return cast(Tensor, self.base.weight)

    @property
    def bias(self) -> Tensor | None:
        """The base's bias, likewise."""
        return cast("Tensor | None", self.base.bias)

    @abstractmethod
    def reset(self, generator: torch.Generator) -> None:
        """Initialise the trainable tensors, so that the output is still the base's."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return what a file holds of this module, by PEFT's name below the module's path."""

    @abstractmethod
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the tensors of `state()`; names and shapes have been checked."""

    @abstractmethod
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of `state()` without making the tensors."""

    def complete(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a foreign file's tensors with those added that it leaves to be made again."""
        return state

    def merged_weight(self, weight: Tensor) -> Tensor:
        """Return the weight that computes base and adapter at once.

        Args:
            weight: (out, in) float32, the base's own.

        Raises:
            NotImplementedError: The method changes more than a weight; merge says so by name.
        """
        raise NotImplementedError


class Method(Config, ABC):
    """What every method's config has, and what the rest of the house asks of it."""

    peft_type: ClassVar[str]
    """PEFT's name of the file format."""

    type: str
    targets: tuple[str, ...] | str = "all-linear"
    """Roles (q, k, v, o, gate, up, down, ...), groups (attention, ffn, all-linear), or names."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the adapter is kept and trained, over any base."""

    @abstractmethod
    def wrap(self, base: nn.Module, site: Site) -> AdapterModule:
        """Build the adapter of one site; its tensors are set by `reset` or `load`."""

    @abstractmethod
    def to_peft(self, modules: Mapping[str, AdapterModule]) -> dict[str, Any]:
        """Return the method's own fields of adapter_config.json for these modules."""

    @classmethod
    @abstractmethod
    def from_peft(cls, fields: Mapping[str, Any]) -> Method:
        """Return the method that a PEFT config describes.

        Raises:
            AdapterError: The config asks for something this method does not do.
        """


def refuse_unknown(fields: Mapping[str, Any], known: Mapping[str, Any], peft_type: str) -> None:
    """Refuse every config field that is set and that nothing here would act on.

    Args:
        fields: The file's config.
        known: Field name to the value that means "not used"; `...` where any value is handled.
        peft_type: For the message.

    Raises:
        AdapterError: Lists all such fields.
    """
    bad = [
        f"{shown(name)}: {shown(value)}"
        for name, value in fields.items()
        if not (name in known and (known[name] is ... or value == known[name]))
        and value not in (None, False, [], {})
    ]
    if bad:
        raise AdapterError(
            f"this {peft_type} adapter uses features that peftkit does not read",
            found="; ".join(sorted(bad)),
            fix="Loading it without them would change its output. Merge it with the tool that "
            "made it, or save it again without these.",
        )
