"""CTC: an encoder predicts a character, or the blank, at each of its positions.

The loss sums over all alignments of a text with the positions (Graves et al., 2006). Decoding
collapses repeated characters and removes blanks, which are the padding token. Padding is masked.

Shapes: B rows, T positions of the longest clip, V vocabulary size, n characters of all texts.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from peftkit.base.heads import ClassHead
from peftkit.base.purpose import Processor, Purpose
from peftkit.data.media.files import Audio
from peftkit.data.rows.encoder import tokenizer_key
from peftkit.errors import BaseError, DataError
from peftkit.events import Listener, ignore
from peftkit.forward.loss import accepted, in_dtype_of, unwrapped
from peftkit.settings import DataConfig
from peftkit.tasks.base import Task, over_batches
from peftkit.tasks.classes.labels import text_of, training_records, values_in
from peftkit.tasks.media.speech import (
    LENGTHS,
    Hearing,
    SpeechConfig,
    SpeechEncoder,
    SpeechRow,
    Utterance,
    metadata_or_self,
)
from peftkit.tasks.metrics import normalizer_of, transcript_metrics

BLANK, UNKNOWN, SPACE = "<pad>", "<unk>", "|"
"""Special tokens of a vocabulary built from the data, with wav2vec2's names."""
MAX_CHARACTERS = 10_000


