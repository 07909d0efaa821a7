"""The predictions of one opened adapter, as `peftkit predict` computes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, tensor
from torch.nn import functional

from peftkit.errors import DataError
from peftkit.evaluation.evaluate import trained_length
from peftkit.evaluation.predict import build_task
from peftkit.formats.open_adapter import Opened
from peftkit_server.endpoints import PREDICTING
from peftkit_server.refusals import RequestError, hide

Prompt = str | tuple[str, str]


class Predictor:
    """An adapter that embeds, ranks or classifies texts, or transcribes audio.

    Only one thread may use it at a time.

    Attributes:
        kind: The name of its task.
        endpoints: Paths that it supports.

    Raises:
        AdapterError: The adapter has another task.
    """

    def __init__(self, opened: Opened) -> None:
        self.kind = opened.task.type
        has_audio = "audio" in opened.task.predicts
        length = None if has_audio else trained_length(opened.file.folder)
        is_suited = self.kind in PREDICTING
        fix = f"Adapters of these tasks do: {', '.join(PREDICTING)}."
        self._task = build_task(
            opened, is_suited, "predicts nothing for texts or audio", fix, length
        )
        self._base = opened.base
        hide(opened.base.name, opened.file.folder)
        self.endpoints = PREDICTING[self.kind]

    @property
    def base_name(self) -> str:
        """Name of the base."""
        return self._base.hub_id or self._base.name

    def count(self, prompts: Sequence[Prompt]) -> int:
        """Return the number of tokens of texts or pairs.

        Raises:
            RequestError: A text is empty or too long: its end would have no effect.
        """
        encoder = self._task.encoder if self.kind == "reranker" else self._task.texts
        total = 0
        for index, prompt in enumerate(prompts):
            parts = (prompt,) if isinstance(prompt, str) else prompt
            if not all(part.strip() for part in parts):
                raise RequestError(f"the text {index} is empty.", param="input")
            encoded = encoder.encode(*parts)
            if encoded.is_cut:
                raise RequestError(
                    f"the text {index} is too long.",
                    found=f"This model reads {self._task.texts.max_length:,} tokens.",
                    fix="Split it.",
                    code="context_length_exceeded",
                    param="input",
                )
            total += len(encoded.input_ids)
        return total

    def embed(self, texts: Sequence[str], dimensions: int | None) -> list[list[float]]:
        """Return the vector of each text, or its first dimensions, with their length restored.

        Raises:
            RequestError: The vectors have fewer dimensions.
        """
        vectors: list[list[float]] = self._task.vectors(self._base.model, texts)
        size = len(vectors[0])
        if dimensions is None or dimensions == size:
            return vectors
        if dimensions > size:
            raise RequestError(
                f"the vectors have {size:,} dimensions.",
                found=f"The request is for {dimensions:,}.",
                param="dimensions",
            )
        cut: Tensor = tensor(vectors)[:, :dimensions]
        if self._task.pooled.normalize:
            cut = functional.normalize(cut, dim=-1)
        shortened: list[list[float]] = cut.tolist()
        return shortened

    def rank(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the probability that each text answers its query."""
        scores: list[float] = self._task.predict(self._base.model, pairs)
        return scores

    def classify(self, texts: Sequence[Prompt]) -> list[dict[str, object]]:
        """Return the probability of each label, the most likely first; or the "value"."""
        classes: list[dict[str, Any]] = self._task.predict_texts(self._base.model, texts)
        return classes

    def transcribe(self, path: Path) -> str:
        """Return the text of an audio file, decoded greedily.

        Raises:
            RequestError: The file cannot be decoded; its path on the server is not reported.
        """
        try:
            (text,) = self._task.transcribe(self._base.model, [path])
        except DataError as error:
            message = str(error).replace(str(path), "the file")
            raise RequestError(message, param="file") from None
        return str(text)
