"""All tasks. A new one is a file in this folder and a line in this table."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from peftkit.config.lazy import LazyTable
from peftkit.tasks.config import TaskConfig

_ADDRESSES = {
    "causal_lm": "tokens:CausalLMConfig",
    "sequence_classification": "sequence_classification:SequenceClassificationConfig",
    "token_classification": "token_classification:TokenClassificationConfig",
    "seq2seq": "seq2seq:Seq2SeqConfig",
    "masked_lm": "masked_lm:MaskedLMConfig",
    "image_classification": "media_classification:ImageClassificationConfig",
    "image_text": "media_text:ImageTextConfig",
    "preference": "preference:PreferenceConfig",
    "distill": "distill:DistillConfig",
    "reward": "reward:RewardConfig",
    "embedding": "embedding:EmbeddingConfig",
    "grpo": "grpo:GRPOConfig",
    "reranker": "reranker:RerankerConfig",
    "transcription": "transcription:TranscriptionConfig",
    "ctc": "ctc:CTCConfig",
    "audio_classification": "media_classification:AudioClassificationConfig",
    "audio_text": "media_text:AudioTextConfig",
}
"""Module in this package, and class."""

TASKS = LazyTable[TaskConfig](
    {name: f"peftkit.tasks.{address}" for name, address in _ADDRESSES.items()}
)


def _spelled_out(value: object) -> Any:
    """Accept a task's type alone as a task with default settings."""
    return {"type": value} if isinstance(value, str) else value


_Section = Annotated[TaskConfig, TASKS]
AnyTask = Annotated[_Section, BeforeValidator(_spelled_out, json_schema_input_type=str | _Section)]
