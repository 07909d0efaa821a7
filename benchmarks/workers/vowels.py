"""A reward that differs between completions: the share of vowels among their letters."""

from __future__ import annotations

from typing import Any


def vowels(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Return the reward of each completion."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [sum(letter in "aeiou" for letter in text) / (len(text) + 1) for text in texts]
