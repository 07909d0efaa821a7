"""The table of all tasks.

Another package adds a task with an entry point of the group peftkit.tasks that names its config.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from peftkit.config.lazy import LazyTable
from peftkit.tasks.config import TaskConfig

_ADDRESSES = {
    "causal_lm": "tokens:CausalLMConfig",
    "sequence_classification": "classes.sequence_classification:SequenceClassificationConfig",
    "token_classification": "classes.token_classification:TokenClassificationConfig",
    "seq2seq": "text.seq2seq:Seq2SeqConfig",
    "masked_lm": "text.masked_lm:MaskedLMConfig",
    "image_classification": "media.media_classification:ImageClassificationConfig",
    "image_text": "media.media_text:ImageTextConfig",
    "preference": "pairs.preference:PreferenceConfig",
    "distill": "distill.distill:DistillConfig",
    "reward": "pairs.reward:RewardConfig",
    "embedding": "retrieval.embedding:EmbeddingConfig",
    "grpo": "rewards.grpo_config:GRPOConfig",
    "reranker": "retrieval.reranker:RerankerConfig",
    "transcription": "media.transcription:TranscriptionConfig",
    "ctc": "media.ctc:CTCConfig",
    "audio_classification": "media.media_classification:AudioClassificationConfig",
    "audio_text": "media.media_text:AudioTextConfig",
}
"""Module in this package, and the config's class."""

TASKS = LazyTable[TaskConfig](
    {name: f"peftkit.tasks.{address}" for name, address in _ADDRESSES.items()}, "peftkit.tasks"
)


def _expand(value: object) -> object:
    """Accept a task's type alone as a task with default settings."""
    return {"type": value} if isinstance(value, str) else value


_Section = Annotated[TaskConfig, TASKS]
AnyTask = Annotated[_Section, BeforeValidator(_expand, json_schema_input_type=str | _Section)]
