"""Causal language modelling: learn what the assistant says, or what completes a prompt.

Shapes: B rows, T tokens, n learnt tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import model_validator
from torch import Tensor, nn

from peftkit.data.encode import DocumentEncoder
from peftkit.data.format import FieldNames
from peftkit.data.pack import LazyRows, PackedRows
from peftkit.errors import PeftkitError
from peftkit.events import Notice
from peftkit.settings import CHAT, DataConfig
from peftkit.tasks.isolation import check_causal, check_packing
from peftkit.tasks.token_task import AnswerConfig, AnswerTask


class CausalLM(AnswerTask):
    """The task: rows from files, batches from rows, a loss from batches.

    Args:
        model: What will be trained; asked how long a row it can read, and, for packing, whether
            documents that share a row are isolated.

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
        data: DataConfig,
        config: CausalLMConfig | None = None,
        **more: Any,
    ) -> None:
        super().__init__(model, tokenizer, config or CausalLMConfig(), data, **more)

    def build(self, model: nn.Module) -> None:
        check_causal(model)
        super().build(model)
        self._check_packing(model)
        self.row_encoder = DocumentEncoder(
            self.tokenizer,
            self.template,
            self.data.format,
            self.max_length,
            self.config.fields,
            self.reasoning,
        )

    def _check_packing(self, model: nn.Module) -> None:
        """Leave packing out where it is only the default, and the model cannot do it."""
        if not self.data.packing:
            return
        try:
            check_packing(model)
        except PeftkitError as error:
            if self.data.packing_is_explicit:
                raise
            self.data = self.data.without_packing()
            found = error.found or str(error)
            self._on_event(Notice(f"Rows are not packed, which only takes longer. {found}"))

    def prepare_rows(self, rows: LazyRows) -> LazyRows:
        """Return the rows packed, if asked."""
        if not self.data.packing or not len(rows):
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

    def inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the tokens alone, unless documents share a row.

        A causal model needs no mask of padding, and without positions it looks for no documents.
        """
        names = ("input_ids", "position_ids") if self.data.packing else ("input_ids",)
        return {name: batch[name] for name in names}


class CausalLMConfig(AnswerConfig):
    """Causal language modelling: chat, instructions, completions, plain text."""

    takes_parts: ClassVar[bool] = True
    data_fields: ClassVar[frozenset[str]] = frozenset(
        {"format", "max_length", "packing", *CHAT, "reasoning", "max_dropped"}
    )

    type: Literal["causal_lm"] = "causal_lm"

    prompt: str | None = None
    """Field with the prompt, as text; null: as data.format says."""
    completion: str | None = None
    """Field with what completes it; set both or neither."""

    @model_validator(mode="after")
    def _both(self) -> CausalLMConfig:
        _ = self.fields
        return self

    @property
    def fields(self) -> FieldNames | None:
        """The two named fields."""
        return FieldNames.of(prompt=self.prompt, completion=self.completion)

    @staticmethod
    def task(
        model: nn.Module, tokenizer: Any, config: CausalLMConfig, data: DataConfig, **more: Any
    ) -> CausalLM:
        return CausalLM(model, tokenizer, data, config, **more)
