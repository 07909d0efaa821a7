"""Checks of a file's rows: the share of dropped rows, and their length."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from peftkit.data.chat import SENTINEL, Chat
from peftkit.data.rows.columns import StoredRows
from peftkit.errors import BaseError, DataError, first_few
from peftkit.forward.loss import unwrapped
from peftkit.model.places import num_embeddings, num_virtual
from peftkit.settings import DataConfig

MAX_NAMED = 5
ALPACA_MARK = "### Response:"
NO_TEMPLATE = (
    "The base has no chat template: prompts use Stanford Alpaca's '### Instruction: ...' format. "
    "To add a template, set data.chat_template to chatml or a .jinja file."
)
PLAIN_PROMPTS = (
    "Rows of prompt and completion are trained as plain text, without the base's chat template. "
    "To train a chat, set task: {type: causal_lm, prompt: prompt, completion: completion}. To "
    "silence this notice, set data.format: prompt_completion."
)
TEXTS_WITH_TURNS = (
    "The rows are texts with turn markers ({}): the loss covers questions as well as answers, and "
    "prompts at inference get no such markers. For a loss over answers only, use rows of messages, "
    "or of instruction and output. To silence this notice, set data.format: text."
)
TRAINED_SYSTEM = "Rows without a system turn use the system prompt of training: {}."


def check_dropped(rows: StoredRows, data: DataConfig, drops: Mapping[str, str]) -> None:
    """Refuse a file with too many dropped rows.

    Args:
        drops: Reasons to drop a row, each with a fix; see `RowEncoder.drops`.

    Raises:
        DataError: No row is left, or the dropped share exceeds `data.max_dropped`.
    """
    dropped = {reason: rows.dropped(reason) for reason in drops}
    number = sum(map(len, dropped.values()))
    if not len(rows):
        problem = f"Cannot train on {rows.where}: no row has a target token."
    elif number / rows.num_read > data.max_dropped:
        problem = (
            f"Cannot use {rows.where}: {number} of {rows.num_read} rows cannot be trained on, "
            f"more than data.max_dropped ({data.max_dropped:.0%}) allows."
        )
    else:
        return
    reasons = {reason: sources for reason, sources in dropped.items() if sources}
    lines = [f"{reason.capitalize()}: {named(sources)}" for reason, sources in reasons.items()]
    fix = ", ".join([*(drops[reason] for reason in reasons), "or remove these rows."])
    raise DataError(problem, found="\n".join(lines), fix=fix[:1].upper() + fix[1:])


def named(sources: Sequence[str]) -> str:
    """Return "3 (a.jsonl:1, a.jsonl:5, a.jsonl:9)", at most MAX_NAMED of them."""
    if not sources:
        return "0"
    return f"{len(sources):,} ({first_few(sources, MAX_NAMED, ', ')})"


def off_prompt(where: str, number: int) -> str:
    """Return the notice for rows whose answers do not follow the generation prompt."""
    return (
        f"{where}: in {number:,} rows the answer does not begin right after the chat template's "
        "generation prompt (it may open a <think> that the rows lack). Generation will therefore "
        "start differently from training. To change the prompt, set data.chat_template."
    )


def turns_in(text: str, tokenizer: Any, template: str | None) -> str:
    """Return the turn marker in a text, of the chat template or Alpaca's; "" if it has none."""
    marks = [ALPACA_MARK]
    if template is not None or tokenizer.chat_template:
        with suppress(DataError):
            turns = [{"role": "user", "content": SENTINEL}]
            before = Chat(tokenizer, template).render(turns, (), "").split(SENTINEL)[0].strip()
            marks.append(before.rpartition("\n")[2])
    return next((mark for mark in marks if mark and mark in text), "")


NO_LIMIT = 1_000_000  # tokenizers without a limit say 1e30


def exact_length(model: nn.Module, tokenizer: Any, max_length: int | None) -> int:
    """Return the maximum row length in tokens: `max_length`, or the model's limit if it is None.

    Raises:
        DataError: The model's limit is lower than `max_length`, or unknown.
    """
    limit = _positions(model)
    if max_length is None:
        limits = [limit, tokenizer.model_max_length]
        finite = [int(n) for n in limits if n is not None and 0 < n < NO_LIMIT]
        if not finite:
            raise DataError(
                "Cannot determine the maximum row length (data.max_length: null).",
                found="Neither the model nor its tokenizer has a limit.",
                fix="Set data.max_length, for example to 1024.",
            )
        return min(finite)
    if limit is not None and max_length > limit:
        raise DataError(
            f"Cannot use data.max_length: {max_length}.",
            found=f"The model reads at most {limit} tokens (its config's max_position_embeddings).",
            fix=f"Set data.max_length to {limit} or less, or to null.",
        )
    return max_length


def longest(model: nn.Module, tokenizer: Any, max_length: int | None) -> int:
    """Return the maximum row length in tokens: the lower of `max_length` and the model's limit.

    For tasks that cut rows: encoders read 512 tokens, less than the default.
    """
    limit = _positions(model)
    for module in model.modules():  # RoBERTa's positions start after the padding id
        if isinstance(module, nn.Embedding) and module.num_embeddings == limit:
            limit -= 0 if module.padding_idx is None else module.padding_idx + 1
            break
    limits = (limit, max_length, tokenizer.model_max_length)
    finite = [int(n) for n in limits if n is not None and 0 < n < NO_LIMIT]
    return min(finite) if finite else exact_length(model, tokenizer, max_length)


def _positions(model: nn.Module) -> int | None:
    from peftkit.forward.row_lengths import context_length

    limit = context_length(unwrapped(model).config)
    return None if limit is None else limit - num_virtual(model)


def check_tokens(
    rows: StoredRows, limit: int, tokenizer: Any, placeholders: Collection[int]
) -> None:
    """Refuse rows with a token that has no row in the embedding.

    Args:
        placeholders: Tokens that the model replaces before its embedding.

    Raises:
        DataError: Names the first such row and token.
    """
    if rows.highest_token < limit:
        return
    for row in rows:
        ids = {*getattr(row, "input_ids", ()), *getattr(row, "labels", ())}.difference(placeholders)
        if (token := max(ids, default=0)) >= limit:
            text = tokenizer.convert_ids_to_tokens(token)
            raise DataError(
                f"Cannot use {row.source}: the base has no embedding of its token {text!r}.",
                found=f"The token has the id {token:,}; the embedding has {limit:,} rows.",
                fix=f"Train a row for it, base.new_tokens: [{json.dumps(text)}], or remove it from "
                "the rows and the chat template.",
            )


def check_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """Refuse a tokenizer whose vocabulary is larger than the model's embedding.

    Added tokens do not count: some models replace image tokens before the embedding.

    Raises:
        BaseError: The vocabulary is too large.
    """
    words = getattr(tokenizer, "vocab_size", None)
    rows = num_embeddings(unwrapped(model))
    if words is not None and rows is not None and words > rows:
        raise BaseError(
            f"The vocabulary of the tokenizer is too large for {type(unwrapped(model)).__name__}.",
            found=f"The tokenizer has {words:,} tokens, the model {rows:,} embeddings.",
            fix="Use the base's own tokenizer.",
        )
