"""Lazy tables, whose classes and functions are imported on first use, and alternatives of types.

Other packages add entries to a table with entry points in their pyproject.toml:

    [project.entry-points."peftkit.methods"]
    scale = "my_package.scale:Scale"
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from peftkit.errors import ConfigError

T = TypeVar("T")
V = TypeVar("V")


class LazyMap(Mapping[str, V]):
    """Maps names to objects; a lookup imports the module, iteration and length import nothing.

    Entry points are read if a name is not built in, or if the names are listed.

    Args:
        addresses: "module:attribute" of each built-in name.
        group: Group of the entry points of other packages; "" for none.
    """

    def __init__(self, addresses: Mapping[str, str], group: str = "") -> None:
        self._addresses, self._group = addresses, group

    @cached_property
    def plugins(self) -> Mapping[str, EntryPoint]:
        """The entry points of other packages, by name.

        Raises:
            ConfigError: Two packages define one name, or a package defines a built-in one.
        """
        points: dict[str, EntryPoint] = {}
        for point in entry_points(group=self._group) if self._group else ():
            other = _package(points[point.name]) if point.name in points else "peftkit"
            if point.name in points or point.name in self._addresses:
                raise ConfigError(
                    f"two packages define {point.name!r} in {self._group}",
                    found=f"{other}; {_package(point)}",
                    fix="Rename one of them, or uninstall its package.",
                )
            points[point.name] = point
        return points

    def __getitem__(self, name: str) -> V:
        if name in self._addresses:
            module, _, attribute = self._addresses[name].partition(":")
            value: V = getattr(import_module(module), attribute)
            return value
        point = self.plugins[name]
        try:
            value = point.load()
        except Exception as error:  # the code of another package
            raise ConfigError(
                f"cannot load {name!r} of {self._group} from the package {_package(point)}",
                found=f"{type(error).__name__}: {error}",
                fix="Update the package, or uninstall it.",
            ) from error
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._addresses or name in self.plugins

    def __iter__(self) -> Iterator[str]:
        return iter((*self._addresses, *self.plugins))

    def __len__(self) -> int:
        return len(self._addresses) + len(self.plugins)


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} ({point.value})" if point.dist else point.value


class LazyTable(LazyMap[type[T]]):
    """A `LazyMap` of classes.

    A table of configs is also the annotation of a section whose `type` selects the config:

        METHODS = LazyTable[Method]({"lora": "peftkit.methods.lora:LoRA", ...})
        AnyMethod = Annotated[Method, METHODS]

    Validation, errors and JSON schema are those of a union discriminated by `type`.
    """

    def __hash__(self) -> int:
        return id(self)

    def __get_pydantic_core_schema__(self, _: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        branch = core_schema.no_info_plain_validator_function
        branches: dict[Any, CoreSchema] = {
            name: branch(partial(self._validate, name)) for name in self._addresses
        }
        # on the union, not its field: a validator before it may accept other values
        functions = {"pydantic_js_functions": [self._json_schema]}
        union = core_schema.tagged_union_schema(branches, "type", metadata=functions)
        return core_schema.no_info_wrap_validator_function(self._of_plugins, union)

    def _of_plugins(self, value: object, built_in: ValidatorFunctionWrapHandler) -> Any:
        """Validate a section with the config of a plugin, or with a built-in one."""
        name = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
        if isinstance(name, str) and name not in self._addresses and name in self.plugins:
            return self._validate(name, value)
        return built_in(value)

    def _json_schema(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        union: Any = Union[tuple(self.values())]  # noqa: UP007  # classes are only available at run time
        return handler(TypeAdapter(Annotated[union, Field(discriminator="type")]).core_schema)

    def _validate(self, name: str, value: object) -> Any:
        kind = self[name]
        if not issubclass(kind, BaseModel):
            package = _package(self.plugins[name])
            raise ConfigError(f"{name!r} of {self._group} is not a config", found=package)
        return kind.model_validate(value)


def options_of(declared: object) -> tuple[Any, ...]:
    """Return the alternatives of a declared type, flattened: `int | None` gives (int, NoneType)."""
    origin = get_origin(declared)
    if origin is Annotated:
        return options_of(get_args(declared)[0])
    if origin in (Union, types.UnionType):
        return tuple(option for arg in get_args(declared) for option in options_of(arg))
    return (declared,)
