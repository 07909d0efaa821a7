"""The first rows of a recipe, token by token, without the weights of its base."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from peftkit.base.load import processors_of
from peftkit.base.skeleton import find_config, hollow, on_meta, with_depth
from peftkit.data.pack import IGNORE
from peftkit.data.records import Record, sources_of
from peftkit.events import Event, Notice, ignore
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

    The task is created for a model of one block without weights: rows depend on the tokenizer and
    the config alone.

    Raises:
        PeftkitError: The base, its tokenizer or the rows cannot be read.
    """
    data = recipe.data.without_packing()
    config = recipe.task.resolve(data)
    location, base = find_config(recipe.base.model, recipe.base.revision, config.purpose)
    model = hollow(on_meta(with_depth(base, 1), config.purpose, torch.float32))
    notices: list[str] = []

    def collect(event: Event) -> None:
        if isinstance(event, Notice):
            notices.append(event.text)

    processors = processors_of(location, config.purpose, ignore)
    processor = next(filter(None, reversed(processors)))
    task = config.on(model, processor, data, on_event=collect)
    encoder = task.rows.encoder
    where = encoder.file_of(sources_of(data)[0].path)
    records: Iterator[Record] = (record for part in encoder.parts(where) for record in part())
    encoded = encoder.rows(encoder.read(list(islice(records, number)), where))
    return [_previewed(task, row) for row in encoded.rows], notices


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
