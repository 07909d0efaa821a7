"""Checks of a file's rows: how many were dropped, and how long they may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from peftkit.data.chat import SENTINEL, Chat
from peftkit.data.rows.columns import StoredRows
from peftkit.errors import BaseError, DataError, first_few
from peftkit.forward.loss import unwrapped
from peftkit.model.places import num_virtual, unwrap_adapter
from peftkit.settings import DataConfig

MAX_NAMED = 5
ALPACA_MARK = "### Response:"
NO_TEMPLATE = (
    "The base has no chat template: prompts become '### Instruction: ...', as Stanford Alpaca's. "
    "data.chat_template: chatml, or a .jinja file, gives it one."
)
PLAIN_PROMPTS = (
    "Rows of prompt and completion are learnt as plain text, without the base's chat template. "
    "For a chat set task: {type: causal_lm, prompt: prompt, completion: completion}; data.format: "
    "prompt_completion leaves this notice out."
)
TEXTS_WITH_TURNS = (
    "The rows are texts that hold turns ({}): questions are learnt like answers, and later prompts "
    "are sent as they are, without such marks. Rows of messages, or of instruction and output, are "
    "learnt on their answers alone; data.format: text leaves this notice out."
)
TRAINED_SYSTEM = "Rows without a system turn are read with that of training: {}."


def check_dropped(rows: StoredRows, data: DataConfig, drops: Mapping[str, str]) -> None:
    """Refuse a file with too many dropped rows.

    Args:
        drops: Why rows are dropped, and how to avoid it; see `RowEncoder.drops`.

    Raises:
        DataError: None is left, or a larger share than `data.max_dropped` was dropped.
    """
    dropped = {why: rows.dropped(number) for number, why in enumerate(drops)}
    number = sum(map(len, dropped.values()))
    if not len(rows):
        problem = f"Cannot train on {rows.where}: no row has a target token."
    elif number / rows.num_read > data.max_dropped:
        problem = (
            f"Cannot use {rows.where}: {number} of {rows.num_read} rows have nothing to train on, "
            f"more than data.max_dropped ({data.max_dropped:.0%}) allows."
        )
    else:
        return
    reasons = {why: sources for why, sources in dropped.items() if sources}
    found = "\n".join(f"{why.capitalize()}: {named(sources)}" for why, sources in reasons.items())
    fix = ", ".join([*(drops[why] for why in reasons), "or remove these rows."])
    raise DataError(problem, found=found, fix=fix[:1].upper() + fix[1:])


def named(sources: Sequence[str]) -> str:
    """Return "3 (a.jsonl:1, a.jsonl:5, a.jsonl:9)", at most MAX_NAMED of them."""
    if not sources:
        return "0"
    return f"{len(sources):,} ({first_few(sources, MAX_NAMED, ', ')})"


def off_prompt(where: str, number: int) -> str:
    """Return the notice on rows whose answers do not follow the generation prompt."""
    return (
        f"{where}: in {number:,} rows the answer does not begin right after the chat template's "
        "generation prompt (it may open a <think> that the rows lack). Generation will start "
        "differently from training; data.chat_template can change that."
    )


def turns_in(text: str, tokenizer: Any, template: str | None) -> str:
    """Return what marks a turn in a text: of the chat template, or of Alpaca; "" if nothing."""
    marks = [ALPACA_MARK]
    if template is not None or tokenizer.chat_template:
        with suppress(DataError):
            turns = [{"role": "user", "content": SENTINEL}]
            before = Chat(tokenizer, template).render(turns, (), "").split(SENTINEL)[0].strip()
            marks.append(before.rpartition("\n")[2])
    return next((mark for mark in marks if mark and mark in text), "")


# Length.


NO_LIMIT = 1_000_000  # tokenizers without a limit say 1e30


def exact_length(model: nn.Module, tokenizer: Any, max_length: int | None) -> int:
    """Return the longest row in tokens: `max_length`, or the model's limit where it is None.

    Raises:
        DataError: The model's limit is lower, or unknown.
    """
    limit = _positions(model)
    if max_length is None:
        limits = [limit, tokenizer.model_max_length]
        finite = [int(n) for n in limits if n is not None and 0 < n < NO_LIMIT]
        if not finite:
            raise DataError(
                "Cannot tell how long a row may be (data.max_length: null).",
                found="Neither the model nor its tokenizer says how many tokens it can read.",
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
    """Return the longest row in tokens: the lower of `max_length` and the model's limit.

    For tasks that cut rows: encoders read 512 tokens, less than the default.
    """
    limit = _positions(model)
    for module in model.modules():  # RoBERTa begins to count after the padding's id
        if isinstance(module, nn.Embedding) and module.num_embeddings == limit:
            limit -= 0 if module.padding_idx is None else module.padding_idx + 1
            break
    limits = (limit, max_length, tokenizer.model_max_length)
    finite = [int(n) for n in limits if n is not None and 0 < n < NO_LIMIT]
    return min(finite) if finite else exact_length(model, tokenizer, max_length)


def _positions(model: nn.Module) -> int | None:
    config = unwrapped(model).config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len")  # the latter is MPT's
    limit = next((getattr(config, name) for name in names if hasattr(config, name)), None)
    return None if limit is None else int(limit) - num_virtual(model)


def check_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """Refuse a tokenizer whose vocabulary is larger than the model's embedding.

    Added tokens do not count: some models replace those of images before the embedding.

    Raises:
        BaseError: The vocabulary is too large.
    """
    words, embedding = getattr(tokenizer, "vocab_size", None), None
    if words:
        with suppress(NotImplementedError):  # of models that read no tokens, such as wav2vec2
            embedding = unwrapped(model).get_input_embeddings()
    if embedding is not None:
        embedding = unwrap_adapter(embedding)
    # not the shape of its weight, which may have to be unpacked, or be in parts
    rows = getattr(embedding, "num_embeddings", words)
    if words is not None and rows is not None and words > rows:
        raise BaseError(
            f"{type(unwrapped(model)).__name__} does not know all tokens of its tokenizer.",
            found=f"The tokenizer has {words:,} tokens, the model {rows:,} embeddings.",
            fix="Give the base its own tokenizer.",
        )
