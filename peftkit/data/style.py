"""The prompt format of training, which an adapter stores for generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from peftkit.data.messages import Message, system_of

# prompts of Stanford Alpaca, for tokenizers without a chat template
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n"
)

StyleName = Literal["chat", "alpaca", "plain"]
STYLES: tuple[StyleName, ...] = get_args(StyleName)


@dataclass(frozen=True, slots=True)
class Style:
    """Prompt format of training, saved with an adapter for generation.

    Args:
        kind: chat: a chat template; alpaca: Alpaca's prompts; plain: unchanged text.
        chat_template: The template's text; None: the tokenizer's template.
        reasoning: See `DataConfig.reasoning`.
        system: The system prompt of all training rows, added to conversations without one.
    """

    kind: StyleName
    chat_template: str | None = None
    reasoning: str = "learn"
    system: str | None = None

    def opened(self, messages: Sequence[Message]) -> list[Message]:
        """Return a conversation, with the style's system turn if it has none."""
        if not self.system or system_of(messages):
            return list(messages)
        return [{"role": "system", "content": self.system}, *messages]
