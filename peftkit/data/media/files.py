"""Images, audio and video of rows: reading and decoding, with limits on size.

A medium is a path (relative to the data file), a data URL, encoded bytes, or {"bytes": ..., "path":
...} as in Hugging Face datasets. Nothing is downloaded. The decoders are optional extras, imported
on first use: Pillow (`images`), soundfile and soxr (`audio`), PyAV (`video`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from peftkit.data.records import Record
from peftkit.errors import DataError, install_extra
from peftkit.files.strict_json import shown

MAX_BYTES = 100 * 2**20
"""Limit for an encoded medium."""
_URL = re.compile(r"(?i)[a-z][a-z0-9+.-]*://")
_DATA_URL = re.compile(r"(?i)data:[^,;]*(;[^,;]*)*;base64,")


@dataclass(frozen=True, slots=True)
class Limits:
    """How media are decoded for a model.

    Attributes:
        max_pixels: Limit for an image or a frame; larger ones are scaled down. None: no limit.
        rate: Audio samples per second.
        max_seconds: Limit for an audio clip; longer clips are errors.
        video_frames: Frames sampled from a video, evenly spaced.
    """

    max_pixels: int | None = None
    rate: int = 16_000
    max_seconds: float = 30.0
    video_frames: int = 16


class Media:
    """An undecoded image, audio clip or video: a path, bytes (maybe memory-mapped) or a data URL.

    Each kind is a subclass. After the first read, the repr contains a hash of the bytes, so equal
    media have equal reprs regardless of their location.

    Args:
        source: The row that contains it.
        which: Its name within the row, for messages.
    """

    __slots__ = ("_digest", "data", "source", "which")
    columns: ClassVar[Mapping[str, str]] = {
        "kind": "string",
        "path": "large_string",
        "num_bytes": "int64",
        "changed": "int64",
        "data": "large_binary",
        "digest": "string",
        "which": "string",
    }
    """Columns in an Arrow file: path, size and modification time, or the bytes."""
    stamp: ClassVar[tuple[str, ...]] = ("path", "num_bytes", "changed")
    """Columns that change with the file."""
    kind: ClassVar[str]
    """Its name in messages."""
    name: ClassVar[str]
    """Its name in processors and chat templates: {"type": name}, name_token, name_token_id."""
    argument: ClassVar[str]
    """The processor's argument for these media."""
    mark: ClassVar[str]
    """Placeholder of a medium in the texts of an example."""
    readers: ClassVar[tuple[str, ...]]
    """Processor attributes that can hold the reader of these media."""
    packages: ClassVar[tuple[str, ...]]
    """Modules that decode these media."""
    extra: ClassVar[str]
    """The extra of peftkit that installs these packages."""
    fields: ClassVar[tuple[str, ...]]
    """Fields of a row that can contain these media."""
    parts: ClassVar[tuple[str, ...]]
    """Types of message parts with these media; also the keys of the medium in a part."""

    def __init__(
        self, data: Path | bytes | memoryview | str, source: str, which: str = "", digest: str = ""
    ) -> None:
        self.data, self.source, self._digest = data, source, digest
        self.which = which or f"the {self.kind}"

    def __repr__(self) -> str:
        return f"{self.name} {self._digest or self.source}"

    @property
    def is_read(self) -> bool:
        """Whether the hash of the bytes has been computed."""
        return bool(self._digest)

    @classmethod
    def require(cls, *more: str) -> None:
        """Raise DataError if a decoder of these media, or another package in `more`, is missing."""
        missing = [
            name for name in (*cls.packages, *more) if importlib.util.find_spec(name) is None
        ]
        if missing:
            raise DataError(
                f"Cannot read {cls.kind}s.",
                found=f"They need {', '.join(missing)}, which is not installed.",
                fix=install_extra(cls.extra),
            )

    def read(self, limits: Limits) -> Any:
        """Decode the medium for a processor.

        Raises:
            DataError: The medium is missing, too large or cannot be decoded.
        """
        raise NotImplementedError

    @classmethod
    def size(cls, read: Any) -> object:
        """Return the properties of a decoded medium that determine a processor's text for it."""
        raise NotImplementedError

    @classmethod
    def describe(cls, read: Any, limits: Limits) -> str:
        """Return the size of a decoded medium, as text."""
        raise NotImplementedError

    @classmethod
    def arguments(cls, rows: Sequence[Sequence[object]], limits: Limits) -> dict[str, Any]:
        """Return a processor's arguments for the media of several texts."""
        return {cls.argument: [one for row in rows for one in row]}

    @classmethod
    def blank(cls, limits: Limits) -> Any:
        """Return a small decoded medium to probe a processor with."""
        raise NotImplementedError

    def stored(self) -> dict[str, Any]:
        """Return the medium's values for an Arrow file, by column."""
        facts = {"kind": self.kind, "digest": self._digest, "which": self.which}
        if isinstance(self.data, Path):
            file = self.data.stat()
            stamp = (str(self.data.absolute()), file.st_size, file.st_mtime_ns)
            return facts | dict(zip(self.stamp, stamp, strict=True))
        return facts | {"data": self.encoded()}

    @staticmethod
    def opened(scalar: Any, source: str) -> Media:
        """Return the medium of an Arrow row; its bytes stay memory-mapped."""
        kind = next(kind for kind in KINDS if kind.kind == scalar["kind"].as_py())
        path = scalar["path"].as_py()
        data = memoryview(scalar["data"].as_buffer()) if path is None else Path(path)
        return kind(data, source, scalar["which"].as_py(), scalar["digest"].as_py())

    @staticmethod
    def is_unchanged(path: str | None, num_bytes: int, changed: int) -> bool:
        """Return whether the file of a stored medium is unchanged; see `stamp`."""
        if path is None:
            return True
        try:
            file = Path(path).stat()
        except OSError:
            return False
        return (file.st_size, file.st_mtime_ns) == (num_bytes, changed)

    def encoded(self) -> bytes:
        """Return the encoded bytes.

        Raises:
            DataError: The file is missing, not a regular file, too large, or does not match the
                row's digest; or the data URL is invalid.
        """
        if isinstance(self.data, Path):
            try:
                num_bytes = self.data.stat().st_size
                if not self.data.is_file():  # for example, an endless device
                    raise self.error(
                        "It is not a regular file.", f"Name the file of the {self.kind}."
                    )
                if num_bytes > MAX_BYTES:
                    raise self._too_long(num_bytes)
                stored = self.data.read_bytes()
            except OSError as problem:
                raise self.error(str(problem), "Replace or remove it.") from None
        elif isinstance(self.data, str):
            if len(self.data) > MAX_BYTES * 4 // 3:
                raise self._too_long(len(self.data) * 3 // 4)
            try:
                stored = base64.b64decode(self.data.partition(",")[2], validate=True)
            except binascii.Error as problem:
                raise self.error(f"Its data URL: {problem}", "Encode it as base64.") from None
        else:
            stored = bytes(self.data)
        if len(stored) > MAX_BYTES:
            raise self._too_long(len(stored))
        digest = hashlib.sha256(stored).hexdigest()[:32]
        if self._digest not in ("", digest):
            fix = f"Prepare the rows again; remove the {self.kind} if it is damaged."
            raise self.error("Its bytes changed after the row was prepared.", fix)
        self._digest = digest
        return stored

    def _too_long(self, size: int) -> DataError:
        return self.error(f"It has {size:,} bytes, more than {MAX_BYTES:,}.", "Make it smaller.")

    def error(self, reason: str, fix: str) -> DataError:
        """Return the error of a medium that cannot be decoded."""
        place = f"{self.data}: " if isinstance(self.data, Path) else ""
        return DataError(
            f"Cannot decode {self.which} of {self.source}.", found=f"{place}{reason}", fix=fix
        )


MediaClass = type[Media]
AnyMedia = TypeVar("AnyMedia", bound=Media)


def media_of(
    cls: type[AnyMedia], value: object, record: Record, where: str, which: str = ""
) -> AnyMedia | None:
    """Return the medium in a field; None if the value is not a medium.

    Args:
        where: The data file; paths are relative to its folder.

    Raises:
        DataError: The value is a URL, or a path in the home of an unknown user.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | Path):
        return cls(value, record.source, which)
    if not isinstance(value, str) or not value:
        return None
    if _DATA_URL.match(value[:256]):
        return cls(value, record.source, which)
    if _URL.match(value):
        raise DataError(
            f"Cannot use {which} of {record.source}.",
            found=f"It is a URL, {shown(value)}, and nothing is fetched.",
            fix="Download it and give the path of the file.",
        )
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise DataError(
            f"Cannot use {which} of {record.source}.",
            found=f"The path {shown(value)} begins with an unknown user.",
            fix="Give the path without ~.",
        ) from None
    folder = Path(where).expanduser().parent
    return cls(path if path.is_absolute() else folder / path, record.source, which)


def scaled_size(width: int, height: int, max_pixels: int | None) -> tuple[int, int] | None:
    """Return the scaled width and height of a picture that exceeds the limit; otherwise None."""
    if max_pixels is None or width * height <= max_pixels:
        return None
    scale = math.sqrt(max_pixels / (width * height))
    return max(1, int(width * scale)), max(1, int(height * scale))


DEEP_MODES = ("I", "F")
"""First letters of Pillow's modes with more than 8 bits, which a conversion would truncate."""
MAX_PIXELS = 100_000_000
"""Limit for an image; checked in its header, before any memory is allocated."""


class Picture(Media):
    """An undecoded image."""

    __slots__ = ()
    kind = "image"
    name = "image"
    argument = "images"
    fields = ("images", "image")
    parts = ("image", "image_url", "input_image")
    mark = "\N{OBJECT REPLACEMENT CHARACTER}"
    readers = ("image_processor",)
    packages = ("PIL",)
    extra = "images"

    def read(self, limits: Limits) -> Any:
        return self.decode("RGB", limits.max_pixels)

    @classmethod
    def size(cls, read: Any) -> object:
        return read.size

    @classmethod
    def describe(cls, read: Any, limits: Limits) -> str:
        return f"{read.width}x{read.height}"

    @classmethod
    def blank(cls, limits: Limits) -> Any:
        """Return a white square."""
        from PIL import Image

        return Image.new("RGB", (64, 64), "white")

    @classmethod
    def arguments(cls, rows: Sequence[Sequence[object]], limits: Limits) -> dict[str, Any]:
        return {"images": [list(row) for row in rows]}

    def decode(self, mode: str = "RGB", max_pixels: int | None = None) -> Any:
        """Return a Pillow image, rotated as its EXIF data requires.

        Args:
            mode: Pillow's: "RGB", or "L" for one channel.
            max_pixels: Larger images are scaled down to this limit and keep their aspect ratio.

        Raises:
            DataError: The image is missing, too large, animated or cannot be decoded.
        """
        self.require()
        from PIL import Image, ImageOps

        try:
            stored = self.encoded()
            if re.match(rb"\s*(<\?xml|<svg|<!DOCTYPE svg)", stored[:256], re.IGNORECASE):
                raise self.error("It is an SVG, which has no pixels.", "Render it to a PNG.")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # see MAX_PIXELS
                opened = Image.open(BytesIO(stored))
            if (problem := _unusable(opened)) is not None:
                raise self.error(*problem)
            image = ImageOps.exif_transpose(opened).convert(mode)
        except DataError:
            raise
        except Image.DecompressionBombError:
            raise self.error(*_TOO_MANY) from None
        except Exception as problem:  # a damaged image can raise anything
            raise self.error(_short(problem), "Replace or remove it.") from problem
        size = scaled_size(image.width, image.height, max_pixels)
        return image if size is None else image.resize(size, Image.Resampling.BICUBIC)


_TOO_MANY = f"It has more than {MAX_PIXELS:,} pixels.", "Scale it down first, or remove it."


def _unusable(image: Any) -> tuple[str, str] | None:
    """Return the problem in an image's header and its fix; None if the image is usable."""
    width, height = image.size
    if not width or not height:
        return f"It has no pixels: {width} x {height}.", "Remove it."
    if width * height > MAX_PIXELS:
        return f"{_TOO_MANY[0][:-1]}: {width:,} x {height:,}.", _TOO_MANY[1]
    # an MPO is a photo followed by a preview or a second view
    if getattr(image, "is_animated", False) and image.format != "MPO":
        return f"It has several frames ({image.format}).", "Keep one of them."
    if image.mode.startswith(DEEP_MODES):
        bits = f"Its pixels have more than 8 bits (Pillow's mode {image.mode})."
        return bits, "Scale it to 8 bits first."
    if image.mode in ("CMYK", "LAB"):
        return (
            f"Its colours are for print ({image.mode}) and have no unique RGB values.",
            "Convert it to RGB first.",
        )
    return None


def _short(problem: Exception) -> str:
    if type(problem).__name__ == "UnidentifiedImageError":  # its text names our buffer
        return "It is in no image format that Pillow knows."
    return (str(problem) or type(problem).__name__).splitlines()[0][:200]


MAX_CHANNELS = 2
"""Audio with more channels comes from several microphones and cannot be mixed."""
SAMPLING_RATES = (1_000, 384_000)
"""Minimum and maximum sampling rate, in hertz."""
MIN_AUDIO_SECONDS = 0.1
"""Shorter audio gives no tokens that the model uses."""
MAX_SILENCE = 1e-5
"""Largest sample of audio that counts as silent."""


class LongAudio(DataError):
    """The audio is too long."""


class SilentAudio(DataError):
    """The audio is empty or silent."""


class Audio(Media):
    """An undecoded audio clip: wav, flac, ogg or mp3."""

    __slots__ = ()
    kind = "audio clip"
    name = "audio"
    argument = "audio"
    fields = ("audio", "audios")
    parts = ("audio", "audio_url", "input_audio")
    mark = "\N{INTERLINEAR ANNOTATION ANCHOR}"
    readers = ("feature_extractor", "audio_processor")
    packages = ("soundfile", "soxr")
    extra = "audio"

    def read(self, limits: Limits) -> Any:
        samples = self.decode(limits.rate, limits.max_seconds, silent=True)
        if len(samples) < MIN_AUDIO_SECONDS * limits.rate:
            lasts = f"{len(samples) / limits.rate:.3f} s"
            words = f"It lasts {lasts}, less than {MIN_AUDIO_SECONDS:g} s."
            raise self.error(words, "Remove it.")
        return samples

    @classmethod
    def size(cls, read: Any) -> object:
        return len(read)

    @classmethod
    def describe(cls, read: Any, limits: Limits) -> str:
        return f"{len(read) / limits.rate:.2f} s"

    @classmethod
    def blank(cls, limits: Limits) -> Any:
        """Return one second of a low hum."""
        times = torch.arange(round(limits.rate * min(1.0, limits.max_seconds))) / limits.rate
        return (0.1 * torch.sin(600 * times)).numpy()

    @classmethod
    def arguments(cls, rows: Sequence[Sequence[object]], limits: Limits) -> dict[str, Any]:
        return {**super().arguments(rows, limits), "sampling_rate": limits.rate}

    def decode(self, rate: int, max_seconds: float, *, silent: bool = False) -> Any:
        """Return the samples as a float32 numpy array (samples,), mixed to mono.

        Args:
            rate: Target sampling rate, in samples per second.
            max_seconds: Limit for the decoded duration, regardless of the header.
            silent: Whether silence is allowed.

        Raises:
            LongAudio: The clip is longer than `max_seconds`.
            SilentAudio: The clip is empty or silent.
            DataError: The clip is missing, cannot be decoded, has too many channels, or contains
                values that are not finite.
        """
        self.require()
        import soundfile
        import soxr

        stored = self.encoded()
        try:
            with soundfile.SoundFile(BytesIO(stored)) as file:
                file_rate = file.samplerate
                if not SAMPLING_RATES[0] <= file_rate <= SAMPLING_RATES[1]:
                    raise self.error(
                        f"It has {file_rate:,} samples per second.", "Resample it first."
                    )
                if file.channels > MAX_CHANNELS:
                    words = f"It has {file.channels} channels, more than {MAX_CHANNELS}."
                    raise self.error(words, "Mix them down, or keep one.")
                most = int(max_seconds * file_rate)
                samples = file.read(most + 1, dtype="float32", always_2d=True)
                if len(samples) > most:
                    lasts = max(file.frames, len(samples)) / file_rate
                    raise LongAudio(
                        f"Cannot use {self.which} of {self.source}.",
                        found=f"It lasts {lasts:,.1f} s, more than {max_seconds:g} s.",
                        fix="Split it, or remove it.",
                    )
        except soundfile.SoundFileError as problem:
            words = str(problem).splitlines()[0].rpartition(": ")[2]
            if "not exist" in words:  # an MP3 without a frame that decodes
                words = "It contains no audio that can be decoded."
            raise self.error(
                f"{words} Supported formats: wav, flac, ogg and mp3.", "Convert it."
            ) from None
        loudest = float(abs(samples).max()) if len(samples) else 0.0
        if loudest <= MAX_SILENCE and not (silent and len(samples)):
            words = f"Cannot use {self.which} of {self.source}."
            raise SilentAudio(words, found="It is empty or silent.", fix="Remove it.")
        if not loudest < float("inf"):  # NaN too
            raise self.error("It contains values that are not finite.", "Replace or remove it.")
        mixed = samples.mean(axis=1)
        return mixed if file_rate == rate else soxr.resample(mixed, file_rate, rate)


MAX_FRAME_PIXELS = 36_000_000
"""Limit for a video frame: 8K."""
MAX_VIDEO_SECONDS = 3600
"""Limit for the duration of a video."""
MAX_VIDEO_FRAMES = 200_000
"""Limit for the frames of a video; counted in its packets before any is decoded."""
MAX_VIDEO_PIXELS = 40_000_000_000
"""Limit for the pixels of all frames: ten minutes of 1920 x 1080, or 1-2 minutes of CPU time."""
FFMPEG_OPTIONS = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpegts,ogg,flv",
    "protocol_whitelist": "none",
}
"""No playlists, whose entries FFmpeg would fetch; FFmpeg reads only the given bytes."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames sampled from a video.

    Attributes:
        frames: (F, 3, H, W), uint8.
        places: Indices of the frames in the video, from 0.
        num_frames: Number of frames of the whole video.
        fps: Frames per second of the whole video.
    """

    frames: Tensor
    places: tuple[int, ...]
    num_frames: int
    fps: float


