"""Reward models: a head of one value, trained on pairs of a better and a worse answer.

The loss of a pair is -log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2
(Bradley and Terry; the margin of Llama 2, arXiv:2307.09288; the centring of arXiv:2312.09244).

Shapes: B pairs, 2 B documents: all chosen ones, then all rejected ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from peftkit.base.heads import ClassHead
from peftkit.data.chat import Chat
from peftkit.data.encode import Encoder
from peftkit.data.examples import Completion, Conversation, Example, Instruction, Text
from peftkit.data.format import parse
from peftkit.data.pack import padded_rows
from peftkit.data.preferences import NOTHING_TO_COMPARE, PAIRS, SIDES, Pair, read_pair
from peftkit.data.records import Dropped, Record
from peftkit.data.style import Style
from peftkit.data.tokens import special_tokens_around
from peftkit.errors import AdapterError
from peftkit.events import Listener, ignore
from peftkit.forward.loss import accepted, target_rows, unwrapped
from peftkit.model.modes import SideAdapter
from peftkit.settings import CHAT
from peftkit.tasks.base import Task
from peftkit.tasks.batches import BATCH_SIZE, equal_parts
from peftkit.tasks.config import Predicts, TaskConfig
from peftkit.tasks.texts import (
    Encoded,
    Texts,
    TextsEncoder,
    TextsRow,
    TextTask,
    head_logits,
    joined_texts,
)

OUTPUT = "reward"
"""Name of the head's one output."""


@dataclass(frozen=True, slots=True)
class RewardRow(TextsRow):
    """A pair: the chosen document, then the rejected one."""

    margin: float
    source: str


TOO_LONG = "an answer ends beyond data.max_length"
"""Reason to drop a pair; see `RowEncoder.drops`."""


class RewardEncoder(TextsEncoder):
    """Encoder of pairs; drops long pairs, since the reward is read at the last token."""

    kind: ClassVar[type[RewardRow]] = RewardRow
    what = PAIRS
    drops: Mapping[str, str] = {**NOTHING_TO_COMPARE, TOO_LONG: "raise data.max_length"}

    def __init__(self, texts: Texts, config: RewardConfig, template: str | None) -> None:
        super().__init__(texts, config)
        self.settings, tokenizer = (*self.settings, template), texts.tokenizer
        self._encoder, self._chat = Encoder(tokenizer, template), Chat(tokenizer, template)
        _, after = special_tokens_around(tokenizer, "a")
        self._frames = bool(after)  # an encoder's, as BERT's [SEP]

    def parse(self, record: Record, where: str) -> tuple[Pair | Dropped, Sequence[str]]:
        return read_pair(record, self.config.margin)

    def row(self, example: Pair) -> RewardRow | Dropped:
        chosen, rejected = self.encoded(example.chosen), self.encoded(example.rejected)
        if chosen.is_cut or rejected.is_cut:
            return Dropped(example.source, TOO_LONG)
        both = joined_texts([chosen, rejected])
        return RewardRow(**both, margin=example.margin or 0.0, source=example.source)

    def example_of(self, example: Pair) -> Example:
        return example.chosen

    def style_of(self, example: Example) -> Style:
        return self._encoder.style(example)

    def encoded(self, example: Example) -> Encoded:
        """Return the tokens of a prompt and its answer."""
        if self._frames:
            return self.texts.encode(self._as_text(example))
        ids = self._encoder.encode(example).input_ids
        return Encoded(ids[: self.texts.max_length], (), len(ids) > self.texts.max_length)

    def _as_text(self, example: Example) -> str:
        if isinstance(example, Conversation):
            return self._chat.render(
                example.messages, example.tools, example.source, variables=example.variables
            )
        if isinstance(example, Instruction):
            return f"{example.request}\n\n{example.output}"
        if isinstance(example, Completion):
            return example.prompt + example.completion
        return example.text


