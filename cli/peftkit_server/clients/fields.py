"""The common parts of request bodies."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    """Fields that are validated without conversion; unknown ones are an error, unless null.

    Attributes:
        UNSUPPORTED: Fields that change the response; an error names them.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    UNSUPPORTED: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        """Drop nulls: clients send null for unset fields and for fields of earlier responses."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


def check_schema(kind: str, schema: object, field: str) -> None:
    """Check that the format json_schema, and no other, has a schema.

    Args:
        kind: Type of the format.
        schema: Value of the field; None if it is missing.
        field: Name of the schema's field, for the error.

    Raises:
        ValueError: It has none, or another format has one.
    """
    if (kind == "json_schema") != (schema is not None):
        raise ValueError(f"the type json_schema, and no other, has the field {field}")
