"""A model's own answers to prompts, as rows: fixed samples of how it behaves before training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peftkit.data.generation import default_style, prompt_ids, stop_ids
from peftkit.data.pack import IGNORE, Row
from peftkit.execution import rng
from peftkit.inference.generate import ModelSampler

AT_ONCE = 32
"""Maximum concurrent answers."""


def own_answers(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, length: int, seed: int
) -> list[Row]:
    """Return the model's answers to prompts, sampled at temperature 1, as rows with targets.

    The prompts are in the tokenizer's chat template, or plain if it has none. The same model,
    prompts and seed give the same rows.

    Args:
        length: Maximum tokens of an answer.

    Raises:
        AnswerTooLarge: Memory does not suffice for a single answer.
    """
    style = default_style(tokenizer)
    ids = [prompt_ids(tokenizer, prompt, style) for prompt in prompts]
    seeds = [[rng.seed_of(seed, number)] for number in range(len(ids))]
    sampler = ModelSampler(model, tokenizer, AT_ONCE)
    stops = stop_ids(tokenizer, style)
    answers = sampler.answers(ids, seeds, max_new_tokens=length, stops=stops)
    rows = []
    for number, (prompt, (answer,)) in enumerate(zip(ids, answers, strict=True), 1):
        tokens, labels = (*prompt, *answer.ids), (*[IGNORE] * len(prompt), *answer.ids)
        rows.append(Row(tokens, labels, (len(tokens),), f"general prompt {number}"))
    return rows
