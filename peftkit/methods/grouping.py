"""Which LoRA layers are computed together while a model trains: those that read one input.

`prepare` lays the groups out, `end` takes them down; in between their copies of A and B follow the
adapter's own tensors: after each step of any optimizer, and whenever a tensor's version says that
it has changed. A model that nobody prepared computes each layer on its own.

The first layer of a group that is called computes all of it and the others find their part. That
they are called with the same input is known by the tensor itself: a group whose layers get others
is broken up, and each computes on its own, as do layers that cannot be in a group.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from peftkit.execution.plan import ExecutionPlan
from peftkit.methods.lora_groups import (
    FusedWeightGroup,
    Group,
    SeparateWeightGroup,
    ServingGroup,
    copy_masters,
)
from peftkit.methods.lora_linear import LoRALinear
from peftkit.methods.protocol import AdapterModule
from peftkit.model.places import find_places

SHARING = ({"q", "k", "v"}, {"gate", "up"})
"""Last parts of roles whose layers, side by side in one module, read the same input."""


class Grouping:
    """The groups of an adapter, from `prepare` to `end`."""

    def __init__(self, model: nn.Module, modules: Mapping[str, AdapterModule]) -> None:
        own = {path: module for path, module in modules.items() if type(module) is LoRALinear}
        self._sets = [[own[path] for path in paths] for paths in sharing(model, own)]
        self._groups: list[Group] = []
        self._hook: RemovableHandle | None = None
        for layer in self._layers():
            layer.training_layout = self

    def _layers(self) -> list[LoRALinear]:
        return [layer for layers in self._sets for layer in layers]

    def prepare(self, plan: ExecutionPlan) -> None:
        """Lay the groups out: in one block with their base's weight, or beside it."""
        self.end()
        kind: type[FusedWeightGroup] | type[SeparateWeightGroup] = (
            FusedWeightGroup if plan.lora_layout == "fused" else SeparateWeightGroup
        )
        for found in self._sets:
            self._groups += [kind(members) for members in kind.fitting(found)]
        this = weakref.ref(self)

        def record_step(*_: Any) -> None:  # fused optimizers leave no trace in a tensor's version
            if (grouping := this()) is not None:
                grouping.refresh()

        self._hook = register_optimizer_step_post_hook(record_step)
        self.refresh()

    def refresh(self) -> None:
        """Take over all A and B as they are now, and break up what does not read one input."""
        for group in [group for group in self._groups if group.is_broken]:
            self._groups.remove(group)
            group.release()
            self._groups += [type(group)([member]) for member in group.members]
        copy_masters(self._groups)

    def end(self) -> None:
        """Give every layer its weight back in memory of its own; it computes by itself again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for group in self._groups:
            group.release()
        self._groups = []

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Have A and B ready for token after token; then layers are as they were."""
        before = [(layer, layer.group) for layer in self._layers()]
        groups = [ServingGroup(m) for found in self._sets for m in ServingGroup.fitting(found)]
        copy_masters(groups)
        try:
            yield
        finally:
            for layer, group in before:
                layer.group = group

    def remove(self) -> None:
        """Leave every layer as it was before there was an adapter."""
        self.end()
        for layer in self._layers():
            layer.training_layout = None


def sharing(model: nn.Module, paths: Iterable[str]) -> list[list[str]]:
    """Return the paths of layers in sets that should read one input: by role and parent."""
    roles = {place.path: place.roles for place in find_places(model)}
    sets: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        context, _, kind = roles.get(path, ("",))[0].rpartition("_")
        shared = next((",".join(sorted(kinds)) for kinds in SHARING if kind in kinds), "")
        place = path.rpartition(".")[0] if shared else path
        sets.setdefault((place, f"{context} {shared}"), []).append(path)
    return list(sets.values())
