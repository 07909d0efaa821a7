"""Reward functions: built in, or Python functions with TRL's signature.

    def reward(prompts, completions, **columns) -> list[float | None]

`columns` are the fields of the prompts' records, a list each. Functions may be async. They return
a finite number, or None (no score), for each answer. If a function raises, hangs or returns
anything else, the run ends with an error that names the row. FILE.py:CLASS is the `get_reward` of
environments (`grpo_tools`).
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

from peftkit.config.schema import Config, Location
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
    """A reward: built in, or a function; the reward of an answer is the weighted sum of all."""

    use: BuiltIn | Annotated[Location, Field(pattern=PATTERN)] = "adapter"
    """exact_match: whether the answer equals the row's. json_fields: share of correct fields, if
    both answers are JSON objects. json_schema: whether the answer is JSON of the schema. regex:
    whether the answer contains the pattern. length: 1 up to max_chars, then falling to 0 at twice
    as many. FILE.py:FUNCTION: a Python function. adapter: the score of a reward adapter
    (task: reward) over the same base; no second model is loaded. grader: a grader in the format of
    OpenAI's reinforcement fine-tuning."""
    weight: float = 1.0
    """Weight in the sum."""
    pattern: str | None = None
    """For regex: the pattern."""
    schema_file: Path | None = None
    """For json_schema: a JSON file."""
    max_chars: Annotated[int, Field(ge=1)] | None = None
    """For length: the length in characters up to which the reward is 1."""
    adapter: Location | None = None
    """For adapter: its folder."""
    grader: AnyGrader | None = None
    """For grader: string_check, text_similarity, score_model, python, or a formula of these."""

    @model_validator(mode="after")
    def _check_settings(self) -> RewardTerm:
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
                    + (f"needs {key}." if self.use == name else f"has no setting {key}.")
                )
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ConfigError(f"{self.pattern!r} is not a valid pattern: {error}") from None
        return self

    @property
    def code(self) -> Sequence[str]:
        """Functions of files that the reward runs."""
        if self.grader is not None:
            return code_of(self.grader)
        return [self.use] if ".py:" in self.use else []

    @property
    def is_function(self) -> bool:
        """Whether the reward runs code of a file."""
        return bool(self.code)

    @property
    def name(self) -> str:
        """Name in metrics."""
        if self.grader is not None:
            return re.sub(r"\W+", "_", self.grader.name)
        return self.use.rpartition(":")[2]


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names, with numbers for duplicates and for "std": reward_std is a metric."""
    result: list[str] = []
    for number, name in enumerate(names, 1):
        numbered = (f"{name}_{n}" for n in itertools.count(number))
        is_unique = names.count(name) == 1 and name != "std"
        result.append(
            name if is_unique else next(n for n in numbered if n not in {*names, *result})
        )
    return result


Scorer = Callable[[str, Sequence[object], Sequence[str]], list[float]]
"""Returns the scores of answers to prompts by the reward adapter of a folder."""


class Rewards:
    """The rewards of a run, with their functions loaded.

    Args:
        timeout: Maximum seconds of one call of a function.
        scorer: Scores answers by reward adapters.
        code: Loads functions; shared with the run's tools.
        ask: Returns the base's answers, for graders.

    Raises:
        ConfigError: A file or function does not exist.
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
        self.names = _unique([term.name for term in terms])
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
        prompts: Sequence[object],
        completions: Sequence[object],
        columns: Mapping[str, Sequence[object]],
        sources: Sequence[str],
        items: Sequence[Mapping[str, object]] = (),
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Return the reward of each answer, and the value of each term; NaN: no score.

        Args:
            sources: Sources of the prompts' rows, for messages.
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
                answers = [Answered(*row) for row in zip(texts, items, sources, strict=True)]
                values: Any = [grade.value for grade in self._graders[name].grades(answers)]
            elif judge is None:
                values = self._scorer(str(term.adapter), prompts, texts)
            else:
                arguments: dict[str, object] = {
                    "texts": texts,
                    "references": columns.get("references"),
                }
                if term.is_function:
                    arguments = {**columns, "prompts": [*prompts], "completions": [*completions]}
                values = self._call(term, judge, arguments, sources)
            parts[name] = _checked(term, values, sources)
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
        arguments: Mapping[str, object],
        sources: Sequence[str],
    ) -> Any:
        values, error = outcome(judge, self.timeout, **arguments)
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
        return values


