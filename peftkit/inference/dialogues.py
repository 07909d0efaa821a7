"""Multi-turn rollouts: an environment replies to the model, which continues.

Sampled tokens are never re-encoded; replies are appended. While a row waits for its reply, its keys
and values stay in the cache, and other rows grow. A row resumes a fixed number of steps after its
turn has ended, or when no other row grows. The rows of a batch, and therefore all rounding, do not
depend on the duration of replies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from peftkit.execution import rng
from peftkit.inference.engine import Completion, Engine, Limits, Request
from peftkit.inference.generate import ModelSampler, SampledAnswer, sampled
from peftkit.inference.open_engine import open_engine
from peftkit.inference.sampling import Sampling

REPLY_STEPS = 16
"""Steps of other rows before a row resumes with its reply."""

Wait = Callable[[int], Sequence[int] | None]
"""Waits for the reply's tokens, given the remaining tokens; None: the reply does not fit."""
Reply = Callable[[int, int, SampledAnswer], Wait | None]
"""Starts the reply to a turn (index of the prompt, number of the answer); None: the answer ends."""


@dataclass(eq=False)
class _Row:
    """An answer that grows turn by turn."""

    index: tuple[int, int]
    prompt: Sequence[int]
    seed: int
    ids: list[int] = field(default_factory=list)
    is_target: list[bool] = field(default_factory=list)
    num_turns: int = 0
    is_cut: bool = False
    completion: Completion | None = None

    def submit(self, engine: Engine, sampling: Sampling) -> None:
        """Request the next turn."""
        left = sampling.max_new_tokens - len(self.ids)
        seed = self.seed if not self.num_turns else rng.seed_of(self.seed, self.num_turns)
        ids = [*self.prompt, *self.ids]
        settings = replace(sampling, max_new_tokens=left)
        request = Request(ids, settings, seed, keeps=True, after=self.completion)
        self.completion = engine.submit(request)
        self.num_turns += 1

    def take(self) -> SampledAnswer:
        """Append the turn that has ended."""
        assert self.completion is not None
        turn = sampled(self.completion)
        self.extend(turn.ids, is_target=True)
        self.is_cut = turn.is_cut
        return turn

    def extend(self, tokens: Sequence[int], *, is_target: bool) -> None:
        self.ids += tokens
        self.is_target += [is_target] * len(tokens)


def dialogues(
    sampler: ModelSampler,
    prompts: Sequence[Sequence[Sequence[int]]],
    seeds: Sequence[Sequence[int]] | None,
    *,
    max_new_tokens: int,
    stops: Sequence[int],
    reply: Reply,
) -> list[list[SampledAnswer]]:
    """Return multi-turn answers; without seeds greedy ones.

    Args:
        prompts: The prompt of each answer of each group.
        max_new_tokens: Limit of an answer, all its turns and replies included. If a reply does not
            fit, the answer ends before it and counts as cut.
        reply: Called at the end of each turn, unless the turn was cut.
    """
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=0.0 if seeds is None else 1.0,
        stops=tuple(stops),
    )
    groups = [
        [_Row((i, n), ids, 0 if seeds is None else seeds[i][n]) for n, ids in enumerate(group)]
        for i, group in enumerate(prompts)
    ]
    rows = [row for group in groups for row in group]
    if rows:
        with open_engine(sampler.model, sampler.tokenizer, Limits(rows=sampler.num_rows)) as engine:
            _run(engine, rows, sampling, reply)
    return [
        [SampledAnswer(tuple(row.ids), row.is_cut, tuple(row.is_target)) for row in group]
        for group in groups
    ]


def _run(engine: Engine, rows: Sequence[_Row], sampling: Sampling, reply: Reply) -> None:
    growing = sorted(rows, key=lambda row: -len(row.prompt))  # the order of Engine.answers
    waiting: list[tuple[int, _Row, Wait]] = []  # the step at which each resumes
    for row in growing:
        row.submit(engine, sampling)
    step = 0
    while growing or waiting:
        if growing:
            engine.step()
            step += 1
        for row in [row for row in growing if row.completion and row.completion.ended_by]:
            growing.remove(row)
            turn = row.take()
            wait = reply(*row.index, turn)
            if wait is None or turn.is_cut:
                _release(engine, row)
            else:
                waiting.append((step + REPLY_STEPS, row, wait))
        due = [item for item in waiting if item[0] <= step] if growing else waiting
        waiting = [item for item in waiting if item not in due]
        for _, row, wait in due:
            tokens = wait(sampling.max_new_tokens - len(row.ids))
            if tokens is None:
                row.is_cut = True
                _release(engine, row)
            else:
                row.extend(tokens, is_target=False)
                row.submit(engine, sampling)
                growing.append(row)


def _release(engine: Engine, row: _Row) -> None:
    assert row.completion is not None
    engine.release(row.completion)
