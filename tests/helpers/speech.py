"""Tiny speech models with random weights and their processors, and sounds made of tones."""

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from peftkit.tasks.media.ctc import BLANK, SPACE, UNKNOWN, tokenizer_of
from tests.helpers.families import _SEQ2SEQ, tiny_tokenizer

soundfile = pytest.importorskip("soundfile", reason="the extra peftkit[audio] is not installed")
RATE = 16_000
END = "<|endoftext|>"
_MARKS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
WHISPER_TOKENS = (
    *(END, "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)),
    *(f"<|{mark}|>" for mark in _MARKS),
)
_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.2,
    "layerdrop": 0.0,
    **dict.fromkeys(("attention_dropout", "activation_dropout", "final_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout", "feat_proj_dropout"), 0.0),
}
_WAV2VEC2: dict[str, Any] = {
    **_ENCODER,
    "mask_time_prob": 0.0,
    "num_feat_extract_layers": 3,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 8, 4),
    "conv_stride": (8, 8, 5),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_FRAMES: dict[str, Any] = {
    **_ENCODER,
    "dropout": 0.0,
    "subsampling_conv_channels": 8,
    "conv_kernel_size": 5,
    "conv_depthwise_kernel_size": 5,
}


def tones(*hertz: float, seconds: float = 0.1, rate: int = RATE) -> Any:
    """Return one tone after the other (samples,)."""
    times = np.arange(round(seconds * rate)) / rate
    parts = [0.4 * np.sin(2 * math.pi * one * times) for one in hertz]
    return np.concatenate(parts).astype("float32")


def encoded(samples: Any, rate: int = RATE, kind: str = "wav") -> bytes:
    """Return a sound as a file's bytes."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind.upper())
    return file.getvalue()


def write_speech_rows(
    folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "rows.jsonl"
) -> Path:
    """Write rows whose `audio` is a list of tones, each with a file beside; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, row in enumerate(rows):
        file = folder / f"{name}.{number}.wav"
        file.write_bytes(encoded(tones(*row["audio"])))
        lines.append(json.dumps({**row, "audio": file.name}))
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def whisper_processor(seconds: int = 1) -> Any:
    """Return Whisper's processor, for sounds of a second."""
    parts = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    tokenizer = transformers.WhisperTokenizer(
        vocab=parts["vocab"], merges=[tuple(pair) for pair in parts["merges"]], pad_token=END
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*WHISPER_TOKENS]})
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=seconds)
    return transformers.WhisperProcessor(extractor, tokenizer)


def whisper(seconds: int = 1, **settings: Any) -> tuple[Any, Any]:
    """Return a tiny multilingual Whisper in eval mode, and its processor."""
    torch.manual_seed(0)
    processor = whisper_processor(seconds)
    token = processor.tokenizer.convert_tokens_to_ids
    config = transformers.WhisperConfig(
        **{
            **_SEQ2SEQ,
            "init_std": 0.5,
            "vocab_size": len(processor.tokenizer),
            "num_mel_bins": 16,
            "max_target_positions": 64,
            "max_source_positions": 50 * seconds,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), token(END)),
            "decoder_start_token_id": token("<|startoftranscript|>"),
            **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens")),
            **settings,
        }
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.model.decoder.embed_tokens.weight.data[token(END)].normal_(0.0, 0.5)  # it was no padding
    model.generation_config.is_multilingual = True
    model.generation_config.lang_to_id = {f"<|{c}|>": token(f"<|{c}|>") for c in LANGUAGES}
    model.generation_config.task_to_id = {
        task: token(f"<|{task}|>") for task in ("transcribe", "translate")
    }
    model.generation_config.no_timestamps_token_id = token("<|notimestamps|>")
    return model, processor


def moonshine() -> tuple[Any, Any]:
    """Return a tiny Moonshine: it hears samples, and knows no language."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = transformers.MoonshineConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
    )
    model = transformers.MoonshineForConditionalGeneration(config).eval()
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    return model, transformers.Wav2Vec2Processor(extractor, tokenizer)


def wav2vec2(kind: str = "ForCTC", family: str = "Wav2Vec2", **settings: Any) -> tuple[Any, Any]:
    """Return a tiny wav2vec2, HuBERT or WavLM, and its processor with a vocabulary."""
    torch.manual_seed(0)
    tokenizer = tokenizer_of((BLANK, UNKNOWN, SPACE, *"abcdefghinoqrstuwx"))
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer), pad_token_id=0, **{**_WAV2VEC2, **settings}
    )
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    return model, transformers.Wav2Vec2Processor(extractor, tokenizer)


def hears_frames(family: str) -> tuple[Any, Any]:
    """Return a tiny CTC model that hears mel bins, Wav2Vec2Bert, Parakeet or Lasr, and the same."""
    torch.manual_seed(0)
    tokenizer = tokenizer_of((BLANK, UNKNOWN, SPACE, *"abcdefghinoqrstuwx"))
    sizes = {**_FRAMES, "num_mel_bins": 16}
    if family == "Wav2Vec2Bert":
        more = {"feature_projection_input_dim": 32, "output_hidden_size": 32}
        config: Any = transformers.Wav2Vec2BertConfig(**sizes, **more, mask_time_prob=0.0)
        extractor: Any = transformers.SeamlessM4TFeatureExtractor(feature_size=16, num_mel_bins=16)
    else:
        encoder = {**sizes, **({"subsampling_factor": 4} if family == "Parakeet" else {})}
        config = getattr(transformers, f"{family}CTCConfig")(encoder_config=encoder)
        extractor = getattr(transformers, f"{family}FeatureExtractor")(feature_size=16)
    config.vocab_size, config.pad_token_id = len(tokenizer), 0
    model = getattr(transformers, f"{family}ForCTC")(config).eval()
    return model, transformers.Wav2Vec2BertProcessor(extractor, tokenizer)


SEQ2SEQ: dict[str, Callable[[], tuple[Any, Any]]] = {"whisper": whisper, "moonshine": moonshine}


def saved(folder: Path, made: tuple[Any, Any]) -> Path:
    """Save a model with its processor; return the folder."""
    model, processor = made
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
