"""Detect truncated and damaged audio files, which decoders accept without an error.

- WAV: the header has the size of the samples (RFC 2361; EBU Tech 3306 for RF64).
- Ogg (RFC 3533): each page has a checksum, and the last page of a stream is marked.
- MP3 (ISO/IEC 11172-3, 13818-3): frames are contiguous; a Xing header has their number.

The decoder of FLAC verifies its checksums. Overwritten samples of a WAV and overwritten bytes
within a frame of an MP3 are not detected, because these formats have no checksums for them.
"""

from __future__ import annotations

import zlib

STREAMED_SIZE = 0x7F000000
"""Minimum size in a WAV header that was written before the size was known (2 or 4 GiB)."""
ALLOWED_SECONDS = 0.05
"""Missing seconds that a WAV may have: some headers include themselves or padding in the size."""
ALLOWED_FRAMES = 1
"""Missing frames that an MP3 may have: some Xing headers count their own frame."""
_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
"""Version bits of an MP3 frame -> samples per second."""
_MPEG1 = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MPEG2 = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
"""Bit rates of layer III in kbit/s, by the index in a frame's header, from 1."""
_SEARCHED = 1 << 16
"""Maximum bytes before the first frame of an MP3, which decoders skip."""
_TAGS = (b"TAG", b"APETAGEX", b"LYRICSBEGIN")
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def audio_damage(stored: bytes) -> str:
    """Return a sentence that describes the damage of encoded audio; "" if none is detected."""
    if stored[:4] in (b"RIFF", b"RF64", b"BW64") and stored[8:12] == b"WAVE":
        return _wav_damage(stored)
    if stored[:4] == b"OggS":
        return _ogg_damage(stored)
    if stored[:3] == b"ID3" or _frame_size(stored, 0):
        return _mp3_damage(stored)
    return ""


def _wav_damage(stored: bytes) -> str:
    at, byte_rate, long_size = 12, 0, 0
    while at + 8 <= len(stored):
        name, size, body = stored[at : at + 4], _number(stored, at + 4), at + 8
        if name == b"fmt ":
            byte_rate = _number(stored, body + 8)
        elif name == b"ds64":
            long_size = _number(stored, body + 8, 8)
        elif name == b"data":
            size = long_size if size == 0xFFFFFFFF and long_size else size
            missing = size - (len(stored) - body)
            if size < STREAMED_SIZE and missing > ALLOWED_SECONDS * byte_rate:
                return (
                    f"It is cut short: its header names {size:,} bytes of samples, and it holds "
                    f"{len(stored) - body:,}."
                )
            return ""
        at = body + size + size % 2
    return ""


def _number(stored: bytes, at: int, num_bytes: int = 4) -> int:
    return int.from_bytes(stored[at : at + num_bytes], "little")


def _ogg_damage(stored: bytes) -> str:
    at, ended = 0, dict[int, bool]()
    while stored[at : at + 4] == b"OggS":
        num_segments = stored[at + 26] if at + 27 <= len(stored) else 0
        body = at + 27 + num_segments
        end = body + sum(stored[at + 27 : body])
        if end > len(stored):
            return f"It is cut short, within the page at byte {at:,}."
        page = stored[at : at + 22] + bytes(4) + stored[at + 26 : end]
        if _ogg_checksum(page) != _number(stored, at + 22):
            return f"It is damaged: the checksum of the page at byte {at:,} differs."
        ended[_number(stored, at + 14)] = bool(stored[at + 5] & 4)
        at = end
    if not all(ended.values()):
        if at < len(stored):
            return f"It is damaged: no page begins at byte {at:,}."
        return "It is cut short: its last page is missing."
    return ""


def _ogg_checksum(page: bytes) -> int:
    """Return the CRC of RFC 3533: zlib's polynomial with reversed bits and the initial value 0."""
    crc = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{crc:032b}"[::-1], 2)


def _mp3_damage(stored: bytes) -> str:
    at = _first_frame(stored, _after_id3(stored, 0))
    if at is None:
        return ""
    counted = _xing_frames(stored[at : at + 200])
    num_frames = 0
    while at < len(stored):
        size = _frame_size(stored, at)
        if size == 0:
            if stored.startswith(b"ID3", at):  # of files that were joined
                at = _after_id3(stored, at)
                continue
            if not stored.startswith(_TAGS, at) and _first_frame(stored, at) is not None:
                return f"It is damaged: no frame begins at byte {at:,}."
            break
        if at + size > len(stored):
            if not counted:
                return f"It is cut short, within the frame at byte {at:,}."
            break
        at, num_frames = at + size, num_frames + 1
    num_audible = num_frames - 1  # the frame with the header has no samples
    if num_audible < counted - ALLOWED_FRAMES:
        words = f"its header counts {counted:,} frames, and it holds {num_audible:,}"
        return f"It is cut short: {words}."
    return ""


def _after_id3(stored: bytes, at: int) -> int:
    """Return the offset after the ID3v2 tag at `at`; `at` if there is none."""
    if not stored.startswith(b"ID3", at) or at + 10 > len(stored):
        return at
    size = 0
    for byte in stored[at + 6 : at + 10]:
        size = size << 7 | byte & 127
    return min(at + 10 + size, len(stored))


def _first_frame(stored: bytes, start: int) -> int | None:
    """Return the offset of the first layer III frame with a valid successor; None if there is none.

    Only the first `_SEARCHED` bytes are searched.
    """
    at = stored.find(b"\xff", start, start + _SEARCHED)
    while at >= 0:
        size = _frame_size(stored, at)
        if size and (_frame_size(stored, at + size) or at + size == len(stored)):
            return at
        at = stored.find(b"\xff", at + 1, start + _SEARCHED)
    return None


def _frame_size(stored: bytes, at: int) -> int:
    """Return the size in bytes of the layer III frame at `at`; 0 if there is none."""
    header = int.from_bytes(stored[at : at + 4], "big") if at + 4 <= len(stored) else 0
    version, layer = header >> 19 & 3, header >> 17 & 3
    bit_rate, rate, padding = header >> 12 & 15, header >> 10 & 3, header >> 9 & 1
    is_layer_3 = header >> 21 == 0x7FF and version != 1 and layer == 1
    if not is_layer_3 or bit_rate in (0, 15) or rate == 3:
        return 0
    kilobits = (_MPEG1 if version == 3 else _MPEG2)[bit_rate - 1]
    return (144 if version == 3 else 72) * 1000 * kilobits // _RATES[version][rate] + padding


def _xing_frames(frame: bytes) -> int:
    """Return the number of frames in the Xing header of a file's first frame; 0 if unknown."""
    at = max(frame.find(b"Xing", 0, 48), frame.find(b"Info", 0, 48))
    if at < 0 or not frame[at + 7 : at + 8] or not frame[at + 7] & 1:
        return 0
    return int.from_bytes(frame[at + 8 : at + 12], "big")
