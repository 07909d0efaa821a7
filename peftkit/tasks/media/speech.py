"""Audio clips as rows with a text, and as features, which the base's own extractor makes.

Features are made for each batch and not stored: 30 s of Whisper's are a megabyte, ten times the
encoded clip.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from peftkit.base.purpose import Processor
from peftkit.data.media.files import Audio, LongAudio, Media, MediaClass, SilentAudio, media_of
from peftkit.data.messages import WrongField, text_of
from peftkit.data.records import Dropped, Record
from peftkit.data.rows.columns import StoredRows
from peftkit.errors import BaseError, DataError
from peftkit.files.strict_json import shown
from peftkit.forward.loss import in_dtype_of, unwrapped
from peftkit.forward.masked_norm import keep_padding_out
from peftkit.settings import DataConfig
from peftkit.tasks.classes.labels import RecordEncoder, field_of
from peftkit.tasks.config import Predicts, TaskConfig

INPUTS = ("input_values", "input_features")
"""Names of audio inputs in transformers."""
LENGTHS = ("_get_feat_extract_output_lengths", "_get_subsampling_output_length")
"""Methods of transformers' models that count positions, given samples or frames."""
MAX_SECONDS = 30.0
"""Longest clip where neither the task nor the feature extractor sets one."""
PER_SECOND = 50
"""Positions of most encoders in a second of audio."""


class ShortAudio(DataError):
    """A clip too short for a single position of the encoder."""


