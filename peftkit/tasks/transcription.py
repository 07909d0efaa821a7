"""Transcription: an encoder hears a sound, a decoder learns to write what is said.

The decoder is given its start token and all labels but the last; all labels are learnt, language
and task tokens too, as transformers' own recipe does.

Shapes: B rows, T tokens of the longest labels, n of all labels together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from peftkit.base.purpose import Processor
from peftkit.data.media import Audio
from peftkit.data.pack import padded_rows
from peftkit.data.rows import StoredRows
from peftkit.events import Listener, Progress, ignore
from peftkit.files.disk import read_json, write_json
from peftkit.settings import DataConfig
from peftkit.tasks.base import Task
from peftkit.tasks.batches import BATCH_SIZE
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.loss import unwrapped
from peftkit.tasks.metrics import error_rates, heard_metrics, normalizer_of
from peftkit.tasks.seq2seq import EncoderDecoder, decoder_start, own_settings_aside
from peftkit.tasks.speech import (
    DecoderLabels,
    Hearing,
    SpeechEncoder,
    SpeechRow,
    metadata_or_self,
)

MAX_TARGET = 448
"""Of labels, where the model does not say."""


class Transcription(EncoderDecoder):
    """Rows from sounds and texts, batches for encoder and decoder, a loss over the texts.

    Args:
        processor: The base's, of sound and text.

    Raises:
        BaseError: The model is no encoder-decoder, or its processor hears nothing.
        DataError: The base knows no such language.
    """

    row_encoder: SpeechEncoder

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        config: TranscriptionConfig,
        data: DataConfig,
        **more: Any,
    ) -> None:
        Audio.require()
        whole = unwrapped(model)
        self._start = decoder_start(whole, "transcription")
        self.hearing = Hearing(whole, processor, config.max_seconds)
        self.example = self.hearing.example()
        super().__init__(model, processor, config, data, **more)
        several = bool(getattr(whole.generation_config, "is_multilingual", False))
        says = config.says if several or config.language else None
        self._labels = DecoderLabels(
            self.tokenizer, config.language, says, self._start, is_multilingual=several
        )
        known = ("max_target_positions", "max_position_embeddings")
        limits = (getattr(whole.config, name, None) for name in known)
        self.max_target = next((int(limit) for limit in limits if limit), MAX_TARGET)
        self.row_encoder = SpeechEncoder(
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
        """How logits are made, and that rows with sounds are padded."""
        return {**super().paths, "rows": "padded, each with its sound"}

    def encode(self, where: str) -> StoredRows:
        return super().encode(metadata_or_self(where))

    def counts(self, rows: StoredRows) -> list[tuple[str, str]]:
        return [("minutes of sound", f"{rows.counts['milliseconds'] / 60_000:,.1f}")]

    def collate(self, rows: Sequence[SpeechRow]) -> dict[str, Tensor]:
        """Return what is heard, decoder_input_ids (B, T), target_index and targets (n,)."""
        shifted = [(self._start, *row.labels[:-1]) for row in rows]
        decoder_input_ids, learnt = padded_rows(shifted, self._pad_id)
        return {
            **self.hearing.features(self.hearing.decoded([row.sound for row in rows])),
            "decoder_input_ids": decoder_input_ids,
            "target_index": learnt.flatten().nonzero().flatten(),
            "targets": torch.tensor([token for row in rows for token in row.labels]),
        }

    def inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what is heard, as the weights are, and the decoder's tokens."""
        own = ("target_index", "targets")
        return self.hearing.given({name: batch[name] for name in batch if name not in own})

    def spans(self, row: SpeechRow) -> list[tuple[str, str]]:
        """Return how long a row's sound lasts, what the decoder is given first, and the labels."""
        return [
            ("sound", self.hearing.told(row.num_samples)),
            ("start", self.text([self._start])),
            *(("learnt", self.text([token])) for token in row.labels[: row.num_prefix]),
            ("learnt", self.text(row.labels[row.num_prefix :])),
        ]

    def metrics(
        self, model: nn.Module, rows: Sequence[SpeechRow], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return loss and perplexity, and what `heard_metrics` says of greedy answers."""
        found = super().metrics(model, rows, on_event=on_event)
        heard = self.answers(model, rows, on_event=on_event)
        normalizer = normalizer_of(self.tokenizer, self.config.language)
        return {**found, **heard_metrics(rows, heard, normalizer, on_event)}

    @torch.no_grad()
    def answers(
        self,
        model: nn.Module,
        rows: Sequence[SpeechRow],
        *,
        max_new_tokens: int | None = None,
        on_event: Listener = ignore,
    ) -> list[str]:
        """Return what the model writes for each row's sound, greedily."""
        from transformers import GenerationMixin  # slow to import

        whole, texts = unwrapped(model), [""] * len(rows)
        prefixes = [(self._start, *row.labels[: row.num_prefix]) for row in rows]
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, prefix in enumerate(prefixes):
            groups.setdefault(prefix, []).append(number)
        parts = [
            group[start : start + BATCH_SIZE]
            for group in groups.values()
            for start in range(0, len(group), BATCH_SIZE)
        ]
        done = 0
        with own_settings_aside(whole) as own:
            for part in parts:
                on_event(Progress("Listening", done, len(rows)))
                asked = self._asked(whole, [rows[n] for n in part], prefixes[part[0]])
                length = asked["decoder_input_ids"].shape[1]
                most = min(max_new_tokens or self.max_target, self.max_target - length)
                # not Whisper's own, which cuts long sounds and guesses languages
                made = GenerationMixin.generate(
                    whole, generation_config=self._settings(own, max(most, 1)), **asked
                )
                for n, ids in zip(part, made[:, length:].tolist(), strict=True):
                    texts[n] = str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()
                done += len(part)
        return texts

    def shown(self, row: SpeechRow) -> str:
        return f"{row.source}, {row.num_samples / self.hearing.rate:.2f} s"

    def reference(self, row: SpeechRow) -> str:
        return row.text

    def answer_metrics(
        self, pairs: Sequence[tuple[str, str]], rows: Sequence[Any]
    ) -> dict[str, float]:
        rates = error_rates([right for _, right in pairs], [heard for heard, _ in pairs])
        return {**super().answer_metrics(pairs, rows), **rates}

    def transcribe(self, model: nn.Module, paths: Sequence[Path]) -> list[str]:
        """Return what the model writes for the sound of each file.

        Raises:
            DataError: One cannot be heard, or the base has to be told a language.
        """
        labels, num_prefix = self._labels("a", None, None, "the sounds")
        sounds = [Audio(path, str(path)) for path in paths]
        rows = [
            SpeechRow(sound, 0, 0, labels, num_prefix, len(labels), "", sound.source)
            for sound in sounds
        ]
        return self.answers(model, rows)

    def _asked(
        self, model: Any, rows: Sequence[SpeechRow], prefix: Sequence[int]
    ) -> dict[str, Any]:
        """Return what the model is given to go on from."""
        heard = self.hearing.features(self.hearing.decoded([row.sound for row in rows]))
        every = torch.ones(len(rows), next(iter(heard.values())).shape[-1], dtype=torch.long)
        given = {"attention_mask": every, **heard}
        given |= {"decoder_input_ids": torch.tensor([[*prefix]] * len(rows))}
        return {n: tensor.to(model.device) for n, tensor in self.hearing.given(given).items()}

    def _settings(self, own: Any, max_new_tokens: int) -> Any:
        """Return greedy generation, with what the model never says."""
        from transformers import GenerationConfig

        return GenerationConfig(
            do_sample=False,
            use_cache=True,
            max_new_tokens=max_new_tokens,
            decoder_start_token_id=self._start,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self._pad_id,
            suppress_tokens=getattr(own, "suppress_tokens", None),
            begin_suppress_tokens=getattr(own, "begin_suppress_tokens", None),
        )


class TranscriptionConfig(TaskConfig):
    """Transcription: what is said in a sound, with Whisper and other encoder-decoders."""

    task_type: ClassVar[None] = None  # PEFT's class for SEQ_2_SEQ_LM gives models input_ids
    auto_class: ClassVar[str] = "AutoModelForSpeechSeq2Seq"
    task: ClassVar[Callable[..., Task]] = Transcription
    processor: ClassVar[Processor] = "audio"
    command: ClassVar[str] = "peftkit generate {folder} --audio FILE"
    writes_text: ClassVar[bool] = True
    measures_before: ClassVar[bool] = True
    data_fields: ClassVar[frozenset[str]] = frozenset({"max_dropped"})

    type: Literal["transcription"] = "transcription"
    audio: str = "audio"
    """Field with the sound: a path beside the file, or bytes; file_name is read too."""
    text: str = "text"
    """Field with what is said."""
    language: str | None = None
    """What is spoken, as the base names it: english, or en; a row's language comes first."""
    says: Literal["transcribe", "translate"] = "transcribe"
    """Whether the text is in the language that is spoken, or in English; a row's task first."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Longest sound, longer ones are dropped; null: what the base hears at once, 30 of Whisper."""

    def resolve(self, data: DataConfig) -> TranscriptionConfig:
        Audio.require()
        return self

    def write_beside(self, folder: Path, config: Any, base: Path | None) -> None:
        """Have generation know language and task without being told."""
        path = folder / "generation_config.json"
        if self.language is not None and path.is_file():
            told = read_json(path)
            write_json({**told, "language": self.language, "task": self.says}, path)
