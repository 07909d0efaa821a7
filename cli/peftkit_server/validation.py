"""Validation of request bodies, field by field; errors name the first invalid fields."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from peftkit.errors import did_you_mean, first_few
from peftkit.files.strict_json import Json, parse_json
from peftkit_server.refusals import RequestError

MAX_ERRORS = 100
"""Invalid fields of a request that are reported individually."""
MAX_NAME = 80
"""Characters of a field's name in an error."""


class Strict(BaseModel):
    """Fields that are validated without conversion; unknown ones are an error.

    Attributes:
        IGNORED: Fields that do not affect the response, with any value.
        UNSUPPORTED: Fields that change the response; an error names them.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())
    IGNORED: ClassVar[Collection[str]] = ()
    UNSUPPORTED: ClassVar[Collection[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def _used(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if cls.is_used(name, value)}

    @classmethod
    def is_used(cls, name: str, value: object) -> bool:
        """Return whether a field is validated; others are dropped."""
        return name not in cls.IGNORED


class NullIsUnset(Strict):
    """Strict fields without nulls: clients send null for unset fields, and repeat responses."""

    @classmethod
    def is_used(cls, name: str, value: object) -> bool:
        return value is not None and super().is_used(name, value)


B = TypeVar("B", bound=Strict)


def read_body(data: bytes, kind: type[B]) -> B:
    """Return the validated body of a request.

    Raises:
        RequestError: The body is not a JSON object, or a field is missing, invalid, unknown or
            unsupported.
    """
    return validated(fields_of(data), kind)


def fields_of(data: bytes) -> Json:
    """Return the fields of a request's body.

    Raises:
        RequestError: The body is not a JSON object.
    """
    return parse_json(data, "the request's body cannot be read.", error=RequestError)


def validated(fields: object, kind: type[B]) -> B:
    """Return the fields of a request as a body.

    Raises:
        RequestError: A field is missing, invalid, unknown or unsupported.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as problem:
        raise _request_error(problem, kind) from None


def _request_error(problem: ValidationError, kind: type[Strict]) -> RequestError:
    """Return the error for invalid fields; beyond `MAX_ERRORS` it has their number only."""
    text = "the request has invalid fields."
    if (number := problem.error_count()) > MAX_ERRORS:
        return RequestError(text, found=f"There are {number:,} errors.")
    lines: dict[str, None] = {}
    errors = problem.errors(include_url=False, include_input=False, include_context=False)
    fields = [str(error["loc"][0])[:MAX_NAME] if error["loc"] else "" for error in errors]
    for field, error in zip(fields, errors, strict=True):
        # pydantic adds the types of a union's branches: keep fields and indices only
        rest = [str(part)[:MAX_NAME] for part in error["loc"][1:]]
        path = [field, *(part for part in rest if part.isdecimal() or part.isidentifier())]
        message = error["msg"]
        if field in kind.UNSUPPORTED:
            message = "this server does not support the field; remove it."
        elif error["type"] == "extra_forbidden":
            known = (*kind.model_fields, *kind.IGNORED)
            hint = did_you_mean(field, known) if len(path) == 1 else ""
            message = f"unknown field. {hint}"
        lines[f"{'.'.join(path)}: {message}".rstrip()] = None
    return RequestError(
        text,
        found=first_few(lines, 5),
        param=fields[0] or None,
        code="unsupported_parameter" if fields[0] in kind.UNSUPPORTED else None,
    )


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
