"""Reward functions: built in, or Python functions, which are called as TRL calls them.

    def reward(prompts, completions, **columns) -> list[float | None]

`columns` are the fields of the prompts' records, a list each. Functions may be async. What raises,
hangs, or returns something else than one finite number (or None: not judged) an answer ends the
run, with the row's name. FILE.py:CLASS is the `get_reward` of environments (`grpo_tools`).
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from peftkit.config.schema import Config
from peftkit.errors import ConfigError, RunError
from peftkit.files.disk import read_json
from peftkit.files.safe_regex import searched
from peftkit.tasks.rewards.graders import AnyGrader, code_of
from peftkit.tasks.rewards.grading import Answered, Ask, Grading
from peftkit.tasks.rewards.json_schema import all_matches, is_same
from peftkit.tasks.user_code import PATTERN, UserCode, outcome, shortly

BuiltIn = Literal[
    "exact_match", "json_fields", "json_schema", "regex", "length", "adapter", "grader"
]
Judge = Callable[..., Any]
NAN = float("nan")


class RewardTerm(Config):
    """One reward: built in, or a function; an answer's reward is the weighted sum of all."""

    use: BuiltIn | Annotated[str, Field(pattern=PATTERN)] = "adapter"
    """exact_match: equal to the row's answer. json_fields: share of the fields of the row's answer
    that are right, both being JSON objects. json_schema: whether it is JSON of this schema. regex:
    whether the pattern is found in it. length: 1 up to max_chars, then falling to 0 at twice as
    many. FILE.py:FUNCTION: a Python function. adapter: the score of a reward adapter
    (task: reward) over the same base; no second model is loaded. grader: as OpenAI's reinforcement
    fine-tuning grades answers."""
    weight: float = 1.0
    """Its weight in the sum."""
    pattern: str | None = None
    """Of regex."""
    schema_file: Path | None = None
    """Of json_schema: a JSON file."""
    max_chars: Annotated[int, Field(ge=1)] | None = None
    """Of length."""
    adapter: str | None = None
    """Of adapter: its folder."""
    grader: AnyGrader | None = None
    """Of grader: string_check, text_similarity, score_model, python, or a formula of them."""

    @model_validator(mode="after")
    def _has_what_it_takes(self) -> RewardTerm:
        takes = {
            "regex": "pattern",
            "json_schema": "schema_file",
            "length": "max_chars",
            "adapter": "adapter",
            "grader": "grader",
        }
        for name, key in takes.items():
            if (self.use == name) is not (getattr(self, key) is not None):
                raise ConfigError(
                    f"the reward {self.use} "
                    + (f"needs {key}." if self.use == name else f"takes no {key}."),
                )
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ConfigError(f"{self.pattern!r} is no pattern: {error}") from None
        return self

    @property
    def code(self) -> Sequence[str]:
        """The functions of files that it runs."""
        if self.grader is not None:
            return code_of(self.grader)
        return [self.use] if ".py:" in self.use else []

    @property
    def is_function(self) -> bool:
        """Whether it runs code of a file."""
        return bool(self.code)

    @property
    def name(self) -> str:
        """Its name in metrics."""
        if self.grader is not None:
            return re.sub(r"\W+", "_", self.grader.name)
        return self.use.rpartition(":")[2]


def _told_apart(names: Sequence[str]) -> list[str]:
    """Return names that are one each; reward_std is a metric already."""
    found: list[str] = []
    for number, name in enumerate(names, 1):
        numbered = (f"{name}_{n}" for n in itertools.count(number))
        is_own = names.count(name) == 1 and name != "std"
        found.append(name if is_own else next(n for n in numbered if n not in {*names, *found}))
    return found


Scorer = Callable[[str, Sequence[Any], Sequence[str]], list[float]]
"""Returns what the reward adapter of a folder says of prompts and their answers."""


