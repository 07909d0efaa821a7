"""ROUGE-L: how many of a reference's words a text has, in their order (Lin, 2004, W04-1013).

P and R are the longest common subsequence's share of the text's and of the reference's words; the
score is their harmonic mean. Words are runs of letters and digits, in lower case and not stemmed:
on ASCII text those of the package rouge-score, which drops all other letters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORD = re.compile(r"[^\W_]+")


def rouge_l(text: str, reference: str) -> float:
    """Return the ROUGE-L F-measure of a text, from 0 to 1; 0 where either has no words."""
    ours, theirs = _WORD.findall(text.lower()), _WORD.findall(reference.lower())
    common = longest_common_subsequence(ours, theirs)
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Return its length, by one addition of long integers for each word (Hyyroe, 2004).

    A bit of `row` is 0 where the table of the textbook's method goes up by one.
    """
    places: dict[str, int] = {}
    for number, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << number
    everywhere = (1 << len(first)) - 1
    row = everywhere
    for word in second:
        matched = row & places.get(word, 0)
        row = ((row + matched) | (row - matched)) & everywhere
    return len(first) - row.bit_count()
