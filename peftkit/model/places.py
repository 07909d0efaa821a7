"""Which weights a live model has that could be adapted, and which roles they play.

A place is such a weight: a linear layer (Conv1D and quantised ones too), a stack of experts, a
router, an embedding. Its role comes from its name in its context (roles.py),
its shape and its neighbours; the rows that the roles of a fused weight own come from the layout
that roles.py has for its class, and from the head counts that the live module and its config give.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftkit.errors import TargetError
from peftkit.model import roles as table


def embedding_of(model: nn.Module) -> nn.Module | None:
    """Return what a model gives as its input embedding; None where it has none of tokens."""
    try:
        found = cast(Any, model).get_input_embeddings()
    except (AttributeError, NotImplementedError):  # models of two towers have none
        return None
    return found if isinstance(found, nn.Module) else None


def input_embedding(model: nn.Module) -> str:
    """Return the path of a model's input embedding.

    Raises:
        TargetError: It has none.
    """
    module = embedding_of(model)
    path = next((p for p, m in model.named_modules() if m is module), None)
    if module is None or path is None:
        raise TargetError(
            f"{type(model).__name__} has no input embedding of tokens",
            fix="Name the module: token_rows: {NAME: [...]}",
        )
    return path


@dataclass(slots=True)
class ModelWeight:
    """A weight of the model, and what its name and its neighbours say about it.

    Attributes:
        path: Module path in the live tree.
        parameter: Name of a parameter of that module: a stack of experts, or a router that is no
            linear layer.
        roles: One; of a fused weight several, in the order of its rows.
        side: "vision", "audio" or "projector" by its path, else "".
        repeats: How often the parts of a fused weight follow one another; 0 when it is not fused.
        sizes: Rows of each part in one repeat.
        set_apart: The model has another side that plain roles mean, so that this one's are called
            "vision_q".
    """

    path: str
    module: nn.Module
    roles: tuple[str, ...]
    parameter: str | None = None
    side: str = ""
    repeats: int = 0
    sizes: tuple[int, ...] = ()
    set_apart: bool = False

    @property
    def is_embedding(self) -> bool:
        """Whether this is an embedding table rather than a matrix that multiplies."""
        return self.roles[0] in ("embed", "pos_embed")

    @property
    def is_stack(self) -> bool:
        """Whether this is a 3-D parameter, one matrix for each expert."""
        return self.parameter is not None and self.roles[0] not in table.CHOOSING

    @property
    def names(self) -> tuple[str, ...]:
        """The roles as the user writes them."""
        if not self.set_apart:
            return self.roles
        return tuple(r if r in table.UNSIDED else f"{self.side}_{r}" for r in self.roles)

    @property
    def block(self) -> str:
        """The path up to the number of the innermost block, "" outside of all."""
        segments = self.path.split(".")
        return ".".join(segments[: len(segments) - len(table.tail(segments))])

    def rows(self, roles: Sequence[str]) -> dict[str, Tensor] | None:
        """Return name -> indices of the output rows of some roles of a fused weight."""
        if not self.repeats or not roles:
            return None
        owner = torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))
        owner = owner.repeat(self.repeats)  # (out,): index of the role that owns each row
        return {
            name: (owner == index).nonzero().flatten()
            for index, (role, name) in enumerate(zip(self.roles, self.names, strict=True))
            if role in roles
        }


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is y = W x + b: nn.Linear, Conv1D, or any quantised form of them."""
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return True
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    has_weight = "weight" in module._parameters or hasattr(type(module), "weight")
    return has_weight and all(isinstance(size, int) for size in sizes)


