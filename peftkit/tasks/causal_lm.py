"""Causal language modelling: learn what the assistant says, or what completes a prompt.

Shapes: B rows, T tokens, n learnt tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from peftkit.data.chat import choose_template
from peftkit.data.encode import Encoder, Style
from peftkit.data.format import parse
from peftkit.data.load import DataConfig, read_records
from peftkit.data.pack import IGNORE, Row, collate, pack
from peftkit.errors import DataError, PeftkitError
from peftkit.events import Listener, Notice, Progress, Stage, Table, ignore
from peftkit.tasks.head import TokenTask, head_of
from peftkit.tasks.isolation import Isolation, check_causal, check_packing, isolating_mask
from peftkit.tasks.length import exact_length
from peftkit.tasks.protocol import TaskConfig, mean_loss
from peftkit.tasks.rows import check_dropped, named
from peftkit.train.metrics import perplexity

PROGRESS_EVERY = 500


@dataclass(slots=True)
class _Counts:
    """What became of the rows of one file."""

    read: int = 0
    truncated: int = 0
    masked: list[str] = field(default_factory=list)
    cut_away: list[str] = field(default_factory=list)


class CausalLM(TokenTask):
    """The task: rows from files, batches from rows, a loss from batches.

    Args:
        model: What will be trained; asked how long a row it can read, and, for packing, whether
            documents that share a row are isolated.
        style: How the adapter in hand was trained to be prompted; None: the rows decide.

    Raises:
        BaseError: The model is not causal.
        DataError: Packing was asked for and the model does not isolate documents; a chat template
            or a length that cannot be.
    """

    is_causal: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        config: DataConfig,
        *,
        style: Style | None = None,
        on_event: Listener = ignore,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        check_causal(model)
        self.max_length = exact_length(model, tokenizer, config.max_length)
        self.isolation = self._isolation_in(model, on_event)
        self._head = head_of(model)
        template = choose_template(tokenizer, config.chat_template)
        if style is not None and style.kind == "chat":
            template = style.chat_template
        self._encoder = Encoder(tokenizer, template)
        self._style = style
        self._on_event = on_event
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self._pad_id: int = next(token for token in pads if token is not None)

    def _isolation_in(self, model: nn.Module, on_event: Listener) -> Isolation | None:
        """Return how packed documents are kept apart; None where they are not to be packed."""
        if not self.config.packing:
            return None
        try:
            return check_packing(model)
        except PeftkitError as error:
            if self.config.asks_to_pack:
                raise
            self.config = self.config.without_packing()
            found = error.found or str(error)
            on_event(Notice(f"Rows are not packed, which only takes longer. {found}"))
            return None

    def data_used(self, data: DataConfig) -> DataConfig:
        return self.config

    @property
    def style(self) -> Style:
        """How generation has to prompt a model that learnt from the rows encoded so far."""
        assert self._style is not None, "no rows have been encoded"
        return self._style

    def load(self, where: str) -> list[Row]:
        """Read a file or data set (see `DataConfig.train`), encode it, pack it if asked.

        Raises:
            DataError: As `encode` does.
        """
        rows = self.encode(where)
        if self.isolation is None:
            return rows
        packed = pack(rows, self.max_length)
        share = sum(len(row.input_ids) for row in rows) / (len(packed) * self.max_length)
        self._on_event(
            Notice(
                f"Packed {len(rows):,} documents into {len(packed):,} rows of up to "
                f"{self.max_length:,} tokens, {share:.0%} full."
            )
        )
        return packed

    def encode(self, where: str) -> list[Row]:
        """Read a file or data set and encode it, one document per row; emits the counts.

        Raises:
            DataError: Named rows cannot be used; too many have nothing to learn; they have to be
                prompted in another style than the rows before.
        """
        self._on_event(Stage(f"Reading {where}"))
        parsed = parse(read_records(where), self.config.format, where=where)
        self._agree_on_style(self._encoder.style(parsed.examples[0]), where)
        counts = _Counts(read=len(parsed.examples))
        off_prompt = self._encoder.num_off_prompt
        rows: list[Row] = []
        for number, example in enumerate(parsed.examples):
            if number % PROGRESS_EVERY == 0:
                self._on_event(Progress(f"Encoding {where}", number, counts.read))
            row = self._cut(self._encoder.encode(example), counts)
            if row is not None:
                rows.append(row)
        self._report(where, parsed.format, parsed.unused, rows, counts)
        why = {
            "Nothing to learn (no answer)": counts.masked,
            f"The answer lies beyond {self.max_length} tokens": counts.cut_away,
        }
        fix = "Raise data.max_length" if counts.cut_away else "Give these rows an answer"
        check_dropped(where, counts.read, why, self.config, fix)
        if self._encoder.num_off_prompt > off_prompt:
            self._on_event(
                Notice(
                    f"{where}: in {self._encoder.num_off_prompt - off_prompt} rows the answer does "
                    "not begin right after the chat template's generation prompt (it may open a "
                    "<think> that the rows lack). Generation will start otherwise than training "
                    "did; data.chat_template can change that."
                )
            )
        return rows

    def padded(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return a batch, padded on the right (see `peftkit.data.pack.collate`)."""
        return collate(rows, self._pad_id, self.max_length)

    def inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the tokens alone, unless documents share a row.

        A causal model needs no mask of padding, and without positions it looks for no documents.
        """
        inputs: dict[str, Any] = {"input_ids": batch["input_ids"]}
        if self.isolation is not None:
            inputs["position_ids"] = batch["position_ids"]
        if self.isolation == "mask":
            inputs["attention_mask"] = isolating_mask(model, batch["position_ids"])
        return inputs

    def spans(self, row: Row) -> list[tuple[str, str]]:
        """Return a row's text in pieces, each with "learnt" or "" before it."""
        pieces = groupby(
            zip(row.input_ids, row.labels, strict=True), key=lambda pair: pair[1] != IGNORE
        )
        return [
            ("learnt" if learnt else "", self._text([token for token, _ in pairs]))
            for learnt, pairs in pieces
        ]

    def metrics(
        self, model: nn.Module, rows: Sequence[Row], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return loss (nats per learnt token) and perplexity."""
        loss, num_tokens = mean_loss(self, model, rows, on_event=on_event)
        return {"loss": loss, "perplexity": perplexity(loss), "num_tokens": num_tokens}

    def last_answer(self, row: Row) -> tuple[list[int], str]:
        """Return what comes before a document's last learnt answer, and the answer's text."""
        stop = max(n for n, label in enumerate(row.labels) if label != IGNORE) + 1
        start = stop
        while start > 0 and row.labels[start - 1] != IGNORE:
            start -= 1
        answer = self.tokenizer.decode(row.input_ids[start:stop], skip_special_tokens=True)
        return list(row.input_ids[:start]), str(answer)

    def _text(self, ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _agree_on_style(self, style: Style, where: str) -> None:
        if self._style is None:
            self._style = style
        if self._style != style:
            raise DataError(
                f"Cannot use {where} here.",
                found=f"Its rows are prompted in the style '{style.kind}', "
                f"the others in the style '{self._style.kind}'.",
                fix="Give rows of one format, or set data.format and data.chat_template.",
            )

    def _cut(self, row: Row, counts: _Counts) -> Row | None:
        """Return a row of at most max_length tokens; None where nothing is left to learn."""
        if row.num_targets == 0:
            counts.masked.append(row.source)
            return None
        if len(row.input_ids) <= self.max_length:
            return row
        cut = replace(
            row,
            input_ids=row.input_ids[: self.max_length],
            labels=row.labels[: self.max_length],
            lengths=(self.max_length,),
        )
        if cut.num_targets == 0:
            counts.cut_away.append(row.source)
            return None
        counts.truncated += 1
        return cut

    def _report(
        self, where: str, name: str, unused: Sequence[str], rows: Sequence[Row], counts: _Counts
    ) -> None:
        tokens = sum(len(row.input_ids) for row in rows)
        targets = sum(row.num_targets for row in rows)
        lines = [
            ("format", name),
            ("rows read", f"{counts.read:,}"),
            ("rows kept", f"{len(rows):,}"),
            (f"cut at {self.max_length:,} tokens", f"{counts.truncated:,}"),
            ("dropped: nothing to learn", named(counts.masked)),
            ("dropped: the answer lies beyond the cut", named(counts.cut_away)),
            ("tokens", f"{tokens:,}"),
            ("learnt tokens", f"{targets:,}"),
        ]
        if unused:
            lines.append(("fields not used", ", ".join(unused)))
        self._on_event(Table(f"Data: {where}", ("what", "how many"), tuple(lines)))


class CausalLMConfig(TaskConfig):
    """Causal language modelling: chat, instructions, completions, plain text."""

    task_type: ClassVar[str] = "CAUSAL_LM"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    command: ClassVar[str] = "peftkit chat {folder}"
    generates: ClassVar[bool] = True
    writes_text: ClassVar[bool] = True
    data_fields: ClassVar[frozenset[str]] = frozenset(
        {"format", "max_length", "packing", "chat_template", "max_dropped"}
    )

    type: Literal["causal_lm"] = "causal_lm"

    def on(
        self,
        model: nn.Module,
        processor: Any,
        data: DataConfig,
        *,
        style: Style | None = None,
        on_event: Listener = ignore,
    ) -> CausalLM:
        return CausalLM(model, processor, data, style=style, on_event=on_event)
