"""Rows of a causal language model, packed or not."""

from __future__ import annotations

from torch import nn

from peftkit.data.pack import PackedRows
from peftkit.data.rows.columns import StoredRows
from peftkit.data.rows.lazy import LazyRows
from peftkit.defaults import should_pack
from peftkit.errors import PeftkitError
from peftkit.events import Notice
from peftkit.forward.batch_layout import BatchLayout
from peftkit.forward.probes import check_packing
from peftkit.tasks.row_loader import RowLoader
from peftkit.tasks.rows import PLAIN_PROMPTS, TEXTS_WITH_TURNS, turns_in


class PackingLoader(RowLoader):
    """Reads files as rows of a causal language model, packed if data.packing is set."""

    _has_packed = by_document = False
    """by_document: whether the model isolates packed documents only in padding-free batches."""

    def check_packing(self, model: nn.Module) -> None:
        """Disable packing if it is the default and the model cannot isolate documents.

        Raises:
            PeftkitError: The recipe requests packing, and the model cannot isolate documents.
        """
        if not self.data.packing:
            return
        try:
            check_packing(model, self.max_length)
        except PeftkitError as error:
            with (layout := BatchLayout()).training(model):
                self.by_document = layout.attention is not None
            if self.by_document:
                return
            if self.data.packing_is_explicit:
                raise
            self.data = self.data.without_packing()
            reason = error.found or str(error)
            self.on_event(Notice(f"Rows are not packed; training takes longer. {reason}"))

    def check(self, rows: StoredRows) -> None:
        is_first = self.style is None
        super().check(rows)
        is_plain = rows.agreed["style"] == "plain" and rows.agreed["format"] == "prompt_completion"
        has_template = self.template is not None or self.tokenizer.chat_template
        if not is_first or self.data.format != "auto":
            return
        if is_plain and has_template:
            self.on_event(Notice(PLAIN_PROMPTS))
        elif rows.agreed["format"] == "text":
            beginning = str(
                self.tokenizer.decode(rows[0].input_ids, clean_up_tokenization_spaces=False)
            )
            if mark := turns_in(beginning, self.tokenizer, self.template):
                self.on_event(Notice(TEXTS_WITH_TURNS.format(mark)))

    def prepare(self, rows: LazyRows) -> LazyRows:
        """Return the rows, packed if the recipe requests it or if they are many enough."""
        if not self.data.packing or not len(rows):
            return rows
        packed = PackedRows(rows, self.max_length)
        is_first, self._has_packed = not self._has_packed, True
        if is_first and not self.data.packing_is_explicit and not should_pack(len(packed)):
            self.data = self.data.without_packing()  # eval rows and further files, too
            return rows
        share = int(rows.num_tokens.sum()) / (len(packed) * self.max_length)
        self.on_event(
            Notice(
                f"Packed {len(rows):,} documents into {len(packed):,} rows of up to "
                f"{self.max_length:,} tokens, {share:.0%} full."
            )
        )
        return packed
