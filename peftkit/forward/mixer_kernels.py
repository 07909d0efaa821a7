"""Functions inside of mixers: a faster one on a CPU, fused ones, and missing ones.

All are recognised by the code and the results of a model's own modules; there is no list of
architectures.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.forward.compat import with_global
from peftkit.kernels.delta_rule import gated_delta_rule
from peftkit.model.places import FrozenWrapper

DELTA_RULE = "torch_chunk_gated_delta_rule"
"""The function in transformers' modules that computes the gated delta rule."""
NORMALIZES = "use_qk_l2norm_in_kernel"
PIP_NAMES = {"fla": "flash-linear-attention"}
_PROBE = {"rows": 2, "tokens": 70, "key_heads": 2, "heads": 4, "size": 8}


def with_delta_rule(
    module: nn.Module, lengths: Callable[[], Sequence[int] | None]
) -> Callable[..., Any]:
    """Return a mixer's forward pass, with our gated delta rule on a CPU if it calls such a rule.

    Args:
        lengths: Returns the lengths of the current rows; None: they are full.
    """
    forward: Callable[..., Any] = module.forward
    inner = inspect.unwrap(type(module).forward)
    is_plain = isinstance(inner, FunctionType) and "forward" not in module.__dict__
    if not is_plain or DELTA_RULE not in inner.__code__.co_names:
        return forward
    rule = inner.__globals__[DELTA_RULE]
    if not _computes_delta_rule(rule):
        return forward

    def replacement(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, g: Any, beta: Any, **more: Any
    ) -> Any:
        has_state = more.get("initial_state") is not None or more.get("output_final_state")
        bounds = any(more.get(name) is not None for name in ("cu_seqlens", "seq_idx"))
        if args or has_state or bounds or query.device.type != "cpu":
            return rule(query, key, value, *args, g=g, beta=beta, **more)
        normalize = more.get(NORMALIZES, False)
        known = lengths() if len(query) > 1 else None
        out = gated_delta_rule(query, key, value, g, beta, normalize=normalize, lengths=known)
        return out, None

    ours = with_global(inner, DELTA_RULE, replacement)
    names = inspect.signature(inner).parameters

    def with_rule(*args: object, **named: object) -> Any:
        if not named.keys() <= names.keys() and "kwargs" not in names:
            return forward(*args, **named)
        return ours(module, *args, **named)

    return with_rule


@cache
def _computes_delta_rule(rule: Callable[..., Any]) -> bool:
    """Return whether a function computes what our gated delta rule computes, on random numbers."""
    draw = torch.Generator().manual_seed(0)
    rows, tokens, key_heads, heads, size = _PROBE.values()
    query, key = torch.randn(2, rows, tokens, key_heads, size, generator=draw)
    value = torch.randn(rows, tokens, heads, size, generator=draw)
    g, beta = torch.rand(2, rows, tokens, heads, generator=draw)
    for normalize in (True, False):
        q, k = (query, key) if normalize else (query, 0.2 * key)
        try:
            theirs, _ = rule(q, k, value, g=-g, beta=beta, **{NORMALIZES: normalize})
        except Exception:  # another signature
            return False
        ours = gated_delta_rule(q, k, value, -g, beta, normalize=normalize)
        if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-4, atol=1e-5):
            return False
    return True


def missing_kernels(model: nn.Module) -> list[str]:
    """Return the packages, by their names for pip, whose kernels a model could use but has not.

    transformers wraps such a function, and the wrapper's closure has the name of the package.
    """
    packages = set()
    for kind in {type(module) for module in model.modules()}:
        forward = inspect.unwrap(kind.forward)
        for name in getattr(getattr(forward, "__code__", None), "co_names", ()):
            function = forward.__globals__.get(name)
            if isinstance(function, FunctionType):
                packages.add(inspect.getclosurevars(function).nonlocals.get("package"))
    names = {name for name in packages if isinstance(name, str) and find_spec(name) is None}
    return sorted(PIP_NAMES.get(name, name.replace("_", "-")) for name in names)


@contextmanager
def adapters_applied(model: nn.Module) -> Iterator[None]:
    """Have mixers call their adapted layers in training mode within the context.

    In training mode, mixers of Mamba pass the weight of `out_proj` (and of `x_proj`) to one fused
    kernel of mamba-ssm, which neither applies nor trains an adapter on that layer. Their other
    path, without the kernel, is taken if `training` is False.
    """
    handles = []
    for module in model.modules():
        if _passes_over(module):
            handles.append(module.register_forward_pre_hook(_leave_training))
            handles.append(module.register_forward_hook(_return_to_training, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _passes_over(module: nn.Module) -> bool:
    """Return whether a module in training mode reads weights of adapted layers, not their outputs.

    Its forward pass refers to `self.training` and to `self.NAME.weight` of an adapted child.
    """
    names = {name for name, child in module.named_children() if isinstance(child, FrozenWrapper)}
    kind: Any = type(module)
    return bool(names) and bool(names & _weights_in_training(kind))


@cache
def _weights_in_training(kind: type[nn.Module]) -> frozenset[str]:
    """Return the layers whose weights a class's forward pass reads, if it also reads `training`."""
    forward = inspect.unwrap(kind.forward)
    if not isinstance(forward, FunctionType) or "training" not in forward.__code__.co_names:
        return frozenset()
    read = [step.argval for step in dis.get_instructions(forward) if step.opname == "LOAD_ATTR"]
    return frozenset(name for name, following in pairwise(read) if following == "weight")


def _leave_training(module: nn.Module, args: object) -> None:
    if module.training:
        module.__dict__["_was_training"] = True
        module.training = False


def _return_to_training(module: nn.Module, args: object, output: Any) -> None:
    if module.__dict__.pop("_was_training", False):
        module.training = True
