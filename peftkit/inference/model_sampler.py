"""The answers that a model learns from, made by the engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peftkit.inference.engine import Limits
from peftkit.inference.open_engine import open_engine
from peftkit.inference.sampling import Sampling
from peftkit.train.task import SampledAnswer


class ModelSampler:
    """Has a model with an adapter on it answer prompts, at temperature 1 or greedily.

    Args:
        num_rows: Answers that are made at once.
    """

    def __init__(self, model: Any, tokenizer: Any, num_rows: int) -> None:
        self.model, self.tokenizer, self.num_rows = model, tokenizer, num_rows

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]] | None,
        *,
        max_new_tokens: int,
        stops: Sequence[int],
        model: Any = None,
    ) -> list[list[SampledAnswer]]:
        """Return answers to each prompt; see `peftkit.train.task.Sampler`."""
        if not prompts:
            return []
        limits = Limits(rows=self.num_rows)
        sampling = Sampling(
            max_new_tokens=max_new_tokens,
            temperature=0.0 if seeds is None else 1.0,
            stops=tuple(stops),
        )
        with open_engine(model or self.model, self.tokenizer, limits) as engine:
            found = engine.answers(
                prompts,
                sampling,
                n=1 if seeds is None else len(seeds[0]),
                seeds=seeds,
                log_probs=False,
            )
        return [
            [
                SampledAnswer((*one.ids, *([] if one.end is None else [one.end])), one.end is None)
                for one in group
            ]
            for group in found
        ]
