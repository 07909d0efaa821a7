"""Sounds, read in one place: bounded in bytes, seconds and channels, and resampled.

soundfile and soxr are imported when a sound is read: the optional extra `audio`.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import torch

from peftkit.data.media import Limits, Media
from peftkit.errors import DataError

MAX_CHANNELS = 2
"""More are those of several microphones, whose mean is not what each of them heard."""
RATES = (1_000, 384_000)
"""Hertz that are taken for a sampling rate."""
MIN_SECONDS = 0.1
"""Of less a processor of sounds and text makes no token, or one that its model takes for none."""
SILENT = 1e-5
"""A sound whose samples never exceed this holds nothing to be heard."""


class LongSound(DataError):
    """It lasts longer than may be."""


class SilentSound(DataError):
    """There is nothing to be heard."""


class Sound(Media):
    """A sound as it is stored: wav, flac, ogg, mp3."""

    __slots__ = ()
    kind = "sound"
    name = "audio"
    argument = "audio"
    fields = ("audio", "audios")
    parts = ("audio", "audio_url", "input_audio")
    mark = "\N{INTERLINEAR ANNOTATION ANCHOR}"
    readers = ("feature_extractor", "audio_processor")
    packages = ("soundfile", "soxr", "jiwer")
    extra = "audio"

    def read(self, limits: Limits) -> Any:
        found = self.decode(limits.rate, limits.max_seconds, silent=True)
        if len(found) < MIN_SECONDS * limits.rate:
            words = f"It lasts {len(found) / limits.rate:.3f} s, less than {MIN_SECONDS:g} s."
            raise self.error(words, "Remove it.")
        return found

    @classmethod
    def size(cls, read: Any) -> object:
        return len(read)

    @classmethod
    def told(cls, read: Any, limits: Limits) -> str:
        return f"{len(read) / limits.rate:.2f} s"

    @classmethod
    def blank(cls, limits: Limits) -> Any:
        """Return a second of a low hum."""
        times = torch.arange(round(limits.rate * min(1.0, limits.max_seconds))) / limits.rate
        return (0.1 * torch.sin(600 * times)).numpy()

    @classmethod
    def given(cls, rows: Sequence[Sequence[Any]], limits: Limits) -> dict[str, Any]:
        return {**super().given(rows, limits), "sampling_rate": limits.rate}

    def decode(self, rate: int, max_seconds: float, *, silent: bool = False) -> Any:
        """Return it as a numpy array of float32 (samples,), its channels mixed.

        Args:
            rate: Samples a second that it is resampled to.
            max_seconds: Longer ones are refused, whatever their header says.
            silent: Whether it may be silent.

        Raises:
            LongSound: It lasts longer.
            SilentSound: It is empty or silent.
            DataError: It is not there, does not decode, has too many channels, or holds values that
                are no numbers; names it.
        """
        self.require()
        import soundfile
        import soxr

        try:
            with soundfile.SoundFile(BytesIO(self.encoded())) as file:
                own = file.samplerate
                if not RATES[0] <= own <= RATES[1]:
                    raise self.error(f"It has {own:,} samples a second.", "Resample it first.")
                if file.channels > MAX_CHANNELS:
                    words = f"It has {file.channels} channels, more than {MAX_CHANNELS}."
                    raise self.error(words, "Mix them, or keep one.")
                most = int(max_seconds * own)
                found = file.read(most + 1, dtype="float32", always_2d=True)
                if len(found) > most:
                    lasts = max(file.frames, len(found)) / own
                    raise LongSound(
                        f"Cannot use {self.which} of {self.source}.",
                        found=f"It lasts {lasts:,.1f} s, more than {max_seconds:g} s.",
                        fix="Cut it into pieces, or remove it.",
                    )
        except soundfile.SoundFileError as problem:
            words = str(problem).splitlines()[0].rpartition(": ")[2]
            raise self.error(f"{words} wav, flac, ogg and mp3 are read.", "Convert it.") from None
        loudest = float(abs(found).max()) if len(found) else 0.0
        if loudest <= SILENT and not (silent and len(found)):
            words = f"Cannot use {self.which} of {self.source}."
            raise SilentSound(words, found="It is empty or silent.", fix="Remove it.")
        if not loudest < float("inf"):  # NaN too
            raise self.error("It holds values that are no numbers.", "Mend or remove it.")
        mixed = found.mean(axis=1)
        return mixed if own == rate else soxr.resample(mixed, own, rate)
