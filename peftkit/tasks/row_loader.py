"""Files to encoded rows: the counts, checks and prompt style of a task's data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn

from peftkit.data.chat import SENTINEL, Chat
from peftkit.data.chat_template import choose_template, own_template, shortened
from peftkit.data.encode import agreed_style
from peftkit.data.generation import template_of
from peftkit.data.records import sources_of
from peftkit.data.rows.cache import encoded
from peftkit.data.rows.columns import StoredRows
from peftkit.data.rows.encoder import RowEncoder
from peftkit.data.rows.lazy import LazyRows, weighted
from peftkit.data.style import STYLES, Style
from peftkit.errors import BaseError, DataError, first_few
from peftkit.events import Listener, Notice, Stage, Table
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


class RowLoader:
    """Reads files as rows of a task, and reports what it read.

    The arguments are those of `Task`.

    Attributes:
        encoder: Encodes records as rows; the task's `build` sets it.
        max_length: Maximum tokens of a row; the task's `build` sets it.
        template: The chat template that replaces the tokenizer's own, if any.
        reasoning: How the assistant's reasoning is handled.
        check_first: Checks the first row of each file, if set.
        num_embeddings: Rows of the model's token embedding; None: it reads no tokens.
    """

    encoder: RowEncoder
    max_length: int = 0
    check_first: Callable[[Any], None] | None = None
    num_embeddings: int | None = None

    def __init__(
        self, processor: Any, data: DataConfig, style: Style | None, on_event: Listener
    ) -> None:
        self.tokenizer: Any = getattr(processor, "tokenizer", processor)
        self.processor, self.data, self.style, self.on_event = processor, data, style, on_event
        self._files: list[StoredRows] = []
        if style is None or style.kind != "chat":
            self.reasoning: str = data.reasoning
            self.template = choose_template(
                processor, data.chat_template, data.chat_template_kwargs
            )
            return
        self.template, self.reasoning = style.chat_template, style.reasoning
        if style.system and processor is self.tokenizer:
            self.template = template_of(processor, style)
            self.style = replace(style, chat_template=self.template)
            on_event(Notice(TRAINED_SYSTEM.format(shortened(style.system))))

    @property
    def prompt_style(self) -> Style:
        """The style of prompts, available after rows were encoded."""
        assert self.style is not None, "no rows have been encoded"
        return self.style

    def load(self, where: str) -> LazyRows:
        """Read a file or data set (see `DataConfig.train`) as rows, and emit their counts.

        Rows stay on disk: each is read from the cache on access.

        Raises:
            DataError: Rows cannot be used; the message lists them.
            RunError: The disk is full.
        """
        return self.prepare(self.encode(where))

    def load_splits(self, data: DataConfig) -> tuple[LazyRows, Sequence[Any]]:
        """Return the training rows and the eval rows of a recipe's data section.

        Raises:
            DataError: Rows cannot be used; or no row, or every row, is held out.
        """
        if isinstance(data.eval, float):
            return self._split(data, data.eval)
        trained = [(self.load(source.path), source.weight) for source in sources_of(data)]
        style = self.style
        held = self.load(data.eval) if data.eval else []
        self.style = style  # keeps the system prompt of the training rows
        return weighted(trained), held

    def _split(self, data: DataConfig, share: float) -> tuple[LazyRows, LazyRows]:
        """Hold out a share of the rows of each source."""
        trained, held = [], []
        for source in sources_of(data):
            parts = self.encode(source.path).held_out(share)
            rows, held_out = map(self.prepare, parts)
            trained.append((rows, source.weight))
            held.append((held_out, 1.0))
        for use, parts_of_all in (("held out", held), ("left to train on", trained)):
            if not sum(len(rows) for rows, _ in parts_of_all):
                raise DataError(
                    f"Cannot hold out the share {share} (data.eval) of {data.train_name}.",
                    found=f"No row is {use}.",
                    fix="Set another share, or a file.",
                )
        return weighted(trained), weighted(held)

    def check(self, rows: StoredRows) -> None:
        """Refuse a file that cannot be used for training; adopt its prompt style.

        Raises:
            DataError: Too many rows were dropped, or their styles differ.
        """
        if "style" in rows.agreed:
            kind = next(name for name in STYLES if name == rows.agreed["style"])
            is_chat = kind == "chat"
            system = rows.shared.get("system")
            style = Style(kind, self.template, self.reasoning, system) if is_chat else Style(kind)
            if self.style is None and kind == "alpaca":
                self.on_event(Notice(NO_TEMPLATE))
            is_first = not self._files
            self.style = agreed_style(self.style, style, rows.where, of_adapter=is_first)
        check_dropped(rows, self.data, self.encoder.reasons)
        if number := rows.counts["off_prompt"]:
            self.on_event(Notice(off_prompt(rows.where, number)))
        limit = self.num_embeddings
        if limit is not None and rows.highest_token >= limit:
            check_tokens(rows, limit, self.tokenizer, self.encoder.placeholders)
        self.encoder.check(rows)
        if self.check_first is not None:
            self.check_first(rows[0])

    def prepare(self, rows: LazyRows) -> LazyRows:
        """Return encoded rows in the form that the model is trained on, for example packed."""
        return self.encoder.prepare(rows)

    def encode(self, where: str) -> StoredRows:
        """Return the encoded rows of a file; emit a table of counts."""
        where = self.encoder.file_of(where)
        self.encoder.drops_invalid = self.data.drop_invalid
        self.on_event(Stage(f"Reading {where}"))
        rows = encoded(where, self.encoder, on_event=self.on_event)
        counts = {
            "num_read": rows.num_read,
            "num_cut": sum(n for name, n in rows.counts.items() if name.startswith("cut")),
            "num_dropped": rows.num_dropped,
        }
        summary = (
            f"{where}: {counts['num_read']:,} rows read, {counts['num_cut']:,} cut, "
            f"{counts['num_dropped']:,} dropped"
        )
        lines, columns = tuple(self._table(rows)), ("what", "how many")
        self.on_event(Table(f"Data: {where}", columns, lines, summary, where, counts))
        self.check(rows)
        self._report_duplicates(rows)
        return rows

    def _table(self, rows: StoredRows) -> Iterator[tuple[str, str]]:
        if "format" in rows.agreed:
            yield "format", rows.agreed["format"]
        yield "rows read", f"{rows.num_read:,}"
        yield "rows kept", f"{len(rows):,}"
        if "cut" in rows.counts:
            yield f"cut at {self.max_length:,} tokens", f"{rows.counts['cut']:,}"
        if self.data.chat_template_kwargs and "style" in rows.agreed:
            pairs = self.data.chat_template_kwargs.items()
            yield "chat template", ", ".join(f"{name}: {value}" for name, value in pairs)
        if "system" in rows.shared:
            yield "system prompt of all rows", shortened(rows.shared["system"])
        if rows.counts["thoughts"]:
            yield f"turns with reasoning ({self.reasoning})", f"{rows.counts['thoughts']:,}"
        if rows.counts["unwritten"]:
            yield "turns whose reasoning the template omits", f"{rows.counts['unwritten']:,}"
        yield from self.encoder.summary(rows)
        for reason in self.encoder.reasons:
            yield f"dropped: {reason}", named(rows.dropped(reason))
        if tokens := int(rows.num_tokens.sum()):
            yield "tokens", f"{tokens:,}"
            sizes = rows.num_tokens.sort().values[[len(rows) // 2, len(rows) * 19 // 20, -1]]
            yield "tokens of a row: median, 95 %, longest", ", ".join(map("{:,}".format, sizes))
        if "targets" in rows.counts:
            yield "target tokens", f"{rows.counts['targets']:,}"
        if unused := [name for name in rows.unused if not self._is_in_template(name)]:
            yield "fields not used", ", ".join(unused)

    def _is_in_template(self, path: str) -> bool:
        """Return whether a key of a turn, or a variable, is one that the chat template reads."""
        key = re.fullmatch(r"(?:\w+\[\]|chat_template_kwargs)\.(\w+)", path)
        text = self.template or own_template(self.processor)
        return key is not None and re.search(rf"\b{key[1]}\b", text) is not None

    def _report_duplicates(self, rows: StoredRows) -> None:
        """Report duplicate rows of a file, and rows that an earlier file has too."""
        if number := rows.num_duplicates:
            text = f"{rows.where}: {number:,} of {len(rows):,} rows repeat an earlier one."
            self.on_event(Notice(text))
        for other in self._files:
            if number := rows.num_shared(other):
                same = "It is the same file." if other.where == rows.where else ""
                text = (
                    f"{number:,} of {len(rows):,} rows of {rows.where} are in {other.where} too: "
                    f"metrics on them do not measure generalization. {same}"
                )
                self.on_event(Notice(text.rstrip()))
        self._files.append(rows)


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


def check_vocabulary(model: nn.Module, tokenizer: object) -> None:
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
