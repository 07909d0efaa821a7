"""What a tokenizer puts around a text: BERT's [CLS] and [SEP], the </s> of T5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peftkit.errors import BaseError


class SpecialTokens:
    """A tokenizer's own beginning and end of a text, apart from the text.

    Attributes:
        lead, tail: Tokens before and after every text.

    Raises:
        BaseError: The tokenizer does not put the same tokens around every text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.lead, self.tail = self._around("a")
        if self._around("the 2 of us") != (self.lead, self.tail):
            raise BaseError(
                "Cannot tell what the tokenizer of the base puts around a text.",
                found="It is not the same tokens for every text.",
                fix="Give a base whose tokenizer does so.",
            )

    @property
    def size(self) -> int:
        """How many tokens stand around a text."""
        return len(self.lead) + len(self.tail)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text without those around it."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def put_around(self, ids: Sequence[int]) -> list[int]:
        """Return tokens with those around them."""
        return [*self.lead, *ids, *self.tail]

    def _around(self, text: str) -> tuple[list[int], list[int]]:
        bare, full = self.tokens(text), list(self._tokenizer(text)["input_ids"])
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], full  # never the same for two texts
