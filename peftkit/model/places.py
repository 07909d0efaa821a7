"""The weights of a model that can be adapted, and their roles.

A place is a linear layer (also Conv1D and quantised layers), a stack of experts, a router or an
embedding. Its role follows from its name in context (roles.py), its shape and its siblings. The
rows of each role of a fused weight follow from the layout in roles.py for its class, and from the
head counts of the module and its config.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftkit.errors import TargetError
from peftkit.model import roles as table


def embedding_of(model: nn.Module) -> nn.Module | None:
    """Return the input embedding of a model; None if it embeds no tokens."""
    try:
        embedding = cast(Any, model).get_input_embeddings()
    except (AttributeError, NotImplementedError):  # models of two towers
        return None
    return embedding if isinstance(embedding, nn.Module) else None


def num_embeddings(model: nn.Module) -> int | None:
    """Return the number of rows of a model's token embedding; None if it embeds no tokens."""
    embedding = embedding_of(model)
    # the weight's shape is no substitute: it may be packed or sharded
    return getattr(None if embedding is None else unwrap_adapter(embedding), "num_embeddings", None)


def input_embedding(model: nn.Module) -> str:
    """Return the path of a model's input embedding.

    Raises:
        TargetError: The model has none.
    """
    module = embedding_of(model)
    path = next((p for p, m in model.named_modules() if m is module), None)
    if module is None or path is None:
        raise TargetError(
            f"{type(model).__name__} has no input embedding of tokens",
            fix="Name the module: token_rows: {NAME: [...]}",
        )
    return path


def token_tables(model: nn.Module) -> dict[str, nn.Module]:
    """Return the input embedding and the output layer of a model by path, those that it has."""
    tables = (embedding_of(model), output_layer(model))
    modules = model.named_modules(remove_duplicate=False)
    return {path: module for path, module in modules if any(module is table for table in tables)}


@dataclass(slots=True)
class ModelWeight:
    """A weight of the model with its roles.

    Attributes:
        path: Module path in the live tree.
        parameter: Name of a parameter of the module: a stack of experts, or a router that is no
            linear layer.
        roles: One role; for a fused weight several, in the order of its rows.
        side: "vision", "audio" or "projector" by its path, otherwise "".
        repeats: How often the roles of a fused weight alternate along its rows; 0 if not fused.
        sizes: Rows of each role in one repeat.
        set_apart: Whether roles have the side's prefix ("vision_q"), because plain roles mean the
            language model.
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
        """Whether this is the table of an embedding."""
        return self.roles[0] in ("embed", "pos_embed")

    @property
    def is_stack(self) -> bool:
        """Whether this is a 3-D parameter with one matrix for each expert."""
        return self.parameter is not None and self.roles[0] not in table.CHOOSING

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the roles in targets."""
        if not self.set_apart:
            return self.roles
        return tuple(r if r in table.UNSIDED else f"{self.side}_{r}" for r in self.roles)

    @property
    def block(self) -> str:
        """The path up to and including the innermost block's number; "" outside of blocks."""
        segments = self.path.split(".")
        return ".".join(segments[: len(segments) - len(table.tail(segments))])

    def rows(self, roles: Sequence[str]) -> dict[str, Tensor] | None:
        """Return the output row indices of some roles of a fused weight, by name."""
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
    """Return whether a module computes W x + b: nn.Linear, Conv1D, or a quantised layer.

    Two nn.Linear do not: DeepSeek V4's grouped projection computes a product for each of
    `n_groups`, and the routers of Llama 4 and PhiMoE return a tuple for the `top_k` experts.
    """
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return getattr(module, "n_groups", 1) == 1 and not hasattr(module, "top_k")
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    has_weight = "weight" in module._parameters or hasattr(type(module), "weight")
    return has_weight and all(isinstance(size, int) for size in sizes)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a linear layer is GPT-2's Conv1D, which stores its weight as (in, out)."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """Return (in_features, out_features) of a linear layer.

    Raises:
        TargetError: It is no linear layer.
    """
    if not is_linear(module):
        raise TargetError(
            f"{type(module).__name__} is not a linear layer.",
            fix="List the linear layers with: peftkit inspect MODEL",
        )
    if hasattr(module, "in_features"):
        return cast(int, module.in_features), cast(int, module.out_features)
    num_in, num_out = _shape(module, "weight")  # Conv1D stores its weight transposed
    return num_in, num_out


def is_transposed(experts: nn.Module) -> bool:
    """Return whether an experts module stores its stacks as (E, in, out), not (E, out, in)."""
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
    """Return the shape of a module's weight without unpacking it; () if there is none."""
    if (weight := module._parameters.get(name)) is not None:
        return tuple(weight.shape)
    packings = cast(Mapping[str, Any], getattr(module, "parametrizations", {}))
    if name not in packings:
        return ()
    form = getattr(packings[name][0], "form", None)
    return tuple(getattr(module, name).shape if form is None else form.shape)


