"""Causal language modelling: learn what the assistant says, or what completes a prompt.

Shapes: B rows, T tokens, n learnt tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import model_validator
from torch import Tensor, nn

from peftkit.data.documents import DocumentEncoder
from peftkit.data.format import FieldNames
from peftkit.data.lazy_rows import LazyRows, PackedRows
from peftkit.data.load import CHAT, DataConfig
from peftkit.errors import PeftkitError
from peftkit.events import Notice
from peftkit.kernels.context import Context
from peftkit.tasks.context_parallel import ContextParallelTask
from peftkit.tasks.isolation import Isolation, check_causal, check_packing, isolating_mask
from peftkit.tasks.protocol import TaskConfig
from peftkit.tasks.token_task import AnswerTask


class CausalLM(AnswerTask):
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
        data: DataConfig,
        config: CausalLMConfig | None = None,
        **more: Any,
    ) -> None:
        check_causal(model)
        config = config or CausalLMConfig()
        super().__init__(model, tokenizer, config, data, **more)
        self.isolation = self._isolation_in(model)
        self.row_encoder = DocumentEncoder(
            tokenizer, self.template, data.format, self.max_length, config.fields, self.reasoning
        )

    def _isolation_in(self, model: nn.Module) -> Isolation | None:
        """Return how packed documents are kept apart; None where they are not to be packed."""
        if not self.data.packing:
            return None
        try:
            return check_packing(model)
        except PeftkitError as error:
            if self.data.asks_to_pack:
                raise
            self.data = self.data.without_packing()
            found = error.found or str(error)
            self._on_event(Notice(f"Rows are not packed, which only takes longer. {found}"))
            return None

    def prepare_rows(self, rows: LazyRows) -> LazyRows:
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

    def in_parts(self, context: Context) -> ContextParallelTask:
        return ContextParallelTask(self, context)

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


class CausalLMConfig(TaskConfig):
    """Causal language modelling: chat, instructions, completions, plain text."""

    task_type: ClassVar[str] = "CAUSAL_LM"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    command: ClassVar[str] = "peftkit chat {folder}"
    generates: ClassVar[bool] = True
    writes_text: ClassVar[bool] = True
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
        return FieldNames.given(prompt=self.prompt, completion=self.completion)

    @staticmethod
    def task(
        model: nn.Module, tokenizer: Any, config: CausalLMConfig, data: DataConfig, **more: Any
    ) -> CausalLM:
        return CausalLM(model, tokenizer, data, config, **more)
