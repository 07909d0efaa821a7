"""Tokens of a text: alone, at the beginning of a document, or as the continuation of a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from peftkit.data.chat import Span
from peftkit.errors import DataError

CHARACTERS_PER_TOKEN = 16
"""Characters of a text to tokenise for each token of its limit before the rest."""


class PromptTooLong(DataError):
    """A prompt fills the model's context."""

    code = "context_length_exceeded"
    """OpenAI's error code, by which clients shorten the conversation."""


def tokens(tokenizer: Any, text: str, limit: int | None = None) -> list[int]:
    """Return the tokens of a text alone.

    Args:
        limit: Tokens of the model's context; the work for a text that exceeds it is in proportion
            to the limit, not to the text.

    Raises:
        PromptTooLong: The beginning of the text has more than twice the limit.
    """
    if limit is not None and len(text) > CHARACTERS_PER_TOKEN * limit:
        # at a space, so that these are the first tokens of the whole text up to the last few
        head = text[: max(0, text.rfind(" ", 0, CHARACTERS_PER_TOKEN * limit))]
        if (number := len(tokens(tokenizer, head))) > 2 * limit:
            raise PromptTooLong(
                f"the prompt leaves no room for an answer: it has over {number:,} tokens.",
                found=f"The context of the model is {limit:,} tokens.",
                fix="Shorten it.",
            )
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def num_common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences of one type."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def decoded(tokenizer: Any, ids: Sequence[int], *, special: bool = False) -> str:
    """Return tokens as text, optionally with special tokens."""
    # clean-up would remove spaces from code and JSON
    options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(ids), **options))


def with_bos(tokenizer: object, text: str, limit: int | None = None) -> list[int]:
    """Return the tokens of the beginning of a document, with bos if the tokenizer adds it.

    Args and errors are as in `tokens`.
    """
    ids = tokens(tokenizer, text, limit)
    lead, _ = special_tokens_around(tokenizer, "a")
    return ids if ids[: len(lead)] == lead else lead + ids


def special_tokens_around(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer puts before and after a text."""
    bare, full = tokens(tokenizer, text), list(tokenizer(text)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], full  # never the same for two texts


def continuation(tokenizer: Any, head: str, tail: str, source: str) -> list[int]:
    """Return tokens of `tail` that continue the tokens of `head` alone.

    If the two are tokenised together, they may share a token ("\\n" + "\\n"). If they are tokenised
    separately, some tokenizers put a space before `tail`. An anchor text that does not merge with
    `tail` avoids both.

    Raises:
        DataError: No such tokens exist.
    """
    before, joint = tokens(tokenizer, head), tokens(tokenizer, head + tail)
    if joint[: len(before)] == before:
        return joint[len(before) :]
    text = decoded(tokenizer, joint, special=True)
    for anchor in ("", "\n", ":", "."):
        lead, both = tokens(tokenizer, anchor), tokens(tokenizer, anchor + tail)
        ids = both[len(lead) :]
        if both[: len(lead)] == lead and decoded(tokenizer, before + ids, special=True) == text:
            return ids
    raise DataError(
        f"Cannot separate the tokens of the prompt and the response of {source}.",
        found=f"The prompt ends in {head[-20:]!r}, the response begins with {tail[:20]!r}; this "
        "tokenizer makes one token of both.",
        fix="Begin the response with a space or a line break, or end the prompt with one.",
    )


def segmentwise(
    tokenizer: object, text: str, spans: Sequence[Span], special: re.Pattern[str], source: str
) -> tuple[list[int], list[bool]]:
    """Tokenise context and targets separately, each as the continuation of the previous segment.

    Args:
        special: Matches the text of a special token.

    Returns:
        The tokens, and for each whether it is a target.
    """
    cuts = [cut for span in spans for cut in (span.start, span.end)]
    ids: list[int] = []
    is_target: list[bool] = []
    for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(text)], strict=True)):
        starts = [match.start() for match in special.finditer(text, 0, start)]
        head = text[starts[-1] if starts else 0 : start]
        segment = continuation(tokenizer, head, text[start:end], source)
        ids += segment
        is_target += [number % 2 == 1] * len(segment)
    return ids, is_target