class CTC(Task):
    """CTC loss over the characters of transcripts.

    Raises:
        BaseError: There is no feature extractor, or the model cannot count its positions.
    """

    def build(self, model: nn.Module) -> None:
        Audio.require("jiwer")  # for error rates
        config, bare = self.config, unwrapped(model)
        self.hearing = Hearing(model, self.processor, config.max_seconds)
        if not self.hearing.is_exact:
            raise BaseError(
                f"{type(bare).__name__} cannot count the positions of an audio clip.",
                found=f"It lacks {' and '.join(LENGTHS)}.",
                fix="Give a base such as wav2vec2, HuBERT, WavLM or Parakeet.",
            )
        if config.tokens:
            self.tokenizer = tokenizer_of(config.tokens)
        self._blank = int(bare.config.pad_token_id)
        self.rows.encoder = SpeechEncoder(
            self.hearing,
            (config.audio, config.text),
            self._labels,
            (*tokenizer_key(self.tokenizer), config.case),
            fits=_fits,
            too_many="texts longer than their audio",
            has_decoder=False,
        )

    def collate(self, rows: Sequence[SpeechRow]) -> dict[str, Tensor]:
        """Return features; positions (B,); targets (n,) and target_lengths (B,)."""
        return {
            **self.hearing.inputs([row.clip for row in rows]),
            "positions": torch.tensor([row.num_encoder_tokens for row in rows]),
            "targets": torch.tensor([label for row in rows for label in row.labels]),
            "target_lengths": torch.tensor([len(row.labels) for row in rows]),
        }

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        return batch["targets"].numel()

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return -log p of the transcripts, summed, in fp32 (1,)."""
        return self._loss(self.logits(model, batch), batch)[None]

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of each position (B, T, V), in fp32."""
        targets = ("positions", "targets", "target_lengths")
        features = {name: batch[name] for name in batch if name not in targets}
        logits: Tensor = model(**accepted(model, in_dtype_of(model, features))).logits
        return logits.float()

    def _loss(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        log_probs = logits.log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(
            log_probs,
            batch["targets"],
            batch["positions"],
            batch["target_lengths"],
            blank=self._blank,
            reduction="sum",
        )

    def spans(self, row: SpeechRow) -> list[tuple[str, str]]:
        """Return the duration and positions of a clip, and its characters."""
        length = f"{self.hearing.duration(row.num_samples)}, {row.num_encoder_tokens} positions"
        characters = self.tokenizer.convert_ids_to_tokens(list(row.labels))
        return [("audio", length), ("learnt", " ".join(characters))]

    @torch.no_grad()
    def metrics(
        self, model: nn.Module, rows: Sequence[SpeechRow], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss, and `transcript_metrics` of the most likely characters."""
        loss, number = 0.0, 0
        seen, transcripts = list[SpeechRow](), list[str]()
        compute = partial(self.logits, model)
        batches = over_batches(self, model, rows, "Transcribing", on_event, compute)
        for part, batch, logits in batches:
            loss += float(self._loss(logits, batch))
            number += self.num_targets(batch)
            seen += [replace(row, text=cased(row.text, self.config.case)) for row in part]
            transcripts += self._texts(logits, batch["positions"])
        normalizer = normalizer_of(self.tokenizer, None)
        rates = transcript_metrics(seen, transcripts, normalizer, on_event)
        return {"loss": loss / number, **rates}

    @torch.no_grad()
    def transcribe(self, model: nn.Module, paths: Sequence[Path]) -> list[str]:
        """Return the transcript of each audio file.

        Raises:
            DataError: A file cannot be decoded.
        """
        device, texts = next(model.parameters()).device, []
        for path in paths:
            (samples,) = self.hearing.decoded([Audio(path, str(path))])
            batch = self.hearing.features([samples])
            logits = self.logits(model, {name: batch[name].to(device) for name in batch})
            texts += self._texts(logits, torch.tensor([self.hearing.positions(len(samples))]))
        return texts

    def _texts(self, logits: Tensor, positions: Tensor) -> list[str]:
        predicted = logits.argmax(-1).tolist()
        pairs = zip(predicted, positions.tolist(), strict=True)
        return [str(self.tokenizer.decode(ids[:length])).strip() for ids, length in pairs]

    def _labels(self, one: Utterance) -> tuple[tuple[int, ...], int]:
        """Return the characters of a text.

        Raises:
            DataError: The vocabulary lacks a character.
        """
        text = cased(" ".join(one.text.split()), self.config.case)
        labels = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.tokenizer.unk_token_id in labels:
            vocabulary = set(self.tokenizer.get_vocab())
            unknown = sorted({c for c in text if not c.isspace()} - vocabulary)
            raise DataError(
                f"Cannot use {one.source}: its text has characters outside the vocabulary.",
                found=f"Unknown: {' '.join(unknown)}",
                fix="Set task.case to upper or lower, remove them, or set task.vocabulary: data.",
            )
        return tuple(labels), 0


def _fits(labels: Sequence[int], positions: int) -> bool:
    """Return whether a text fits its positions; equal neighbours need a blank between them."""
    repeated = sum(a == b for a, b in pairwise(labels))
    return len(labels) + repeated <= positions


class CTCConfig(SpeechConfig):
    """CTC: transcripts of audio, with wav2vec2, HuBERT, WavLM and others."""

    auto_class: ClassVar[str] = "AutoModelForCTC"
    task: ClassVar[Callable[..., Task]] = CTC

    type: Literal["ctc"] = "ctc"
    vocabulary: Literal["base", "data"] = "base"
    """base: the base tokenizer's characters; data: the texts' characters, with a new head."""
    case: Literal["keep", "lower", "upper"] = "keep"
    """Convert texts to lower or upper case first; wav2vec2's vocabulary is upper case."""
    tokens: tuple[str, ...] = ()
    """The vocabulary of the data, read from data.train and stored with the adapter."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Longest clip in seconds, longer ones are dropped; null: 30."""

    def resolve(self, data: DataConfig) -> CTCConfig:
        Audio.require("jiwer")  # for error rates
        if self.tokens or self.vocabulary == "base":
            return self
        used, read = set[str](), partial(text_of, name=self.text, setting="task.text")
        for text, _ in values_in(training_records(data, metadata_or_self), read):
            used.update(cased(text, self.case))
        characters = sorted(c for c in used if not c.isspace() and c != SPACE)
        if not 0 < len(characters) <= MAX_CHARACTERS:
            raise DataError(
                f"Cannot build a vocabulary from the texts of {data.train_name}.",
                found=f"They have {len(characters):,} different characters.",
                fix=f"Set task.text to the right field; the limit is {MAX_CHARACTERS:,}.",
            )
        return self.model_copy(update={"tokens": (BLANK, UNKNOWN, SPACE, *characters)})

    @property
    def head(self) -> ClassHead:
        return ClassHead(self.tokens, fresh=self.vocabulary == "data", is_vocabulary=True)

    @property
    def purpose(self) -> Purpose:
        processor: Processor = "audio" if self.vocabulary == "base" else "feature_extractor"
        return replace(super().purpose, processor=processor)

    def write_beside(self, folder: Path, config: object, base: Path | None) -> None:
        """Write the tokenizer of a vocabulary built from the data."""
        if self.tokens:
            tokenizer_of(self.tokens).save_pretrained(folder)


def cased(text: str, case: str) -> str:
    """Return a text in lower case, upper case or unchanged."""
    return {"lower": text.lower, "upper": text.upper}.get(case, lambda: text)()


def tokenizer_of(tokens: Sequence[str]) -> Any:
    """Return wav2vec2's tokenizer with these tokens, in this order."""
    from transformers import Wav2Vec2CTCTokenizer

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.json"
        path.write_text(json.dumps({token: n for n, token in enumerate(tokens)}), encoding="utf-8")
        return Wav2Vec2CTCTokenizer(str(path), bos_token=None, eos_token=None)
