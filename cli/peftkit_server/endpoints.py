"""The endpoints that models of each kind support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COMPLETING = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
)
"""Paths of models that complete prompts."""
PREDICTING: Mapping[str, Sequence[str]] = {
    "embedding": ("/v1/embeddings",),
    "reranker": ("/v1/rerank", "/v1/score"),
    "sequence_classification": ("/v1/classify",),
    "transcription": ("/v1/audio/transcriptions",),
    "ctc": ("/v1/audio/transcriptions",),
}
"""Paths of other models, by their task."""
