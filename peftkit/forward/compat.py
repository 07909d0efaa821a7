"""Names of transformers that differ between its versions.

They are read from the signatures and abstract methods of the installed classes, not from version
numbers: transformers 5.24 renamed the argument `past_key_values` of all models to `cache`, and code
of models outside transformers keeps the old name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import Any, TypeVar

from torch import nn

CACHE_NAMES = ("cache", "past_key_values")
"""Names of the key-value cache in arguments and outputs: since transformers 5.24, and before."""

Kind = TypeVar("Kind", bound=type)


def arguments(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's forward pass."""
    kind: Any = type(module)
    return _arguments(kind)


@cache
def _arguments(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def cache_name(module: nn.Module) -> str | None:
    """Return the name of a module's argument for the key-value cache; None: it has none."""
    return next((name for name in CACHE_NAMES if name in arguments(module)), None)


def cache_in(values: Any) -> Any:
    """Return the key-value cache in the arguments or the output of a model; None: there is none."""
    # not `values.get`: it warns about the old name in outputs of transformers 5.24
    found = dict(values.items()) if hasattr(values, "items") else {}
    return next((found[name] for name in CACHE_NAMES if found.get(name) is not None), None)


def missing_arguments(module: nn.Module, needed: Collection[str]) -> str:
    """Return which arguments a module's forward pass lacks, in words; "" if it has all of them.

    Args:
        needed: Names of arguments; "cache" stands for each of `CACHE_NAMES`.
    """
    names = {*arguments(module), *(["cache"] if cache_name(module) else [])}
    missing = [name for name in needed if name not in names]
    if not missing:
        return ""
    plural = "s" * (len(missing) > 1)
    forward = f"{type(module).__name__}.forward"
    return f"{installed('transformers')}: {forward} has no argument{plural} {', '.join(missing)}"


def register_attention(name: str, attend: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Make an implementation of attention and its masks available to all models under a name."""
    from transformers import AttentionInterface, AttentionMaskInterface  # slow to import

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)


def unregister_attention(name: str) -> None:
    """Undo `register_attention`; transformers has no public function for this."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for table in (AttentionInterface, AttentionMaskInterface):
        table._global_mapping.pop(name, None)


def passes_argument(model: nn.Module, name: str) -> bool:
    """Return whether a module of a model passes a keyword argument of this name to a function."""
    kinds: set[Any] = {type(module) for module in model.modules()}
    return any(name in _passed(kind) for kind in kinds)


@cache
def _passed(kind: Any) -> frozenset[str]:
    """Return the names of keyword arguments in the calls of a class's forward pass."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    names = (const for const in getattr(code, "co_consts", ()) if isinstance(const, tuple))
    return frozenset(name for group in names for name in group if isinstance(name, str))


def installed(name: str) -> str:
    """Return a library with its version, such as "transformers 5.24.0"."""
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} (not installed)"


def with_all_methods(kind: Kind) -> Kind:
    """Implement the abstract methods that a class lacks by methods that raise an error.

    Other versions of a base class have other abstract methods, which are rarely called.
    """
    for name in getattr(kind, "__abstractmethods__", ()):

        def method(self: Any, *args: Any, _name: str = name, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{type(self).__name__} has no {_name}")

        setattr(kind, name, method)
    kind.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return kind


def without_renaming(function: Callable[..., Any]) -> Any:
    """Return the function inside transformers' decorators for renamed arguments.

    The code and the globals of a decorated function are those of the decorator.
    """
    while getattr(function, "__globals__", {}).get("__name__") == "transformers.utils.deprecation":
        function = getattr(function, "__wrapped__")  # noqa: B009
    return function


def with_global(function: FunctionType, name: str, value: Any) -> FunctionType:
    """Return a copy of a function of transformers in which a global name has another value."""
    scope = {**function.__globals__, name: value}
    parts = function.__name__, function.__defaults__, function.__closure__
    ours = FunctionType(function.__code__, scope, *parts)
    ours.__kwdefaults__ = function.__kwdefaults__
    return ours