class Video(Media):
    """An undecoded video: mp4, mov, webm, mkv, avi, gif and others; see FFMPEG_OPTIONS."""

    __slots__ = ()
    kind = "video"
    name = "video"
    argument = "videos"
    fields = ("videos", "video")
    parts = ("video", "video_url", "input_video")
    mark = "\N{INTERLINEAR ANNOTATION SEPARATOR}"
    readers = ("video_processor",)
    packages = ("av",)
    extra = "video"

    def read(self, limits: Limits) -> Clip:
        return self.decode(limits.video_frames, limits.max_pixels)

    @classmethod
    def size(cls, read: Clip) -> object:
        return (*read.frames.shape, *read.places, read.num_frames, read.fps)

    @classmethod
    def describe(cls, read: Clip, limits: Limits) -> str:
        count, _, height, width = read.frames.shape
        return f"{count} of {read.num_frames} frames, {width}x{height}"

    @classmethod
    def blank(cls, limits: Limits) -> Clip:
        return Clip(torch.full((4, 3, 64, 64), 255, dtype=torch.uint8), (0, 1, 2, 3), 4, 2.0)

    @classmethod
    def arguments(cls, rows: Sequence[Sequence[Any]], limits: Limits) -> dict[str, Any]:
        """Return arguments that keep all frames and switch off the processor's own sampling."""
        clips = [clip for row in rows for clip in row]
        metadata = [
            {
                "total_num_frames": clip.num_frames,
                "fps": clip.fps,
                "duration": clip.num_frames / clip.fps,
                "frames_indices": list(clip.places),
            }
            for clip in clips
        ]
        frames = [clip.frames for clip in clips]
        return {"videos": frames, "video_metadata": metadata, "do_sample_frames": False}

    def decode(self, num_frames: int, max_pixels: int | None = None) -> Clip:
        """Return evenly spaced frames, the first and the last included.

        Args:
            num_frames: Maximum number of frames.
            max_pixels: Larger frames are scaled down to this limit and keep their aspect ratio.

        Raises:
            DataError: The video is missing, too long, too large or cannot be decoded.
        """
        self.require()
        import av

        try:
            stored = BytesIO(self.encoded())
            with av.open(stored, metadata_errors="replace", options=FFMPEG_OPTIONS) as file:
                if not file.streams.video:
                    raise self.error("It contains no video.", "Remove it.")
                stream = file.streams.video[0]
                stream.thread_type = "AUTO"
                packets = self._packets(file, stream)
                times = sorted(time for time, _ in packets)
                most = min(num_frames, len(times))
                places = [n * (len(times) - 1) // max(most - 1, 1) for n in range(most)]
                keys = sorted(time for time, is_key in packets if is_key)
                chosen = [times[place] for place in places]
                frames = [
                    torch.from_numpy(_pixels(frame, max_pixels))
                    for frame in self._at(file, stream, chosen, keys)
                ]
                seconds = (times[-1] - times[0]) * float(stream.time_base or 0) or 1.0
                if len(frames) < len(places):
                    words = f"It is cut short: {len(frames)} of {len(places)} frames decode."
                    raise self.error(words, "Replace or remove it.")
                fps = max(len(times) - 1, 1) / seconds
        except DataError:
            raise
        except Exception as problem:  # a damaged video can raise anything
            words = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
            text = words.splitlines()[0][:200]
            raise self.error(f"It does not decode: {text}", "Replace or remove it.") from problem
        if len({frame.shape for frame in frames}) > 1:
            raise self.error("Its frames have several sizes.", "Split it.")
        stacked = torch.stack(frames).permute(0, 3, 1, 2).contiguous()
        return Clip(stacked, tuple(places), len(times), fps)

    def _packets(self, file: Any, stream: Any) -> list[tuple[int, bool]]:
        """Return the time of each frame and whether it is a key frame, without decoding.

        Raises:
            DataError: The video has too many frames, is too long, or has too large frames.
        """
        side = stream.codec_context.width * stream.codec_context.height
        if not side:
            raise self.error("It has no pixels.", "Remove it.")
        if side > MAX_FRAME_PIXELS:
            raise self.error(
                f"Its frames have more than {MAX_FRAME_PIXELS:,} pixels.", "Scale it down."
            )
        packets = []
        for packet in file.demux(stream):
            time = packet.pts if packet.pts is not None else packet.dts
            if time is None or not packet.size:
                continue  # the final packet is empty
            packets.append((time, packet.is_keyframe))
            if len(packets) > MAX_VIDEO_FRAMES or len(packets) * side > MAX_VIDEO_PIXELS:
                words = f"It has more than {len(packets) - 1:,} frames of {side:,} pixels."
                raise self.error(words, "Shorten it, or scale it down.")
        if not packets:
            raise self.error("It contains no frames.", "Remove it.")
        times = [time for time, _ in packets]
        seconds = (max(times) - min(times)) * float(stream.time_base)
        if seconds > MAX_VIDEO_SECONDS:
            words = f"It lasts {seconds:,.0f} s, more than {MAX_VIDEO_SECONDS:,}."
            raise self.error(words, "Split it.")
        return packets

    def _at(
        self, file: Any, stream: Any, times: Sequence[int], keys: Sequence[int]
    ) -> Iterator[Any]:
        """Yield the frames at the given times, in order; seek to key frames between them."""
        frames: Iterator[Any] = iter(())
        last: int | None = None
        for time in times:
            begins = max((key for key in keys if key <= time), default=None)
            if last is None or (begins is not None and begins > last):
                file.seek(time if begins is None else begins, stream=stream)
                frames = file.decode(stream)
            for frame in frames:
                if frame.width * frame.height > MAX_FRAME_PIXELS:
                    raise self.error("It has a frame larger than its header states.", "Remove it.")
                last = frame.pts if frame.pts is not None else frame.dts
                if last is not None and last >= time:
                    yield frame
                    break


def _pixels(frame: Any, max_pixels: int | None) -> Any:
    """Return a frame as a uint8 numpy array (H, W, 3), scaled down if it exceeds the limit."""
    size = scaled_size(frame.width, frame.height, max_pixels)
    if size is not None:
        frame = frame.reformat(*size)
    return frame.to_ndarray(format="rgb24")


KINDS: tuple[type[Media], ...] = (Picture, Audio, Video)
"""All kinds of media."""
MARKS = {kind.mark: kind for kind in KINDS}
"""Marks of media in the texts of an example."""
ANY_MARK = re.compile(f"([{''.join(MARKS)}])")
