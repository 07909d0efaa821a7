"""What every method provides: the interface between methods and everything else.

A method is a frozen config that says *where* it sits (`sites`) and *what* it puts there (`wrap`),
and its modules how they *merge* (`merged_weight`). Its files are the business of peft_format.py.
Freezing, saving, loading, disabling and merging are derived from the two, once, for all methods.
One module of the model carries one adapter module, whatever number of its weights that adapts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from peftkit.config.schema import Config
from peftkit.errors import TargetError
from peftkit.model.places import FrozenWrapper, find_places, is_linear
from peftkit.model.roles import ALL_LINEAR
from peftkit.model.targets import Site, resolve
from peftkit.quant.layers import weight_of

ADAPTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

InitValues = tuple[Tensor, Tensor | None]
"""Initial values of an `AdapterModule`: A and B of LoRA, where None is zero."""


class AdapterModule(FrozenWrapper, ABC):
    """A frozen module plus the small trainable tensors that a method puts beside it.

    Its own parameters are what is trained and what is saved; nothing else of the model is.

    Attributes:
        changes_ties: True if all modules tied to the base's weight are wrapped too.
    """

    changes_ties = False

    def __init__(self, base: nn.Module, site: Site) -> None:
        super().__init__(base)
        self.site = site

    @property
    def base_device(self) -> torch.device | None:
        tensors = (*self.base.parameters(), *self.base.buffers())
        return next((tensor.device for tensor in tensors), None)

    def new_parameter(self, *shape: int, dtype: torch.dtype) -> nn.Parameter:
        """Return zeros to train, on the base's device."""
        return nn.Parameter(torch.zeros(shape, dtype=dtype, device=self.base_device))

    def frozen(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the frozen layer gives for x.

        Modules beside a linear layer ask here, so that several adapters can share one product.
        """
        return cast(Tensor, self.base(x, *args, **kwargs))

    @abstractmethod
    def reset(self, generator: torch.Generator) -> None:
        """Initialise the trainable tensors, so that the output is still the base's."""

    def init_from(self, *start: Tensor | None) -> None:
        """Initialise the trainable tensors with what `Method.initializer` names."""
        raise NotImplementedError

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save, by PEFT's name relative to the module's path."""

    @abstractmethod
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state()`; names and shapes have been checked."""

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of `state()`."""
        return {name: tuple(tensor.shape) for name, tensor in self.state().items()}

    @property
    def stacked(self) -> tuple[str, ...]:
        """Names of the base's stacks of expert weights that are adapted; () of a linear layer."""
        return ()

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the base's parameters that a merge replaces."""
        return self.stacked or ("weight",)

    def weights(self, base: nn.Module) -> dict[str, Tensor]:
        """Return views of the weights to merge into, by parameter name, laid out for merged_weight.

        Args:
            base: This module's base, or the same layer of another copy of the model.
        """
        return {
            name: weight_of(base) if name == "weight" and is_linear(base) else getattr(base, name)
            for name in self.changed
        }

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        """Return the weight with the adapter merged in.

        Args:
            weight: The base's own in float32: (out, in), (experts, out, in), or a bias (out,).
            name: Which of `weights`.

        Raises:
            NotImplementedError: The method cannot be merged (`Method.unmergeable`).
        """
        raise NotImplementedError


class Method(Config, ABC):
    """The config of a method, and what the rest of the code asks of it."""

    changes_bias: ClassVar[bool] = False
    """Whether a merge replaces biases too."""
    shared_names: ClassVar[tuple[str, ...]] = ()
    """Names of tensors that belong to the adapter as a whole, not to one module."""
    unmergeable: ClassVar[str] = ""
    """Why it cannot be merged into the weights; "" if it can."""
    sits_on_stacks: ClassVar[bool] = False
    """Whether it supports stacked experts."""
    acts_on_input: ClassVar[bool] = False
    """Whether it acts on the input only and has no target modules."""
    beside_linear_layers: ClassVar[bool] = False
    """Whether it sits beside linear layers and reads no weight outside of their blocks: its base
    may then be spread over processes."""
    takes_token_rows: ClassVar[bool] = False
    """Whether `token_rows` may stand beside it: PEFT has them beside a LoRA only."""
    files: ClassVar[str] = "PEFT"
    """Other tools that read its files; "" if none does."""

    type: str
    targets: tuple[str, ...] | str = ALL_LINEAR
    """Roles (q, k, v, o, gate, up, down, ...), groups (attention, ffn, all-linear), or names. Where
    none are named, towers for images and sound are left out."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """dtype of the adapter's weights, whatever the base's is."""
    train_fully: tuple[str, ...] = ()
    """Modules that are trained in full too, by the ends of their names: [classifier]."""
    start_from: str | None = None
    """Adapter to continue, a folder or USER/NAME on the hub; the method is its own, and nothing
    else has to be set. Losses that compare take the adapter as it is now as their reference."""
    token_rows: tuple[int, ...] | dict[str, tuple[int, ...]] = ()
    """Token ids whose rows of the input embedding (and of a tied head) are trained too; or by
    the ends of module names: {embed_tokens: [7], lm_head: [7]}."""

    def sites(self, model: nn.Module) -> list[Site]:
        """Return the weights of this model that the targets name.

        Raises:
            TargetError: A target is not in it.
        """
        return resolve(model, self.targets, stacks=self.sits_on_stacks)

    def for_model(self, model: nn.Module) -> Method:
        """Return the method with explicit targets: by default, towers are left out."""
        unnamed = "targets" not in self.model_fields_set and self.targets == ALL_LINEAR
        if unnamed and any(place.set_apart for place in find_places(model)):
            return self.model_copy(update={"targets": (f"language.{ALL_LINEAR}",)})
        return self

    def left_out(self, model: nn.Module) -> list[Site]:
        """Return weights that a group of the targets includes and the method cannot adapt."""
        return []

    def candidates(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Return the paths of all modules it could adapt, each with its stacks of experts."""
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
        """Why a fresh adapter changes the output; "" if it does not.

        A method of which this is always true has a class variable instead.
        """
        return ""

    @property
    def initializer(self) -> str:
        """The function that makes the initial values for `attach`; "" where it needs none."""
        return ""

    def check_quantize(self, quantize: str) -> None:
        """Raise ConfigError if the method does not support this `base.quantize`."""

    @abstractmethod
    def wrap(self, base: nn.Module, site: Site) -> AdapterModule:
        """Build the adapter of one site; its tensors are set by `reset`, `init_from` or `load`."""

    def wrap_experts(self, experts: nn.Module, sites: Sequence[Site]) -> AdapterModule:
        """Build the adapter of one module's stacked expert parameters.

        Raises:
            TargetError: The method does not support them.
        """
        raise TargetError(
            f"{self.type} cannot sit on stacked expert parameters",
            found=f"{sites[0].path}: {', '.join(str(site.parameter) for site in sites)}",
            fix="Leave the experts out of the targets, or use LoRA.",
        )

    def connect(self, model: nn.Module, modules: Mapping[str, AdapterModule]) -> Sequence[Any]:
        """Add to the model what the method needs besides its modules, which are in place by now.

        Returns:
            What `remove()` is called of when the adapter is taken off.
        """
        return []

    def share(self, modules: Mapping[str, AdapterModule]) -> None:
        """Give all modules the tensors that they share."""

    def shared(self, modules: Mapping[str, AdapterModule]) -> dict[str, Tensor]:
        """Return the shared tensors to save, by name."""
        return {}