def _checked(term: RewardTerm, values: object, sources: Sequence[str]) -> list[float]:
    """Return a function's rewards as numbers."""
    if not isinstance(values, Sequence) or len(values) != len(sources):
        size = len(values) if isinstance(values, Sequence) else type(values).__name__
        raise RunError(
            f"the reward {term.use} returned {size} for {len(sources)} answers",
            fix="Return a list with a number, or None, for each completion.",
        )
    numbers = []
    for value, source in zip(values, sources, strict=True):
        try:
            number = NAN if value is None else float(value)
        except Exception:  # tensors raise errors of their own types
            number = math.inf
        if value is not None and not math.isfinite(number):
            raise RunError(
                f"the reward {term.use} returned {shortly(value)} for an answer to {source}",
                fix="Return a finite number, or None for no score.",
            )
        numbers.append(number)
    return numbers


def _judge(term: RewardTerm, timeout: float, code: UserCode) -> Judge:
    """Return the function of a term; built-in ones take `texts` and `references`."""
    if term.is_function:
        function = code.load(term.use)
        return _environment_rewards if inspect.isclass(function) else function
    if term.use == "regex":
        pattern = re.compile(term.pattern or "", re.S).pattern
        return lambda texts, **_: searched([(pattern, text) for text in texts], timeout, flags=re.S)
    if term.use == "json_schema":
        assert term.schema_file is not None
        schema = read_json(term.schema_file, error=ConfigError)
        return lambda texts, **_: _match_schema(texts, schema, timeout)
    if term.use == "length":
        limit = term.max_chars or 1
        return lambda texts, **_: [min(1.0, max(0.0, 2 - len(text) / limit)) for text in texts]
    of_pair = _share_of_fields if term.use == "json_fields" else _is_equal
    return lambda texts, references: [*map(of_pair, texts, references)]


async def _environment_rewards(environments: Sequence[Any], **_: object) -> list[Any]:
    """Return the rewards of the environments' answers."""
    rewards = [environment.get_reward() for environment in environments]
    return [await reward if inspect.isawaitable(reward) else reward for reward in rewards]


def _text(completion: Any) -> str:
    """Return an answer's text; for several messages, the last text of the assistant."""
    if isinstance(completion, str):
        return completion
    texts = (turn["content"] for turn in reversed(completion) if turn["role"] == "assistant")
    return str(next(texts, ""))


def _match_schema(texts: Sequence[str], schema: Mapping[str, object], timeout: float) -> list[bool]:
    """Return whether each text is JSON that is valid against a schema."""
    values = {number: _json(text) for number, text in enumerate(texts)}
    values = {
        number: value
        for number, value in values.items()
        if value is not None or texts[number].strip() == "null"
    }
    matches = dict(zip(values, all_matches([*values.values()], schema, timeout), strict=True))
    return [matches.get(number, False) for number in range(len(texts))]


def _share_of_fields(text: str, reference: str | None) -> float | None:
    expected, actual = _json(reference or ""), _json(text)
    if not isinstance(expected, dict) or not expected:
        return None
    if not isinstance(actual, dict):
        return 0.0
    names = expected.keys() | actual.keys()
    in_both = expected.keys() & actual.keys()
    same = sum(is_same(actual[name], expected[name]) for name in in_both)
    return 0.2 + 0.8 * same / len(names)


def _is_equal(text: str, reference: str | None) -> float | None:
    return None if reference is None else float(text.strip() == reference.strip())


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
