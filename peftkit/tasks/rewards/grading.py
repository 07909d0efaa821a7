"""Apply graders (graders.py) to completions."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from peftkit.errors import RunError
from peftkit.tasks.metrics import bleu, gleu, indel_similarity, rouge_l, rouge_n
from peftkit.tasks.rewards.graders import (
    PLACEHOLDER,
    Grader,
    Multi,
    PythonGrader,
    ScoreModel,
    StringCheck,
    TextSimilarity,
    code_of,
    computed,
    parsed,
    steps_of,
)
from peftkit.tasks.user_code import UserCode, outcome, shortly

MAX_TEXT = 100_000
"""Maximum characters of a template with its values."""

_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?|-?\.\d+")

Problem = Literal["", "sample_parse_error", "model_grader_parse_error"]
Ask = Callable[[Sequence[Sequence[Mapping[str, str]]], Mapping[str, object]], list[str]]
"""Returns the base's answers to conversations, with settings of `Sampling`."""


class Answered(NamedTuple):
    """An answer, with the record of its prompt and the record's source."""

    text: str
    item: Mapping[str, object]
    source: str


class Grade(NamedTuple):
    """The grade of an answer; None: no grade.

    If an answer lacks a value of the template, its grade is 0 or the range's lower end
    ("sample_parse_error"). If the base answers without a number, there is no grade
    ("model_grader_parse_error"). `parts` are the grades in a formula.
    """

    value: float | None
    problem: Problem = ""
    parts: Mapping[str, float | None] = {}


class _MissingValue(Exception):
    """An answer lacks a value of a template."""


class Grading:
    """A grader with its functions loaded.

    Args:
        ask: Returns the base's answers.
        seconds: Time limit for loading a file, and for a call with all answers.

    Raises:
        ConfigError: A file or function does not exist.
    """

    def __init__(self, grader: Grader, ask: Ask, seconds: float, code: UserCode) -> None:
        self.grader, self._ask, self._seconds = grader, ask, seconds
        self._functions = {use: code.load(use, seconds) for use in code_of(grader)}

    def grades(self, answers: Sequence[Answered]) -> list[Grade]:
        """Return the grade of each answer.

        Raises:
            RunError: A row lacks a field, a function failed, or a formula has no value.
        """
        grader = self.grader
        if not isinstance(grader, Multi):
            return self._of_one(grader, answers)
        columns = {name: self._of_one(part, answers) for name, part in grader.graders.items()}
        formula = parsed(grader.calculate_output, grader.graders)
        grades = []
        for n, answer in enumerate(answers):
            row = {name: column[n] for name, column in columns.items()}
            parts = {name: grade.value for name, grade in row.items()}
            problems = [grade.problem for grade in row.values() if grade.problem]
            total = _total(formula, grader, parts, answer)
            grades.append(Grade(total, problems[0] if problems else "", parts))
        return grades

    def _of_one(self, grader: Grader, answers: Sequence[Answered]) -> list[Grade]:
        if isinstance(grader, PythonGrader):
            return self._computed(grader, answers)
        if isinstance(grader, ScoreModel):
            return self._scored(grader, answers)
        assert isinstance(grader, StringCheck | TextSimilarity)
        return [_compared(grader, answer) for answer in answers]

    def _scored(self, grader: ScoreModel, answers: Sequence[Answered]) -> list[Grade]:
        """Return the base's grades, generated in one batch for all answers."""
        conversations = {}
        for n, answer in enumerate(answers):
            try:
                conversations[n] = [
                    {"role": m.role, "content": _filled(m.content, answer)} for m in grader.input
                ]
            except _MissingValue:
                continue
        settings = grader.sampling_params.model_dump()
        settings["max_new_tokens"] = settings.pop("max_completions_tokens")
        texts = self._ask([*conversations.values()], settings) if conversations else []
        grades = [Grade(grader.range[0], "sample_parse_error")] * len(answers)
        for n, text in zip(conversations, texts, strict=True):
            number = _NUMBER.search(_THOUGHT.sub("", text))
            if number is None:
                grades[n] = Grade(None, "model_grader_parse_error")
            else:
                low, high = grader.range
                grades[n] = Grade(min(high, max(low, float(number[0]))))
        return grades

    def _computed(self, grader: PythonGrader, answers: Sequence[Answered]) -> list[Grade]:
        function = self._functions[grader.source]

        def call() -> list[object]:
            return [function(_sample(answer.text), dict(answer.item)) for answer in answers]

        returned, error = outcome(call, self._seconds)
        if error is not None:
            raise RunError(
                f"the grader {grader.source} failed: {type(error).__name__}: {error}",
                found=f"It was called for answers to {answers[0].source} to {answers[-1].source}.",
            ) from error
        return [
            Grade(_number(grader, value, answer))
            for value, answer in zip(returned, answers, strict=True)
        ]


