"""What a model hears of sounds: its own feature extractor is asked, for each batch.

What is heard is not kept: 30 s of Whisper's are a megabyte, ten times the sound as it is stored.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from peftkit.data.format import WrongField, read_each, text_of
from peftkit.data.load import Record
from peftkit.data.media import Audio, LongAudio, SilentAudio, media_of
from peftkit.data.rows import Dropped, EncodedRows, RowEncoder, tokenizer_key
from peftkit.errors import BaseError, DataError
from peftkit.tasks.loss import unwrapped

INPUTS = ("input_values", "input_features")
"""What transformers calls what a model hears."""
LENGTHS = ("_get_feat_extract_output_lengths", "_get_subsampling_output_length")
"""What transformers' models call their own count of positions, given samples or frames."""
MAX_SECONDS = 30.0
"""Of a sound, where neither the task nor the feature extractor says."""
PER_SECOND = 50
"""Positions of most encoders in a second of sound."""


class ShortSound(DataError):
    """The encoder has no position for it."""


class Hearing:
    """The feature extractor of a base, and how many positions its encoder takes of a sound.

    Args:
        processor: The base's, with or without a tokenizer.
        max_seconds: Of a sound; None: what the feature extractor takes at once, or MAX_SECONDS.

    Attributes:
        rate: Samples a second.
        max_seconds: Longer sounds are not heard.

    Raises:
        BaseError: There is no feature extractor.
    """

    def __init__(self, model: nn.Module, processor: Any, max_seconds: float | None) -> None:
        found = getattr(processor, "feature_extractor", processor)
        if not hasattr(found, "sampling_rate"):
            raise BaseError(
                f"{type(processor).__name__} reads no sounds.",
                found="It has no feature extractor with a sampling rate.",
                fix="Give a base such as Whisper or wav2vec2, with its preprocessor_config.json.",
            )
        self.extractor, self.rate = found, int(found.sampling_rate)
        at_once = getattr(found, "chunk_length", None) or max_seconds or MAX_SECONDS
        self.max_seconds = min(float(at_once), max_seconds or float("inf"))
        self._model: Any = unwrapped(model)
        names = [name for name in LENGTHS if hasattr(self._model, name)]
        self._asked: Any = getattr(self._model, names[0]) if names else None
        self._of_samples = self._positions_of_samples()
        self._of_frames = dict[int, int]()

    @property
    def is_exact(self) -> bool:
        """Whether positions are known to the last sample, as CTC needs them."""
        return self._of_samples is not None or self._has_masks

    def fits(self, labels: Sequence[int], positions: int) -> bool:
        """Tell whether a text can be said in so many positions.

        What stands twice in a row needs a blank between.
        """
        twice = sum(a == b for a, b in pairwise(labels))
        return len(labels) + twice <= positions

    @property
    def fewest(self) -> int:
        """How many positions a sound needs to be trained on: a span of them may be masked."""
        config = self._model.config
        masks = getattr(config, "apply_spec_augment", False) and config.mask_time_prob > 0
        return int(config.mask_time_length) + 1 if masks else 1

    @property
    def key(self) -> object:
        """What rows depend on that are made with it."""
        return (self.rate, self.max_seconds, self.positions(self.rate))

    def told(self, num_samples: int) -> str:
        """Return how long a sound lasts, for people."""
        return f"{num_samples / self.rate:.2f} s at {self.rate:,} Hz"

    def decoded(self, sounds: Sequence[Audio]) -> list[Any]:
        """Return sounds as arrays of samples.

        Raises:
            ShortSound: One is too short to be heard.
            DataError: See `Audio.decode`.
        """
        found = [sound.decode(self.rate, self.max_seconds) for sound in sounds]
        for sound, heard in zip(sounds, found, strict=True):
            if len(heard) < self.rate // 2 and not self.positions(len(heard)):
                raise ShortSound(
                    f"Cannot use {sound.which} of {sound.source}.",
                    found=f"It is too short: {self.told(len(heard))}.",
                    fix="Give a longer one, or remove it.",
                )
        return found

    def features(self, heard: Sequence[Any]) -> dict[str, Tensor]:
        """Return what the model hears of arrays of samples, padded as its extractor does."""
        takes = inspect.signature(type(self.extractor).__call__).parameters
        more: dict[str, Any] = {}
        if "padding" in takes:  # Whisper's pads to 30 s by default, others not at all
            own = takes["padding"].default
            more["padding"] = own if isinstance(own, str) else True
        if self._has_masks:
            more["return_attention_mask"] = True
        made = self.extractor(list(heard), sampling_rate=self.rate, return_tensors="pt", **more)
        return dict(made)

    def given(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return inputs with floats as the model's weights are."""
        dtype = self._model.dtype
        return {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}

    def example(self, seed: int = 0) -> dict[str, Tensor]:
        """Return what the model hears of half a second of noise."""
        noise = torch.randn(self.rate // 2, generator=torch.Generator().manual_seed(seed))
        made = self.given(self.features([noise.numpy() / 10]))
        return {name: value.to(self._model.device) for name, value in made.items()}

    def positions(self, num_samples: int) -> int:
        """Return how many positions of the encoder a sound takes."""
        if self._of_samples is not None:
            return max(int(self._of_samples[num_samples]), 0)
        if self._has_masks:
            if num_samples not in self._of_frames:
                self._of_frames[num_samples] = self._positions_of_frames(num_samples)
            return self._of_frames[num_samples]
        fixed = getattr(self._model.config, "max_source_positions", None)
        if getattr(self.extractor, "chunk_length", None) and fixed:
            return int(fixed)
        return num_samples * PER_SECOND // self.rate

    @property
    def _has_masks(self) -> bool:
        """Whether the model counts positions of frames, and the extractor says which are heard."""
        names = getattr(self.extractor, "model_input_names", ())
        frames = self._model.main_input_name == "input_features"
        return frames and self._asked is not None and "attention_mask" in names

    def _positions_of_samples(self) -> Any:
        """Return the positions of sounds of 0, 1, 2, ... samples, where the model hears samples."""
        if self._asked is None or self._model.main_input_name != "input_values":
            return None
        samples = torch.arange(int(self.max_seconds * self.rate) + self.rate)
        try:
            return self._asked(samples).numpy()
        except ValueError:  # Moonshine's takes one number
            return None

    def _positions_of_frames(self, num_samples: int) -> int:
        """Return the positions of a sound of which the model hears frames: mel bins, for example.

        0 of one that is too short for its extractor: it raises, or divides by nothing.
        """
        noise = torch.randn(num_samples, generator=torch.Generator().manual_seed(0)).numpy()
        try:
            made = self.features([noise])
        except (RuntimeError, ValueError, IndexError):
            return 0
        if not made["input_features"].isfinite().all():
            return 0
        return max(int(self._asked(made["attention_mask"].sum(-1))), 0)


# Rows: audio, and the target tokens of its text.


METADATA = ("metadata.jsonl", "metadata.csv")
"""A folder of sounds says with one of these files what is said in them."""
NO_TEXT, MANY, SILENT, LONG, SHORT = range(5)
UNHEARD = {SilentAudio: SILENT, LongAudio: LONG, ShortSound: SHORT}
TASKS = ("transcribe", "translate")


@dataclass(frozen=True, slots=True)
class SpeechRow:
    """A sound, and what is said in it.

    Args:
        sound: As it is stored; what the model hears is made of it for each batch.
        num_samples: As it is heard.
        num_encoder_tokens: Positions that the encoder takes of it.
        labels: All that is learnt: what sets language and task, the text, the end token.
        num_prefix: How many of these stand before the text.
        num_decoder_tokens: How many a decoder reads.
        text: As the file has it.
        source: "train.jsonl:7".
    """

    sound: Audio
    num_samples: int
    num_encoder_tokens: int
    labels: tuple[int, ...]
    num_prefix: int
    num_decoder_tokens: int
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Utterance:
    """A record as it was read."""

    sound: Audio
    text: str
    language: str | None
    task: str | None
    source: str


class SpeechEncoder(RowEncoder):
    """Makes a row of each sound and its text; each is decoded once, so that damage shows now.

    Args:
        names: Of the fields with the sound and the text.
        labels: Makes of an utterance all that is learnt, and how much of it is before the text.
        key: Of `labels`.
        most: Of labels, given the encoder's positions. has_decoder: Whether a decoder reads them.
        too_many: Why rows with more are dropped.
    """

    kind: ClassVar[type[SpeechRow]] = SpeechRow
    at_once: ClassVar[int] = 100

    def __init__(
        self,
        hearing: Hearing,
        names: tuple[str, str],
        labels: Callable[[Utterance], tuple[tuple[int, ...], int]],
        key: object,
        *,
        fits: Callable[[Sequence[int], int], bool],
        too_many: str,
        has_decoder: bool,
    ) -> None:
        self._hearing, self._names, self._labels = hearing, names, labels
        self._fits, self._has_decoder = fits, has_decoder
        self.drops = {
            "no text": "give these rows a text",
            too_many: "cut them into pieces",
            "silent or empty sounds": "give these rows another sound",
            f"sounds longer than {hearing.max_seconds:g} s": "cut them into pieces",
            "sounds that are too short": "give these rows another sound",
        }
        self._key = (names, key, hearing.key)

    def key(self, where: str) -> object:
        return (str(Path(where).absolute().parent), self._key)

    def read(
        self, records: Sequence[Record], where: str
    ) -> tuple[list[Utterance], tuple[str, ...]]:
        return read_utterances(records, self._names, where)

    def rows(self, read: tuple[list[Utterance], tuple[str, ...]]) -> EncodedRows:
        utterances, unused = read
        counts = Counter[str]()
        rows = [self._row(one, counts) for one in utterances]
        return EncodedRows(rows, counts=counts, unused=unused)

    def _row(self, one: Utterance, counts: Counter[str]) -> SpeechRow | Dropped:
        if not one.text.strip():
            return Dropped(one.source, NO_TEXT)
        try:
            (heard,) = self._hearing.decoded([one.sound])
        except tuple(UNHEARD) as problem:
            return Dropped(one.source, UNHEARD[type(problem)])
        labels, num_prefix = self._labels(one)
        positions = self._hearing.positions(len(heard))
        if positions < self._hearing.fewest:
            return Dropped(one.source, SHORT)
        if not self._fits(labels, positions):
            return Dropped(one.source, MANY)
        counts.update(milliseconds=len(heard) * 1000 // self._hearing.rate, targets=len(labels))
        return SpeechRow(
            one.sound,
            len(heard),
            positions,
            labels,
            num_prefix,
            len(labels) if self._has_decoder else 0,
            one.text,
            one.source,
        )


class DecoderLabels:
    """All that a decoder has to say of an utterance: the tokenizer is asked.

    It puts the decoder's start before; who shifts labels puts it back, so that it goes.

    Args:
        language, task: Where a row does not say.
        start: The token that the decoder is given first.
        is_multilingual: Whether it has to be told the language.
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
        """Return an utterance's labels, and how many of them stand before the text."""
        return self(one.text, one.language, one.task, one.source)

    def __call__(
        self, text: str, language: str | None, task: str | None, source: str
    ) -> tuple[tuple[int, ...], int]:
        """Return a text's labels, and how many of them stand before the text.

        Raises:
            DataError: No language is named, or the tokenizer does not know it.
        """
        language, task = language or self._language, task or self._task
        if self._is_multilingual and language is None:
            raise DataError(
                f"Cannot use {source}: no language is named.",
                found="The base knows several languages, and is told which it hears.",
                fix="Set task.language, for example english, or give rows the field language.",
            )
        tokenizer = self._tokenizer
        if hasattr(tokenizer, "set_prefix_tokens"):
            tokenizer.language = tokenizer.task = None  # None would mean: as they were
            try:
                tokenizer.set_prefix_tokens(
                    language=language, task=task if language else None, predict_timestamps=False
                )
            except ValueError as problem:
                raise DataError(
                    f"Cannot use {source}.",
                    found=str(problem),
                    fix="Name a language as the base does: english, or en.",
                ) from None
        elif language is not None or task == "translate":
            raise DataError(
                f"Cannot use {source}.",
                found=f"{type(tokenizer).__name__} has no tokens for languages and tasks.",
                fix="Leave language and task out.",
            )
        whole = list(tokenizer(text)["input_ids"])
        bare = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = whole[1:] if whole[:1] == [self._start] else whole
        end = tokenizer.eos_token_id
        if end is not None and whole[-1:] != [end]:
            whole.append(int(end))
        places = range(len(whole) - len(bare) + 1)
        first = next((n for n in places if whole[n : n + len(bare)] == bare), 0)
        return tuple(whole), first


def metadata_or_self(where: str) -> str:
    """Return the file that says what is in a folder's sounds, if it has one; else what is given."""
    folder = Path(where).expanduser()
    return next((str(folder / name) for name in METADATA if (folder / name).is_file()), where)


def read_utterances(
    records: Sequence[Record], names: tuple[str, str], where: str
) -> tuple[list[Utterance], tuple[str, ...]]:
    """Return what records say, and the fields that none of them needed.

    Args:
        names: Of the fields with the sound and the text.

    Raises:
        DataError: With file, line and field of the first few that cannot be used.
    """
    read = partial(_utterance, names=names, where=where)
    return read_each(records, read, "a sound and its text", where)


def _utterance(
    record: Record, names: tuple[str, str], where: str
) -> tuple[Utterance, Iterable[str]]:
    """Return what a record says, and the fields that it was looked for in."""
    fields = record.fields
    audio = names[0] if names[0] in fields else "file_name"
    if audio not in fields:
        raise WrongField(names[0], "missing")
    sound = media_of(Audio, fields[audio], record, where)
    if sound is None:
        raise WrongField(audio, f"expected a path or bytes of a sound, found {fields[audio]!r:.40}")
    text = text_of(fields, names[1])
    if mark := re.search(r"<\|[^|]*\|>", text):
        raise WrongField(names[1], f"holds {mark[0]}: timestamps and other marks are not learnt")
    named = [name for name in ("language", "task") if fields.get(name)]
    told = {name: text_of(fields, name) for name in named}
    if told.get("task") not in (None, *TASKS):
        raise WrongField("task", f"expected {' or '.join(TASKS)}, found {told['task']!r:.40}")
    found = Utterance(sound, text, told.get("language"), told.get("task"), record.source)
    return found, (audio, names[1], "language", "task")
