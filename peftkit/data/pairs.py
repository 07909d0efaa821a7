"""Pairs of a source and a target, for models with an encoder and a decoder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from peftkit.data.cache import tokenizer_key
from peftkit.data.columns import Dropped
from peftkit.data.encode import SpecialTokens
from peftkit.data.encoding import EncodedRows, RowEncoder
from peftkit.data.format import (
    Completion,
    Example,
    FieldNames,
    Instruction,
    ParsedRow,
    parse,
)
from peftkit.data.load import Record
from peftkit.errors import DataError


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts."""

    given: str
    target: str
    source: str


@dataclass(frozen=True, slots=True)
class PairRow:
    """A source and its target as tokens.

    Args:
        input_ids: The source's, with what the tokenizer puts around them.
        labels: The target's, all of them learnt; the last is the end token unless it was cut.
        target: The target as the file has it.
        source: "train.jsonl:7".
    """

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    target: str
    source: str

    @property
    def num_decoder_tokens(self) -> int:
        """How many tokens the decoder reads: its start instead of the last label."""
        return len(self.labels)


def read_pairs(
    records: Sequence[Record], name: Any, fields: FieldNames | None, where: str
) -> tuple[list[Pair], ParsedRow]:
    """Return the pairs of a file, and what it was read as.

    Args:
        name: The format, or "auto".
        fields: Names of the fields with the source and the target, instead of a format.

    Raises:
        DataError: Rows that are no pairs; names them.
    """
    parsed = parse(records, name, where=where, fields=fields)
    return [_pair(example) for example in parsed.examples], parsed


class PairEncoder(RowEncoder):
    """Makes rows of pairs; those of which one of the two texts is empty are dropped.

    Args:
        name, fields: See `read_pairs`.
        prefix: Put before every source.
        max_source, max_target: Longest in tokens; longer ones are cut.
    """

    kind: ClassVar[type[PairRow]] = PairRow
    drops: Mapping[str, str] = {"source or target is empty": "give these rows both"}

    def __init__(
        self,
        tokenizer: Any,
        name: Any,
        fields: FieldNames | None,
        *,
        prefix: str,
        max_source: int,
        max_target: int,
    ) -> None:
        self._tokenizer, self._name, self._fields = tokenizer, name, fields
        self._end, self._prefix = tokenizer.eos_token_id, prefix
        self._frame = SpecialTokens(tokenizer)
        self._room, self._max_target = max_source - self._frame.size, max_target
        if self._room < 1:
            raise DataError(
                f"Cannot use data.max_length: {max_source}.",
                found=f"The tokenizer alone puts {self._frame.size} tokens around a text.",
                fix="Set it to 128, for example.",
            )

    def key(self, where: str) -> object:
        known = (self._name, self._fields, self._prefix, self._room, self._max_target)
        return (*tokenizer_key(self._tokenizer), *known)

    def read(self, records: Sequence[Record], where: str) -> tuple[list[Pair], ParsedRow]:
        return read_pairs(records, self._name, self._fields, where)

    def rows(self, read: tuple[list[Pair], ParsedRow]) -> EncodedRows:
        pairs, parsed = read
        counts = Counter[str]()
        rows = [self.encode(pair, counts) or Dropped(pair.source, 0) for pair in pairs]
        return EncodedRows(rows, {"format": parsed.format}, counts, parsed.unused)

    def encode(self, pair: Pair, counts: Counter[str]) -> PairRow | None:
        """Return a row, cut where it is too long; None where one of the two texts is empty."""
        ids = self._frame.tokens(self._prefix + pair.given)
        if not ids or not pair.target.strip():
            return None
        labels = self._frame.put_around(self._frame.tokens(pair.target))
        if self._end is not None and labels[-1] != self._end:
            labels.append(int(self._end))
        counts["cut sources"] += len(ids) > self._room
        counts["cut targets"] += len(labels) > self._max_target
        labels = labels[: self._max_target]
        counts["targets"] += len(labels)
        return PairRow(
            input_ids=tuple(self._frame.put_around(ids[: self._room])),
            labels=tuple(labels),
            target=pair.target,
            source=pair.source,
        )


def _pair(example: Example) -> Pair:
    if isinstance(example, Completion):
        return Pair(example.prompt, example.completion, example.source)
    if isinstance(example, Instruction):
        return Pair(example.request, example.output, example.source)
    raise DataError(
        f"Cannot make a source and a target from {example.source}.",
        found=f"It is a {type(example).__name__.lower()}.",
        fix='Give rows {"prompt": "...", "completion": "..."} or {"instruction": "...", '
        '"output": "..."}, or name the fields: task.source and task.target.',
    )