def _number(grader: PythonGrader, value: object, answer: Answered) -> float:
    try:
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an int too large for a float
        pass
    raise RunError(
        f"the grader {grader.source} returned {shortly(value)} for an answer to {answer.source}",
        fix="Return a finite number.",
    )


def _compared(grader: StringCheck | TextSimilarity, answer: Answered) -> Grade:
    try:
        text, reference = _filled(grader.input, answer), _filled(grader.reference, answer)
    except _MissingValue:
        return Grade(0.0, "sample_parse_error")
    if isinstance(grader, StringCheck):
        holds = {
            "eq": text == reference,
            "ne": text != reference,
            "like": reference in text,
            "ilike": reference.lower() in text.lower(),
        }
        return Grade(float(holds[grader.operation]))
    return Grade(SIMILARITIES[grader.evaluation_metric](text, reference))


SIMILARITIES: Mapping[str, Callable[[str, str], float]] = {
    "fuzzy_match": indel_similarity,
    "bleu": bleu,
    "gleu": gleu,
    **{f"rouge_{n}": partial(rouge_n, size=n) for n in range(1, 6)},
    "rouge_l": rouge_l,
}


def _total(
    formula: ast.expr, grader: Multi, parts: Mapping[str, float | None], answer: Answered
) -> float | None:
    values = {name: value for name, value in parts.items() if value is not None}
    if len(values) < len(parts):
        return None
    try:
        total = computed(formula, values)
        if not math.isfinite(total):
            raise OverflowError("too large")
    except (ArithmeticError, ValueError) as problem:
        raise RunError(
            f"the formula of the grader {grader.name} has no value: {problem}",
            found=f"{grader.calculate_output} with {values}, for an answer to {answer.source}",
        ) from None
    return total


def _sample(text: str) -> dict[str, object]:
    """Return the variables of an answer for templates and functions."""
    try:
        return {"output_text": text, "output_json": json.loads(text)}
    except (ValueError, RecursionError):
        return {"output_text": text}


def _filled(template: str, answer: Answered) -> str:
    """Return a template with its values; braces in a value are not expanded.

    Raises:
        RunError: The row lacks a field, or the text becomes too long.
        _MissingValue: The answer lacks a value.
    """
    roots = {"item": answer.item, "sample": _sample(answer.text)}
    size = len(template)

    def value(match: re.Match[str]) -> str:
        nonlocal size
        root, *steps = steps_of(match[1])
        node: Any = roots[str(root)]
        for step in steps:
            try:
                node = node[step]
            except (KeyError, IndexError, TypeError):
                if root == "sample":
                    raise _MissingValue from None
                raise RunError(
                    f"the grader reads {{{{{match[1].strip()}}}}}, which {answer.source} lacks",
                    found=f"Its fields: {', '.join(answer.item)}.",
                ) from None
        text = node if isinstance(node, str) else json.dumps(node, ensure_ascii=False)
        size += len(text)
        if size > MAX_TEXT:
            raise RunError(
                f"the text of the grader has more than {MAX_TEXT:,} characters",
                found=f"For {answer.source} and an answer of {len(answer.text):,} characters.",
            )
        return text

    return PLACEHOLDER.sub(value, template)
