"""Audio that is cut short or damaged is named, where decoders give shorter audio without a word."""

import io
import struct

import numpy as np
import pytest
import soundfile

from peftkit.data.media.audio_damage import audio_damage
from peftkit.data.media.files import Audio
from peftkit.errors import DataError

RATE, SECONDS = 16_000, 3
KINDS = {"WAV": "PCM_16", "OGG": "VORBIS", "MP3": "MPEG_LAYER_III", "OPUS": "OPUS"}


def encoded(kind: str, **settings: object) -> bytes:
    """Return audio that is not the same for long, so that frames are of usual sizes."""
    noise = np.random.default_rng(0).normal(size=RATE * SECONDS)
    samples = (0.1 * np.convolve(noise, np.hanning(9), "same")).astype("float32")
    file, container = io.BytesIO(), "OGG" if kind == "OPUS" else kind
    soundfile.write(file, samples, RATE, format=container, subtype=KINDS[kind], **settings)
    return file.getvalue()


def decoded(stored: bytes) -> int:
    return len(Audio(stored, "rows.jsonl:7").decode(RATE, 30.0))


def cut(stored: bytes, share: float) -> bytes:
    return stored[: int(len(stored) * share)]


def overwritten(stored: bytes, byte: int) -> bytes:
    half = len(stored) // 2
    return stored[:half] + bytes([byte]) * 400 + stored[half + 400 :]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_audio_is_read_whole(kind):
    assert decoded(encoded(kind)) == RATE * SECONDS


@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_audio_that_is_cut_short_is_an_error_that_names_the_row(kind, share):
    with pytest.raises(DataError, match=r"of rows\.jsonl:7(.|\n)*It is cut short"):
        decoded(cut(encoded(kind), share))


@pytest.mark.parametrize("byte", [0, 255])
@pytest.mark.parametrize("kind", ["OGG", "OPUS", "MP3"])
def test_overwritten_bytes_are_an_error(kind, byte):
    with pytest.raises(DataError, match="It is damaged"):
        decoded(overwritten(encoded(kind), byte))


def test_an_ogg_without_its_last_page_is_cut_short():
    stored = encoded("OPUS")
    with pytest.raises(DataError, match="its last page is missing"):
        decoded(stored[: stored.rindex(b"OggS")])


def test_the_beginning_of_an_mp3_is_not_said_to_be_no_file():
    with pytest.raises(DataError) as error:
        decoded(encoded("MP3")[:700])
    assert "exist" not in error.value.found


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFFFFF])
def test_a_wav_written_before_its_size_was_known_is_read(size):
    stored = bytearray(encoded("WAV"))
    at = stored.index(b"data") + 4
    stored[at : at + 4] = struct.pack("<I", size)
    assert audio_damage(bytes(stored)) == ""


def test_a_large_wav_header_is_held_against_the_file():
    file = io.BytesIO()
    soundfile.write(file, np.full(RATE, 0.1, "float32"), RATE, format="RF64", subtype="PCM_16")
    assert audio_damage(file.getvalue()) == ""
    assert "cut short" in audio_damage(cut(file.getvalue(), 0.5))


def test_an_mp3_without_a_count_and_with_tags_is_read():
    stored = encoded("MP3")
    bare = stored[stored.index(b"\xff", 200) :]
    # an ID3v2 tag of 300 bytes, joined files, an ID3v1 tag
    id3 = b"ID3\x04\x00\x00\x00\x00\x02\x2c" + bytes(300)
    whole = id3 + bare + id3 + bare + b"TAG" + bytes(125)
    assert audio_damage(whole) == ""
    assert audio_damage(bare + bytes(50)) == ""
    assert "within the frame" in audio_damage(bare[:-20])


@pytest.mark.parametrize("stored", [b"", b"OggS", b"RIFF\0\0\0\0WAVE", b"ID3", b"\xff\xfb\x90"])
def test_beginnings_alone_raise_nothing(stored):
    assert isinstance(audio_damage(stored), str)
