"""A second, frozen LoRA on the same base.

Shapes: r rank; in, out features of a layer; n hidden states of size H.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from peftkit.model.modes import adapters_off


@dataclass(frozen=True, slots=True)
class SideAdapter:
    """A second, frozen LoRA on the same base, for example a reward model's.

    Attributes:
        updates: Module path to A (r, in) and the scaled B (out, r).
        head: Tensors of the value head, by the last segment of their name.
        task: The section `task` of its recipe.
        style: Its prompt format.
        key: Hash of its tensors.
    """

    updates: Mapping[str, tuple[Tensor, Tensor]]
    head: Mapping[str, Tensor]
    task: Mapping[str, Any]
    style: Any
    key: str

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Use this adapter instead of the attached one within the context."""
        first = next(model.parameters())
        hooks = []
        try:
            for path, (a, b) in self.updates.items():
                pair = a.to(first.device), b.to(first.device)
                hooks.append(model.get_submodule(path).register_forward_hook(_added(*pair)))
            with adapters_off(model):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def values(self, hidden: Tensor) -> Tensor:
        """Return the values (n,) of hidden states (n, H), in fp32."""
        bias = self.head.get("bias")
        weight = self.head["weight"].to(hidden.device, hidden.dtype)
        bias = None if bias is None else bias.to(hidden.device, hidden.dtype)
        return linear(hidden, weight, bias)[:, 0].float()


def _added(a: Tensor, b: Tensor) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        x = args[0]
        return out + linear(linear(x, a.to(x.dtype)), b.to(x.dtype))

    return hook
