"""The ready-made recipes, and the tasks that `peftkit init` writes recipes for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peftkit.errors import ConfigError, did_you_mean


def recipes_folder() -> Path:
    """Return the folder of the recipes in the installed package or a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def recipe_file(name: str) -> Path:
    """Return the file of a ready-made recipe.

    Raises:
        ConfigError: There is no recipe with this name.
    """
    files = {file.stem: file for file in sorted(recipes_folder().glob("*.yaml"))}
    stem = name.removesuffix(".yaml")
    if stem not in files:
        raise ConfigError(
            f"there is no recipe named '{name}'.",
            found=f"The recipes are: {', '.join(files)}. {did_you_mean(stem, files)}".rstrip(),
            fix="To list them with their purpose: peftkit recipes ls",
        )
    return files[stem]


@dataclass(frozen=True, slots=True)
class Goal:
    """A task of `peftkit init`.

    Attributes:
        does: The purpose, for the prompt.
        recipe: The ready-made recipe to start from.
        small: A base that a CPU trains in minutes; "" if there is none.
        base: The base for a GPU; "" for the base of the recipe.
        section: Value of `task` if it differs from the ready-made recipe.
        fields: Settings of the task that name the input field and the target field.
        by_rules: Whether the learning rate and the rank follow the rules of peftkit.defaults.
        compares: Whether it trains on preferences, with a lower learning rate.
    """

    does: str
    recipe: str
    small: str = "smollm2-135m"
    base: str = ""
    section: str = ""
    fields: tuple[str, str] | tuple[()] = ()
    by_rules: bool = True
    compares: bool = False


ENCODER = "all-minilm-l6-v2"
GOALS = {
    "causal_lm": Goal(
        "answer, chat, follow instructions, write text", "chat-sft", fields=("prompt", "completion")
    ),
    "preference": Goal("prefer chosen over rejected answers (DPO)", "preference", compares=True),
    "kto": Goal("prefer answers labelled as good (KTO)", "kto", compares=True),
    "distill": Goal("replace a long prompt by an adapter", "distill"),
    "grpo": Goal("maximise rewards (reinforcement learning)", "grpo", by_rules=False),
    "reward": Goal("score answers", "reward", by_rules=False),
    "sequence_classification": Goal(
        "classify texts", "text-classification", ENCODER, fields=("text", "label")
    ),
    "token_classification": Goal(
        "label words, such as names and places", "token-classification", ENCODER
    ),
    "embedding": Goal("find texts that belong together", "embedding", ENCODER, by_rules=False),
    "reranker": Goal(
        "rank texts by relevance to a query", "embedding", ENCODER, section="reranker"
    ),
    "seq2seq": Goal("rewrite texts, with T5 or BART", "seq2seq", "", fields=("source", "target")),
    "masked_lm": Goal("adapt BERT to the texts of a domain", "masked-lm", ENCODER, by_rules=False),
    "image_classification": Goal("classify images", "image-classification", "", by_rules=False),
    "image_text": Goal("answer questions about images", "read-digits", "", by_rules=False),
    "audio_text": Goal("answer questions about audio", "audio-chat", "", by_rules=False),
    "transcription": Goal(
        "transcribe speech, with Whisper",
        "hear-digits",
        "",
        base="openai/whisper-small",
        section="transcription",
        by_rules=False,
    ),
    "ctc": Goal(
        "transcribe speech, with wav2vec 2.0",
        "hear-digits",
        "",
        base="facebook/wav2vec2-base-960h",
        by_rules=False,
    ),
    "audio_classification": Goal(
        "classify sounds",
        "hear-digits",
        "",
        base="facebook/wav2vec2-base",
        section="audio_classification",
        by_rules=False,
    ),
}
"""Goals by task; kto is a loss of the task preference."""
OTHER_NAMES = {
    "sft": "causal_lm",
    "chat": "causal_lm",
    "instruct": "causal_lm",
    "dpo": "preference",
    "orpo": "preference",
    "rm": "reward",
    "classification": "sequence_classification",
    "ner": "token_classification",
    "embeddings": "embedding",
    "asr": "transcription",
}
"""Names of tasks in other programs, and ours."""
