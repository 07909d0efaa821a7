"""The text of an answer as it grows, and the texts that end it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from peftkit.inference.request import Running


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of an answer."""
    # Not cleaned up: that takes spaces out of code and JSON.
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


class TextStream:
    """Turns the tokens of one answer into pieces of text.

    Args:
        stop_texts: Texts that end the answer before them.

    Attributes:
        text: What was told so far.
        is_stopped: Whether a stop text has ended it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_texts: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop_texts = [text for text in stop_texts if text]
        self._whole = ""
        self._from = self._until = 0
        self.text, self.is_stopped = "", False

    def take(self, running: Running) -> str:
        """Return the text that has come since; end the answer where a stop text stands."""
        if self.is_stopped:
            return ""
        is_over = running.ended_by is not None
        text = self._grown(running.ids, is_over)
        found = [at for stop in self._stop_texts if (at := text.find(stop)) >= 0]
        if found:
            text, self.is_stopped = text[: min(found)], True
            running.finish("stop")
        elif not is_over:
            text = text[: len(text) - self._num_held(text)]
        new = text[len(self.text) :]
        self.text += new
        return new

    def _grown(self, ids: Sequence[int], is_over: bool) -> str:
        """Return the text of the tokens; but for a character of which a part is still to come.

        Only the last tokens are decoded, after some before them, by which spaces go.
        """
        before = decoded(self._tokenizer, ids[self._from : self._until])
        after = decoded(self._tokenizer, ids[self._from :])
        if is_over or not after.endswith("\N{REPLACEMENT CHARACTER}"):
            self._whole += after[len(before) :]
            self._from, self._until = self._until, len(ids)
        return self._whole

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
