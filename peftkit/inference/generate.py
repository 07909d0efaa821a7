"""Completions of prompts, whole or streamed, from a model with or without an adapter on it.

The base's own generation_config (temperature, penalties, lengths) is ignored, except for its end
tokens. Temperature 0 is greedy decoding.

Shapes: B prompts, T tokens of the longest, N new tokens.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from peftkit.data.encode import Style, default_style, prompt_ids, stop_ids
from peftkit.errors import DataError
from peftkit.inference.ready import ready_for_tokens
from peftkit.inference.shared_prefix import padded_between, shared_cache
from peftkit.kernels.device import forked_generators
from peftkit.model.modes import evaluating
from peftkit.tasks.length import num_virtual

MAX_NEW_TOKENS = 256


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | Sequence[str],
    *,
    style: Style | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    batch_size: int = 8,
) -> list[str]:
    """Return one completion for each prompt.

    Args:
        model: A causal language model, with an adapter on it or without; its mode is kept.
        tokenizer: The model's own.
        prompts: One text or several.
        style: The adapter's prompt format; by default the prompt is a user message in the chat
            template, or plain if the tokenizer has none.
        max_new_tokens, temperature, top_p, seed, batch_size: As in `generate_ids`.

    Raises:
        DataError: A prompt is empty or fills the context, or an argument is out of its range.
    """
    style = style or default_style(tokenizer)
    asked = [prompts] if isinstance(prompts, str) else prompts
    answers = generate_ids(
        model,
        tokenizer,
        [prompt_ids(tokenizer, prompt, style) for prompt in asked],
        stops=stop_ids(tokenizer, style),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        batch_size=batch_size,
    )
    return [decoded(tokenizer, ids) for ids in answers]


def generate_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    stops: Sequence[int] = (),
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    batch_size: int = 8,
) -> list[list[int]]:
    """Return the token ids that follow each prompt, without the end token that stopped it.

    Args:
        model: A causal language model; left in the train or eval mode it was in.
        tokenizer: The model's own.
        prompts: Token ids of each prompt.
        stops: Token ids that end an answer, besides the tokenizer's and the model's end tokens.
        max_new_tokens: Maximum; an answer also ends at the model's context length.
        temperature: 0: greedy; above: samples from softmax(logits / temperature).
        top_p: Samples only from the most likely tokens with this total probability.
        seed: Of the sampling; torch's global generators are left unchanged.
        batch_size: Prompts per batch, padded on the left.

    Raises:
        DataError: A prompt is empty or fills the context, or an argument is out of its range.
    """
    settings = settings_of(model, tokenizer, stops, temperature, top_p)
    room_left(model, prompts, max_new_tokens)  # before any work is done
    answers: list[list[int]] = [[] for _ in prompts]
    # Longest first: prompts of like length share a batch, and a lack of memory shows at once.
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    with sampling(model, seed):
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = [prompts[index] for index in chosen]
            settings.max_new_tokens = room_left(model, batch, max_new_tokens)
            cache = shared_cache(model, batch)
            common = 0 if cache is None else cache.get_seq_length()
            inputs = padded_between(batch, common, int(settings.pad_token_id))
            new = run_batch(model, inputs, settings, cache=cache)
            for index, ids in zip(chosen, new.tolist(), strict=True):
                answers[index] = until_end(settings.eos_token_id or (), ids)
    return answers


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int] | Mapping[str, Tensor],
    *,
    stops: Sequence[int] = (),
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> Iterator[str]:
    """Yield the text that follows a prompt as it is made; arguments as in `generate_ids`.

    Args:
        prompt: Token ids; or all inputs of one prompt, whose input_ids are (1, T).

    The model runs in a thread. Leaving the loop early, by `break` or Ctrl-C, stops it at the next
    token.
    """
    settings = settings_of(model, tokenizer, stops, temperature, top_p)
    inputs = (
        prompt if isinstance(prompt, Mapping) else left_padded([prompt], int(settings.pad_token_id))
    )
    ids = inputs["input_ids"].tolist()
    settings.max_new_tokens = room_left(model, ids, max_new_tokens)
    pieces, stop = _Pieces(tokenizer), threading.Event()

    def work() -> None:
        try:
            with sampling(model, seed):
                run_batch(model, inputs, settings, pieces, stop.is_set)
        except Exception as error:  # raised again below, in the thread that reads
            pieces.queue.put(error)
        finally:
            pieces.queue.put(None)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while (piece := pieces.queue.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece
    finally:
        stop.set()
        thread.join()


def settings_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stops: Sequence[int],
    temperature: float,
    top_p: float,
) -> GenerationConfig:
    """Return a generation config with our settings and the model's end tokens."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise DataError(
            f"the temperature is {temperature}.",
            fix="Use 0 for greedy decoding, or a number such as 0.7 to sample.",
        )
    if not 0 < top_p <= 1:
        raise DataError(f"top_p is {top_p}.", fix="Give a number above 0, at most 1.")
    found = model.generation_config.eos_token_id if model.generation_config is not None else None
    of_model = [] if found is None else [found] if isinstance(found, int) else list(found)
    of_tokenizer = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ends = sorted({int(token) for token in (*stops, *of_model, *of_tokenizer)})
    pad = tokenizer.pad_token_id
    settings = GenerationConfig(
        do_sample=temperature > 0,
        use_cache=True,
        eos_token_id=ends or None,
        pad_token_id=int(pad) if pad is not None else (ends[0] if ends else 0),
    )
    if temperature > 0:
        settings.update(temperature=temperature, top_p=top_p, top_k=0)
    return settings


