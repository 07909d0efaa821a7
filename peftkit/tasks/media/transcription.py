"""Transcription: an encoder reads audio, a decoder writes its transcript.

The decoder reads its start token and all labels except the last. All labels are targets, including
language and task tokens, as in transformers' recipe.

Shapes: B rows, T tokens of the longest labels, n of all labels together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from peftkit.data.media.files import Audio
from peftkit.data.rows.encoder import tokenizer_key
from peftkit.errors import DataError
from peftkit.events import Listener, ignore
from peftkit.files.disk import read_json, write_json
from peftkit.forward.loss import in_dtype_of, unwrapped
from peftkit.tasks.base import Task
from peftkit.tasks.media.speech import Hearing, SpeechConfig, SpeechEncoder, SpeechRow, Utterance
from peftkit.tasks.metrics import error_rates, normalizer_of, transcript_metrics
from peftkit.tasks.text.seq2seq import EncoderDecoder

MAX_TARGET = 448
"""Maximum number of labels of a row if the model's config sets none."""


class Transcription(EncoderDecoder):
    """Token loss over the transcripts of audio clips.

    Raises:
        BaseError: The model is not an encoder-decoder, or its processor has no feature extractor.
        DataError: The base does not support the language.
    """

    def build(self, model: nn.Module) -> None:
        Audio.require("jiwer")  # for error rates
        config = self.config
        self.hearing = Hearing(model, self.processor, config.max_seconds)
        self.example = self.hearing.example()
        super().build(model)
        settings = unwrapped(model).generation_config
        is_multilingual = bool(getattr(settings, "is_multilingual", False))
        says = config.says if is_multilingual or config.language else None
        self._labels = DecoderLabels(
            self.tokenizer, config.language, says, self._start, is_multilingual
        )
        names = ("max_target_positions", "max_position_embeddings")
        limits = (getattr(unwrapped(model).config, name, None) for name in names)
        self.max_target = next((int(limit) for limit in limits if limit), MAX_TARGET)
        self.max_positions = self.max_target
        self.rows.encoder = SpeechEncoder(
            self.hearing,
            (config.audio, config.text),
            self._labels.of,
            (*self._labels.key, self.max_target),
            fits=lambda labels, _: len(labels) <= self.max_target,
            too_many=f"texts longer than {self.max_target} tokens",
            has_decoder=True,
        )

    @property
    def paths(self) -> dict[str, str]:
        """How logits and rows are computed; rows with audio are padded."""
        return {**super().paths, "rows": "padded, each with its audio"}

    def collate(self, rows: Sequence[SpeechRow]) -> dict[str, Tensor]:
        """Return the features of the clips, and `decoder_batch`."""
        return self.hearing.inputs([row.clip for row in rows]) | self.decoder_batch(rows)

    def inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the features, in the dtype of the weights, and the decoder's inputs."""
        targets = ("target_index", "targets")
        return in_dtype_of(model, {name: batch[name] for name in batch if name not in targets})

    def spans(self, row: SpeechRow) -> list[tuple[str, str]]:
        """Return the duration of a clip, the decoder's first token, and the labels."""
        return [
            ("audio", self.hearing.duration(row.num_samples)),
            ("start", self.text([self._start])),
            *(("learnt", self.text([token])) for token in row.labels[: row.num_prefix]),
            ("learnt", self.text(row.labels[row.num_prefix :])),
        ]

    def metrics(
        self, model: nn.Module, rows: Sequence[SpeechRow], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return loss and perplexity, and `transcript_metrics` of greedy answers."""
        losses = super().metrics(model, rows, on_event=on_event)
        transcripts = self.measured_texts(model, rows, on_event)
        normalizer = normalizer_of(self.tokenizer, self.config.language)
        return {**losses, **transcript_metrics(rows, transcripts, normalizer, on_event)}

    def encoder_batch(self, rows: Sequence[SpeechRow]) -> dict[str, Tensor]:
        features = self.hearing.inputs([row.clip for row in rows])
        length = next(iter(features.values())).shape[-1]
        return {"attention_mask": torch.ones(len(rows), length, dtype=torch.long), **features}

    def decoder_prefix(self, row: SpeechRow) -> tuple[int, ...]:
        return (self._start, *row.labels[: row.num_prefix])

    def prompt_text(self, row: SpeechRow) -> str:
        return f"{row.source}, {row.num_samples / self.hearing.rate:.2f} s"

    def reference_text(self, row: SpeechRow) -> str | None:
        return row.text or None

    def answer_metrics(
        self, pairs: Sequence[tuple[str, str]], rows: Sequence[SpeechRow]
    ) -> dict[str, float]:
        rates = error_rates([reference for _, reference in pairs], [text for text, _ in pairs])
        return {**super().answer_metrics(pairs, rows), **rates}

    def transcribe(self, model: nn.Module, paths: Sequence[Path]) -> list[str]:
        """Return the transcript of each audio file.

        Raises:
            DataError: A file cannot be decoded, or the base needs a language.
        """
        labels, num_prefix = self._labels("a", None, None, "the audio files")
        clips = [Audio(path, str(path)) for path in paths]
        rows = [
            SpeechRow(clip, 0, 0, labels, num_prefix, len(labels), "", clip.source)
            for clip in clips
        ]
        return self.completions(model, rows)


class DecoderLabels:
    """Target tokens of an utterance, from the base's tokenizer.

    The tokenizer prepends the decoder's start token. Shifting the labels adds it again, so it is
    removed here.

    Args:
        language, task: Defaults for rows without these fields.
        start: The decoder's start token.
        is_multilingual: Whether the base requires a language.
    """

    def __init__(
        self,
        tokenizer: Any,
        language: str | None,
        task: str | None,
        start: int,
        is_multilingual: bool,
    ) -> None:
        self._tokenizer, self._language, self._task = tokenizer, language, task
        self._start, self._is_multilingual = start, is_multilingual
        if language is not None:
            self("a", None, None, "task.language")
        self.key = (*tokenizer_key(tokenizer), language, task, start)

    def of(self, one: Utterance) -> tuple[tuple[int, ...], int]:
        """Return an utterance's labels, and how many of them precede the text."""
        return self(one.text, one.language, one.task, one.source)

    def __call__(
        self, text: str, language: str | None, task: str | None, source: str
    ) -> tuple[tuple[int, ...], int]:
        """Return a text's labels, and how many of them precede the text.

        Raises:
            DataError: The language is missing, or the tokenizer does not support it.
        """
        language, task = language or self._language, task or self._task
        if self._is_multilingual and language is None:
            raise DataError(
                f"Cannot use {source}: it has no language.",
                found="The base is multilingual and needs the language of each clip.",
                fix="Set task.language, for example english, or give rows the field language.",
            )
        tokenizer = self._tokenizer
        if hasattr(tokenizer, "set_prefix_tokens"):
            tokenizer.language = tokenizer.task = None  # set_prefix_tokens keeps old ones for None
            try:
                tokenizer.set_prefix_tokens(
                    language=language, task=task if language else None, predict_timestamps=False
                )
            except ValueError as problem:
                raise DataError(
                    f"Cannot use {source}.",
                    found=str(problem),
                    fix="Use the base's name of the language, for example english or en.",
                ) from None
        elif language is not None or task == "translate":
            raise DataError(
                f"Cannot use {source}.",
                found=f"{type(tokenizer).__name__} has no tokens for languages and tasks.",
                fix="Remove language and task.",
            )
        labels = list(tokenizer(text)["input_ids"])
        bare = tokenizer(text, add_special_tokens=False)["input_ids"]
        labels = labels[1:] if labels[:1] == [self._start] else labels
        end = tokenizer.eos_token_id
        if end is not None and labels[-1:] != [end]:
            labels.append(int(end))
        starts = range(len(labels) - len(bare) + 1)
        first = next((n for n in starts if labels[n : n + len(bare)] == bare), 0)
        return tuple(labels), first


class TranscriptionConfig(SpeechConfig):
    """Transcription: transcripts of audio, with Whisper and other encoder-decoders."""

    auto_class: ClassVar[str] = "AutoModelForSpeechSeq2Seq"
    task: ClassVar[Callable[..., Task]] = Transcription
    writes_text: ClassVar[bool] = True

    type: Literal["transcription"] = "transcription"
    language: str | None = None
    """Spoken language by the base's name: english, or en; a row's `language` takes precedence."""
    says: Literal["transcribe", "translate"] = "transcribe"
    """Text in the spoken language, or in English; a row's `task` takes precedence."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Longest clip in seconds, longer ones are dropped; null: the base's chunk length."""

    def write_beside(self, folder: Path, config: object, base: Path | None) -> None:
        """Write language and task into the generation config."""
        path = folder / "generation_config.json"
        if self.language is not None and path.is_file():
            config = read_json(path)
            write_json({**config, "language": self.language, "task": self.says}, path)
