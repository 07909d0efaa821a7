"""The base classes of a method: its config, its modules, its format in PEFT's files.

- `Method`, a frozen config: *where* an adapter sits (`sites`) and *what* it puts there (`wrap`).
- `AdapterModule`: one wrapped module of the model, what it computes and how it merges.
- `PeftFormat`: adapter_config.json and the names of tensors.

Freezing, saving, loading, disabling and merging follow from these, once, for all methods.
A module of the model has at most one adapter module, which may adapt several of its weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from peftkit.config.schema import Config
from peftkit.errors import AdapterError, TargetError
from peftkit.files.strict_json import shown
from peftkit.model.places import FrozenWrapper, find_places, is_linear
from peftkit.model.roles import ALL_LINEAR
from peftkit.model.targets import Site, resolve
from peftkit.quant.layers import weight_of

ADAPTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

InitValues = tuple[Tensor, Tensor | None]
"""Initial values of a LoRA layer: A (r, in) and B (out, r), where None is zero."""


class AdapterModule(FrozenWrapper, ABC):
    """A frozen module plus the small trainable tensors of a method.

    Its own parameters are all that is trained and saved.

    Attributes:
        changes_ties: True if all modules tied to the base's weight are wrapped too.
        can_group: Whether modules that read one input can be computed together.
        group: Computes this module together with others; None if it computes by itself.
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

    def new_parameter(self, *shape: int, dtype: torch.dtype) -> nn.Parameter:
        """Return zeros to train, on the base's device."""
        return nn.Parameter(torch.zeros(shape, dtype=dtype, device=self.base_device))

    @abstractmethod
    def reset(self, generator: torch.Generator) -> None:
        """Initialise the trainable tensors; the output stays the base's."""

    def init_from(self, *start: Tensor | None) -> None:
        """Initialise the trainable tensors with values that `Method.initializer` computed."""
        raise NotImplementedError

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save, by PEFT's names relative to the module's path."""

    @abstractmethod
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load tensors named as in `state()`; names and shapes have been checked."""

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of `state()`."""
        return {name: tuple(tensor.shape) for name, tensor in self.state().items()}

    @classmethod
    def form_groups(cls, model: nn.Module, *, serves: bool) -> None:
        """Set `group` of the modules of this class in a model, for generation or for training."""

    @classmethod
    def refresh_groups(cls, model: nn.Module) -> None:
        """Copy the trained tensors to the groups of this class in a model."""

    @property
    def stacked(self) -> tuple[str, ...]:
        """Names of the base's stacks of expert weights that are adapted; () of a linear layer."""
        return ()

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the base's parameters that a merge replaces."""
        return self.stacked or ("weight",)

    def weights(self, base: nn.Module) -> dict[str, Tensor]:
        """Return views of the weights to merge into, by name, shaped as `merged_weight` takes.

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
    """The config of a method, and what it can do."""

    shared_names: ClassVar[tuple[str, ...]] = ()
    """Names of tensors that belong to the adapter as a whole, not to one module."""
    unmergeable: ClassVar[str] = ""
    """Why it cannot be merged into the weights; "" if it can."""
    sits_on_stacks: ClassVar[bool] = False
    """Whether it supports stacked experts."""
    acts_on_input: ClassVar[bool] = False
    """Whether it acts on the input only and has no target modules."""
    wraps_linear_layers: ClassVar[bool] = False
    """Whether it wraps linear layers and reads no weight outside of their blocks: its base may then
    be sharded over processes."""
    takes_token_rows: ClassVar[bool] = False
    """Whether it allows `token_rows`: PEFT has them with LoRA only."""
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
        """Return the weights of a model that the targets name.

        Raises:
            TargetError: A target is not in the model.
        """
        return resolve(model, self.targets, stacks=self.sits_on_stacks)

    def for_model(self, model: nn.Module) -> Method:
        """Return the method with explicit targets: by default, towers are left out."""
        unnamed = "targets" not in self.model_fields_set and self.targets == ALL_LINEAR
        if unnamed and any(place.set_apart for place in find_places(model)):
            return self.model_copy(update={"targets": (f"language.{ALL_LINEAR}",)})
        return self

    def left_out(self, model: nn.Module) -> list[Site]:
        """Return weights that a group among the targets includes and the method cannot adapt."""
        return []

    def candidates(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Return the path of every module it could adapt, with the module's stacks of experts."""
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
        """Why a fresh adapter changes the output; "" if it does not."""
        return ""

    @property
    def initializer(self) -> str:
        """Name of the function that computes initial values for `attach`; "" if it needs none."""
        return ""

    @property
    def reads_rows(self) -> str:
        """The setting whose initial values need training rows; "" if none does."""
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

    def connect(
        self, model: nn.Module, modules: Mapping[str, AdapterModule]
    ) -> list[RemovableHandle]:
        """Add hooks to the model, in which the modules are in place.

        Returns:
            Handles; `remove()` of each is called when the adapter is taken off.
        """
        return []

    def share(self, modules: Mapping[str, AdapterModule]) -> None:
        """Give all modules their shared tensors."""

    def shared(self, modules: Mapping[str, AdapterModule]) -> dict[str, Tensor]:
        """Return the shared tensors to save, by name."""
        return {}