class FrozenWrapper(nn.Module):
    """A module that replaces a frozen one and computes with it.

    Attributes:
        base: The frozen module.
        enabled: False while adapters are disabled; the output is then bitwise the base's.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.enabled = True

    @property
    def weight(self) -> Tensor:
        """The base's weight, for models that read their layers' weights."""
        return cast(Tensor, self.base.weight)

    @property
    def bias(self) -> Tensor | None:
        return cast("Tensor | None", self.base.bias)

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that require a gradient."""
        return (parameter for parameter in self.parameters() if parameter.requires_grad)


def unwrap_adapter(module: nn.Module) -> nn.Module:
    """Return the frozen module inside a `FrozenWrapper`, or the module itself."""
    while isinstance(module, FrozenWrapper):
        module = module.base
    return module


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield (path, module, parent) of every module in order, without duplicates or adapters.

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
    """Return all places of a model, in the order of its modules."""
    places: list[ModelWeight] = []
    head, embedding = output_layer(model), embedding_of(model)
    embedding = None if embedding is None else unwrap_adapter(embedding)
    tables = (own_table(m) for _, m, _ in walk(model) if isinstance(m, nn.Embedding))
    tied = {id(table) for table in tables if table is not None}
    for path, module, parent in walk(model):
        if is_linear(module):
            is_mamba_dt = path.endswith(".dt_proj") and hasattr(parent, "x_proj")
            kind: Any = type(parent)
            if path.rpartition(".")[2] in _read_by_torch(kind) or is_mamba_dt:
                continue  # torch and Mamba read its weight and never call the layer
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


@cache
def _read_by_torch(attention: type[nn.Module]) -> frozenset[str]:
    """Return the names in methods of a class that pass weights to torch's attention function."""
    codes = [
        inspect.unwrap(f).__code__ for _, f in inspect.getmembers(attention, inspect.isfunction)
    ]
    reading = [c.co_names for c in codes if "multi_head_attention_forward" in c.co_names]
    return frozenset(name for names in reading for name in names)


def output_layer(model: nn.Module) -> nn.Module | None:
    """Return the bare output layer of a model; None without one."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if getter else None
    return None if head is None else unwrap_adapter(head)


def _by_siblings(role: str, path: str, parent: nn.Module) -> str:
    """Correct a role with the layer's siblings: gate or router, up or gate_up, qkv or kv."""
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
    """Return the tensor that stores a layer's weight, the same object for tied layers."""
    return module._parameters.get("weight", module._parameters.get("packed"))


def _embedding_role(
    path: str, module: nn.Module, parent: nn.Module, embedding: nn.Module | None
) -> str:
    """Return embed or pos_embed for embeddings and patch convolutions, otherwise ""."""
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


def _stacks(path: str, module: nn.Module) -> dict[str, str]:
    """Return the 3-D expert parameters of a module, name -> role."""
    whole = table.STACKED_MODULES.get(".".join(path.split(".")[-2:]), "")
    context = "shared" if "shared" in path else "expert"
    roles = {name: f"{context}_{kind}" for name, kind in table.STACKED_LEAVES.items()}
    roles |= {"weight": whole} if whole else {}
    return {name: role for name, role in roles.items() if len(_shape(module, name)) == 3}


def _linear(place: ModelWeight, owner: nn.Module, model: nn.Module) -> ModelWeight:
    """Split a fused linear layer into its roles if the order of its rows is known."""
    context, kind = table.split(place.roles[0])
    configs = (getattr(owner, "config", None), getattr(model, "config", None))
    shape = linear_shape(place.module)
    if split := table.split_rows(kind, place.path, owner, configs, *shape):
        place.repeats, sizes = split
        place.roles, place.sizes = tuple(context + role for role in sizes), tuple(sizes.values())
    return place


def _stack(place: ModelWeight) -> ModelWeight:
    """Set the roles of a stack of experts; gate and up are halves, or alternate (gpt-oss)."""
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
        if place.set_apart and place.side == "projector":  # one role for all of its layers
            place.roles, place.repeats, place.sizes = ("projector",), 0, ()


def num_virtual(model: nn.Module) -> int:
    """Return the number of virtual tokens that an adapter puts before every row."""
    return sum(int(getattr(module, "num_virtual", 0)) for module in model.modules())


def head_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of a model's head: the modules outside of its backbone."""
    return tuple(
        name
        for name, child in model.named_children()
        if child is not model.base_model
        and not any(isinstance(module, nn.ModuleList) for module in child.modules())
        and any(True for _ in child.parameters())
    )
