"""Videos, read in one place: bounded in bytes, seconds and pixels; some frames of each.

PyAV is imported when a video is read, the optional extra `video`; it decodes what FFmpeg does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from peftkit.data.media import Limits, Media
from peftkit.errors import DataError

MAX_PIXELS = 36_000_000
"""Of a frame: 8K."""
MAX_SECONDS = 3600
"""Of a video."""
MAX_FRAMES = 200_000
"""Of a video; looked up in its packets, before any of them is decoded."""
MAX_DECODED = 40_000_000_000
"""Pixels of all frames of a video: ten minutes of 1920 x 1080, a minute or two of a processor."""
OPTIONS = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpegts,ogg,flv",
    "protocol_whitelist": "none",
}
"""Of FFmpeg: no playlists, whose files it would fetch; nothing but the bytes that it is given."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Some frames of a video.

    Attributes:
        frames: (F, 3, H, W), bytes.
        places: Their numbers in the video, from 0.
        num_frames: Of the whole. fps: Frames of the whole in a second.
    """

    frames: Tensor
    places: tuple[int, ...]
    num_frames: int
    fps: float


class Video(Media):
    """A video as it is stored: mp4, mov, webm, mkv, avi, gif and others; see OPTIONS."""

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
    def told(cls, read: Clip, limits: Limits) -> str:
        count, _, height, width = read.frames.shape
        return f"{count} of {read.num_frames} frames, {width}x{height}"

    @classmethod
    def blank(cls, limits: Limits) -> Clip:
        return Clip(torch.full((4, 3, 64, 64), 255, dtype=torch.uint8), (0, 1, 2, 3), 4, 2.0)

    @classmethod
    def given(cls, rows: Sequence[Sequence[Any]], limits: Limits) -> dict[str, Any]:
        """Return clips as they are: a processor that chose frames of its own would lose some."""
        clips = [clip for row in rows for clip in row]
        told = [
            {
                "total_num_frames": clip.num_frames,
                "fps": clip.fps,
                "duration": clip.num_frames / clip.fps,
                "frames_indices": list(clip.places),
            }
            for clip in clips
        ]
        frames = [clip.frames for clip in clips]
        return {"videos": frames, "video_metadata": told, "do_sample_frames": False}

    def decode(self, num_frames: int, max_pixels: int | None = None) -> Clip:
        """Return frames that lie evenly over it, from the first to the last.

        Args:
            num_frames: So many, or all that there are.
            max_pixels: Larger frames are scaled down to so many, sides in proportion.

        Raises:
            DataError: It is not there, is too long or too large, or does not decode; names it.
        """
        self.require()
        import av

        try:
            stored = BytesIO(self.encoded())
            with av.open(stored, metadata_errors="replace", options=OPTIONS) as file:
                if not file.streams.video:
                    raise self.error("There is no video in it.", "Remove it.")
                stream = file.streams.video[0]
                stream.thread_type = "AUTO"
                packets = self._packets(file, stream)
                times = sorted(time for time, _ in packets)
                most = min(num_frames, len(times))
                places = [n * (len(times) - 1) // max(most - 1, 1) for n in range(most)]
                keys = sorted(time for time, is_key in packets if is_key)
                wanted = [times[place] for place in places]
                found = [
                    torch.from_numpy(self._scaled(frame, max_pixels).to_ndarray(format="rgb24"))
                    for frame in self._at(file, stream, wanted, keys)
                ]
                seconds = (times[-1] - times[0]) * float(stream.time_base or 0) or 1.0
                if len(found) < len(places):
                    words = f"It breaks off: {len(found)} of {len(places)} frames are there."
                    raise self.error(words, "Mend or remove it.")
                fps = max(len(times) - 1, 1) / seconds
        except DataError:
            raise
        except Exception as problem:  # a damaged video can raise anything
            said = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
            text = said.splitlines()[0][:200]
            raise self.error(f"It does not decode: {text}", "Mend or remove it.") from problem
        if len({frame.shape for frame in found}) > 1:
            raise self.error("Its frames have several sizes.", "Cut it into pieces.")
        frames = torch.stack(found).permute(0, 3, 1, 2).contiguous()
        return Clip(frames, tuple(places), len(times), fps)

    def _packets(self, file: Any, stream: Any) -> list[tuple[int, bool]]:
        """Return the time of each frame, and whether it is decoded without others; no frame is.

        Raises:
            DataError: They are too many, too long, or too large.
        """
        side = stream.codec_context.width * stream.codec_context.height
        if not side:
            raise self.error("It has no pixels.", "Remove it.")
        if side > MAX_PIXELS:
            raise self.error(f"Its frames have more than {MAX_PIXELS:,} pixels.", "Scale it down.")
        found = []
        for packet in file.demux(stream):
            time = packet.pts if packet.pts is not None else packet.dts
            if time is None or not packet.size:
                continue  # the last one, which is empty
            found.append((time, packet.is_keyframe))
            if len(found) > MAX_FRAMES or len(found) * side > MAX_DECODED:
                words = f"It has more than {len(found) - 1:,} frames of {side:,} pixels."
                raise self.error(words, "Cut it, or scale it down.")
        if not found:
            raise self.error("It holds no frames.", "Remove it.")
        times = [time for time, _ in found]
        seconds = (max(times) - min(times)) * float(stream.time_base)
        if seconds > MAX_SECONDS:
            words = f"It lasts {seconds:,.0f} s, more than {MAX_SECONDS:,}."
            raise self.error(words, "Cut it into pieces.")
        return found

    def _at(
        self, file: Any, stream: Any, wanted: Sequence[int], keys: Sequence[int]
    ) -> Iterator[Any]:
        """Yield the frames of some times, in order; what lies between is skipped if it can be."""
        frames: Iterator[Any] = iter(())
        last: int | None = None
        for time in wanted:
            begins = max((key for key in keys if key <= time), default=None)
            if last is None or (begins is not None and begins > last):
                file.seek(time if begins is None else begins, stream=stream)
                frames = file.decode(stream)
            for frame in frames:
                if frame.width * frame.height > MAX_PIXELS:
                    raise self.error("A frame of it is larger than it says.", "Remove it.")
                last = frame.pts if frame.pts is not None else frame.dts
                if last is not None and last >= time:
                    yield frame
                    break

    @staticmethod
    def _scaled(frame: Any, max_pixels: int | None) -> Any:
        if max_pixels is None or frame.width * frame.height <= max_pixels:
            return frame
        scale = math.sqrt(max_pixels / (frame.width * frame.height))
        return frame.reformat(
            width=max(1, int(frame.width * scale)), height=max(1, int(frame.height * scale))
        )
