"""The first rows of a recipe, token by token, without the weights of its base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peftkit.data.pack import IGNORE
from peftkit.events import Event, Notice
from peftkit.planning.resolve import encode_first
from peftkit.recipe import Recipe

MAX_TOKENS = 1500
MAX_BYTES_OF_CHARACTER = 4
INPUTS = ("", "source", "audio", "image", "video")
"""Labels of spans (`Task.spans`) that are not targets."""


@dataclass(frozen=True, slots=True)
class PreviewedRow:
    """A row in the loss.

    Attributes:
        source: File and line.
        dropped: Why training drops the row, or "".
        num_tokens, num_targets: Tokens of the row, and those in the loss.
        tokens: (text, whether the token is a target) of the first tokens. Tokens that only together
            decode to a character are joined.
    """

    source: str
    dropped: str = ""
    num_tokens: int = 0
    num_targets: int = 0
    tokens: tuple[tuple[str, bool], ...] = ()


def first_rows(recipe: Recipe, number: int) -> tuple[list[PreviewedRow], list[str]]:
    """Return the first rows of a recipe's training data, and notices about them.

    Raises:
        PeftkitError: The base, its tokenizer or the rows cannot be read.
    """
    notices: list[str] = []

    def collect(event: Event) -> None:
        if isinstance(event, Notice):
            notices.append(event.text)

    task, rows = encode_first(recipe, number, collect)
    return [_previewed(task, row) for row in rows], notices


def _previewed(task: Any, row: Any) -> PreviewedRow:
    if reason := getattr(row, "reason", ""):
        return PreviewedRow(row.source, dropped=reason)
    tokens = _tokens(task, row)
    labels = getattr(row, "labels", None)
    num_targets = sum(is_target for _, is_target in tokens)
    if labels is not None:
        num_targets = sum(int(label) != IGNORE for label in labels)
    num_tokens = len(getattr(row, "input_ids", tokens))
    return PreviewedRow(row.source, "", num_tokens, num_targets, tuple(tokens[:MAX_TOKENS]))


def _tokens(task: Any, row: Any) -> list[tuple[str, bool]]:
    """Return the tokens of a row; for rows without a label of each token, its spans."""
    labels, ids = getattr(row, "labels", None), [int(i) for i in getattr(row, "input_ids", ())]
    if labels is None or len(labels) != len(ids):
        return [(text, kind not in INPUTS) for kind, text in task.spans(row)]
    tokens: list[tuple[str, bool]] = []
    pending: list[int] = []
    for token, label in zip(ids, labels, strict=True):
        pending.append(token)
        text = task.tokenizer.decode(
            pending, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        is_partial = text.endswith("\N{REPLACEMENT CHARACTER}")
        if not is_partial or len(pending) >= MAX_BYTES_OF_CHARACTER:
            tokens.append((text, int(label) != IGNORE))
            pending = []
        if len(tokens) >= MAX_TOKENS:
            break
    return tokens
