"""The LoRA layer, y = W x + s B A x, and groups of layers that read one input.

A layer computes alone, unless `form_groups` puts it into a `LoRAGroup` with the other layers that
read the same input (q, k and v; gate and up). The group's first layer to be called computes all of
them; the others take their output. The input's identity as a tensor is checked at each call. If the
layers of a group read different inputs, the next `refresh_groups` splits the group.

A group holds copies of A and B in the compute dtype. It refreshes them when the version of a
layer's tensor has changed. Fused optimizers do not change versions: call `refresh_groups` after an
optimizer step. The base's weights stay in place, packed or not.

Shapes: r rank, R = columns of the full B (r, times the roles of a fused layer, times two if the
initial values are subtracted), in a group the sum over its layers; out, in features of the layer;
M rows of input; `...` is any leading shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from peftkit.kernels.fused import recipe_of
from peftkit.kernels.lora import Layer, add_lora, grouped_lora_linear, low_rank
from peftkit.methods.base import AdapterModule
from peftkit.methods.lora_init import SUBTRACTED, Init, Options, of_weight
from peftkit.model.places import find_places, linear_shape
from peftkit.model.targets import RowSlice, Site
from peftkit.quant.layers import QuantizedLinear
from peftkit.quant.weights import frozen_weight, weight_of

SHARING = ({"q", "k", "v"}, {"gate", "up"}, {"in"})  # mixer_in
"""Last segments of roles whose layers read the same input within one module."""
MAX_MISSES = 2
"""Consecutive changes of input within a group after which its layers are separated."""


def drawn(init: Init, shape: torch.Size, rank: int, generator: torch.Generator) -> Tensor:
    """Return a random A, drawn on the CPU in float32 and thus equal on all devices."""
    if init == "gaussian":
        return torch.empty(shape).normal_(std=1 / rank, generator=generator)
    bound = 1 / math.sqrt(shape[-1])  # kaiming_uniform_(a=sqrt(5)), like nn.Linear
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


class LoRALinear(AdapterModule):
    """A frozen linear layer plus a trainable low-rank update.

    On a fused projection only the rows of the targeted roles are adapted: each role has a pair of
    rank r, and the full B is zero in other rows.

    Attributes:
        lora_A: (num_roles * r, in / constant_in): one value for each block of columns.
        lora_B: (num_rows, r) for the adapted output rows: all rows unless fused.
        initial_A, initial_B: (r, in), (out, r): subtracted initial values of PiSSA and OLoRA, or
            None.
        group: Computes this layer together with others; None if the layer computes alone.
        quantized: Computes it with the quantised merged weight (forward/fake_quantized.py).
    """

    initial_A: Tensor | None
    initial_B: Tensor | None
    can_group: ClassVar[bool] = True
    group: LoRAGroup | None
    quantized: Any = None

    def __init__(self, base: nn.Module, site: Site, options: Options) -> None:
        super().__init__(base, site)
        self.in_features, self.out_features = linear_shape(base)
        self.rank, self.scaling, self.init, dtype, dropout, self.constant_in = options
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.slice = RowSlice(site, self.out_features, self.base_device, self.rank)
        num_blocks = self.in_features // self.constant_in
        self.lora_A = self.new_parameter(self.slice.num_roles * self.rank, num_blocks, dtype=dtype)
        self.lora_B = self.new_parameter(self.slice.num_rows, self.rank, dtype=dtype)
        subtracts = self.init in SUBTRACTED
        for name, like in (("initial_A", self.lora_A), ("initial_B", self.lora_B)):
            start = torch.zeros_like(like.detach()) if subtracts else None
            self.register_buffer(name, start, persistent=False)

    def full_a(self) -> Tensor:
        """Return the applied and saved A, (R, in)."""
        if self.constant_in > 1:
            return self.lora_A.repeat_interleave(self.constant_in, 1)
        return self.lora_A if self.initial_A is None else torch.cat([self.lora_A, self.initial_A])

    def full_b(self) -> Tensor:
        """Return the applied and saved B, (out, R), with zeros in rows that are not adapted."""
        if self.initial_B is not None:
            return torch.cat([self.lora_B, -self.initial_B], dim=1)
        return self.slice.spread_matrix(self.lora_B)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        if self.quantized is not None and self.enabled:
            return cast(Tensor, self.quantized(self, x))
        group = self.group if self.enabled and not (args or kwargs) else None
        if group is not None and group.takes(x):
            return group.output(self, x)
        out: Tensor = self.base(x, *args, **kwargs)
        if not self.enabled:
            return out
        x = self.dropout(x)
        if self.initial_A is None or self.initial_B is None:
            return add_lora(out, x, self.full_a(), self.full_b(), self.scaling)
        # both sides compute the same products in the same order: their difference starts at zero;
        # contiguous, because torch folds a strided x for trained weights only
        x = x.contiguous()
        trained = low_rank(x, self.lora_A, self.lora_B)
        return out + self.scaling * (trained - low_rank(x, self.initial_A, self.initial_B))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        if self.initial_A is None or self.initial_B is None:
            shape = torch.Size([len(self.lora_A), self.in_features])
            a = drawn(self.init, shape, self.rank, generator)
            return self.init_from(a[:, :: self.constant_in], None)
        return self.init_from(*self.subtracted_values())

    @torch.no_grad()
    def subtracted_values(self, *, exact: bool = False) -> tuple[Tensor, Tensor]:
        """Set and return the subtracted initial values of A and B; see `of_weight`."""
        assert self.initial_A is not None
        assert self.initial_B is not None
        weight = weight_of(self.base).float()
        a, b = of_weight(self.init, weight, self.rank, self.scaling, exact=exact)
        return self.initial_A.copy_(a), self.initial_B.copy_(b)

    @torch.no_grad()
    def init_from(self, *values: Tensor | None) -> None:
        for trained, value in zip((self.lora_A, self.lora_B), values, strict=True):
            trained.zero_() if value is None else trained.copy_(value)

    def state(self) -> dict[str, Tensor]:
        return {"lora_A.weight": self.full_a().detach(), "lora_B.weight": self.full_b().detach()}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        columns = self.lora_A.shape[0] * (1 if self.initial_A is None else 2)
        return {
            "lora_A.weight": (columns, self.in_features),
            "lora_B.weight": (self.out_features, columns),
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        a, b = state["lora_A.weight"], state["lora_B.weight"]
        self.lora_A.copy_(a[: self.lora_A.shape[0], :: self.constant_in])
        if self.initial_A is not None and self.initial_B is not None:
            self.lora_B.copy_(b[:, : self.rank])
            self.initial_A.copy_(a[self.rank :])
            self.initial_B.copy_(-b[:, self.rank :])
        else:
            self.lora_B.copy_(self.slice.take_matrix(b))

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        a, b = self.full_a().float(), self.full_b().float()
        return torch.addmm(weight, b.to(weight.device), a.to(weight.device), alpha=self.scaling)

    @classmethod
    def form_groups(cls, model: nn.Module, *, serves: bool) -> None:
        sets = _sets_of_one_input(model)
        _copy_to_groups([LoRAGroup(layers, serves=serves) for layers in sets])

    @classmethod
    def separate_wrong_groups(cls, model: nn.Module) -> str:
        from peftkit.methods.group_check import separate_wrong  # a leaf

        return separate_wrong(
            model, dict.fromkeys(layer.group for layer in _layers(model).values())
        )

    @classmethod
    def refresh_groups(cls, model: nn.Module) -> None:
        """Copy A and B to the groups, and separate groups whose layers read several inputs."""
        groups = []
        for group in dict.fromkeys(layer.group for layer in _layers(model).values()):
            if group is not None and group.has_several_inputs:
                groups += [LoRAGroup([layer]) for layer in group.layers]
            elif group is not None:
                groups.append(group)
        _copy_to_groups(groups)


class LoRAGroup:
    """LoRA layers of one input, computed together.

    Args:
        serves: Whether the group is for generation, without casts of A and B for each token;
            otherwise for training.

    Attributes:
        ranks: Rows of each layer's A.
        dtype: Compute dtype of the base or of autocast.
        lora_a: (R, in), s A of all layers. lora_b: B (out, r) of each layer.
        scales: (R,), s for each row of A.
    """

    def __init__(self, layers: Sequence[LoRALinear], *, serves: bool = False) -> None:
        self.layers, self.serves = list(layers), serves
        self.dropout = layers[0].dropout
        self.ranks = tuple(layer.lora_A.shape[0] for layer in layers)
        device = layers[0].lora_A.device
        self.dtype = _autocast_dtype(layers[0].lora_A) or _compute_dtype(layers[0].base)
        options: Any = {"dtype": self.dtype, "device": device}
        self.lora_a = torch.zeros(sum(self.ranks), layers[0].in_features, **options)
        pairs = list(zip(layers, self.ranks, strict=True))
        self.lora_b = [torch.zeros(layer.out_features, rank, **options) for layer, rank in pairs]
        scalings = [layer.scaling for layer in layers]
        scales = [layer.scaling for layer, rank in pairs for _ in range(rank)]
        self.scales = torch.tensor(scales, device=device)
        self.copies = [*self.lora_a.split(self.ranks), *self.lora_b]
        self.factors = [*scalings, *[1.0] * len(layers)]
        self.copied_versions: list[int] = []
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        self._misses = 0
        for layer in layers:
            layer.group = self

    def takes(self, x: Tensor) -> bool:
        """Return whether the group computes its layers for this input in the current mode."""
        trains, autocast = self.layers[0].training, _autocast_dtype(x)
        if trains == self.serves or torch.is_grad_enabled() == self.serves:
            return False
        if self.serves and autocast is not None:
            return False
        return (autocast or x.dtype) == self.dtype and x.device == self.lora_a.device

    def output(self, layer: LoRALinear, x: Tensor) -> Tensor:
        """Return the output (..., out) of a layer for x (..., in)."""
        if not torch.compiler.is_compiling() and self.copied_versions != self.versions():
            _copy_to_groups([self])
        index = self.layers.index(layer)
        if self._input is not x or index not in self._outputs:
            if self._outputs:
                self._misses += 1
            self._input, self._outputs = x, dict(enumerate(self._computed(x)))
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input, self._misses = None, 0
        return output

    @property
    def has_several_inputs(self) -> bool:
        return self._misses >= MAX_MISSES and len(self.layers) > 1

    @property
    def kind(self) -> tuple[Any, ...]:
        """Everything but sizes that selects the code of the group's products."""
        layers, _ = _base_tensors([layer.base for layer in self.layers])
        forms = [(form and form.kind, has_bias) for form, _, has_bias in layers]
        return self.dtype, *((type(m.base), *f) for m, f in zip(self.layers, forms, strict=True))

    def input_like(self, values: Tensor) -> Tensor:
        """Return values in the dtype of the layers' input."""
        return values.to(_compute_dtype(self.layers[0].base))

    def refresh(self) -> None:
        """Copy A and B of the layers."""
        _copy_to_groups([self])

    def forget(self) -> None:
        """Drop outputs that were computed with previous values of A and B."""
        self._input, self._outputs = None, {}

    def versions(self) -> list[int]:
        """Return torch's version, a count of changes in place, of each A and B."""
        return [tensor._version for layer in self.layers for tensor in (layer.lora_A, layer.lora_B)]

    def masters(self) -> list[Tensor]:
        """Return the trained tensors: A of each layer, then the full B of each layer."""
        return [*(m.full_a() for m in self.layers), *(m.full_b() for m in self.layers)]

    def _computed(self, x: Tensor) -> list[Tensor]:
        flat, bases = x.reshape(-1, x.shape[-1]), [layer.base for layer in self.layers]
        outputs: Iterable[Tensor]
        if self.serves:
            hiddens = functional.linear(flat, self.lora_a).split(self.ranks, 1)
            products = zip(bases, hiddens, self.lora_b, strict=True)
            # in place: cuBLAS would first copy the base's product into another array
            outputs = [base(flat).addmm_(hidden, b.t()) for base, hidden, b in products]
        else:
            dropped = None if isinstance(self.dropout, nn.Identity) else self.dropout(flat)
            layers, frozen = _base_tensors(bases)
            outputs = grouped_lora_linear(
                flat.to(self.dtype),
                None if dropped is None else dropped.to(self.dtype),
                layers,
                frozen,
                self.lora_a,
                self.scales,
                self.lora_b,
                self.masters(),
                None if dropped is not None or torch.compiler.is_compiling() else recipe_of(x),
            )
        return [out.view(*x.shape[:-1], out.shape[-1]) for out in outputs]


