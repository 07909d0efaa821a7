"""Texts for models with a head of classes: their tokens as the tokenizer frames them, and batches.

Shapes: B rows, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from peftkit.data.cache import tokenizer_key
from peftkit.data.pack import padded_rows
from peftkit.errors import BaseError
from peftkit.tasks.length import longest
from peftkit.tasks.loss import unwrapped


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a text, or of a pair of texts.

    Args:
        input_ids: Cut to what the model reads.
        types: 0 for the first text of a pair, 1 for the second; () where the model knows no pairs.
        is_cut: Whether something is missing at its end.
        offsets: Where in the text each token begins and ends, if asked for; (0, 0) is nowhere.
    """

    input_ids: tuple[int, ...]
    types: tuple[int, ...]
    is_cut: bool
    offsets: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TextsRow:
    """A row of several texts, each read by itself.

    Args:
        input_ids, types, lengths: The tokens of all texts, one after the other, and how many of
            each.
    """

    input_ids: tuple[int, ...]
    types: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def texts(self) -> list[Encoded]:
        """Each text by itself."""
        stops = [*accumulate(self.lengths)]
        parts = [
            slice(stop - length, stop) for stop, length in zip(stops, self.lengths, strict=True)
        ]
        return [Encoded(self.input_ids[part], self.types[part], False) for part in parts]


def joined_texts(texts: Sequence[Encoded]) -> dict[str, tuple[int, ...]]:
    """Return the fields of a `TextsRow`."""
    return {
        "input_ids": tuple(token for text in texts for token in text.input_ids),
        "types": tuple(kind for text in texts for kind in text.types),
        "lengths": tuple(len(text.input_ids) for text in texts),
    }


class Texts:
    """Makes tokens of texts and batches of tokens.

    Attributes:
        max_length: In tokens, those around the text included.

    Raises:
        BaseError: The model cannot tell padding from text.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, asked: int | None) -> None:
        self.tokenizer = tokenizer
        self.max_length = longest(model, tokenizer, asked)
        pad_id = unwrapped(model).config.get_text_config().pad_token_id
        if pad_id is None:
            raise BaseError(
                f"{type(unwrapped(model)).__name__} cannot tell padding from text.",
                found="Its config has no pad_token_id.",
                fix="Load it for this task: load_base(..., purpose=task.purpose).",
            )
        self._pad_id = int(pad_id)

    @property
    def key(self) -> tuple[object, ...]:
        """What the tokens of a text depend on."""
        return (*tokenizer_key(self.tokenizer), self.max_length, self._pad_id)

    def encode(self, text: str, pair: str | None = None, *, offsets: bool = False) -> Encoded:
        """Return the tokens of a text; of a pair, the longer one loses its end first."""
        wish: dict[str, Any] = {"return_offsets_mapping": True} if offsets else {}
        made = self.tokenizer(text, pair, verbose=False, **wish)
        is_cut = len(made["input_ids"]) > self.max_length
        if is_cut:
            wish |= {"truncation": True, "max_length": self.max_length}
            made = self.tokenizer(text, pair, **wish)
        return Encoded(
            tuple(made["input_ids"]) or (self._pad_id,),
            tuple(made.get("token_type_ids", ())),
            is_cut,
            tuple(made.get("offset_mapping", ())),
        )

    def bare(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a part of a text, without those around it."""
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def collate(self, texts: Sequence[Any]) -> dict[str, Tensor]:
        """Return input_ids, attention_mask and, if there are any, token_type_ids (B, T).

        Padded on the right: a decoder reads the class off the last token that is none.

        Args:
            texts: `Encoded`, or rows with its `input_ids` and `types`.
        """
        ids, mask = padded_rows([text.input_ids for text in texts], self._pad_id)
        batch = {"input_ids": ids, "attention_mask": mask}
        if texts[0].types:
            batch["token_type_ids"], _ = padded_rows([text.types for text in texts], 0)
        return batch

    def pieces(self, ids: Sequence[int]) -> str:
        """Return tokens as text, special ones too."""
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
