"""Tools for rollouts of three turns, and a reward."""

from __future__ import annotations

from typing import Any


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: One.
        b: The other.
    """
    return int(a) * int(b)


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return int(a) + int(b)


def turns(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Return the number of messages of each completion."""
    return [float(len(messages)) for messages in completions]
