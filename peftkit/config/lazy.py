"""Tables of classes by name, each imported when a recipe or a file first names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Annotated, Any, TypeVar, Union

from pydantic import BaseModel, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

T = TypeVar("T")


class LazyTable(Mapping[str, type[T]]):
    """Classes by name. Looking one up imports its module; names and length import nothing.

    A table of configs is also the annotation of a section that one of them describes, chosen by
    its `type`:

        METHODS = LazyTable[Method]({"lora": "peftkit.methods.lora:LoRA", ...})
        AnyMethod = Annotated[Method, METHODS]

    It validates, reports errors and has a JSON schema like a union discriminated by `type`.

    Args:
        addresses: "module:Class" of each name.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = addresses

    def __getitem__(self, name: str) -> type[T]:
        module, _, attribute = self._addresses[name].partition(":")
        kind: type[T] = getattr(import_module(module), attribute)
        return kind

    def __iter__(self) -> Iterator[str]:
        return iter(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)

    def __hash__(self) -> int:
        return id(self)

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        branch = core_schema.no_info_plain_validator_function
        branches: dict[Any, CoreSchema] = {
            name: branch(partial(self._validate, name)) for name in self
        }
        # with the union itself, not its field: a validator before it may take other values
        functions = {"pydantic_js_functions": [self._json_schema]}
        return core_schema.tagged_union_schema(branches, "type", metadata=functions)

    def _json_schema(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        union: Any = Union[tuple(self.values())]  # noqa: UP007  # of classes known at run time
        return handler(TypeAdapter(Annotated[union, Field(discriminator="type")]).core_schema)

    def _validate(self, name: str, value: Any) -> Any:
        kind = self[name]
        assert issubclass(kind, BaseModel)
        return kind.model_validate(value)
