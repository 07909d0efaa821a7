"""Causal language modelling: learn what the assistant says, or what completes a prompt.

Shapes: B rows, T tokens, n learnt tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from peftkit.data.chat import choose_template
from peftkit.data.documents import BEYOND, NOTHING, DocumentEncoder, style_of
from peftkit.data.encode import Style
from peftkit.data.lazy_rows import LazyRows, PackedRows
from peftkit.data.load import DataConfig
from peftkit.data.pack import IGNORE, Row, collate, last_answer
from peftkit.data.stored import StoredRows
from peftkit.errors import PeftkitError
from peftkit.events import Listener, Notice, ignore
from peftkit.kernels.context import Context
from peftkit.tasks.context_parallel import ContextParallelTask
from peftkit.tasks.head import TokenTask, head_of
from peftkit.tasks.isolation import Isolation, check_causal, check_packing, isolating_mask
from peftkit.tasks.length import exact_length
from peftkit.tasks.measure import mean_loss
from peftkit.tasks.protocol import TaskConfig
from peftkit.tasks.rows import agreed_style, check_dropped, named, off_prompt
from peftkit.train.metrics import perplexity


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
        self._template, self._style = template, style
        self.row_encoder = DocumentEncoder(tokenizer, template, config.format, self.max_length)
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

    def arranged(self, rows: LazyRows) -> LazyRows:
        """Return the rows packed, if asked."""
        if self.isolation is None or not len(rows):
            return rows
        packed = PackedRows(rows, self.max_length)
        share = int(rows.num_tokens.sum()) / (len(packed) * self.max_length)
        self._on_event(
            Notice(
                f"Packed {len(rows):,} documents into {len(packed):,} rows of up to "
                f"{self.max_length:,} tokens, {share:.0%} full."
            )
        )
        return packed

    def counts(self, rows: StoredRows) -> list[tuple[str, str]]:
        return [
            ("format", rows.agreed["format"]),
            ("rows read", f"{rows.num_read:,}"),
            ("rows kept", f"{len(rows):,}"),
            (f"cut at {self.max_length:,} tokens", f"{rows.counts['cut']:,}"),
            ("dropped: nothing to learn", named(rows.dropped(NOTHING))),
            ("dropped: the answer lies beyond the cut", named(rows.dropped(BEYOND))),
            ("tokens", f"{int(rows.num_tokens.sum()):,}"),
            ("learnt tokens", f"{rows.counts['targets']:,}"),
        ]

    def check(self, rows: StoredRows) -> None:
        style = style_of(rows.agreed, self._template)
        self._style = agreed_style(self._style, style, rows.where)
        cut_away = rows.dropped(BEYOND)
        why = {
            "Nothing to learn (no answer)": rows.dropped(NOTHING),
            f"The answer lies beyond {self.max_length} tokens": cut_away,
        }
        fix = "Raise data.max_length" if cut_away else "Give these rows an answer"
        check_dropped(rows.where, rows.num_read, why, self.config, fix)
        if number := rows.counts["off_prompt"]:
            self._on_event(Notice(off_prompt(rows.where, number)))

    def in_parts(self, context: Context) -> ContextParallelTask:
        return ContextParallelTask(self, context)

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
        return last_answer(self.tokenizer, row)

    def _text(self, ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


class CausalLMConfig(TaskConfig):
    """Causal language modelling: chat, instructions, completions, plain text."""

    task_type: ClassVar[str] = "CAUSAL_LM"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    command: ClassVar[str] = "peftkit chat {folder}"
    generates: ClassVar[bool] = True
    writes_text: ClassVar[bool] = True
    takes_parts: ClassVar[bool] = True
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
