"""What `peftkit init` writes recipes for: the tasks, and which rows each of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """A purpose of an adapter.

    Attributes:
        does: The purpose in words. recipe: The ready-made recipe to start from.
        small: A base that a CPU trains in minutes; "" if there is none.
        base: The base for a GPU; "": the recipe's.
        section: The recipe's `task`, where it is not the ready-made one's.
        fields: Its settings that name the field that is read and the one that is learnt.
        by_rules: Whether the learning rate and the rank follow the rules of peftkit.defaults.
        compares: Whether it learns from answers of which one is better: at a lower rate.
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
        "answer, chat, follow instructions, write text",
        "chat-sft",
        fields=("prompt", "completion"),
    ),
    "preference": Goal("prefer the better of two answers", "preference", compares=True),
    "kto": Goal("answer like the wanted answers, unlike the unwanted", "kto", compares=True),
    "distill": Goal("answer as with a prompt, without it", "distill"),
    "grpo": Goal("earn rewards for its own answers", "grpo", by_rules=False),
    "reward": Goal("score answers", "reward", by_rules=False),
    "sequence_classification": Goal(
        "label texts", "text-classification", ENCODER, fields=("text", "label")
    ),
    "token_classification": Goal("label words: names, places", "token-classification", ENCODER),
    "embedding": Goal("find texts that belong together", "embedding", ENCODER, by_rules=False),
    "reranker": Goal(
        "rank texts by how well they answer", "embedding", ENCODER, section="reranker"
    ),
    "seq2seq": Goal(
        "turn a text into another, with T5 or BART", "seq2seq", "", fields=("source", "target")
    ),
    "masked_lm": Goal("read texts of your field, with BERT", "masked-lm", ENCODER, by_rules=False),
    "image_classification": Goal("label images", "image-classification", "", by_rules=False),
    "image_text": Goal("answer questions about images", "read-digits", "", by_rules=False),
    "audio_text": Goal("answer questions about audio", "audio-chat", "", by_rules=False),
    "transcription": Goal(
        "write down speech, with Whisper",
        "hear-digits",
        "",
        base="openai/whisper-small",
        section="transcription",
        by_rules=False,
    ),
    "ctc": Goal(
        "write down speech, with wav2vec 2.0",
        "hear-digits",
        "",
        base="facebook/wav2vec2-base-960h",
        by_rules=False,
    ),
    "audio_classification": Goal(
        "label sounds",
        "hear-digits",
        "",
        base="facebook/wav2vec2-base",
        section="audio_classification",
        by_rules=False,
    ),
}
"""By task; kto is a loss of the task preference."""
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
"""What other programs call a task -> its name here."""


def menu(suited: Sequence[str]) -> str:
    """Return the question for the task: those that the rows suit, the likeliest first."""
    width = max(map(len, suited))
    lines = (f"  {name:{width}}  {GOALS[name].does}" for name in suited)
    return "\n".join(["What should it learn?", *lines, "Task"])
