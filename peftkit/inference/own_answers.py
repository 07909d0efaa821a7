"""A model's own answers to prompts, as rows: fixed samples of how it behaves before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from peftkit.data.generation import default_style, prompt_ids, stop_ids
from peftkit.data.pack import IGNORE, Row
from peftkit.execution import rng
from peftkit.inference.generate import ModelSampler

AT_ONCE = 32
"""Maximum concurrent answers."""


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How a model reads a user's text, and ends an answer.

    Attributes:
        encode: Returns the tokens of a prompt.
        stops: Tokens that end an answer.
    """

    encode: Callable[[str], Sequence[int]]
    stops: Sequence[int]


def default_format(tokenizer: Any) -> PromptFormat:
    """Return the tokenizer's chat template as a format; plain text if it has none."""
    style = default_style(tokenizer)
    return PromptFormat(partial(prompt_ids, tokenizer, style=style), stop_ids(tokenizer, style))


def own_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    length: int,
    seed: int,
    prompt_format: PromptFormat | None = None,
) -> list[Row]:
    """Return the model's answers to prompts, sampled at temperature 1, as rows with targets.

    The same model, prompts and seed give the same rows.

    Args:
        length: Maximum tokens of an answer.
        prompt_format: None: `default_format`.

    Raises:
        AnswerTooLarge: Memory does not suffice for a single answer.
    """
    form = prompt_format or default_format(tokenizer)
    ids = [form.encode(prompt) for prompt in prompts]
    seeds = [[rng.seed_of(seed, number)] for number in range(len(ids))]
    sampler = ModelSampler(model, tokenizer, AT_ONCE)
    answers = sampler.answers(ids, seeds, max_new_tokens=length, stops=form.stops)
    rows = []
    for number, (prompt, (answer,)) in enumerate(zip(ids, answers, strict=True), 1):
        tokens, labels = (*prompt, *answer.ids), (*[IGNORE] * len(prompt), *answer.ids)
        rows.append(Row(tokens, labels, (len(tokens),), f"general prompt {number}"))
    return rows
