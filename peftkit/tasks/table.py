"""All tasks there are. A new one is a file beside this one and a line in this table."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field

from peftkit.tasks.audio_classification import AudioClassificationConfig
from peftkit.tasks.causal_lm import CausalLMConfig
from peftkit.tasks.ctc import CTCConfig
from peftkit.tasks.distill.task import DistillConfig
from peftkit.tasks.embedding import EmbeddingConfig
from peftkit.tasks.image_classification import ImageClassificationConfig
from peftkit.tasks.masked_lm import MaskedLMConfig
from peftkit.tasks.media_text import AudioTextConfig, ImageTextConfig
from peftkit.tasks.on_policy.task import GRPOConfig
from peftkit.tasks.preference.config import PreferenceConfig
from peftkit.tasks.protocol import TaskConfig
from peftkit.tasks.reranker import RerankerConfig
from peftkit.tasks.reward import RewardConfig
from peftkit.tasks.seq2seq import Seq2SeqConfig
from peftkit.tasks.sequence_classification import SequenceClassificationConfig
from peftkit.tasks.token_classification import TokenClassificationConfig
from peftkit.tasks.transcription import TranscriptionConfig


def _spelled_out(value: object) -> Any:
    """Let a task's type alone stand for a task without settings."""
    return {"type": value} if isinstance(value, str) else value


_AnyConfig = (
    CausalLMConfig
    | SequenceClassificationConfig
    | TokenClassificationConfig
    | Seq2SeqConfig
    | MaskedLMConfig
    | ImageClassificationConfig
    | ImageTextConfig
    | PreferenceConfig
    | DistillConfig
    | RewardConfig
    | EmbeddingConfig
    | GRPOConfig
    | RerankerConfig
    | TranscriptionConfig
    | CTCConfig
    | AudioClassificationConfig
    | AudioTextConfig
)
TASKS: dict[str, type[TaskConfig]] = {
    task.model_fields["type"].default: task for task in get_args(_AnyConfig)
}
_Section = Annotated[_AnyConfig, Field(discriminator="type")]
AnyTask = Annotated[_Section, BeforeValidator(_spelled_out, json_schema_input_type=str | _Section)]