class Reward(TextTask):
    """A loss of the rewards of pairs of documents, by a head of one value."""

    metric_names = ("accuracy", "margin", "reward_chosen", "reward_rejected")

    def build(self, model: nn.Module) -> None:
        super().build(model)
        self.encoder = RewardEncoder(self.texts, self.config, self.rows.template)
        self.rows.encoder = self.encoder

    @property
    def paths(self) -> dict[str, str]:
        """Each document is a row of its own."""
        return {"pairs": "two rows"}

    def collate(self, rows: Sequence[RewardRow]) -> dict[str, Tensor]:
        """Return a batch of tokens (2 B, T), and margins (B,)."""
        ordered = [row.texts[side] for side in (0, 1) for row in rows]
        margins = torch.tensor([row.margin for row in rows])
        return {**self.texts.collate(ordered), "margins": margins}

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        return batch["margins"].numel()

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        chosen, rejected = self.values(model, batch).chunk(2)
        losses = -functional.logsigmoid(chosen - rejected - batch["margins"])
        if self.config.centring:
            losses = losses + self.config.centring * (chosen + rejected) ** 2
        good, bad = chosen.detach(), rejected.detach()
        figures = (good > bad, good - bad, good, bad)
        return torch.stack([losses.sum(), *(each.to(losses).sum() for each in figures)])

    def values(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the reward of each document of a batch, in fp32."""
        return head_logits(model, batch)[:, 0]

    def names(self, row: RewardRow) -> Sequence[str]:
        return SIDES

    def scores(
        self, model: nn.Module, examples: Sequence[Example], on_event: Listener = ignore
    ) -> list[float]:
        """Return the reward of each example; long ones are cut."""
        documents = [self.encoder.encoded(example) for example in examples]
        return self.for_each(model, documents, self.values, "Scoring", on_event)

    def predict_rows(
        self, model: nn.Module, records: Sequence[Record], on_event: Listener = ignore
    ) -> list[dict[str, object]]:
        """Return the score of each row, in any format with a text or a prompt and an answer."""
        parsed = parse(records, "auto", where=records[0].source.rpartition(":")[0])
        values = self.scores(model, parsed.examples, on_event)
        return [{"score": value} for value in values]

    def predict_texts(
        self, model: nn.Module, texts: Sequence[str | tuple[str, str]]
    ) -> list[dict[str, float]]:
        style = self.rows.style or Style("plain")
        examples = [
            Text(text, "the text") if isinstance(text, str) else answered(*text, style, "the text")
            for text in texts
        ]
        return [{"score": value} for value in self.scores(model, examples)]


class RewardConfig(TaskConfig):
    """Rewards: how good an answer is, trained on pairs of a better and a worse one."""

    task_type: ClassVar[str] = "SEQ_CLS"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    task: ClassVar[Callable[..., Task]] = Reward
    command: ClassVar[str] = "peftkit predict {folder} --data FILE --out scored.jsonl"
    num_texts: ClassVar[int] = 2
    predicts: ClassVar[frozenset[Predicts]] = frozenset({"texts", "rows"})
    data_fields: ClassVar[frozenset[str]] = frozenset({"max_length", *CHAT})

    type: Literal["reward"] = "reward"
    margin: str | None = None
    """Field with the margin between the two rewards; null: none."""
    centring: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared sum of both rewards, which centres them around 0; 0.01 is usual."""

    @property
    def head(self) -> ClassHead:
        return ClassHead((OUTPUT,), "regression")


# Rewards of a policy's answers.


def adapter_rewards(
    model: nn.Module,
    adapter: SideAdapter,
    tokenizer: object,
    style: Style,
    pad_id: int,
    prompts: Sequence[object],
    texts: Sequence[str],
) -> list[float]:
    """Return the rewards of answers to prompts, formatted as in the training of the adapter.

    Args:
        style: The format of prompts if the adapter has none.
        pad_id: The tokenizer's padding, for a model whose config names none.

    Raises:
        AdapterError: The adapter was trained on single prompts, and a prompt is a conversation.
    """
    style = adapter.style or style
    own_pad = unwrapped(model).config.get_text_config().pad_token_id
    pad_id = pad_id if own_pad is None else own_pad
    encoder = Encoder(tokenizer, style.chat_template)
    documents = [
        encoder.encode(answered(prompt, text, style, "an answer")).input_ids
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    rewards = [0.0] * len(documents)
    order = sorted(range(len(documents)), key=lambda n: len(documents[n]))
    with adapter.on(model):
        for part in equal_parts(order, 2 * BATCH_SIZE):
            ids, _ = padded_rows([documents[n] for n in part], pad_id)
            # as transformers' heads: the last token that is not padding, which may be the end token
            last = ((ids != pad_id) * torch.arange(ids.shape[1])).argmax(1)
            last += torch.arange(len(part)) * ids.shape[1]
            device = unwrapped(model).device
            inputs = accepted(model, {"input_ids": ids.to(device), "use_cache": False})
            values = adapter.values(target_rows(model, inputs, last.to(device)))
            for n, value in zip(part, values.tolist(), strict=True):
                rewards[n] = value
    return rewards


def answered(prompt: Any, text: str, style: Style, source: str) -> Example:
    """Return an answer to a prompt as an example of the adapter's training.

    Args:
        prompt: A text, or messages.

    Raises:
        AdapterError: The prompt is messages, and the adapter was trained on single prompts.
    """
    if isinstance(prompt, str):
        if style.kind == "plain":
            return Completion(prompt, text, source)
        return Instruction(prompt, "", text, source)
    if style.kind != "chat":
        raise AdapterError(
            "a reward adapter cannot read conversations",
            found="It was trained on single prompts.",
            fix="Train it on messages, or give prompts as text.",
        )
    turns = (*prompt, {"role": "assistant", "content": text})
    return Conversation(turns, (len(turns) - 1,), (), source)
