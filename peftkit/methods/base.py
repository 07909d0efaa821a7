"""The base classes of a method: its config and its modules.

- `Method`, a frozen config, selects the weights to adapt (`sites`) and wraps them (`wrap`).
- `AdapterModule` is one wrapped module of the model: it computes and merges.
- `PeftFormat` (peft_format.py) defines adapter_config.json and the names of tensors.

Freezing, saving, loading, disabling and merging are implemented once, for all methods. A module of
the model has at most one adapter module, which may adapt several of its weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from peftkit.config.schema import Config, Location
from peftkit.errors import TargetError
from peftkit.model.places import FrozenWrapper, find_places, is_linear
from peftkit.model.roles import ALL_LINEAR
from peftkit.model.targets import Site, resolve

ADAPTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

InitValues = tuple[Tensor, Tensor | None]
"""Initial values of a LoRA layer: A (r, in) and B (out, r); None: zero."""


class AdapterModule(FrozenWrapper, ABC):
    """A frozen module plus the small trainable tensors of a method.

    Only its parameters, without the frozen module's, are trained and saved.

    Attributes:
        changes_ties: Whether all modules tied to the base's weight are wrapped too.
        can_group: Whether modules that read one input can be computed together.
        group: Computes this module together with others; None if it computes alone.
    """

    changes_ties = False
    can_group: ClassVar[bool] = False
    group: Any = None

    def __init__(self, base: nn.Module, site: Site) -> None:
        super().__init__(base)
        self.site = site

    @property
    def base_device(self) -> torch.device | None:
        tensors = (*self.base.parameters(), *self.base.buffers())
        return next((tensor.device for tensor in tensors), None)

    @classmethod
    def separate_wrong_groups(cls, model: nn.Module) -> str:
        """Undo groups that compute something else than their modules alone; return what differs."""
        return ""

    def new_parameter(self, *shape: int, dtype: torch.dtype) -> nn.Parameter:
        """Return a trainable parameter of zeros on the base's device."""
        return nn.Parameter(torch.zeros(shape, dtype=dtype, device=self.base_device))

    @abstractmethod
    def reset(self, generator: torch.Generator) -> None:
        """Initialise the trainable tensors without changing the output."""

    def init_from(self, *values: Tensor | None) -> None:
        """Initialise the trainable tensors with values from the function `Method.initializer`."""
        raise NotImplementedError

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save by PEFT's name, relative to the module's path."""

    @abstractmethod
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load tensors with the names of `state()`; the caller has checked names and shapes."""

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of `state()`."""
        return {name: tuple(tensor.shape) for name, tensor in self.state().items()}

    @classmethod
    def form_groups(cls, model: nn.Module, *, serves: bool) -> None:
        """Set `group` of all modules of this class in a model, for generation or for training."""

    @classmethod
    def refresh_groups(cls, model: nn.Module) -> None:
        """Copy the trained tensors to the groups of this class in a model."""

    @property
    def stacked(self) -> tuple[str, ...]:
        """Names of the adapted stacks of expert weights; () for a linear layer."""
        return ()

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the base's parameters that a merge replaces."""
        return self.stacked or ("weight",)

    def weights(self, base: nn.Module) -> dict[str, Tensor]:
        """Return views of the weights to merge into by name, with the shapes of `merged_weight`.

        Args:
            base: This module's base, or the same layer of another copy of the model.
        """
        from peftkit.quant.weights import weight_of

        return {
            name: weight_of(base) if name == "weight" and is_linear(base) else getattr(base, name)
            for name in self.changed
        }

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        """Return the weight with the adapter merged in.

        Args:
            weight: Weight of the base in float32: (out, in), (experts, out, in), or a bias (out,).
            name: Name of the weight in `weights`.

        Raises:
            NotImplementedError: The method cannot be merged (`Method.unmergeable`).
        """
        raise NotImplementedError


Modules = Mapping[str, AdapterModule]
"""A method's modules on a model, by path."""
Handles = list[RemovableHandle]