class Hearing:
    """The feature extractor of a base, and how many positions its encoder makes of a clip.

    Args:
        processor: The base's, with or without a tokenizer.
        max_seconds: Longest clip; None: the extractor's chunk length, or MAX_SECONDS.

    Attributes:
        rate: Samples per second.
        max_seconds: Longest clip.

    Raises:
        BaseError: There is no feature extractor.
    """

    def __init__(self, model: nn.Module, processor: Any, max_seconds: float | None) -> None:
        extractor = getattr(processor, "feature_extractor", processor)
        if not hasattr(extractor, "sampling_rate"):
            raise BaseError(
                f"{type(processor).__name__} reads no audio.",
                found="It has no feature extractor with a sampling rate.",
                fix="Give a base such as Whisper or wav2vec2, with its preprocessor_config.json.",
            )
        self.extractor, self.rate = extractor, int(extractor.sampling_rate)
        at_once = getattr(extractor, "chunk_length", None) or max_seconds or MAX_SECONDS
        self.max_seconds = min(float(at_once), max_seconds or float("inf"))
        self._model: Any = unwrapped(model)
        names = [name for name in LENGTHS if hasattr(self._model, name)]
        self._count: Any = getattr(self._model, names[0]) if names else None
        self._of_samples = self._positions_of_samples()
        self._needs_mask = self._of_samples is not None and keep_padding_out(self._model)
        self._of_frames = dict[int, int]()

    @property
    def is_exact(self) -> bool:
        """Whether positions are known to the last sample, as CTC needs them."""
        return self._of_samples is not None or self._has_masks

    @property
    def fewest(self) -> int:
        """Fewest positions of a clip to train on: a span of them may be masked."""
        config = self._model.config
        masks = getattr(config, "apply_spec_augment", False) and config.mask_time_prob > 0
        return int(config.mask_time_length) + 1 if masks else 1

    @property
    def key(self) -> object:
        """What rows depend on, for the key of the cache."""
        return (self.rate, self.max_seconds, self.positions(self.rate))

    def duration(self, num_samples: int) -> str:
        """Return the duration of a clip, for messages."""
        return f"{num_samples / self.rate:.2f} s at {self.rate:,} Hz"

    def decoded(self, clips: Sequence[Audio]) -> list[Any]:
        """Return clips as arrays of samples.

        Raises:
            ShortAudio: One is too short for the encoder.
            DataError: See `Audio.decode`.
        """
        arrays = [clip.decode(self.rate, self.max_seconds) for clip in clips]
        for clip, samples in zip(clips, arrays, strict=True):
            if len(samples) < self.rate // 2 and not self.positions(len(samples)):
                raise ShortAudio(
                    f"Cannot use {clip.which} of {clip.source}.",
                    found=f"It is too short: {self.duration(len(samples))}.",
                    fix="Give a longer one, or remove it.",
                )
        return arrays

    def features(self, arrays: Sequence[Any]) -> dict[str, Tensor]:
        """Return the features of arrays of samples, padded as the extractor does."""
        takes = inspect.signature(type(self.extractor).__call__).parameters
        options: dict[str, object] = {}
        if "padding" in takes:  # Whisper's pads to 30 s by default, others not at all
            default = takes["padding"].default
            options["padding"] = default if isinstance(default, str) else True
        if self._has_masks or self._needs_mask:
            options["return_attention_mask"] = True
        arguments = {"sampling_rate": self.rate, "return_tensors": "pt", **options}
        return dict(self.extractor(list(arrays), **arguments))

    def inputs(self, clips: Sequence[Audio]) -> dict[str, Tensor]:
        """Return the features of audio clips; see `decoded`."""
        return self.features(self.decoded(clips))

    def example(self, seed: int = 0) -> dict[str, Tensor]:
        """Return the features of half a second of noise, on the model's device."""
        noise = torch.randn(self.rate // 2, generator=torch.Generator().manual_seed(seed))
        inputs = in_dtype_of(self._model, self.features([noise.numpy() / 10]))
        return {name: tensor.to(self._model.device) for name, tensor in inputs.items()}

    def positions(self, num_samples: int) -> int:
        """Return how many positions the encoder makes of a clip."""
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
        """Whether the model counts positions of frames, and the extractor masks padded frames."""
        names = getattr(self.extractor, "model_input_names", ())
        frames = self._model.main_input_name == "input_features"
        return frames and self._count is not None and "attention_mask" in names

    def _positions_of_samples(self) -> Any:
        """Return the positions of clips of 0, 1, 2, ... samples, where the model reads samples."""
        if self._count is None or self._model.main_input_name != "input_values":
            return None
        samples = torch.arange(int(self.max_seconds * self.rate) + self.rate)
        try:
            return self._count(samples).numpy()
        except ValueError:  # Moonshine's takes one number
            return None

    def _positions_of_frames(self, num_samples: int) -> int:
        """Return the positions of a clip that the model reads as frames: mel bins, for example.

        0 for a clip that is too short for the extractor, which raises or divides by zero.
        """
        noise = torch.randn(num_samples, generator=torch.Generator().manual_seed(0)).numpy()
        try:
            inputs = self.features([noise])
        except (RuntimeError, ValueError, IndexError):
            return 0
        if not inputs["input_features"].isfinite().all():
            return 0
        return max(int(self._count(inputs["attention_mask"].sum(-1))), 0)


# Rows: audio, and the target tokens of its text.


METADATA = ("metadata.jsonl", "metadata.csv")
"""Files that list the media of a folder, with their texts or labels."""
FILE_NAME = "file_name"
"""Field of such a file with the path of the medium."""
NO_TEXT, SILENT, SHORT = "no text", "silent or empty audio", "audio that is too short"
"""Reasons to drop a record; see `RowEncoder.drops`."""
TASKS = ("transcribe", "translate")


@dataclass(frozen=True, slots=True)
class SpeechRow:
    """An audio clip and its transcript.

    Args:
        clip: Encoded; its features are made for each batch.
        num_samples: After decoding and resampling.
        num_encoder_tokens: Positions that the encoder makes of it.
        labels: All target tokens: language and task, the text, the end token.
        num_prefix: How many of these precede the text.
        num_decoder_tokens: How many a decoder reads.
        text: As the file has it.
        source: "train.jsonl:7".
    """

    clip: Audio
    num_samples: int
    num_encoder_tokens: int
    labels: tuple[int, ...]
    num_prefix: int
    num_decoder_tokens: int
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Utterance:
    """A parsed record: an audio clip, its text, and options of the decoder."""

    clip: Audio
    text: str
    language: str | None
    task: str | None
    source: str


class MediumEncoder(RecordEncoder):
    """Encoder of records with a medium; its file may be the METADATA of a folder."""

    at_once: ClassVar[int] = 100

    def key(self, where: str) -> object:
        return (str(Path(where).absolute().parent), *self.settings)

    def file_of(self, where: str) -> str:
        return metadata_or_self(where)


class SpeechEncoder(MediumEncoder):
    """Encoder of audio clips with their texts; decodes each clip once to find damaged files.

    Args:
        names: Of the fields with the clip and the text.
        labels: Makes all target tokens of an utterance, and how many of them precede the text.
        key: Of `labels`.
        fits: Whether the encoder's positions suffice for the labels.
        too_many: Why rows with more labels are dropped.
        has_decoder: Whether a decoder reads the labels.
    """

    kind: ClassVar[type[SpeechRow]] = SpeechRow
    what = "an audio clip and its text"

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
        self._too_many, long = too_many, f"audio longer than {hearing.max_seconds:g} s"
        self.drops = {
            NO_TEXT: "give these rows a text",
            too_many: "cut them into pieces",
            SILENT: "give these rows another clip",
            long: "cut it into pieces",
            SHORT: "give these rows another clip",
        }
        self._reasons = {SilentAudio: SILENT, LongAudio: long, ShortAudio: SHORT}
        self.settings = (names, key, hearing.key)

    def summary(self, rows: StoredRows) -> list[tuple[str, str]]:
        return [("minutes of audio", f"{rows.counts['milliseconds'] / 60_000:,.1f}")]

    def parse(self, record: Record, where: str) -> tuple[Utterance, Sequence[str]]:
        return utterance(record, self._names, where)

    def row(self, example: Utterance) -> SpeechRow | Dropped:
        if not example.text.strip():
            return Dropped(example.source, NO_TEXT)
        try:
            (samples,) = self._hearing.decoded([example.clip])
        except (SilentAudio, LongAudio, ShortAudio) as problem:
            return Dropped(example.source, self._reasons[type(problem)])
        labels, num_prefix = self._labels(example)
        positions = self._hearing.positions(len(samples))
        if positions < self._hearing.fewest:
            return Dropped(example.source, SHORT)
        if not self._fits(labels, positions):
            return Dropped(example.source, self._too_many)
        milliseconds = len(samples) * 1000 // self._hearing.rate
        self.counts.update(milliseconds=milliseconds, targets=len(labels))
        return SpeechRow(
            example.clip,
            len(samples),
            positions,
            labels,
            num_prefix,
            len(labels) if self._has_decoder else 0,
            example.text,
            example.source,
        )


def metadata_or_self(where: str) -> str:
    """Return the file of METADATA in a folder, if it has one; else `where` itself."""
    folder = Path(where).expanduser()
    return next((str(folder / name) for name in METADATA if (folder / name).is_file()), where)


def medium_in(
    record: Record, name: str, setting: str, kind: MediaClass, where: str
) -> tuple[Any, str]:
    """Return the medium of a record, and its field: `name` or, if that is missing, FILE_NAME.

    Args:
        setting: Names the field in a recipe.
        where: The data file; paths are relative to its folder.

    Raises:
        WrongField: There is none.
        DataError: It is a web address.
    """
    if name not in record.fields and FILE_NAME in record.fields:
        name = FILE_NAME
    value = field_of(record.fields, name, setting)
    medium: Media | None = media_of(kind, value, record, where)
    if medium is None:
        raise WrongField(name, f"expected a path or bytes ({kind.kind}), found {shown(value)}")
    return medium, name


def utterance(
    record: Record, names: tuple[str, str], where: str
) -> tuple[Utterance, Sequence[str]]:
    """Return the clip and the text of a record, and the fields that were read.

    Args:
        names: Of the fields with the clip and the text.

    Raises:
        WrongField: One is missing or unusable.
    """
    fields = record.fields
    clip, audio = medium_in(record, names[0], "task.audio", Audio, where)
    text = text_of(fields, names[1])
    if mark := re.search(r"<\|[^|]*\|>", text):
        raise WrongField(
            names[1], f"holds {mark[0]}: timestamps and other marks are not trained on"
        )
    options = {name: text_of(fields, name) for name in ("language", "task") if fields.get(name)}
    if options.get("task") not in (None, *TASKS):
        raise WrongField("task", f"expected {' or '.join(TASKS)}, found {shown(options['task'])}")
    parsed = Utterance(clip, text, options.get("language"), options.get("task"), record.source)
    return parsed, (audio, names[1], "language", "task")


class SpeechConfig(TaskConfig):
    """Base of the configs of tasks of audio and text."""

    task_type: ClassVar[None] = None  # PEFT's class for SEQ_2_SEQ_LM gives models input_ids
    processor: ClassVar[Processor] = "audio"
    command: ClassVar[str] = "peftkit generate {folder} --audio FILE"
    measures_before: ClassVar[bool] = True
    predicts: ClassVar[frozenset[Predicts]] = frozenset({"audio"})

    audio: str = "audio"
    """Field with the audio clip: a path relative to the file, or bytes; file_name works, too."""
    text: str = "text"
    """Field with its transcript."""

    def resolve(self, data: DataConfig) -> TaskConfig:
        Audio.require("jiwer")  # of error rates
        return self
