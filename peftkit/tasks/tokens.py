"""Tasks whose loss is one of tokens, and the one of them that most runs have: causal_lm.

Rows go through the model without padding where it keeps documents apart; logits are made of the
target tokens alone, chunk by chunk.

Shapes: B rows, T tokens, n target tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn

from peftkit.data.encode import DocumentEncoder
from peftkit.data.field_names import FieldNames
from peftkit.data.pack import IGNORE, PackedRows, Row, collate, padded
from peftkit.data.row_text import labelled_segments
from peftkit.data.rows.columns import StoredRows
from peftkit.data.rows.lazy import LazyRows
from peftkit.data.style import Style
from peftkit.defaults import should_pack
from peftkit.errors import PeftkitError
from peftkit.events import Listener, Notice, ignore
from peftkit.execution.plan import ExecutionPlan
from peftkit.forward.attention import TrainingAttention, training_attention
from peftkit.forward.loss import accepted, head_of, perplexity, token_loss, unwrapped
from peftkit.forward.padding_free import faster, laid_out, layout_in, num_positions, unpadded
from peftkit.forward.probes import can_unpad, check_causal, check_packing
from peftkit.settings import CHAT, DataConfig
from peftkit.tasks.base import Task
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.rows import PLAIN_PROMPTS, TEXTS_WITH_TURNS, exact_length, turns_in


class TokenTask(Task):
    """A task whose loss is one of tokens.

    Its batches have target_index (n,), positions in the flattened tokens; targets (n,), the tokens
    to predict there; and what the model reads.

    Attributes:
        example: What the model needs next to tokens, to be probed with a few of them.
        input_names: What the model reads of a padded batch.
    """

    predicts_tokens: ClassVar[bool] = True
    is_causal: ClassVar[bool] = True
    """Whether no token depends on those after it."""
    is_padded: ClassVar[bool] = False
    """Whether rows stay padded even where the model could do without."""
    example: Mapping[str, Tensor] = {}
    input_names: tuple[str, ...] = ("input_ids",)
    _attention: TrainingAttention | None = None
    """The model's, while it trains on rows without padding."""

    def build(self, model: nn.Module) -> None:
        super().build(model)
        self._head = head_of(model, self.example)
        pads = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        self._pad_id: int = next(int(token) for token in pads if token is not None)

    @property
    def paths(self) -> dict[str, str]:
        """Whether logits are made in chunks, and whether rows are padded."""
        loss = "label rows alone, in chunks" if self._head else "label rows, all logits at once"
        if self._attention is None:
            return {"loss": loss, "rows": "padded"}
        rows = "without padding" + ", common beginnings once" * self.is_causal
        return {"attention": self._attention.kernel, "loss": loss, "rows": rows}

    @contextmanager
    def training(self, model: nn.Module, plan: ExecutionPlan | None = None) -> Iterator[None]:
        """Train with the attention of a plan, and without padding where the model allows it."""
        bare = unwrapped(model)
        if not self.is_padded:
            with training_attention(bare, plan) as attention:
                if attention is not None and can_unpad(model, attention, share=self.is_causal):
                    self._attention = attention
                    try:
                        yield
                    finally:
                        self._attention = None
                    return
        with training_attention(bare, plan, documents=False):
            yield

    def num_positions(self, rows: Sequence[Any]) -> int:
        as_padded = len(rows) * padded(*rows)
        if self._attention is None:
            return as_padded
        lengths = [n for row in rows for n in getattr(row, "lengths", (padded(row),))]
        if self._attention.takes_spans:
            return sum(lengths)
        return min(as_padded, num_positions(lengths))

    def without_padding(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a padded batch in one row where that is faster."""
        if self._attention is None:
            return batch
        if self._attention.takes_spans:
            return unpadded(batch, share=self.is_causal, spans=True)
        return faster(batch, unpadded(batch, share=self.is_causal))

    def inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what the model reads of a padded batch."""
        return {name: batch[name] for name in self.input_names}

    @contextmanager
    def model_inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[Any]:
        """Yield the model's arguments, its attention knowing the layout of the batch.

        The layout stays for the backward pass, which may compute blocks again.
        """
        inputs: Mapping[str, Any] = laid_out(batch, self._attention)
        if layout_in(batch) is None:
            inputs = self.inputs(model, batch)
        yield accepted(model, {**inputs, "use_cache": False})
        if not torch.is_grad_enabled():
            self.forget_layout()

    def forget_layout(self) -> None:
        """Have attention take each row as one document again, after a training step."""
        if self._attention is not None:
            self._attention.layout = None

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        with self.model_inputs(model, batch) as inputs:
            loss = token_loss(model, self._head, inputs, batch["target_index"], batch["targets"])
        return loss[None]

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of target tokens; it never waits for the GPU."""
        return batch["targets"].numel()

    @torch.no_grad()
    def metrics(
        self, model: nn.Module, rows: Sequence[Any], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return loss (nats per target token) and perplexity."""
        means, num_tokens = self.mean_loss(model, rows, on_event)
        return {**means, "perplexity": perplexity(means["loss"]), "num_tokens": num_tokens}

    def spans(self, row: Any) -> list[tuple[str, str]]:
        return labelled_segments(row, self.text, "learnt")

    def text(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Return tokens as text, with or without special tokens."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
        )

    # Answers that are generated while it trains.

    @property
    def prompt_style(self) -> Style:
        """How prompts are written, once rows were encoded."""
        assert self._style is not None, "no rows have been encoded"
        return self._style

    def prompted(self, row: Any) -> list[Row]:
        """Return the documents of a row whose last answer the model may be asked for."""
        return [each for each in row.documents if each.labels[0] == IGNORE and each.num_targets]

    def answer_metrics(
        self, pairs: Sequence[tuple[str, str]], rows: Sequence[Any]
    ) -> dict[str, float]:
        """Return how good generated answers are.

        Args:
            pairs: Each answer and its reference. rows: The row of each.
        """
        return {"exact_match": share_equal(pairs)}


def share_equal(pairs: Sequence[tuple[str, str]]) -> float:
    """Return the share of pairs whose texts are equal but for the space around them."""
    return sum(a.strip() == b.strip() for a, b in pairs) / len(pairs)


class CausalLM(TokenTask):
    """Learn what the assistant says, or what completes a prompt.

    Args:
        model: Probed: how long a row it reads and, for packing, whether documents that share a row
            are isolated.

    Raises:
        BaseError: The model is not causal.
        DataError: Packing was asked for and the model does not isolate documents; a chat template
            or a length that cannot be.
    """

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
        self._has_rows = False
        super().build(model)
        self.max_length = exact_length(model, self.tokenizer, self.data.max_length)
        self._check_packing(model)
        if self.data.packing:  # elsewhere the model would look for documents in the positions
            self.input_names = ("input_ids", "position_ids")
        is_plain = self._style is not None and self._style.kind == "plain"
        self.row_encoder = DocumentEncoder(
            self.tokenizer,
            self.template,
            "prompt_completion" if is_plain and self.config.fields else self.data.format,
            self.max_length,
            self.config.fields,
            self.reasoning,
        )

    def check(self, rows: StoredRows) -> None:
        is_first = self._style is None
        super().check(rows)
        is_plain = rows.agreed["style"] == "plain" and rows.agreed["format"] == "prompt_completion"
        has_template = self.template is not None or self.tokenizer.chat_template
        if not is_first or self.data.format != "auto":
            return
        if is_plain and has_template:
            self._on_event(Notice(PLAIN_PROMPTS))
        elif rows.agreed["format"] == "text":
            beginning = self.text(rows[0].input_ids)
            if mark := turns_in(beginning, self.tokenizer, self.template):
                self._on_event(Notice(TEXTS_WITH_TURNS.format(mark)))

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
            reason = error.found or str(error)
            self._on_event(Notice(f"Rows are not packed, which only takes longer. {reason}"))

    def prepare_rows(self, rows: LazyRows) -> LazyRows:
        """Return the rows packed, if requested; by default only where there are enough of them."""
        if not self.data.packing or not len(rows):
            return rows
        packed = PackedRows(rows, self.max_length)
        is_first, self._has_rows = not self._has_rows, True
        if is_first and not self.data.packing_is_explicit and not should_pack(len(packed)):
            self.data = self.data.without_packing()  # of eval rows and further files, too
            return rows
        share = int(rows.num_tokens.sum()) / (len(packed) * self.max_length)
        self._on_event(
            Notice(
                f"Packed {len(rows):,} documents into {len(packed):,} rows of up to "
                f"{self.max_length:,} tokens, {share:.0%} full."
            )
        )
        return packed

    def collate(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return a batch (see `peftkit.data.pack.collate`), in one row if that is faster."""
        return self.without_padding(collate(rows, self._pad_id, self.max_length))


class AnswerConfig(TaskConfig):
    """Base of the configs of causal language models that answer prompts."""

    task_type: ClassVar[str] = "CAUSAL_LM"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    command: ClassVar[str] = "peftkit chat {folder}"
    generates: ClassVar[bool] = True
    writes_text: ClassVar[bool] = True


class CausalLMConfig(AnswerConfig):
    """Causal language modelling: chat, instructions, completions, plain text."""

    data_fields: ClassVar[frozenset[str]] = frozenset(
        {"format", "max_length", "packing", *CHAT, "reasoning", "max_dropped"}
    )

    type: Literal["causal_lm"] = "causal_lm"

    prompt: str | None = None
    """Field with the prompt, as text; null: as data.format says. On a base with a chat template it
    is a user's message, unless data.format is prompt_completion."""
    completion: str | None = None
    """Field with what completes it, or answers the message; set both or neither."""

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
