"""Who teaches; and a teacher that is another model, with the same tokens and a head of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import model_validator
from torch import Tensor

from peftkit.config.schema import Config
from peftkit.errors import BaseError, ConfigError
from peftkit.events import Listener
from peftkit.tasks.loss import Head, accepted, head_of, target_rows


class TeacherConfig(Config):
    """Who is learnt from: the base without the adapter, another adapter on it, or another model."""

    prompt: str | None = None
    """A file that the teacher reads before a row: instructions as text (.md, .txt), with examples
    under the headings "## User" and "## Assistant"; or messages with role and content (.json,
    .jsonl)."""
    adapter: str | None = None
    """Folder of a LoRA on the same base; null: the base without an adapter."""
    model: str | None = None
    """Another model, with the same tokens: hub id, folder, .gguf file or short name."""

    @model_validator(mode="after")
    def _says_who(self) -> TeacherConfig:
        if self.adapter and self.model:
            raise ConfigError(
                "task.teacher names an adapter and a model.",
                found="A teacher is an adapter on the base, or another model.",
                fix="Leave one of them out; merge the adapter if it belongs to that model.",
            )
        if not (self.prompt or self.adapter or self.model):
            raise ConfigError(
                "task.teacher names nobody.",
                found="Without a prompt the base would teach itself.",
                fix="Name a prompt, an adapter or a model.",
            )
        return self


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model beside the base.

    Attributes:
        head: Makes its logits.
    """

    model: Any
    head: Head

    @property
    def hidden_size(self) -> int:
        """Of what reaches its head."""
        return int(self.model.config.get_text_config().hidden_size)

    @torch.no_grad()
    def hidden(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return what reaches its head (n, H) at the places of a padded batch."""
        asked = {"input_ids": batch["input_ids"], "use_cache": False}
        return target_rows(self.model, accepted(self.model, asked), batch["target_index"])


def other_model(
    name: str, student: Any, tokenizer: Any, head: Head | None, say: Listener
) -> OtherModel:
    """Load a teacher for a student's tokens.

    Args:
        student: The model that learns. head: Its own.

    Raises:
        BaseError: It has other tokens than the student, or a head that cannot be had apart.
    """
    from peftkit.base.load import load_base  # it takes seconds, and most teachers are the base

    loaded = load_base(name, device=student.device, on_event=say)
    asked = f"{name} cannot teach this base token by token"
    if loaded.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise BaseError(
            asked,
            found="Their tokenizers differ.",
            fix="Have it answer your questions (peftkit generate), and learn its answers: task: "
            "causal_lm; or take a teacher of the same family.",
        )
    own = head_of(loaded.model)
    if own is None or head is None or own.vocab_size != head.vocab_size:
        sizes = [each.vocab_size if each else "none" for each in (own, head)]
        raise BaseError(
            asked,
            found=f"Rows of their heads: {sizes[0]} and {sizes[1]}.",
            fix="Take a teacher whose head has as many rows.",
        )
    return OtherModel(loaded.model, own)
