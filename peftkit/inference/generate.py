"""Completions of prompts, whole or streamed, by a model with or without an adapter.

The base's generation_config (temperature, penalties, lengths) is ignored, except for its end
tokens. Temperature 0 is greedy decoding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftkit.data.generation import default_style, prompt_ids, stop_ids
from peftkit.data.messages import Message
from peftkit.data.pack import Row, answered_row
from peftkit.data.style import Style
from peftkit.data.tokens import decoded
from peftkit.execution import rng
from peftkit.inference.engine import (
    MAX_ROWS,
    Completion,
    Limits,
    OnAnswer,
    OnFewer,
    Request,
    room_left,
)
from peftkit.inference.open_engine import open_engine
from peftkit.inference.plain_engine import PlainEngine
from peftkit.inference.sampling import Sampling, seed_of

THOUGHT, TAIL = "<think>", 16
"""The opening tag of reasoning, and the last tokens of a prompt that may contain it."""


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | Sequence[str],
    *,
    style: Style | None = None,
    batch_size: int | None = None,
    **settings: Any,
) -> list[str]:
    """Return one completion for each prompt.

    Args:
        model: A causal language model, with or without an adapter; its mode is restored.
        tokenizer: The model's tokenizer.
        prompts: One text or several.
        style: The adapter's prompt format; by default the prompt is a user message in the chat
            template, or plain if the tokenizer has none.
        batch_size: Maximum concurrent completions; None: 64.
        settings: max_new_tokens, temperature, top_p, top_k, seed, as in `Sampling`.

    Raises:
        DataError: A prompt is empty or fills the context, or an argument is out of range.
    """
    style = style or default_style(tokenizer)
    texts = [prompts] if isinstance(prompts, str) else prompts
    ids = [prompt_ids(tokenizer, prompt, style) for prompt in texts]
    stops = stop_ids(tokenizer, style)
    answers = generate_ids(model, tokenizer, ids, stops=stops, batch_size=batch_size, **settings)
    return [decoded(tokenizer, answer) for answer in answers]


def answers_to(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Message]],
    **settings: Any,
) -> list[str]:
    """Return the answer to each conversation, in the tokenizer's chat template.

    If the template opens reasoning in the prompt, the answer begins with its opening tag.

    Args:
        settings: As in `generate`.

    Raises:
        DataError: The tokenizer has no chat template, or see `generate_ids`.
    """
    style = Style("chat")
    prompts = [prompt_ids(tokenizer, turns, style) for turns in conversations]
    ids = generate_ids(model, tokenizer, prompts, stops=stop_ids(tokenizer, style), **settings)
    tails = (decoded(tokenizer, prompt[-TAIL:], special=True) for prompt in prompts)
    tags = [THOUGHT if tail.rstrip().endswith(THOUGHT) else "" for tail in tails]
    return [tag + decoded(tokenizer, answer) for tag, answer in zip(tags, ids, strict=True)]


def generate_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int | None = None,
    on_answer: OnAnswer | None = None,
    on_fewer: OnFewer | None = None,
    **settings: Any,
) -> list[list[int]]:
    """Return the token ids that follow each prompt, without the end token that stopped it.

    Args:
        model: A causal language model; its train or eval mode is restored.
        tokenizer: The model's tokenizer.
        prompts: Token ids of each prompt.
        batch_size: Maximum concurrent completions; None: 64.
        on_answer: See `OnAnswer`.
        on_fewer: See `OnFewer`.
        settings: max_new_tokens, temperature, top_p, top_k, seed, stops, as in `Sampling`.
            Sampling depends on the seed and on the prompt's index.

    Raises:
        DataError: A prompt is empty or fills the context, or an argument is out of range.
    """
    sampling = Sampling(**settings)
    room_left(model, prompts, sampling.max_new_tokens)  # raises early
    limits = Limits(rows=batch_size or MAX_ROWS)
    with open_engine(model, tokenizer, limits, on_fewer=on_fewer) as engine:
        answers = engine.answers(prompts, sampling, log_probs=False, on_answer=on_answer)
    return [answer.ids for (answer,) in answers]


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int] | Mapping[str, Tensor],
    *,
    special: bool = False,
    **settings: Any,
) -> Iterator[str]:
    """Yield the text that follows a prompt as it grows; settings as in `generate_ids`.

    The model runs in a thread. Leaving the loop early, by `break` or Ctrl-C, stops it at the next
    token.

    Args:
        prompt: Token ids; or the model's inputs for one prompt, whose input_ids are (1, T).
        special: Whether the text includes special tokens.
    """
    sampling = Sampling(**settings)
    inputs = prompt if isinstance(prompt, Mapping) else None
    ids = prompt["input_ids"][0].tolist() if isinstance(prompt, Mapping) else list(prompt)
    queue: SimpleQueue[Completion | Exception | None] = SimpleQueue()
    text = TextStream(tokenizer, special=special)
    with (open_engine if inputs is None else PlainEngine)(model, tokenizer) as engine:
        seed = seed_of(sampling, 0)
        completion = engine.submit(Request(ids, sampling, seed, on_token=queue.put, inputs=inputs))

        def work() -> None:
            try:
                engine.run()
            except Exception as error:  # raised again below, in the thread that reads
                queue.put(error)
            finally:
                queue.put(None)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            while (item := queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                if new_text := text.take(item):
                    yield new_text
        finally:
            completion.finish()
            thread.join()


class TextStream:
    """Incremental decoder of the tokens of one answer.

    Args:
        stop_texts: Texts that end the answer; they are not part of it.
        special: Whether the text includes special tokens.

    Attributes:
        text: All text returned so far.
        stop_text: The stop text that has ended it; None: none has.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_texts: Sequence[str] = (),
        *,
        special: bool = False,
    ) -> None:
        self._decode = partial(decoded, tokenizer, special=special)
        self._stop_texts = [text for text in stop_texts if text]
        self._decoded_text = ""
        self._start = self._end = 0
        self.text = ""
        self.stop_text: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text has ended it."""
        return self.stop_text is not None

    def take(self, completion: Completion) -> str:
        """Return the new text; end the answer at a stop text."""
        if self.is_stopped:
            return ""
        has_ended = completion.ended_by is not None
        text = self._decoded(completion.ids, has_ended)
        stops = [(at, stop) for stop in self._stop_texts if (at := text.find(stop)) >= 0]
        if stops:
            at, self.stop_text = min(stops)
            text = text[:at]
            completion.finish("stop")
        elif not has_ended:
            text = text[: len(text) - num_held(text, self._stop_texts)]
        new = text[len(self.text) :]
        self.text += new
        return new

    def _decoded(self, ids: Sequence[int], has_ended: bool) -> str:
        """Return the text of the tokens, without an incomplete last character.

        Decodes only the last tokens and some context, which determines spaces.
        """
        before = self._decode(ids[self._start : self._end])
        after = self._decode(ids[self._start :])
        if has_ended or not after.endswith("\N{REPLACEMENT CHARACTER}"):
            self._decoded_text += after[len(before) :]
            self._start, self._end = self._end, len(ids)
        return self._decoded_text


def num_held(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end may begin a mark."""
    longest = max(map(len, marks), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((n for n in sizes if any(mark.startswith(text[-n:]) for mark in marks)), 0)


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A sampled completion: `ids` with its end token, unless it was cut.

    Attributes:
        is_target: Which of `ids` the model generated, not replies; None: all.
    """

    ids: tuple[int, ...]
    is_cut: bool
    is_target: tuple[bool, ...] | None = None

    @property
    def num_targets(self) -> int:
        """Number of tokens that the model generated."""
        return len(self.ids) if self.is_target is None else sum(self.is_target)


class ModelSampler:
    """Samples completions from the model in training, at temperature 1 or greedily.

    Args:
        num_rows: Maximum concurrent completions.
    """

    def __init__(self, model: Any, tokenizer: Any, num_rows: int) -> None:
        self.model, self.tokenizer, self.num_rows = model, tokenizer, num_rows

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]] | None,
        *,
        max_new_tokens: int,
        stops: Sequence[int],
    ) -> list[list[SampledAnswer]]:
        """Return the completions of each prompt: one per seed, or a greedy one without seeds.

        A completion depends only on its prompt, its seed and the model.
        """
        if not prompts:
            return []
        limits = Limits(rows=self.num_rows)
        sampling = Sampling(
            max_new_tokens=max_new_tokens,
            temperature=0.0 if seeds is None else 1.0,
            stops=tuple(stops),
        )
        with open_engine(self.model, self.tokenizer, limits) as engine:
            groups = engine.answers(
                prompts,
                sampling,
                n=1 if seeds is None else len(seeds[0]),
                seeds=seeds,
                log_probs=False,
            )
        return [[sampled(completion) for completion in group] for group in groups]


def sampled(completion: Completion) -> SampledAnswer:
    """Return a completed answer with its end token, if any."""
    end = completion.end
    return SampledAnswer((*completion.ids, *([] if end is None else [end])), end is None)


AT_ONCE = 32
"""Maximum concurrent answers."""


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How a model reads a user's text, and ends an answer.

    Attributes:
        encode: Returns the tokens of a prompt.
        stops: Tokens that end an answer.
    """

    encode: Callable[[str], Sequence[int]]
    stops: Sequence[int]


def default_format(tokenizer: Any) -> PromptFormat:
    """Return the tokenizer's chat template as a format; plain text if it has none."""
    style = default_style(tokenizer)
    return PromptFormat(partial(prompt_ids, tokenizer, style=style), stop_ids(tokenizer, style))


def own_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    length: int,
    seed: int,
    prompt_format: PromptFormat | None = None,
) -> list[Row]:
    """Return the model's answers to prompts, sampled at temperature 1, as rows with targets.

    The same model, prompts and seed give the same rows.

    Args:
        length: Maximum tokens of an answer.
        prompt_format: None: `default_format`.

    Raises:
        AnswerTooLarge: Memory does not suffice for a single answer.
    """
    form = prompt_format or default_format(tokenizer)
    ids = [form.encode(prompt) for prompt in prompts]
    seeds = [[rng.seed_of(seed, number)] for number in range(len(ids))]
    sampler = ModelSampler(model, tokenizer, AT_ONCE)
    answers = sampler.answers(ids, seeds, max_new_tokens=length, stops=form.stops)
    return [
        answered_row(prompt, answer.ids, f"general prompt {number}")
        for number, (prompt, (answer,)) in enumerate(zip(ids, answers, strict=True), 1)
    ]
