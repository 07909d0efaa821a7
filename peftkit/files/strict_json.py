"""Parse untrusted JSON in bounded time and depth; refuse ambiguous JSON."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from peftkit.errors import AdapterError, PeftkitError

MAX_DEPTH = 32
Json = dict[str, Any]
"""A JSON object."""
JsonMap = Mapping[str, Any]
"""A JSON object that is only read."""

_BRACKETS = re.compile(r'\\.|["\[\]{}]', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class AmbiguousJsonError(ValueError):
    """Valid JSON that parsers interpret differently."""


def strict_decoder(parse_int: Callable[[str], int]) -> json.JSONDecoder:
    """Return a decoder that raises `AmbiguousJsonError` for duplicate keys, NaN and Infinity.

    Args:
        parse_int: Converts an integer, or raises the same error if it is too large.
    """
    return json.JSONDecoder(
        object_pairs_hook=_unique,
        parse_constant=_no_constant,
        parse_int=parse_int,
        parse_float=_finite_float,
    )


def parse_json(data: bytes, message: str, *, error: type[PeftkitError] = AdapterError) -> Json:
    """Parse a JSON object; on failure raise `error` with `message` as its first sentence.

    Refused: duplicate keys, NaN and Infinity, numbers outside the range of float64, integers beyond
    64 bits, a byte order mark, encodings other than UTF-8, unpaired surrogates, and nesting deeper
    than MAX_DEPTH.
    """

    def refuse(reason: str) -> PeftkitError:
        return error(message, found=reason, fix="Save it again as plain UTF-8 JSON.")

    text = _decoded(data, refuse)
    if _nesting_exceeds(text, MAX_DEPTH):
        raise refuse(f"It is nested more than {MAX_DEPTH} deep.")
    try:
        value = _DECODER.decode(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as problem:
        raise refuse(f"line {problem.lineno}, column {problem.colno}: {problem.msg}") from None
    except UnicodeEncodeError:
        raise refuse("It contains an unpaired surrogate escape (\\ud800 to \\udfff).") from None
    except AmbiguousJsonError as problem:
        raise refuse(str(problem)) from None
    if not isinstance(value, dict):
        raise refuse(f"It contains a {type(value).__name__}, not an object.")
    return value


def shown(value: object, limit: int = 80) -> str:
    """Return a short, printable form of an untrusted value: ASCII, no control characters."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _decoded(data: bytes, refuse: Callable[[str], PeftkitError]) -> str:
    if not data.strip():
        raise refuse("It is empty.")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data:
        raise refuse("It is UTF-16 or binary (it contains NUL bytes), not UTF-8 text.")
    if data.startswith(b"\xef\xbb\xbf"):
        raise refuse("It begins with a byte order mark (BOM).")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise refuse(f"Byte {problem.start} is not UTF-8.") from None


def _nesting_exceeds(text: str, limit: int) -> bool:
    depth, in_string = 0, False
    for match in _BRACKETS.finditer(text):
        token = match[0]
        if token == '"':
            in_string = not in_string
        elif in_string or token[0] == "\\":
            continue
        elif token in "[{":
            depth += 1
            if depth > limit:
                return True
        else:
            depth -= 1
    return False


def _unique(pairs: list[tuple[str, object]]) -> Json:
    value = dict(pairs)
    if len(value) != len(pairs):
        duplicate = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise AmbiguousJsonError(f"The key {shown(duplicate)} is given twice in one object.")
    return value


def _no_constant(text: str) -> Any:
    raise AmbiguousJsonError(f"{text} is not a JSON number.")


def _bounded_int(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise AmbiguousJsonError(f"The integer {text[:20]} does not fit 64 bits.")
    return int(text)


def _finite_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise AmbiguousJsonError(f"The number {text[:40]} is out of range.")
    return value


_DECODER = strict_decoder(_bounded_int)
