"""The interface of a task's row encoder, which needs no model."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from peftkit.data import records
from peftkit.data.messages import system_of
from peftkit.data.records import Dropped, Part, Record
from peftkit.data.style import Style

if TYPE_CHECKING:
    from peftkit.data.rows.columns import StoredRows
    from peftkit.data.rows.lazy import LazyRows


@dataclass(slots=True)
class EncodedRows:
    """The rows of some records.

    Attributes:
        rows: Rows in the order of the records, and `Dropped` for records without a row.
        agreed: Names and values that all rows of a file must share: the format.
        shared: Names and values stored only if all rows of a file share them: the system prompt.
        counts: Names and counts that are summed over the file.
        unused: Fields that no record used.
    """

    rows: list[Any]
    agreed: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    unused: tuple[str, ...] = ()
    shared: dict[str, str] = field(default_factory=dict)


INVALID, INVALID_FIX = "invalid", "set data.drop_invalid: false, which reports each error"
"""Reason to drop a record that cannot be used."""


class RowEncoder(ABC):
    """Encoder of records as a task's rows; needs no model.

    Attributes:
        kind: The rows' dataclass, with a field `source`.
        in_processes: Whether several processes may encode a file.
        at_once: Records that are encoded between two reports of progress.
        drops: Reasons to drop a record, each with a fix.
        placeholders: Tokens that the model replaces before its embedding.
        drops_invalid: Whether records that cannot be used are dropped instead of refused.
        tokenizer, settings: What rows depend on, for `key`.
    """

    kind: ClassVar[type[Any]]
    in_processes: ClassVar[bool] = True
    at_once: ClassVar[int] = 1_000
    drops: Mapping[str, str] = MappingProxyType({})
    placeholders: Collection[int] = ()
    drops_invalid: bool = False
    tokenizer: Any
    settings: tuple[object, ...] = ()

    @property
    def reasons(self) -> Mapping[str, str]:
        """All reasons to drop a record, each with a fix."""
        return {**self.drops, INVALID: INVALID_FIX} if self.drops_invalid else self.drops

    def key(self, where: str) -> object:
        """Return everything that rows depend on, except the file's bytes and the code."""
        return (*tokenizer_key(self.tokenizer), *self.settings)

    def encode_records(self, records: Sequence[Record], where: str) -> EncodedRows:
        """Parse records and encode them; raises DataError for records that cannot be used."""
        self.counts.clear()
        return self.rows(self.read(records, where))

    @cached_property
    def counts(self) -> Counter[str]:
        """Counts by name, which `read` and `row` increase."""
        return Counter()

    @abstractmethod
    def read(self, records: Sequence[Record], where: str) -> Any:
        """Parse records without tokenising them; by default to a `ParsedRow`.

        Raises:
            DataError: Records cannot be used; names the first few.
        """

    def rows(self, read: Any) -> EncodedRows:
        """Encode the result of `read`: each example that is not `Dropped`, by `row`."""
        rows = [e if isinstance(e, Dropped) else self.row(e) for e in read.examples]
        examples = [self.example_of(e) for e in read.examples if not isinstance(e, Dropped)]
        agreed, shared = self.agreed(examples, read.format), shared_system(examples)
        return EncodedRows(rows, agreed, Counter(self.counts), read.unused, shared)

    def row(self, example: Any) -> Any:
        """Return the row of an example, or `Dropped`."""
        raise NotImplementedError

    def example_of(self, example: Any) -> Any:
        """Return the part of an example that has the prompt style and the system prompt."""
        return example

    def style_of(self, example: Any) -> Style | None:
        """Return the prompt style of a part of an example; None: the task has no prompts."""
        return None

    def agreed(self, examples: Sequence[Any], form: str) -> dict[str, str]:
        """Return names and values that all rows of a file must share: the format, the style."""
        style = self.style_of(examples[0]) if examples else None
        values = {"format": form, "style": style and style.kind}
        return {name: value for name, value in values.items() if value}

    def parts(self, where: str) -> Iterator[Part]:
        """Yield functions, each of which reads some records, in the order of the file."""
        return records.parts(where)

    def stamp(self, where: str) -> object | None:
        """Return a value that changes with rows from other sources than a file; None: unknown."""
        return records.stamp_of(where)

    def file_of(self, where: str) -> str:
        """Return the file with the records of a source, which may be a folder of media."""
        return where

    def summary(self, rows: StoredRows) -> Sequence[tuple[str, str]]:
        """Return lines on a file's rows for the table of counts: what, and how many."""
        return ()

    def check(self, rows: StoredRows) -> None:
        """Refuse a file by its rows, with a DataError."""
        return None

    def prepare(self, rows: LazyRows) -> LazyRows:
        """Return the rows that the model is trained on, made of the encoded ones."""
        return rows


def shared_system(examples: Iterable[object]) -> dict[str, str]:
    """Return the system prompt of all examples, for `EncodedRows.shared`; {} if they differ."""
    systems = {system_of(getattr(example, "messages", ())) for example in examples}
    return {"system": systems.pop()} if len(systems) == 1 and "" not in systems else {}


def tokenizer_key(tokenizer: Any) -> tuple[object, ...]:
    """Return everything in a tokenizer that affects tokens, for `RowEncoder.key`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    settings = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    if backend is not None:
        for name in ("truncation", "padding"):  # set by the last call
            settings.pop(name, None)
    return (
        type(tokenizer).__name__,
        hashlib.sha256(json.dumps(settings).encode()).hexdigest(),
        sorted(tokenizer.special_tokens_map.items()),
        tokenizer.chat_template,
        getattr(tokenizer, "init_kwargs", {}).get("add_bos_token"),
    )