class Rewards:
    """The rewards of a run, their functions loaded.

    Args:
        timeout: Seconds that one call of a function may take.
        scorer: Scores answers by reward adapters.
        code: Loads functions, those of the run's tools too.
        ask: Has the base answer, for graders.

    Raises:
        ConfigError: A file or function is not there.
    """

    def __init__(
        self,
        terms: Sequence[RewardTerm],
        timeout: float,
        scorer: Scorer = lambda *_: [],
        code: UserCode | None = None,
        ask: Ask = lambda *_: [],
    ) -> None:
        self.terms, self.timeout, self._scorer = terms, timeout, scorer
        self.names = _told_apart([term.name for term in terms])
        code = code or UserCode()
        self._judges = [
            None if term.adapter or term.grader else _judge(term, timeout, code) for term in terms
        ]
        self._graders = {
            name: Grading(term.grader, ask, timeout, code)
            for name, term in zip(self.names, terms, strict=True)
            if term.grader is not None
        }

    def judge(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        sources: Sequence[str],
        items: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Return each answer's reward, and its parts by name; NaN where no function scored it.

        Args:
            sources: Of the prompts' rows, for messages.
            items: All fields of these rows, for graders.

        Raises:
            RunError: A function failed.
        """
        parts: dict[str, list[float]] = {name: [] for name in self.names}
        if not sources:
            return [], parts
        texts = [_text(completion) for completion in completions]
        for name, term, judge in zip(self.names, self.terms, self._judges, strict=True):
            if name in self._graders:
                answers = [Answered(*each) for each in zip(texts, items, sources, strict=True)]
                found: Any = [grade.value for grade in self._graders[name].grades(answers)]
            elif judge is None:
                found = self._scorer(str(term.adapter), prompts, texts)
            else:
                found = self._call(term, judge, prompts, completions, columns, sources)
            parts[name] = _checked(term, found, sources)
        totals = []
        judged = zip(*parts.values(), strict=True) if parts else [()] * len(sources)
        for row in judged:
            pairs = [
                term.weight * value
                for term, value in zip(self.terms, row, strict=True)
                if not math.isnan(value)
            ]
            totals.append(sum(pairs) if pairs else NAN)
        return totals, parts

    def _call(
        self,
        term: RewardTerm,
        judge: Judge,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        sources: Sequence[str],
    ) -> Any:
        """Call a function, for at most so long."""
        given = {**columns, "prompts": [*prompts], "completions": [*completions]}
        found, error = outcome(judge, self.timeout, **given)
        rows = f"It was called for answers to {sources[0]} to {sources[-1]}."
        if isinstance(error, TimeoutError):
            raise RunError(
                f"the reward {term.use} took longer than {self.timeout:g} seconds",
                found=rows,
                fix="Fix the function, or raise task.reward_timeout; then start again, with "
                "--resume if a step was saved.",
            )
        if error is not None:
            raise RunError(
                f"the reward {term.use} failed: {type(error).__name__}: {error}",
                found=rows,
                fix="Fix the function; then start again, with --resume if a step was saved.",
            ) from error
        return found


def _checked(term: RewardTerm, found: Any, sources: Sequence[str]) -> list[float]:
    """Return a function's rewards as numbers."""
    if not isinstance(found, Sequence) or len(found) != len(sources):
        size = len(found) if isinstance(found, Sequence) else type(found).__name__
        raise RunError(
            f"the reward {term.use} returned {size} for {len(sources)} answers",
            fix="Return a list with a number, or None, for each completion.",
        )
    numbers = []
    for value, source in zip(found, sources, strict=True):
        try:
            number = NAN if value is None else float(value)
        except Exception:  # a tensor's is none of Python's own
            number = math.inf
        if value is not None and not math.isfinite(number):
            raise RunError(
                f"the reward {term.use} returned {shortly(value)} for an answer to {source}",
                fix="Return a finite number, or None where it does not judge.",
            )
        numbers.append(number)
    return numbers


def _judge(term: RewardTerm, timeout: float, code: UserCode) -> Judge:
    if term.is_function:
        found = code.load(term.use)
        return _own_rewards if inspect.isclass(found) else found
    if term.use == "regex":
        pattern = re.compile(term.pattern or "", re.S).pattern
        return _of_texts(
            lambda texts: searched([(pattern, text) for text in texts], timeout, flags=re.S)
        )
    if term.use == "json_schema":
        assert term.schema_file is not None
        schema = read_json(term.schema_file, error=ConfigError)
        return _of_texts(lambda texts: _are_of(texts, schema, timeout))
    if term.use == "length":
        most = term.max_chars or 1
        return _each(lambda text, _: min(1.0, max(0.0, 2 - len(text) / most)))
    if term.use == "json_fields":
        return _each(_share_of_fields)
    return _each(_is_equal)


async def _own_rewards(environments: Sequence[Any], **_: Any) -> list[Any]:
    """Return what environments say of the answers that used them."""
    found = [one.get_reward() for one in environments]
    return [await one if inspect.isawaitable(one) else one for one in found]


def _text(completion: Any) -> str:
    """Return an answer's text: of several messages the last of the assistant's."""
    if isinstance(completion, str):
        return completion
    said = (each["content"] for each in reversed(completion) if each["role"] == "assistant")
    return str(next(said, ""))


def _each(judge: Callable[[str, str | None], float | None]) -> Judge:
    """Return a reward function of a judge of one answer and the row's own."""

    def function(
        completions: Sequence[Any], references: Sequence[str | None], **_: Any
    ) -> list[float | None]:
        texts = [_text(completion) for completion in completions]
        return [judge(text, right) for text, right in zip(texts, references, strict=True)]

    return function


def _of_texts(judge: Callable[[list[str]], list[bool]]) -> Judge:
    """Return a reward function of a judge of all answers."""

    def function(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(is_right) for is_right in judge([_text(one) for one in completions])]

    return function


def _are_of(texts: Sequence[str], schema: Mapping[str, Any], timeout: float) -> list[bool]:
    """Tell which texts are JSON of a schema."""
    values = {number: _json(text) for number, text in enumerate(texts)}
    values = {
        number: value
        for number, value in values.items()
        if value is not None or texts[number].strip() == "null"
    }
    right = dict(zip(values, all_matches([*values.values()], schema, timeout), strict=True))
    return [right.get(number, False) for number in range(len(texts))]


def _share_of_fields(text: str, right: str | None) -> float | None:
    wanted, made = _json(right or ""), _json(text)
    if not isinstance(wanted, dict) or not wanted:
        return None
    if not isinstance(made, dict):
        return 0.0
    names = wanted.keys() | made.keys()
    in_both = wanted.keys() & made.keys()
    same = sum(is_same(made[name], wanted[name]) for name in in_both)
    return 0.2 + 0.8 * same / len(names)


def _is_equal(text: str, right: str | None) -> float | None:
    return None if right is None else float(text.strip() == right.strip())


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