M = TypeVar("M", bound=Method)

_COMMON = (
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path",
    "revision", "inference_mode", "runtime_config",
)  # fmt: skip
"""Fields of every config that do not change what an adapter computes."""
MAGNITUDE = "lora_magnitude_vector"
"""The tensor of a DoRA's row norms."""
PROMPT = "prompt_embeddings"
"""Tensor of methods that act on the input."""
TARGETS = ("target_modules", "exclude_modules")
LAYERS = ("layers_to_transform", "layers_pattern")
"""Fields that say which modules are adapted; the tensor names say it too."""


class PeftFormat(ABC, Generic[M]):
    """A method's adapters in PEFT's files: adapter_config.json and named tensors."""

    peft_type: ClassVar[str]
    """PEFT's name of the method."""
    method_class: type[M]
    settings: ClassVar[Mapping[str, str]] = {}
    """Fields of the method that the config holds unchanged: our name to PEFT's. One that is left
    out has our default, which is PEFT's too."""
    known_fields: ClassVar[Collection[str]]
    """Further fields that are read, or that do not change what the adapter computes."""
    absent_fields: ClassVar[Collection[str]] = ()
    """Fields of PEFT's LoRA config that this method's config does not have."""
    subset_fields: ClassVar[Collection[str]] = ()
    """Fields that list a subset of the targets; see `subset_of`."""
    shared_prefix: ClassVar[str] = "base_model."
    """Prefix of `Method.shared_names` in the tensor file."""

    def describes(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a config is of this method."""
        return fields.get("peft_type") == self.peft_type

    def read(self, fields: Mapping[str, Any]) -> M:
        """Return the method that a config describes.

        Raises:
            AdapterError: A field is set that would change the output and is not supported; lists
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
                "made it, or save it again without these.",
            )
        return self.method(fields)

    def method(self, fields: Mapping[str, Any]) -> M:
        """Return the method of a config whose fields are all supported."""
        values = {
            ours: fields[theirs] for ours, theirs in self.settings.items() if theirs in fields
        }
        return self.method_class(**values)

    def fields(
        self, method: M, model: nn.Module, modules: Mapping[str, AdapterModule]
    ) -> dict[str, Any]:
        """Return the method's own fields of adapter_config.json."""
        return {theirs: getattr(method, ours) for ours, theirs in self.settings.items()}

    def subset_of(self, module: AdapterModule) -> str:
        """Return the one of `subset_fields` that lists this module, or ""."""
        return ""

    def to_file(
        self, state: Mapping[str, Tensor], model: nn.Module, modules: Mapping[str, AdapterModule]
    ) -> Mapping[str, Tensor]:
        """Return the tensors to write, from those of `Adapter.state()`."""
        return state

    def from_file(
        self, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Undo `to_file`: return the config and the tensors as `Adapter.load_state` takes them.

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
        """Add to a file's tensors those that PEFT computes from the base when it loads."""
        return tensors
