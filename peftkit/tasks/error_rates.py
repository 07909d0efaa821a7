"""How much of what is said is heard otherwise: the error rates of words and of characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from peftkit.events import Listener, Notice

NUM_SHOWN = 3
"""Rows whose texts are shown beside what was heard."""


def heard_metrics(
    rows: Sequence[Any], heard: Sequence[str], normalizer: Callable[[str], str], on_event: Listener
) -> dict[str, float]:
    """Return the error rates of what was heard, raw and normalised; show the first of the rows.

    Args:
        rows: With a text and a source each.
    """
    for row, text in list(zip(rows, heard, strict=True))[:NUM_SHOWN]:
        on_event(Notice(f"{row.source}: said: {row.text} | heard: {text}"))
    on_event(Notice(f"Normalised by transformers' {type(normalizer).__name__}."))
    said = [row.text for row in rows]
    normal = [[*map(normalizer, texts)] for texts in (said, heard)]
    return error_rates(said, heard) | error_rates(normal[0], normal[1], "_normalized")


def error_rates(said: Sequence[str], heard: Sequence[str], name: str = "") -> dict[str, float]:
    """Return the error rates of words and characters over all texts together; both can exceed 1.

    Args:
        said: What is right; texts without a word are left out.
        name: Put after theirs.
    """
    import jiwer

    pairs = [(a, b) for a, b in zip(said, heard, strict=True) if a.strip()]
    if not pairs:
        return {}
    right, found = [a for a, _ in pairs], [b for _, b in pairs]
    rates = {"wer": jiwer.wer(right, found), "cer": jiwer.cer(right, found)}
    return {rate + name: float(value) for rate, value in rates.items()}


def normalizer_of(tokenizer: Any, language: str | None) -> Callable[[str], str]:
    """Return the normaliser of Whisper's authors for a language.

    The English one for English, with the tokenizer's list of spellings; else the basic one. Both
    drop combining marks, which distorts the rates of scripts that need them.
    """
    from transformers.models.whisper import english_normalizer as normalizers

    spellings = getattr(tokenizer, "english_spelling_normalizer", None)
    if spellings and str(language).lower() in ("english", "en"):
        return normalizers.EnglishTextNormalizer(spellings)
    return normalizers.BasicTextNormalizer()