def is_conv1d(module: nn.Module) -> bool:
    """Tell whether a linear layer keeps its weight as (in, out): GPT-2's Conv1D, or a subclass."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """Return (in_features, out_features) of a linear layer.

    Raises:
        TargetError: It is none.
    """
    if not is_linear(module):
        raise TargetError(
            f"{type(module).__name__} is not a linear layer.",
            fix="List the linear layers with: peftkit inspect MODEL",
        )
    if hasattr(module, "in_features"):
        return cast(int, module.in_features), cast(int, module.out_features)
    num_in, num_out = _shape(module, "weight")  # Conv1D keeps its weight transposed
    return num_in, num_out


def is_transposed(experts: nn.Module) -> bool:
    """Tell whether the stacks of an experts module are (E, in, out) rather than (E, out, in)."""
    flag = getattr(experts, "is_transposed", None)
    if flag is not None:
        return bool(flag)
    up, down = _shape(experts, "gate_up_proj"), _shape(experts, "down_proj")
    return bool(up and down) and up[2] == 2 * down[1] and up[1] == down[2]


def stacked_shape(experts: nn.Module, parameter: str) -> tuple[int, int, int]:
    """Return (num_experts, in_features, out_features) of a stack of experts."""
    num_experts, first, second = _shape(experts, parameter)
    if is_transposed(experts):
        return num_experts, first, second
    return num_experts, second, first


def _shape(module: nn.Module, name: str) -> tuple[int, ...]:
    """Return the shape of a module's own weight, () without one; a packed one is not unpacked."""
    if (weight := module._parameters.get(name)) is not None:
        return tuple(weight.shape)
    packings = cast(Mapping[str, Any], getattr(module, "parametrizations", {}))
    if name not in packings:
        return ()
    form = getattr(packings[name][0], "form", None)
    return tuple(getattr(module, name).shape if form is None else form.shape)


class FrozenWrapper(nn.Module):
    """A module of ours in the place of a frozen one, which it computes with.

    Attributes:
        base: The frozen module.
        enabled: False while adapters are disabled: it then gives what the base gives, to the bit.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.enabled = True

    @property
    def weight(self) -> Tensor:
        """The base's weight, for models that read the weights of their layers."""
        return cast(Tensor, self.base.weight)

    @property
    def bias(self) -> Tensor | None:
        return cast("Tensor | None", self.base.bias)

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that are trained here."""
        return (parameter for parameter in self.parameters() if parameter.requires_grad)


def unwrap_adapter(module: nn.Module) -> nn.Module:
    """Return the frozen module inside a wrapper of ours, or the module itself."""
    while isinstance(module, FrozenWrapper):
        module = module.base
    return module


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield (path, module, parent) of every module once, in order; adapters are unwrapped.

    Raises:
        TargetError: The model carries an adapter of PEFT.
    """
    seen: set[nn.Module] = set()
    stack = [("", model, model)]
    while stack:
        path, module, parent = stack.pop()
        module = unwrap_adapter(module)
        if module in seen:
            continue
        seen.add(module)
        if hasattr(module, "base_layer"):
            raise TargetError(
                f"{type(model).__name__} carries an adapter of PEFT at {path}.",
                fix="Load the bare base model, or merge that adapter first.",
            )
        yield path, module, parent
        prefix = f"{path}." if path else ""
        children = [(prefix + name, child, module) for name, child in module.named_children()]
        stack += reversed(children)


def find_places(model: nn.Module) -> list[ModelWeight]:
    """Return every place of a model in the order of its modules."""
    places: list[ModelWeight] = []
    head, embedding = _output_layer(model), embedding_of(model)
    embedding = None if embedding is None else unwrap_adapter(embedding)
    tables = (own_table(m) for _, m, _ in walk(model) if isinstance(m, nn.Embedding))
    tied = {id(table) for table in tables if table is not None}
    for path, module, parent in walk(model):
        if is_linear(module):
            if isinstance(parent, nn.MultiheadAttention) or _is_read_by_mamba(path, parent):
                continue  # torch, and Mamba, read its weight and never call it
            in_head = head is not None and (module is head or parent is head)
            in_head = in_head or id(own_table(module)) in tied
            role = "head" if in_head else _by_siblings(table.linear_role(path), path, parent)
            places.append(_linear(ModelWeight(path, module, (role,)), parent, model))
        elif role := _embedding_role(path, module, parent, embedding):
            places.append(ModelWeight(path, module, (role,)))
        elif _is_bare_router(path, module):
            places.append(ModelWeight(path, module, ("router",), "weight"))
        else:
            places += [
                _stack(ModelWeight(path, module, (role,), name))
                for name, role in _stacks(path, module).items()
            ]
    _set_sides_apart(model, places)
    return places


