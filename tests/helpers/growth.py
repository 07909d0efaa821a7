"""Requests whose inputs grow, and the time and memory that a server takes for them."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

Grown = Callable[[Any, int], Any]
"""Returns a value in place of a field's value, of about a size."""

FREE_SECONDS, FREE_BYTES = 1.0, 96 << 20
"""CPU seconds and memory that any request may take."""
FACTOR = 2.5
"""Allowed time of a request whose size doubles, in terms of the smaller one."""
BYTES_PER_BYTE = 256
"""Allowed memory per byte of a request: JSON takes about 30, tokens of a text about 170."""
MOST_SECONDS = 30.0


class Cost(NamedTuple):
    """What a request took.

    Attributes:
        seconds: CPU time of this process and of its ended children.
        memory: Bytes above those before the request, at its peak.
    """

    endpoint: str
    field: str
    change: str
    size: int
    status: int
    seconds: float
    memory: int


def nested(number: int) -> Any:
    """Return lists and objects nested `number` deep, as a JSON text could have them."""
    value: Any = 1
    for level in range(number):
        value = [value] if level % 2 else {"a": value}
    return value


def _repeated(value: Any, size: int) -> Any:
    """Return a list with its first element, or an object with its first value, many times."""
    if isinstance(value, list) and value:
        one = len(json.dumps(value[0])) + 2
        return [value[0]] * max(1, size // one)
    if isinstance(value, dict) and value:
        first = next(iter(value.values()))
        one = len(json.dumps(first)) + 10
        return {f"k{n}": first for n in range(max(1, size // one))}
    return None


CHANGES: Mapping[str, Grown] = {
    "long text": lambda value, size: "a" * size,
    "words": lambda value, size: "the quick " * (size // 10),
    "special tokens": lambda value, size: "<|im_end|>" * (size // 10) + "x",
    "spaces": lambda value, size: " " * size + "x",
    "wide text": lambda value, size: "\N{GRINNING FACE}" * (size // 12),
    "digits": lambda value, size: "9" * size,
    "braces": lambda value, size: "{{" * (size // 4) + "}}" * (size // 4),
    "many": _repeated,
    "numbers": lambda value, size: [7] * (size // 3),
    "depth": lambda value, size: nested(min(size // 4, 900)),
    "keys": lambda value, size: {f"k{n}": n for n in range(size // 12)},
}
"""Ways in which a field may grow; None: it does not apply to the value."""


def fields(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all fields of a body, nested ones included."""
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(body, dict):
        items = [*body.items()]
    elif isinstance(body, list):
        items = [(0, body[0])] if body else []
    for key, value in items:
        yield (*path, key)
        yield from fields(value, (*path, key))


def grown(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a body with another value of a field."""
    if not path:
        return value
    copy: Any = dict(body) if isinstance(body, dict) else list(body)
    copy[path[0]] = grown(body[path[0]], path[1:], value)
    return copy


def value_at(body: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        body = body[key]
    return body


def bodies(
    endpoints: Mapping[str, Any], sizes: Sequence[int], changes: Sequence[str]
) -> Iterator[tuple[str, str, str, list[bytes]]]:
    """Yield each endpoint, field and change, with a body in JSON for each size."""
    for endpoint, body in endpoints.items():
        for path in fields(body):
            for change in changes:
                values = [CHANGES[change](value_at(body, path), size) for size in sizes]
                if values[0] is None:
                    continue
                name = ".".join(map(str, path))
                texts = [json.dumps(grown(body, path, value)).encode() for value in values]
                yield endpoint, name, change, texts


class Meter:
    """Measures calls: CPU time with ended children, and the peak of the resident memory."""

    def __init__(self) -> None:
        self._clear, self._status = Path("/proc/self/clear_refs"), Path("/proc/self/status")

    def _memory(self, name: str) -> int:
        for line in self._status.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
        return 0

    def _seconds(self) -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    def of(self, call: Callable[[], int]) -> tuple[int, float, int]:
        """Return the status that a call returns, its seconds, and its bytes at the peak."""
        self._clear.write_text("5")  # resets the peak
        before, began = self._memory("VmRSS"), self._seconds()
        status = call()
        return status, self._seconds() - began, max(0, self._memory("VmHWM") - before)


def measure(
    send: Callable[[str, bytes], int], cases: Iterator[tuple[str, str, str, list[bytes]]]
) -> tuple[list[Cost], list[str]]:
    """Return the cost of each request, and which ones grow faster than their size.

    Args:
        send: Sends a body to an endpoint; returns the status.
    """
    meter, costs, problems = Meter(), list[Cost](), list[str]()
    for endpoint, field, change, texts in cases:
        earlier: Cost | None = None
        for text in texts:
            cost = Cost(
                endpoint,
                field,
                change,
                len(text),
                *meter.of(partial(send, endpoint, text)),
            )
            costs.append(cost)
            problem = problem_of(cost, earlier)
            if problem:
                problems.append(f"{endpoint} {field}, {change}, {len(text):,} bytes: {problem}")
                break
            earlier = cost
    return costs, problems


def problem_of(cost: Cost, earlier: Cost | None) -> str:
    """Return how a request exceeds a cost that is linear in its size; "": it does not."""
    if cost.status >= 500 and cost.status != 507:
        return f"status {cost.status}"
    if cost.memory > FREE_BYTES + BYTES_PER_BYTE * cost.size:
        return f"{cost.memory >> 20} MiB"
    if cost.seconds <= FREE_SECONDS:
        return ""
    if cost.seconds > MOST_SECONDS:
        return f"{cost.seconds:.1f} s"
    if earlier is not None and earlier.size < cost.size:
        ratio = cost.size / earlier.size
        if cost.seconds > FREE_SECONDS + FACTOR * ratio * earlier.seconds:
            return f"{cost.seconds:.1f} s, after {earlier.seconds:.2f} s for {earlier.size:,} bytes"
    return ""


def table(costs: Sequence[Cost]) -> str:
    """Return the largest time and memory of each endpoint as a Markdown table."""
    lines = [
        "| endpoint | requests | most seconds | by | most MiB | by |",
        "|---|---:|---:|---|---:|---|",
    ]
    for endpoint in dict.fromkeys(cost.endpoint for cost in costs):
        own = [cost for cost in costs if cost.endpoint == endpoint]
        slow, large = max(own, key=lambda c: c.seconds), max(own, key=lambda c: c.memory)
        names = [f"{c.field}, {c.change}, {c.size:,} bytes, {c.status}" for c in (slow, large)]
        lines.append(
            f"| {endpoint} | {len(own)} | {slow.seconds:.2f} | {names[0]} "
            f"| {large.memory / (1 << 20):.0f} | {names[1]} |"
        )
    return "\n".join(lines)
