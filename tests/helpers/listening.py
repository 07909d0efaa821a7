"""Tiny models that chat about sounds, with random weights, each with a processor, without a hub."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from peftkit.base.processors import UnreadVideos, without_video_support
from peftkit.settings import DataConfig
from peftkit.tasks.media.media_text import AudioTextConfig, MediaText
from tests.helpers.speech import encoded, tones
from tests.helpers.vision import FAMILIES as SEEING
from tests.helpers.vision import (
    MROPE_TEXT,
    QWEN_WIDE,
    TEXT,
    WIDE,
    Family,
    Q,
    conversations,
    dialog,
    gemma4,
    made,
    qwen_images,
    template,
    token_id,
    tokenizer,
)
from tests.helpers.vision import write_image_rows as write_seen

SPOKEN = conversations("audio", "wav", "no sound")
_TURNS = [(turn["role"], turn["content"]) for turn in SPOKEN[1]["messages"][1:]]
_ONE_EACH = [*SPOKEN]
_ONE_EACH[1] = {"messages": dialog((Q, "see <audio> dog"), *_TURNS), "audios": ["b.wav"]}
_SEEN_TOO = [*SPOKEN[:3], {**SPOKEN[3], "image": "a.png"}]


def write_sound_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows, and the sounds and images that they name, into a folder."""
    (folder / "a.wav").write_bytes(encoded(tones(300, 500)))
    (folder / "b.wav").write_bytes(encoded(tones(700, seconds=0.35)))
    return write_seen(folder, rows)


_QWEN = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
_ENCODER: dict[str, Any] = {
    "num_mel_bins": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "d_model": 32,
    "max_source_positions": 50,
    **WIDE,
}


def _extractor(seconds: int = 1) -> Any:
    return transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=seconds)


QWEN2_AUDIO = Family(
    made(
        "Qwen2Audio",
        text_config={**TEXT, "model_type": "qwen2"},
        audio_config=_ENCODER,
        audio_token_index=token_id("<|AUDIO|>", *_QWEN),
    ),
    lambda: transformers.Qwen2AudioProcessor(
        _extractor(),
        tokenizer(*_QWEN),
        chat_template=template(audio="<|audio_bos|><|AUDIO|><|audio_eos|>\\n"),
    ),
    ("feature_attention_mask",),
    config=AudioTextConfig,
    rows=SPOKEN,
)
GLMASR = Family(
    made(
        "GlmAsr",
        text_config={**TEXT, "model_type": "llama"},
        audio_config={
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_mel_bins": 16,
            "max_position_embeddings": 100,
            **WIDE,
        },
        audio_token_id=token_id("<|sound|>", "<|sound|>"),
    ),
    lambda: transformers.GlmAsrProcessor(
        _extractor(2),
        tokenizer("<|sound|>"),
        chat_template=template(audio="<|sound|>"),
        audio_token="<|sound|>",
    ),
    ("input_features_mask",),
    config=AudioTextConfig,
    rows=_ONE_EACH,
)
_CONFORMER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
_CONFORMER |= {"subsampling_conv_channels": [128, 8], "output_proj_dims": 32, "conv_kernel_size": 3}
_KINDS = ("image", "audio", "video")
_OMNI = {f"{kind}_token": f"<|{kind.upper()}|>" for kind in _KINDS}
_OMNI |= {f"{k}_{e}_token": f"<|{k}_{e}|>" for k in ("vision", "audio") for e in ("bos", "eos")}
QWEN2_5_OMNI = Family(
    made(
        "Qwen2_5OmniThinker",
        text_config=MROPE_TEXT,
        vision_config={**QWEN_WIDE, "depth": 1, "window_size": 16, "fullatt_block_indexes": [0]},
        audio_config={**_ENCODER, "n_window": 25, "output_dim": 32},
        **{f"{n}_token_index": token_id(_OMNI[f"{n}_token"], **_OMNI) for n in _KINDS},
        **{
            f"{n}_{end}_token_id": token_id(_OMNI[f"{n}_{own}_token"], **_OMNI)
            for n in ("audio", "vision")
            for end, own in (("start", "bos"), ("end", "eos"))
        },
    ),
    lambda: without_video_support(transformers.Qwen2_5OmniProcessor)(
        image_processor=qwen_images(),
        video_processor=UnreadVideos({}),
        feature_extractor=_extractor(),
        tokenizer=tokenizer(**_OMNI),
        chat_template=template(
            "<|vision_bos|><|IMAGE|><|vision_eos|>", audio="<|audio_bos|><|AUDIO|><|audio_eos|>"
        ),
    ),
    ("feature_attention_mask",),
    rows=_SEEN_TOO,
)
HEARING: dict[str, Family] = {
    "qwen2_audio": QWEN2_AUDIO,
    "glmasr": GLMASR,
    "gemma4_hearing": gemma4(_CONFORMER, config=AudioTextConfig, rows=_SEEN_TOO),
    "qwen2_5_omni": QWEN2_5_OMNI,
}
FAMILIES = {**SEEING, **HEARING}
_LAYOUTS = (
    *("llava", "qwen2_5_vl", "gemma3", "paligemma", "idefics3", "mllama"),
    *("qwen2_audio", "glmasr", "gemma4_hearing"),
)
"""Families whose processors lay their inputs out unlike each other; others are slow tests."""
EACH = [
    name if name in _LAYOUTS else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES
]


@cache
def processor_of(name: str) -> Any:
    return FAMILIES[name].processor()


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return FAMILIES[name].model().eval()


def task_of(name: str, model: Any = None, *, on_event: Any = None, **data: Any) -> MediaText:
    config = DataConfig(**{"train": "", "max_length": None, **data})
    events = {} if on_event is None else {"on_event": on_event}
    task = FAMILIES[name].config()
    return task.on(model or model_of(name), processor_of(name), config, **events)