def _output_layer(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if getter else None
    return None if head is None else unwrap_adapter(head)


# ------------------------------------------------------------------- neighbours and shapes


def _by_siblings(role: str, path: str, parent: nn.Module) -> str:
    """Tell a gate from a router, one fused with up from a plain up, and qkv from kv."""
    if role.endswith("qkv") and hasattr(parent, table.OWN_QUERY):
        return role.replace("qkv", "kv")
    if not role.endswith(("gate", "up")):
        return role
    siblings = {
        table.FFN_LEAVES.get(name): unwrap_adapter(child)
        for name, child in parent.named_children()
        if is_linear(unwrap_adapter(child))
    }
    context, kind = table.split(role)
    if kind == "gate" and "up" not in siblings:
        return "router" if path.endswith(".gate") else f"{context}up"
    if kind == "up" and "gate" not in siblings and {"up", "down"} <= siblings.keys():
        out, into = linear_shape(siblings["up"])[1], linear_shape(siblings["down"])[0]
        return f"{context}gate_up" if out == 2 * into else role
    return role


def own_table(module: nn.Module) -> Tensor | None:
    """Return the tensor that a layer keeps its weight in; of two that are tied it is one."""
    return module._parameters.get("weight", module._parameters.get("packed"))


def _embedding_role(
    path: str, module: nn.Module, parent: nn.Module, embedding: nn.Module | None
) -> str:
    """Return embed or pos_embed for tables of rows and patch convolutions, else ""."""
    if not (isinstance(module, nn.Embedding | nn.Conv2d) or hasattr(module, "num_embeddings")):
        return ""
    leaf = path.rpartition(".")[2]
    shared = None if embedding is None else own_table(embedding)
    tied = shared is not None and shared is own_table(module)
    if tied or embedding in (module, parent) or leaf in table.EMBED_LEAVES:
        return "embed"
    return "pos_embed" if re.search(table.POSITION, leaf) else ""


def _is_bare_router(path: str, module: nn.Module) -> bool:
    return path.rpartition(".")[2] in table.ROUTER_LEAVES and len(_shape(module, "weight")) == 2


def _is_read_by_mamba(path: str, parent: nn.Module) -> bool:
    """Tell whether a layer is the dt_proj of a state-space mixer; Doge calls its own."""
    return path.endswith(".dt_proj") and hasattr(parent, "x_proj")


def _stacks(path: str, module: nn.Module) -> dict[str, str]:
    """Return a module's own 3-D expert parameters, name -> role."""
    whole = table.STACKED_MODULES.get(".".join(path.split(".")[-2:]), "")
    context = "shared" if "shared" in path else "expert"
    roles = {name: f"{context}_{kind}" for name, kind in table.STACKED_LEAVES.items()}
    roles |= {"weight": whole} if whole else {}
    return {name: role for name, role in roles.items() if len(_shape(module, name)) == 3}


def _linear(place: ModelWeight, owner: nn.Module, model: nn.Module) -> ModelWeight:
    """Split a fused linear layer into its roles where the order of its rows is known."""
    context, kind = table.split(place.roles[0])
    configs = (getattr(owner, "config", None), getattr(model, "config", None))
    shape = linear_shape(place.module)
    if split := table.split_rows(kind, place.path, owner, configs, *shape):
        place.repeats, sizes = split
        place.roles, place.sizes = tuple(context + role for role in sizes), tuple(sizes.values())
    return place


def _stack(place: ModelWeight) -> ModelWeight:
    """Give a stack of experts its roles: gate and up are halves, or alternate (gpt-oss)."""
    context, kind = table.split(place.roles[0])
    if kind == "gate_up":
        _, _, out = stacked_shape(place.module, cast(str, place.parameter))
        place.roles = (f"{context}gate", f"{context}up")
        place.repeats = 1 if getattr(place.module, "is_concatenated", True) else out // 2
        place.sizes = (out // 2 // place.repeats,) * 2
    return place


def _set_sides_apart(model: nn.Module, places: list[ModelWeight]) -> None:
    """Set every place's side, and whether plain roles mean another side."""
    for place in places:
        place.side = table.side(place.path)
    equal = any(name.startswith(table.EQUAL_TOWERS) for name in model._parameters)
    if equal or not any(p.block and not p.side and not p.is_embedding for p in places):
        return
    places[:] = [p for p in places if p.side != "projector" or not p.is_embedding]
    for place in places:
        place.set_apart = place.side != "" and place.roles != ("head",)
        if place.set_apart and place.side == "projector":  # whatever is in it, it is one thing
            place.roles, place.repeats, place.sizes = ("projector",), 0, ()