def _layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Return a model's layers that can be grouped, by path."""
    modules = model.named_modules()
    return {path: m for path, m in modules if isinstance(m, LoRALinear) and m.can_group}


def _sets_of_one_input(model: nn.Module) -> list[list[LoRALinear]]:
    """Return layers in sets of one parent, input, dtype, device and width."""
    layers = _layers(model)
    if not layers:
        return []
    roles = {place.path: place.roles for place in find_places(model)}
    sets: dict[Any, list[LoRALinear]] = {}
    for path, layer in layers.items():
        base = layer.base
        has_weight = isinstance(base, QuantizedLinear) or frozen_weight(base) is not None
        if layer.initial_A is not None or not has_weight:
            continue
        context, _, kind = roles.get(path, ("",))[0].rpartition("_")
        shared = next((",".join(sorted(kinds)) for kinds in SHARING if kind in kinds), "")
        parent = path.rpartition(".")[0] if shared else path
        form = _compute_dtype(base), layer.lora_A.device, layer.in_features
        sets.setdefault((parent, context, shared, form), []).append(layer)
    return list(sets.values())


@torch.no_grad()
def _copy_to_groups(groups: Sequence[LoRAGroup]) -> None:
    """Copy A and B of all layers to their groups with a few kernels.

    The versions of the copies do not change: two forward passes may precede one backward pass.
    """
    if not groups:
        return
    factors = [factor for group in groups for factor in group.factors]
    sources: list[Tensor] = []
    for group in groups:
        sources += [layer.full_a().detach() for layer in group.layers]
        sources += [layer.full_b().detach() for layer in group.layers]
    scaled = list(torch._foreach_mul(sources, factors))
    torch._foreach_copy_([copy.data for group in groups for copy in group.copies], scaled)
    for group in groups:
        group.copied_versions = group.versions()
        group.forget()


def _compute_dtype(base: nn.Module) -> torch.dtype:
    weight = frozen_weight(base)
    return cast(QuantizedLinear, base).packing.dtype if weight is None else weight.dtype


def _base_tensors(bases: Sequence[nn.Module]) -> tuple[tuple[Layer, ...], list[Tensor]]:
    """Return the storage form of frozen layers, and their tensors."""
    layers: list[Layer] = []
    frozen: list[Tensor] = []
    for base in bases:
        bias = cast("Tensor | None", base.bias)
        weight = frozen_weight(base)
        if weight is not None:
            layers.append(Layer(None, 0, bias is not None))
            frozen.append(weight)
        else:
            assert isinstance(base, QuantizedLinear)
            scales = base.packing.scales
            layers.append(Layer(base.packing.form, len(scales), bias is not None))
            frozen += [base.packed, *scales]
        frozen += [] if bias is None else [bias]
    return tuple(layers), frozen


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return autocast's dtype for x's device; None if autocast is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
