"""Tasks with a loss over tokens, and causal_lm, the task of most runs.

Batches are padding-free where the model keeps documents apart. Only the logits of target tokens are
computed, in chunks.

Shapes: B rows, T tokens, n target tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from peftkit.config.lazy import LazyMap
from peftkit.data.encode import DocumentEncoder
from peftkit.data.format import FieldNames, parse
from peftkit.data.pack import IGNORE, PackedRows, Row, collate, labelled_segments
from peftkit.data.records import parts, sources_of
from peftkit.data.rows.columns import StoredRows
from peftkit.data.rows.lazy import LazyRows
from peftkit.data.tokens import decoded
from peftkit.defaults import should_pack
from peftkit.errors import PeftkitError
from peftkit.events import Listener, Notice, ignore
from peftkit.execution.plan import ExecutionPlan
from peftkit.forward.batch_layout import BatchLayout
from peftkit.forward.loss import (
    accepted,
    head_of,
    perplexity,
    target_logits,
    target_rows,
    token_loss,
)
from peftkit.forward.padding_free import layout_in
from peftkit.forward.probes import check_causal, check_packing
from peftkit.forward.row_lengths import limits_of
from peftkit.settings import CHAT, DataConfig
from peftkit.tasks.base import Task, mean_loss
from peftkit.tasks.completions import CompletingTask
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.row_loader import (
    PLAIN_PROMPTS,
    TEXTS_WITH_TURNS,
    RowLoader,
    exact_length,
    turns_in,
)

IGNORED = {"target_index": 0, "targets": IGNORE}
"""Targets that a loss over tokens ignores."""


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
            beginning = decoded(self.tokenizer, rows[0].input_ids, special=True)
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


class TokenTask(Task):
    """A task with a loss over tokens.

    Its batches hold target_index (n,), positions in the flattened tokens; targets (n,), the tokens
    to predict there; and the model's inputs.

    Attributes:
        layout: Padded or padding-free batches. `build` sets the default; a subclass may replace it
            afterwards.
        example: Inputs other than tokens that a probe of the model needs.
        input_names: Entries of a padded batch that the model reads.
        head: Computes logits from hidden states; None if the model's head cannot run alone.
        pad_id: Token of the padding.
    """

    predicts_tokens: ClassVar[bool] = True
    example: Mapping[str, Tensor] = {}
    input_names: tuple[str, ...] = ("input_ids",)

    def build(self, model: nn.Module) -> None:
        super().build(model)
        self.layout = BatchLayout()
        if limits_of(model).document and "attention_mask" not in self.input_names:
            self.input_names = (*self.input_names, "attention_mask")  # where a row ends
        self.head = head_of(model, self.example)
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        self.pad_id: int = next(int(token) for token in ids if token is not None)

    @property
    def paths(self) -> dict[str, str]:
        """How logits are computed, and whether rows are padded."""
        loss = "label rows alone, in chunks" if self.head else "label rows, all logits together"
        return {"loss": loss, **self.layout.paths}

    def training(
        self, model: nn.Module, plan: ExecutionPlan | None = None
    ) -> AbstractContextManager[object]:
        return self.layout.training(model, plan)

    def num_positions(self, rows: Sequence[Any]) -> int:
        return self.layout.num_positions(rows)

    def inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the model's inputs for a padded batch."""
        return {name: batch[name] for name in self.input_names}

    @contextmanager
    def model_inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[Any]:
        """Yield the model's arguments; its attention has the layout of the batch.

        The layout stays for the backward pass, which may recompute blocks.
        """
        inputs = self.layout.inputs(batch)
        if layout_in(batch) is None:
            inputs = self.inputs(model, batch)
        yield accepted(model, {**inputs, "use_cache": False})
        if not torch.is_grad_enabled():
            self.layout.forget()

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        with self.model_inputs(model, batch) as inputs:
            loss = token_loss(model, self.head, inputs, batch["target_index"], batch["targets"])
        return loss[None]

    def before_head(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the head's input at targets (n, H); logits (n, V) if it cannot run alone."""
        compute = target_logits if self.head is None else target_rows
        with self.model_inputs(model, batch) as inputs:
            return compute(model, inputs, batch["target_index"])

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of target tokens, without synchronizing with the GPU."""
        return batch["targets"].numel()

    @torch.no_grad()
    def metrics(
        self, model: nn.Module, rows: Sequence[Any], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss; of tokens of text (nats per target token) with its perplexity."""
        if not self.predicts_tokens:
            return super().metrics(model, rows, on_event=on_event)
        means, num_targets = mean_loss(self, model, rows, on_event)
        return {**means, "perplexity": perplexity(means["loss"]), "num_targets": num_targets}

    def spans(self, row: Any) -> list[tuple[str, str]]:
        return labelled_segments(row, self.text, "learnt")

    def text(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Return tokens as text, with or without special tokens."""
        return decoded(self.tokenizer, ids, special=special)


class CausalLM(CompletingTask, TokenTask):
    """Supervised fine-tuning: the loss of the assistant's turns, or of completions.

    Raises:
        BaseError: The model is not causal.
        DataError: The recipe requests packing, and the model does not isolate documents; or a chat
            template or length is invalid.
    """

    row_loader: ClassVar[type[PackingLoader]] = PackingLoader
    ignored_targets: ClassVar[Mapping[str, int] | None] = IGNORED
    rows: PackingLoader

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
        rows = self.rows
        rows.max_length = exact_length(model, self.tokenizer, rows.data.max_length)
        rows.check_packing(model)
        # without position_ids the model would merge documents
        if rows.data.packing and not rows.by_document:
            self.input_names = ("input_ids", "position_ids")
        is_plain = rows.style is not None and rows.style.kind == "plain"
        rows.encoder = DocumentEncoder(
            self.tokenizer,
            rows.template,
            "prompt_completion" if is_plain and self.config.fields else rows.data.format,
            rows.max_length,
            self.config.fields,
            rows.reasoning,
        )

    def collate(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return a batch (see `peftkit.data.pack.collate`), padding-free if that is faster."""
        return self.layout.unpadded(self.padded(self._apart(rows)))

    def padded(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return a batch, padded on the right."""
        # beside packed documents padding is a document: of zeros some norms have no gradient
        pad = rows[0].input_ids[0] if self.rows.data.packing else self.pad_id
        return collate(rows, pad, self.rows.max_length)

    def num_positions(self, rows: Sequence[Row]) -> int:
        return self.layout.num_positions(self._apart(rows))

    def _apart(self, rows: Sequence[Row]) -> Sequence[Row]:
        if not self.rows.by_document:
            return rows
        return [document for row in rows for document in row.documents]


VARIANTS = LazyMap[type[CausalLM]]({"anchor": "peftkit.tasks.text.anchor:AnchoredLM"})
"""Subclasses by the setting that selects them."""


class AnswerConfig(TaskConfig):
    """Base of the configs of causal language models that answer prompts."""

    task_type: ClassVar[str] = "CAUSAL_LM"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    command: ClassVar[str] = "peftkit chat {folder}"
    generates: ClassVar[bool] = True
    writes_text: ClassVar[bool] = True


class CausalLMConfig(AnswerConfig):
    """Causal language modelling: chat, instructions, completions, plain text."""

    evaluates_answers: ClassVar[bool] = True
    data_fields: ClassVar[frozenset[str]] = frozenset(
        {"format", "max_length", "packing", *CHAT, "reasoning"}
    )

    type: Literal["causal_lm"] = "causal_lm"

    prompt: str | None = None
    """Field with the prompt, as text; null: data.format decides. If the base has a chat template,
    the prompt is a user message, unless data.format is prompt_completion."""
    completion: str | None = None
    """Field with the completion, or the reply to the message; set both fields or neither."""

    anchor: float | None = Field(default=None, gt=0)
    """Weight of the KL divergence, in nats per token, from the model before training on its own
    answers to general prompts: limits what the run changes elsewhere; null: no anchor."""

    @model_validator(mode="after")
    def _check_fields(self) -> CausalLMConfig:
        _ = self.fields
        return self

    @property
    def fields(self) -> FieldNames | None:
        """The two named fields."""
        return FieldNames.of(prompt=self.prompt, completion=self.completion)

    def resolve(self, data: DataConfig) -> CausalLMConfig:
        """Check the format and the fields of each file's first rows, before the base is loaded."""
        for source in () if data.drop_invalid else sources_of(data):
            for part in islice(parts(source.path), 1):
                parse(part(), data.format, where=source.path, fields=self.fields)
        return self

    @staticmethod
    def task(
        model: nn.Module, tokenizer: Any, config: CausalLMConfig, data: DataConfig, **more: Any
    ) -> CausalLM:
        if config.anchor is not None:
            return VARIANTS["anchor"](model, tokenizer, data, config, **more)
        return CausalLM(model, tokenizer, data, config, **more)
