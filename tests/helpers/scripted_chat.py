"""A bank of models for chats with tools, which can be made to generate given texts."""

import json
from pathlib import Path
from typing import Any

import pytest

from peftkit.data.style import Style
from peftkit.inference.bank import AdapterBank
from peftkit.methods.lora import LoRA
from tests.helpers.bank import tiny_base, write_adapter
from tests.helpers.call_templates import SHORT

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
from peftkit_server.completions import ChatService
from peftkit_server.grammars import Grammar, Grammars

THINKS = "{% if enable_thinking %}T{% endif %}" + SHORT
STYLES = {
    "tools": Style("chat", SHORT),
    "thinks": Style("chat", THINKS),
    "plain": Style("plain"),
    "mute": Style("chat", "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"),
}


def scripted_bank(llama: Any, tokenizer: Any, folder: Path) -> AdapterBank:
    """Return a tiny base with an adapter of each style."""
    return AdapterBank(
        tiny_base(llama, tokenizer),
        {
            name: write_adapter(llama, LoRA(rank=2, alpha=4), folder / name, 1, prompt_style=style)
            for name, style in STYLES.items()
        },
    )


def make_say(monkeypatch: pytest.MonkeyPatch, bank: AdapterBank, *texts: str) -> None:
    """Make the model generate these texts, one for each request; the last one repeats."""
    base, left = bank.base, list(texts)
    grammars = Grammars(base.tokenizer, 384, [base.tokenizer.eos_token_id])

    def constraint(*_: Any) -> Any:
        text = left.pop(0) if len(left) > 1 else left[0]
        return grammars.constraint(Grammar(f"start: {json.dumps(text)}", is_lark=True))

    monkeypatch.setattr(ChatService, "_constraint", constraint)
