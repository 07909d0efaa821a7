"""Rows of one document each, for causal language modelling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from peftkit.data.cache import tokenizer_key
from peftkit.data.columns import Dropped
from peftkit.data.encode import Encoder, Style
from peftkit.data.encoding import EncodedRows, RowEncoder
from peftkit.data.format import FieldNames, ParsedRow, parse
from peftkit.data.load import FormatName, Record
from peftkit.data.pack import IGNORE, Row, cut_document
from peftkit.errors import DataError

NOTHING, BEYOND = 0, 1
"""Why a row is dropped: nothing to learn; its answer lies beyond the cut."""


class DocumentEncoder(RowEncoder):
    """Makes a row of tokens of each record, cut to a length.

    Args:
        template: A chat template's text, used instead of the tokenizer's own.
        fields: Names of those with prompt and completion, whatever the format.
    """

    kind: ClassVar[type[Row]] = Row
    drops: Mapping[str, str] = {
        "nothing to learn": "give these rows an answer",
        "the answer lies beyond the cut": "raise data.max_length",
    }

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        format: Literal["auto"] | FormatName,
        max_length: int,
        fields: FieldNames | None = None,
        reasoning: str = "learn",
    ) -> None:
        self._encoder = Encoder(tokenizer, template, reasoning)
        self._tokenizer, self._template, self._reasoning = tokenizer, template, reasoning
        self._format, self._max_length, self._fields = format, max_length, fields

    def key(self, where: str) -> object:
        known = (self._template, self._format, self._max_length, self._fields, self._reasoning)
        return (*tokenizer_key(self._tokenizer), *known)

    def read(self, records: Sequence[Record], where: str) -> ParsedRow:
        return parse(records, self._format, where=where, fields=self._fields)

    def rows(self, read: ParsedRow) -> EncodedRows:
        encoder, counts = self._encoder, Counter[str]()
        encoder.counts.clear()
        rows: list[Row | Dropped] = []
        for example in read.examples:
            row = encoder.encode(example)
            cut = cut_document(row, self._max_length)
            if cut.num_targets == 0:
                why = NOTHING if all(label == IGNORE for label in row.labels) else BEYOND
                rows.append(Dropped(row.source, why))
                continue
            counts["cut"] += len(row.input_ids) > self._max_length
            counts["targets"] += cut.num_targets
            rows.append(cut)
        counts.update(encoder.counts)
        style: str = encoder.style(read.examples[0]).kind
        return EncodedRows(rows, {"format": str(read.format), "style": style}, counts, read.unused)


def agreed_style(known: Style | None, style: Style, where: str) -> Style:
    """Return how rows are prompted, which is one way for all of a task's rows.

    Args:
        known: Of the rows before, or of the adapter in hand; None: these are the first.

    Raises:
        DataError: These rows are prompted in another style.
    """
    if known is not None and known != style:
        raise DataError(
            f"Cannot use {where} here.",
            found=f"Its rows are prompted in the style '{style.kind}', "
            f"the others in the style '{known.kind}'.",
            fix="Give rows of one format, or set data.format and data.chat_template.",
        )
    return style
