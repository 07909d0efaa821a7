"""The common parts of the request bodies of the chat APIs."""

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
