"""Answers of several turns: something replies to the model, which goes on.

Tokens stay as they were sampled, replies are appended. Meanwhile a row's keys and values wait in
the cache, and other rows grow. A row goes on a fixed number of steps after its turn has ended, or
when no other grows: which rows share a batch, and so every rounding, does not depend on how long
replies take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from peftkit.execution import rng
from peftkit.inference.engine import Completion, Engine, Limits, Request
from peftkit.inference.generate import ModelSampler, SampledAnswer
from peftkit.inference.open_engine import open_engine
from peftkit.inference.sampling import Sampling

REPLY_STEPS = 16
"""Tokens by which other rows grow before one waits for its reply."""

Wait = Callable[[int], Sequence[int] | None]
"""Waits for the tokens that follow a turn; None: they leave none of so many tokens."""
Reply = Callable[[int, int, SampledAnswer], Wait | None]
"""Begins the reply to a turn of an answer (its prompt's index, its number); None: it has ended."""


@dataclass(eq=False)
class _Row:
    """An answer that grows turn by turn."""

    place: tuple[int, int]
    prompt: Sequence[int]
    seed: int
    ids: list[int] = field(default_factory=list)
    learnt: list[bool] = field(default_factory=list)
    num_turns: int = 0
    is_cut: bool = False
    completion: Completion | None = None

    def ask(self, engine: Engine, sampling: Sampling) -> None:
        """Request the next turn."""
        left = sampling.max_new_tokens - len(self.ids)
        seed = self.seed if not self.num_turns else rng.seed_of(self.seed, self.num_turns)
        ids = [*self.prompt, *self.ids]
        settings = replace(sampling, max_new_tokens=left)
        request = Request(ids, settings, seed, keeps=True, after=self.completion)
        self.completion = engine.submit(request)
        self.num_turns += 1

    def take(self) -> SampledAnswer:
        """Take the turn that has ended."""
        assert self.completion is not None
        end = self.completion.end
        turn = SampledAnswer((*self.completion.ids, *([] if end is None else [end])), end is None)
        self._extend(turn.ids, is_learnt=True)
        self.is_cut = turn.is_cut
        return turn

    def go_on(self, tokens: Sequence[int]) -> None:
        """Append a reply."""
        self._extend(tokens, is_learnt=False)

    def _extend(self, tokens: Sequence[int], *, is_learnt: bool) -> None:
        self.ids += tokens
        self.learnt += [is_learnt] * len(tokens)


def dialogues(
    sampler: ModelSampler,
    prompts: Sequence[Sequence[Sequence[int]]],
    seeds: Sequence[Sequence[int]] | None,
    *,
    max_new_tokens: int,
    stops: Sequence[int],
    reply: Reply,
) -> list[list[SampledAnswer]]:
    """Return answers of several turns; without seeds greedy ones.

    Args:
        prompts: Of each answer of each group.
        max_new_tokens: Of all turns of an answer and the replies to them. An answer whose reply
            leaves no room to go on ends before it, and counts as cut.
        reply: Called at the end of each turn; one that was cut gets no reply.
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
        [SampledAnswer(tuple(row.ids), row.is_cut, tuple(row.learnt)) for row in group]
        for group in groups
    ]


def _run(engine: Engine, rows: Sequence[_Row], sampling: Sampling, reply: Reply) -> None:
    growing = sorted(rows, key=lambda row: -len(row.prompt))  # as Engine.answers begins
    waiting: list[tuple[int, _Row, Wait]] = []  # the step at which each goes on
    for row in growing:
        row.ask(engine, sampling)
    step = 0
    while growing or waiting:
        if growing:
            engine.step()
            step += 1
        for row in [row for row in growing if _has_ended(row)]:
            growing.remove(row)
            turn = row.take()
            wait = reply(*row.place, turn)
            if wait is None or turn.is_cut:
                _release(engine, row)
            else:
                waiting.append((step + REPLY_STEPS, row, wait))
        due = [one for one in waiting if one[0] <= step] if growing else waiting
        waiting = [one for one in waiting if one not in due]
        for _, row, wait in due:
            tokens = wait(sampling.max_new_tokens - len(row.ids))
            if tokens is None:
                row.is_cut = True
                _release(engine, row)
            else:
                row.go_on(tokens)
                row.ask(engine, sampling)
                growing.append(row)


def _has_ended(row: _Row) -> bool:
    return row.completion is not None and row.completion.ended_by is not None


def _release(engine: Engine, row: _Row) -> None:
    assert row.completion is not None
    engine.release(row.completion)
