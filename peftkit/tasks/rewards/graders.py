"""Graders: rewards of answers as OpenAI's reinforcement fine-tuning writes them down.

A grader compares texts, asks the base for a number, calls a function, or computes a formula of
others. Its texts are templates: {{item.x}} is a field of the prompt's row, {{sample.output_text}}
the answer, {{sample.output_json.x}} a value in an answer that is JSON. Source: OpenAI's API
reference, graders. Of text_similarity, `cosine` needs a model of embeddings and `meteor` a
dictionary, which are not here: they are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from peftkit.config.schema import Config
from peftkit.errors import ConfigError
from peftkit.tasks.rewards.grader_formulas import MAX_FORMULA, parsed
from peftkit.tasks.user_code import PATTERN

MAX_TEMPLATE = 20_000
"""Characters of a template."""
MAX_GRADERS = 16
MAX_SCORE_TOKENS = 1024

PLACEHOLDER = re.compile(r"\{\{([^{}]*)\}\}")
_PATH = re.compile(r"(item|sample)((?:\.[\w-]+|\[\d{1,6}\])+)")
_STEP = re.compile(r"\.([\w-]+)|\[(\d+)\]")


def _check_template(text: str) -> str:
    for inside in PLACEHOLDER.findall(text):
        steps_of(inside)
    return text


def steps_of(inside: str) -> list[str | int]:
    """Return what stands in braces as steps: item, a field, and so on.

    Raises:
        ConfigError: There is no such place.
    """
    match = _PATH.fullmatch(inside.strip())
    steps: list[str | int] = []
    if match:
        found = _STEP.findall(match[2])
        steps = [match[1], *(name or int(number) for name, number in found)]
    known = steps[:2] == ["sample", "output_json"] or steps == ["sample", "output_text"]
    if not match or (match[1] == "sample" and not known) or isinstance(steps[1], int):
        raise ConfigError(
            f"the template asks for {{{{{inside[:80]}}}}}.",
            fix="Use {{item.FIELD}}, {{sample.output_text}} or {{sample.output_json.FIELD}}.",
        )
    return steps


Template = Annotated[str, Field(max_length=MAX_TEMPLATE), AfterValidator(_check_template)]


class _Named(Config):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Its name in metrics."""


class StringCheck(_Named):
    """1 where a text is (eq), is not (ne) or holds (like) another; ilike: in any case."""

    type: Literal["string_check"]
    input: Template
    """The text that is looked at."""
    reference: Template
    """The other one."""
    operation: Literal["eq", "ne", "like", "ilike"]
    """What has to hold."""


Similarity = Literal[
    "fuzzy_match",
    "bleu",
    "gleu",
    "rouge_1",
    "rouge_2",
    "rouge_3",
    "rouge_4",
    "rouge_5",
    "rouge_l",
]


class TextSimilarity(_Named):
    """How similar two texts are, from 0 to 1."""

    type: Literal["text_similarity"]
    input: Template
    """The text that is looked at."""
    reference: Template
    """The text that it should be like."""
    evaluation_metric: Similarity
    """fuzzy_match: twice the longest common subsequence of characters, as a share of both texts.
    rouge: the F-measure of common runs of words. bleu, gleu: of a sentence, runs of up to 4 words.
    cosine and meteor need models and dictionaries that are not here."""


def _as_text(content: Any) -> Any:
    """Return the content of a message, a text or parts of text, as one text."""
    parts = content if isinstance(content, list | tuple) else [content]
    texts = []
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text")
        texts.append(part.get("text") if is_text else part)
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


class GraderMessage(Config):
    """A message to the base."""

    role: Literal["system", "developer", "user", "assistant"]
    """Whose it is."""
    content: Annotated[Template, BeforeValidator(_as_text)]
    """Its text."""
    type: Literal["message"] = "message"
    """What OpenAI's clients call it."""


class ScoreSampling(Config):
    """How the base answers."""

    max_completions_tokens: Annotated[int, Field(ge=1, le=MAX_SCORE_TOKENS)] = 32
    """The most tokens of its answer."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0: the likeliest answer."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the likeliest tokens with this total probability."""
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0
    """Of the sampling."""


class ScoreModel(_Named):
    """The first number that the base, without the adapter in training, answers to messages."""

    type: Literal["score_model"]
    model: Literal["base"] = "base"
    """The base itself: no second model is loaded."""
    input: Annotated[tuple[GraderMessage, ...], Field(min_length=1, max_length=32)]
    """What it is asked. Have it answer with a number alone."""
    range: tuple[float, float] = (0.0, 1.0)
    """Numbers outside are moved to the nearer end."""
    sampling_params: ScoreSampling = ScoreSampling()
    """How it answers."""

    @model_validator(mode="after")
    def _is_a_range(self) -> ScoreModel:
        if not self.range[0] < self.range[1]:
            raise ConfigError(f"the range {list(self.range)} is empty.", fix="Write [0, 1].")
        return self


class PythonGrader(_Named):
    """What a Python function says: grade(sample, item) -> float."""

    type: Literal["python"]
    source: Annotated[str, Field(pattern=PATTERN)]
    """FILE.py:FUNCTION. `sample` has output_text and, of JSON, output_json; `item` the row."""


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
    """The graders, by the names that the formula has for them."""
    calculate_output: Annotated[str, Field(max_length=MAX_FORMULA)]
    """Of their names and numbers: + - * / ^ ( ), min, max, abs, floor, ceil, exp, sqrt, log."""

    @model_validator(mode="after")
    def _has_a_formula(self) -> Multi:
        parsed(self.calculate_output, self.graders)
        return self


Grader = StringCheck | TextSimilarity | ScoreModel | PythonGrader | Multi
AnyGrader = Annotated[Grader, Field(discriminator="type")]


def parts_of(grader: Grader) -> Mapping[str, Grader]:
    """Return the graders of a formula by their names in it; of any other one, itself."""
    return grader.graders if isinstance(grader, Multi) else {grader.name: grader}


def code_of(grader: Grader) -> list[str]:
    """Return the Python functions that a grader calls."""
    return [one.source for one in parts_of(grader).values() if isinstance(one, PythonGrader)]


def fields_of(grader: Grader) -> set[str]:
    """Return the fields that a grader's templates read of rows."""
    paths = [
        steps_of(inside) for text in _templates(grader) for inside in PLACEHOLDER.findall(text)
    ]
    return {str(path[1]) for path in paths if path[0] == "item"}


def _templates(grader: Grader) -> Iterator[str]:
    for one in parts_of(grader).values():
        if isinstance(one, StringCheck | TextSimilarity):
            yield from (one.input, one.reference)
        elif isinstance(one, ScoreModel):
            yield from (message.content for message in one.input)