def room_left(model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Return how many tokens may follow the longest prompt."""
    if max_new_tokens < 1:
        raise DataError(f"max_new_tokens is {max_new_tokens}.", fix="Give a number above 0.")
    if not all(prompts):
        raise DataError("the prompt is empty: it has no tokens.", fix="Give at least one word.")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or not prompts:
        return max_new_tokens
    longest = max(len(prompt) for prompt in prompts) + num_virtual(model)
    if longest >= limit:
        raise DataError(
            f"the prompt leaves no room for an answer: it has {longest:,} tokens.",
            found=f"The context of {type(model).__name__} is {limit:,} tokens.",
            fix="Shorten it.",
        )
    return min(max_new_tokens, int(limit) - longest)


@contextmanager
def sampling(model: PreTrainedModel, seed: int | None) -> Iterator[None]:
    """Eval mode with seeded generators; both are restored on leaving."""
    own = model.generation_config
    try:
        # An empty one: what a config does not set, transformers fills in from the model's own.
        model.generation_config = GenerationConfig()
        with (
            evaluating(model),
            ready_for_tokens(model),
            forked_generators(model.device, enabled=seed is not None),
        ):
            if seed is not None:
                torch.manual_seed(seed)
            yield
    finally:
        model.generation_config = own


class _Pieces(BaseStreamer):
    """Receives token ids as they are generated and queues the text that each adds; None ends it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.queue: SimpleQueue[str | Exception | None] = SimpleQueue()
        self._tokenizer = tokenizer
        self._ids: list[int] | None = None  # None: the first ids to come are the prompt's
        self._num_shown = 0

    def put(self, value: Tensor) -> None:
        """Take the prompt, or the next token."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.flatten().tolist()
        text = decoded(self._tokenizer, self._ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character is not whole yet
            self._show(text)

    def end(self) -> None:
        """Queue the remaining text."""
        self._show(decoded(self._tokenizer, self._ids or []))

    def _show(self, text: str) -> None:
        if len(text) > self._num_shown:
            self.queue.put(text[self._num_shown :])
            self._num_shown = len(text)


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of an answer."""
    # Not cleaned up: that takes spaces out of code and JSON.
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


class _Stop(StoppingCriteria):
    """Stops generation when it is set from outside."""

    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        self.is_stopped = is_stopped

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        return torch.full((len(input_ids),), self.is_stopped(), device=input_ids.device)


def left_padded(prompts: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, Tensor]:
    """Return prompts as a batch whose last column is every row's last token."""
    return padded_between(prompts, 0, pad_token_id)


def run_batch(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    settings: GenerationConfig,
    streamer: BaseStreamer | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    cache: Any = None,
) -> Tensor:
    """Return the new ids, (B, N), padded on the right where a row ended early.

    Args:
        inputs: Of prompts padded on the left: input_ids (B, T), and what goes with them.
        cache: Keys and values of the first columns, the same in all rows.
    """
    more = {} if cache is None else {"past_key_values": cache}
    generate = cast(Callable[..., Tensor], model.generate)  # its decorators hide its type
    output = generate(
        **{name: value.to(model.device) for name, value in inputs.items()},
        generation_config=settings,
        stopping_criteria=StoppingCriteriaList([_Stop(is_stopped)]),
        streamer=streamer,
        **more,
    )
    return output[:, inputs["input_ids"].shape[1] :]


def until_end(ends: Sequence[int], ids: Sequence[int]) -> list[int]:
    """Return the ids before the first that ends an answer."""
    end = next((index for index, token in enumerate(ids) if token in ends), len(ids))
    return list(ids[:end])