class Method(Config, ABC):
    """The config and the capabilities of a method."""

    shared_names: ClassVar[tuple[str, ...]] = ()
    """Names of tensors that belong to the adapter as a whole, not to one module."""
    unmergeable: ClassVar[str] = ""
    """The reason why it cannot be merged into the weights; "" if it can."""
    sits_on_stacks: ClassVar[bool] = False
    """Whether it supports stacked experts."""
    acts_on_input: ClassVar[bool] = False
    """Whether it acts on the input only and has no target modules."""
    wraps_linear_layers: ClassVar[bool] = False
    """Whether it wraps linear layers and reads no weight outside of their blocks; only then may the
    base be sharded over processes."""
    takes_token_rows: ClassVar[bool] = False
    """Whether it allows `token_rows`, which PEFT has for LoRA only."""
    files: ClassVar[str] = "PEFT"
    """Other tools that read its files; "" if there are none."""

    type: str
    targets: tuple[str, ...] | str = ALL_LINEAR
    """Roles (q, k, v, o, gate, up, down, ...), groups (attention, ffn, all-linear), or names. Where
    none are named, towers for images and sound are left out."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """dtype of the adapter's weights, whatever the base's is."""
    train_fully: tuple[str, ...] = ()
    """Modules that are trained in full too, by the ends of their names: [classifier]."""
    start_from: Location | None = None
    """Adapter to continue, a folder or USER/NAME on the hub; its method is used, and nothing else
    has to be set. Losses with a reference model take the adapter at the start as reference."""
    token_rows: tuple[int, ...] | dict[str, tuple[int, ...]] = ()
    """Token ids whose rows of the input embedding (and of a tied head) are trained too; or by
    the ends of module names: {embed_tokens: [7], lm_head: [7]}."""

    @property
    def target_names(self) -> list[str]:
        """`targets` as a list."""
        return [self.targets] if isinstance(self.targets, str) else list(self.targets)

    def sites(self, model: nn.Module) -> list[Site]:
        """Return the sites that the targets select; raises TargetError for a missing target."""
        return resolve(model, self.targets, stacks=self.sits_on_stacks)

    def for_model(self, model: nn.Module) -> Method:
        """Return the method with explicit targets; the default targets omit towers."""
        unnamed = "targets" not in self.model_fields_set and self.targets == ALL_LINEAR
        if unnamed and any(place.set_apart for place in find_places(model)):
            return self.model_copy(update={"targets": (f"language.{ALL_LINEAR}",)})
        return self

    def left_out(self, model: nn.Module) -> list[Site]:
        """Return weights that a targeted group includes but the method cannot adapt."""
        return []

    def candidates(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Return the path of every module that could be adapted, with its stacks of experts."""
        stacks: dict[str, tuple[str, ...]] = {}
        for place in find_places(model):
            if place.is_stack:
                stacks[place.path] = (*stacks.get(place.path, ()), str(place.parameter))
        return {
            path: stacks.get(path, ())
            for path, module in model.named_modules()
            if path in stacks or is_linear(module)
        }

    @property
    def fresh_changes(self) -> str:
        """The reason why a fresh adapter changes the output; "" if it does not."""
        return ""

    @property
    def initializer(self) -> str:
        """Name of the function that computes initial values for `attach`, or ""."""
        return ""

    @property
    def reads_rows(self) -> str:
        """The setting whose initial values need training rows, or ""."""
        return ""

    def check_quantize(self, quantize: str) -> None:
        """Raise ConfigError if the method does not support this `base.quantize`."""

    @abstractmethod
    def wrap(self, base: nn.Module, site: Site) -> AdapterModule:
        """Build the adapter of one site; its tensors are set by `reset`, `init_from` or `load`."""

    def wrap_experts(self, experts: nn.Module, sites: Sequence[Site]) -> AdapterModule:
        """Build the adapter of stacked expert parameters; raises TargetError if unsupported."""
        raise TargetError(
            f"{self.type} does not support stacked expert parameters",
            found=f"{sites[0].path}: {', '.join(str(site.parameter) for site in sites)}",
            fix="Remove the experts from the targets, or use LoRA.",
        )

    def connect(self, model: nn.Module, modules: Modules) -> Handles:
        """Add hooks to the model with its modules; return their handles, removed by `detach`."""
        return []

    def share(self, modules: Modules) -> None:
        """Set the shared tensors of all modules."""

    def shared(self, modules: Modules) -> dict[str, Tensor]:
        """Return the shared tensors to save, by name."""
        return {}
