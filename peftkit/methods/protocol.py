"""What every method provides: the interface between methods and everything else.

A method is a frozen config that says *where* it sits (`sites`) and *what* it puts there (`wrap`),
and its modules how they *merge* (`merged_weight`). Its files are the business of peft_format.py.
Freezing, saving, loading, disabling and merging are derived from the two, once, for all methods.
One module of the model carries one adapter module, whatever number of its weights that adapts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from peftkit.config.schema import Config
from peftkit.errors import TargetError
from peftkit.model.places import find_places, is_linear
from peftkit.model.targets import Site, resolve
from peftkit.quant.layers import weight_of

ADAPTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Start = tuple[Tensor, Tensor | None]
"""What an `AdapterModule` begins with: A and B of LoRA, where None is zero."""


class Removable(Protocol):
    """What a method has hung on a model: a handle of a hook, for one."""

    def remove(self) -> None:
        """Take it away again."""


class AdapterModule(nn.Module, ABC):
    """A frozen module plus the small trainable tensors that a method puts beside it.

    Its own parameters are what is trained and what is saved; nothing else of the model is.

    Attributes:
        base: The frozen module, untouched: switching the adapter off gives it back to the bit.
        enabled: False while `Adapter.disabled()` holds.
        changes_ties: True if all modules tied to the base's weight are wrapped too.
    """

    changes_ties = False

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

    def frozen(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the frozen layer gives for x.

        Modules beside a linear layer ask here, so that several adapters can share one product.
        """
        return cast(Tensor, self.base(x, *args, **kwargs))

    @abstractmethod
    def reset(self, generator: torch.Generator) -> None:
        """Initialise the trainable tensors, so that the output is still the base's."""

    def init_from(self, *start: Tensor | None) -> None:
        """Initialise the trainable tensors with what `Method.started_by` has made."""
        raise NotImplementedError

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return what a file holds of this module, by PEFT's name below the module's path."""

    @abstractmethod
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the tensors of `state()`; names and shapes have been checked."""

    @abstractmethod
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of `state()` without making the tensors."""

    @property
    def stacked(self) -> tuple[str, ...]:
        """Names of the base's stacks of expert weights that are adapted; () of a linear layer."""
        return ()

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the base's parameters that a merge replaces."""
        return self.stacked or ("weight",)

    def weights(self, base: nn.Module) -> dict[str, Tensor]:
        """Return the weights to merge into, by parameter name: views, as merged_weight takes them.

        Args:
            base: This module's base, or the same layer of another copy of the model.
        """
        return {
            name: weight_of(base) if name == "weight" and is_linear(base) else getattr(base, name)
            for name in self.changed
        }

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        """Return the parameter that computes base and adapter at once.

        Args:
            weight: The base's own in float32: (out, in), (experts, out, in), or a bias (out,).
            name: Which of `weights`.

        Raises:
            NotImplementedError: `Method.unmergeable`.
        """
        raise NotImplementedError


class Method(Config, ABC):
    """What every method's config has, and what the rest of the house asks of it."""

    changes_bias: ClassVar[bool] = False
    """Whether a merge replaces biases too."""
    shared_names: ClassVar[tuple[str, ...]] = ()
    """Tensors that belong to the adapter as a whole, not to one module."""
    unmergeable: ClassVar[str] = ""
    """Why no weights compute base and adapter at once; "" where some do."""
    sits_on_stacks: ClassVar[bool] = False
    """Whether it has a form for stacks of experts."""
    acts_on_input: ClassVar[bool] = False
    """Whether it sits on the input alone: its files name no targets."""
    takes_token_rows: ClassVar[bool] = False
    """Whether `token_rows` may stand beside it: PEFT has them beside a LoRA only."""
    files: ClassVar[str] = "PEFT"
    """Who else reads its files; "" where nobody does."""

    type: str
    targets: tuple[str, ...] | str = "all-linear"
    """Roles (q, k, v, o, gate, up, down, ...), groups (attention, ffn, all-linear), or names."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the adapter is kept and trained, over any base."""
    train_fully: tuple[str, ...] = ()
    """Modules that are trained whole beside it, by the ends of their names: [classifier]."""
    token_rows: tuple[int, ...] | dict[str, tuple[int, ...]] = ()
    """Tokens whose rows of the input embedding are trained beside it, and of a head that is tied to
    it; or of modules by the ends of their names: {embed_tokens: [7], lm_head: [7]}."""

    def sites(self, model: nn.Module) -> list[Site]:
        """Return where the targets are in this model.

        Raises:
            TargetError: A target is not in it.
        """
        return resolve(model, self.targets, stacks=self.sits_on_stacks)

    def left_out(self, model: nn.Module) -> list[Site]:
        """Return what a group of the targets names and the method cannot sit on."""
        return []

    def candidates(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Return the paths of all modules that it could sit on, each with its stacks of experts."""
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
        """Why the output changes before any training; "" where it does not.

        A method of which this is always so has a class variable instead.
        """
        return ""

    @property
    def started_by(self) -> str:
        """The function that makes the initial values for `attach`; "" where it needs none."""
        return ""

    def check_quantize(self, quantize: str) -> None:
        """Raise ConfigError where the method does not go with `base.quantize`."""

    @abstractmethod
    def wrap(self, base: nn.Module, site: Site) -> AdapterModule:
        """Build the adapter of one site; its tensors are set by `reset`, `begin` or `load`."""

    def wrap_experts(self, experts: nn.Module, sites: Sequence[Site]) -> AdapterModule:
        """Build the adapter of one module's parameters.

        Raises:
            TargetError: The method has no form for them.
        """
        raise TargetError(
            f"{self.type} cannot sit on stacked expert parameters",
            found=f"{sites[0].path}: {', '.join(str(site.parameter) for site in sites)}",
            fix="Leave the experts out of the targets, or use LoRA.",
        )

    def connect(
        self, model: nn.Module, modules: Mapping[str, AdapterModule]
    ) -> Sequence[Removable]:
        """Hang on the model what the method needs beside its modules; they are in place by now."""
        return []

    def share(self, modules: Mapping[str, AdapterModule]) -> None:
        """Give all modules what they have in common."""

    def shared(self, modules: Mapping[str, AdapterModule]) -> dict[str, Tensor]:
        """Return what is saved of that, by name."""
        return {}
