"""Graders: rewards in the format of OpenAI's reinforcement fine-tuning.

A grader compares texts, generates a number with the base, calls a function, or computes a formula
of other graders. Its texts are templates: {{item.x}} is a field of the prompt's row,
{{sample.output_text}} the answer, {{sample.output_json.x}} a value in a JSON answer. Source:
OpenAI's API reference, graders. The text similarities `cosine` and `meteor` are not supported,
because they need an embedding model and a dictionary.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from peftkit.config.schema import Config, Location
from peftkit.errors import ConfigError
from peftkit.tasks.user_code import PATTERN

MAX_TEMPLATE = 20_000
"""Maximum characters of a template."""
MAX_GRADERS = 16
MAX_FORMULA, MAX_DEPTH = 500, 40
"""Characters of a formula, and how deep it is nested."""
MAX_SCORE_TOKENS = 1024

PLACEHOLDER = re.compile(r"\{\{([^{}]*)\}\}")
_PATH = re.compile(r"(item|sample)((?:\.[\w-]+|\[\d{1,6}\])+)")
_STEP = re.compile(r"\.([\w-]+)|\[(\d+)\]")


def _check_template(text: str) -> str:
    for inside in PLACEHOLDER.findall(text):
        steps_of(inside)
    return text


def steps_of(inside: str) -> list[str | int]:
    """Return the path in the braces of a placeholder as keys: item, a field, and so on.

    Raises:
        ConfigError: The path is invalid.
    """
    match = _PATH.fullmatch(inside.strip())
    steps: list[str | int] = []
    if match:
        keys = _STEP.findall(match[2])
        steps = [match[1], *(name or int(number) for name, number in keys)]
    is_output = steps[:2] == ["sample", "output_json"] or steps == ["sample", "output_text"]
    if not match or (match[1] == "sample" and not is_output) or isinstance(steps[1], int):
        raise ConfigError(
            f"The placeholder {{{{{inside[:80]}}}}} of the template is invalid.",
            fix="Use {{item.FIELD}}, {{sample.output_text}} or {{sample.output_json.FIELD}}.",
        )
    return steps


Template = Annotated[str, Field(max_length=MAX_TEMPLATE), AfterValidator(_check_template)]


class _Named(Config):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Its name in metrics."""


class StringCheck(_Named):
    """1 if a text equals (eq), differs from (ne) or contains (like) another; ilike ignores case."""

    type: Literal["string_check"]
    input: Template
    """The text to check."""
    reference: Template
    """The text to compare with."""
    operation: Literal["eq", "ne", "like", "ilike"]
    """The comparison."""


Similarity = Literal[
    "fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"
]


class TextSimilarity(_Named):
    """Similarity of two texts, from 0 to 1."""

    type: Literal["text_similarity"]
    input: Template
    """The text to check."""
    reference: Template
    """The text to compare with."""
    evaluation_metric: Similarity
    """fuzzy_match: twice the longest common subsequence of characters, as a share of both texts.
    rouge: the F-measure of common n-grams of words. bleu, gleu: sentence scores with n-grams of up
    to 4 words. cosine and meteor are not supported."""


def _as_text(content: Any) -> Any:
    """Return the content of a message, a text or a list of text parts, as one text."""
    parts = content if isinstance(content, list | tuple) else [content]
    texts = []
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text")
        texts.append(part.get("text") if is_text else part)
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


class GraderMessage(Config):
    """A message to the base."""

    role: Literal["system", "developer", "user", "assistant"]
    """Role of the author."""
    content: Annotated[Template, BeforeValidator(_as_text)]
    """Text of the message."""
    type: Literal["message"] = "message"
    """Type that OpenAI's clients send."""


class ScoreSampling(Config):
    """Sampling settings of the base."""

    max_completions_tokens: Annotated[int, Field(ge=1, le=MAX_SCORE_TOKENS)] = 32
    """Maximum tokens of an answer."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the likeliest tokens with this total probability."""
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0
    """Seed of the sampling."""


class ScoreModel(_Named):
    """The first number in the base's answer to messages, with the adapter in training off."""

    type: Literal["score_model"]
    model: Literal["base"] = "base"
    """The base; no second model is loaded."""
    input: Annotated[tuple[GraderMessage, ...], Field(min_length=1, max_length=32)]
    """Messages to the base, which should request an answer with a number alone."""
    range: tuple[float, float] = (0.0, 1.0)
    """Range to which numbers are clamped."""
    sampling_params: ScoreSampling = ScoreSampling()
    """Sampling settings."""

    @model_validator(mode="after")
    def _is_a_range(self) -> ScoreModel:
        if not self.range[0] < self.range[1]:
            raise ConfigError(f"The range {list(self.range)} is empty.", fix="Write [0, 1].")
        return self


