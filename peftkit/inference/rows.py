"""A batch of answers, each told as it grows and each with an end of its own.

Shapes: B rows, T tokens of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from peftkit.inference.generate import (
    decoded,
    left_padded,
    room_left,
    run_batch,
    sampling,
    settings_of,
)


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that is over.

    Attributes:
        reason: stop: an end token or a stop text; length: its maximum, or the model's context.
        num_tokens: How many tokens were made for it.
    """

    text: str
    reason: Literal["stop", "length"]
    num_tokens: int


class Row:
    """One prompt of a batch and its answer so far.

    Args:
        ids: Tokens of the prompt.
        max_new_tokens: Maximum of the answer.
        stop_texts: Texts that end the answer before them.
        tell: Called with each piece of text, at the end with the whole, by the thread that runs
            the model.
        is_cancelled: Says that nobody wants the rest.
    """

    def __init__(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        *,
        stop_texts: Sequence[str] = (),
        tell: Callable[[str | Whole], None],
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ids, self.max_new_tokens = ids, max_new_tokens
        self.done = False
        self._stop_texts = [text for text in stop_texts if text]
        self._tell, self._is_cancelled = tell, is_cancelled
        self._new: list[int] = []
        self._num_shown = 0

    @property
    def num_new(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self._new)

    def take(self, token: int, ends: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the next token; one that comes after the end is padding."""
        if self.done:
            return
        if self._is_cancelled():
            self.done = True
        elif token in ends:
            self.finish("stop", tokenizer)
        else:
            self._new.append(token)
            self._grow(tokenizer)

    def finish(self, reason: Literal["stop", "length"], tokenizer: PreTrainedTokenizerBase) -> None:
        """Tell the rest and the whole."""
        self._end(decoded(tokenizer, self._new), reason)

    def _grow(self, tokenizer: PreTrainedTokenizerBase) -> None:
        text = decoded(tokenizer, self._new)
        found = [at for stop in self._stop_texts if (at := text.find(stop)) >= 0]
        if found:
            self._end(text[: min(found)], "stop")
        elif len(self._new) >= self.max_new_tokens:
            self._end(text, "length")
        elif not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character is not whole yet
            self._show(text[: len(text) - self._num_held(text)])

    def _end(self, text: str, reason: Literal["stop", "length"]) -> None:
        self.done = True
        self._show(text)
        self._tell(Whole(text, reason, len(self._new)))

    def _num_held(self, text: str) -> int:
        """Return how many characters at the end may be the beginning of a stop text."""
        longest = max(map(len, self._stop_texts), default=1) - 1
        return next(
            (
                size
                for size in range(min(longest, len(text)), 0, -1)
                if any(stop.startswith(text[-size:]) for stop in self._stop_texts)
            ),
            0,
        )

    def _show(self, text: str) -> None:
        if len(text) > self._num_shown:
            self._tell(text[self._num_shown :])
            self._num_shown = len(text)


class _Rows(BaseStreamer):
    """Hands each row its token, step by step."""

    def __init__(
        self, rows: Sequence[Row], ends: Sequence[int], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._rows, self._ends, self._tokenizer = rows, ends, tokenizer
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        """Take the prompts, or the next token of each row, (B,)."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        for row, token in zip(self._rows, value.flatten().tolist(), strict=True):
            row.take(token, self._ends, self._tokenizer)

    def end(self) -> None:
        """End the rows that have reached neither an end nor their maximum."""
        for row in self._rows:
            if not row.done:
                row.finish("length", self._tokenizer)


def run_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    stops: Sequence[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> None:
    """Generate all rows in one batch until the last has ended; arguments as in `generate_ids`.

    Raises:
        DataError: A prompt is empty or fills the context, or an argument is out of its range.
    """
    settings = settings_of(model, tokenizer, stops, temperature, top_p)
    for row in rows:
        row.max_new_tokens = room_left(model, [row.ids], row.max_new_tokens)
    settings.max_new_tokens = max(row.max_new_tokens for row in rows)
    inputs = left_padded([row.ids for row in rows], int(settings.pad_token_id))
    streamer = _Rows(rows, settings.eos_token_id or (), tokenizer)
    with sampling(model, seed):
        run_batch(model, inputs, settings, streamer, lambda: all(row.done for row in rows))
