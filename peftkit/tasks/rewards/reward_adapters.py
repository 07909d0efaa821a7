"""Rewards of answers by a reward adapter over the policy's base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from peftkit.data.encode import Encoder
from peftkit.data.examples import Completion, Conversation, Example
from peftkit.data.pack import padded_rows
from peftkit.data.style import Style
from peftkit.errors import AdapterError
from peftkit.forward.loss import accepted, target_rows, unwrapped
from peftkit.model.modes import SideAdapter

BATCH_SIZE = 16


def adapter_rewards(
    model: nn.Module,
    adapter: SideAdapter,
    tokenizer: Any,
    style: Style,
    pad_id: int,
    prompts: Sequence[Any],
    texts: Sequence[str],
) -> list[float]:
    """Return the rewards of answers to prompts, formatted as in the training of the adapter.

    Args:
        style: The format of prompts if the adapter has none.

    Raises:
        AdapterError: The adapter was trained on single prompts, and a prompt is a conversation.
    """
    style = adapter.style or style
    encoder = Encoder(tokenizer, style.chat_template)
    documents = [
        encoder.encode(_example(prompt, text, style)).input_ids
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    rewards = [0.0] * len(documents)
    order = sorted(range(len(documents)), key=lambda n: len(documents[n]))
    with adapter.on(model):
        for start in range(0, len(order), BATCH_SIZE):
            part = order[start : start + BATCH_SIZE]
            ids, mask = padded_rows([documents[n] for n in part], pad_id)
            last = torch.arange(len(part)) * ids.shape[1] + mask.sum(1) - 1
            device = unwrapped(model).device
            inputs = accepted(model, {"input_ids": ids.to(device), "use_cache": False})
            values = adapter.values(target_rows(model, inputs, last.to(device)))
            for n, value in zip(part, values.tolist(), strict=True):
                rewards[n] = value
    return rewards


def _example(prompt: Any, text: str, style: Style) -> Example:
    if style.kind != "chat":
        if not isinstance(prompt, str):
            raise AdapterError(
                "a reward adapter cannot read conversations",
                found="It was trained on single prompts.",
                fix="Train it on messages, or give prompts as text.",
            )
        return Completion(prompt, text, "an answer")
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    turns = (*turns, {"role": "assistant", "content": text})
    return Conversation(turns, (len(turns) - 1,), (), "an answer")