class PythonGrader(_Named):
    """The result of a Python function grade(sample, item) -> float."""

    type: Literal["python"]
    source: Annotated[Location, Field(pattern=PATTERN)]
    """FILE.py:FUNCTION. `sample` has output_text and, for JSON, output_json; `item` is the row."""


Simple = Annotated[
    StringCheck | TextSimilarity | ScoreModel | PythonGrader, Field(discriminator="type")
]


class Multi(_Named):
    """A formula of other graders."""

    type: Literal["multi"]
    graders: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,63}$")], Simple],
        Field(min_length=1, max_length=MAX_GRADERS),
    ]
    """The graders, with their names in the formula as keys."""
    calculate_output: Annotated[str, Field(max_length=MAX_FORMULA)]
    """The formula: names, numbers, + - * / ^ ( ), min, max, abs, floor, ceil, exp, sqrt, log."""

    @model_validator(mode="after")
    def _has_a_formula(self) -> Multi:
        parsed(self.calculate_output, self.graders)
        return self


Grader = StringCheck | TextSimilarity | ScoreModel | PythonGrader | Multi
AnyGrader = Annotated[Grader, Field(discriminator="type")]


def parts_of(grader: Grader) -> Mapping[str, Grader]:
    """Return the graders of a formula with their names; for any other grader, the grader itself."""
    return grader.graders if isinstance(grader, Multi) else {grader.name: grader}


def code_of(grader: Grader) -> list[str]:
    """Return the Python functions that a grader calls."""
    return [part.source for part in parts_of(grader).values() if isinstance(part, PythonGrader)]


def fields_of(grader: Grader) -> set[str]:
    """Return the fields of rows that a grader's templates read."""
    paths = [
        steps_of(inside) for text in _templates(grader) for inside in PLACEHOLDER.findall(text)
    ]
    return {str(path[1]) for path in paths if path[0] == "item"}


def _templates(grader: Grader) -> Iterator[str]:
    for part in parts_of(grader).values():
        if isinstance(part, StringCheck | TextSimilarity):
            yield from (part.input, part.reference)
        elif isinstance(part, ScoreModel):
            yield from (message.content for message in part.input)


# Formulas: numbers, names, + - * / ^, and a few functions.


_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}


def parsed(formula: str, names: Collection[str]) -> ast.expr:
    """Parse a formula to a tree of numbers, names, operators and calls of known functions.

    Raises:
        ConfigError: The formula is invalid, or has names that are not in `names`.
    """
    try:
        tree = ast.parse(formula.replace("^", "**").strip(), mode="eval").body
        _check_formula(tree, names, MAX_DEPTH)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as problem:
        raise ConfigError(
            f"the formula {formula[:120]!r} cannot be computed.",
            found=getattr(problem, "msg", None) or str(problem),
            fix=f"Known are: + - * / ^ ( ), {', '.join([*names, *_FUNCTIONS])}.",
        ) from None
    return tree


def _check_formula(node: ast.expr, names: Collection[str], depth: int) -> None:
    inner: Sequence[ast.expr]
    if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in _OPERATORS:
        inner = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        inner, name = node.args, node.func.id
        fewest, most = (2, MAX_FORMULA) if name in ("min", "max") else (1, 1)
        if name not in _FUNCTIONS or not fewest <= len(inner) <= most:
            raise ValueError(f"There is no function {name} of {len(inner)} numbers.")
    elif _is_leaf(node, names):
        inner = []
    else:
        raise ValueError(f"{ast.unparse(node)[:80]} is not known.")
    if depth == 0:
        raise ValueError(f"It is nested more than {MAX_DEPTH} deep.")
    for each in inner:
        _check_formula(each, names, depth - 1)


def _is_leaf(node: ast.expr, names: Collection[str]) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(value := node.value, int | float) and math.isfinite(float(value))
    return isinstance(node, ast.Name) and node.id in names


def computed(node: ast.expr, values: Mapping[str, float]) -> float:
    """Return a formula's value.

    Raises:
        ArithmeticError, ValueError: The value is undefined, such as 1 / 0.
    """
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Constant):
        return float(node.value)  # type: ignore[arg-type]  # checked before
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](computed(node.left, values), computed(node.right, values))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](computed(node.operand, values))
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return float(_FUNCTIONS[node.func.id](*(computed(arg, values) for arg in node.args)))
