"""Completions of prompts, whole or streamed, from a model with or without an adapter on it.

The base's own generation_config (temperature, penalties, lengths) is ignored, except for its end
tokens. Temperature 0 is greedy decoding.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftkit.data.encode import Style, default_style, prompt_ids, stop_ids
from peftkit.inference.engine import Limits, OnAnswer, room_left
from peftkit.inference.open_engine import open_engine
from peftkit.inference.plain import PlainEngine
from peftkit.inference.request import Request, Running
from peftkit.inference.sampling import Sampling, seed_of
from peftkit.inference.text import TextStream, decoded


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
        model: A causal language model, with an adapter on it or without; its mode is kept.
        tokenizer: The model's own.
        prompts: One text or several.
        style: The adapter's prompt format; by default the prompt is a user message in the chat
            template, or plain if the tokenizer has none.
        batch_size: Most answers made at once; None: 64.
        settings: max_new_tokens, temperature, top_p, top_k, seed, as in `Sampling`.

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
        batch_size=batch_size,
        **settings,
    )
    return [decoded(tokenizer, ids) for ids in answers]


def generate_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int | None = None,
    on_answer: OnAnswer | None = None,
    **settings: Any,
) -> list[list[int]]:
    """Return the token ids that follow each prompt, without the end token that stopped it.

    Args:
        model: A causal language model; left in the train or eval mode it was in.
        tokenizer: The model's own.
        prompts: Token ids of each prompt.
        batch_size: Most answers made at once; None: 64.
        on_answer: Called with the number of answers that are over, as it grows.
        settings: max_new_tokens, temperature, top_p, top_k, seed, stops, as in `Sampling`; what is
            drawn for a prompt depends on the seed and on its place among the prompts.

    Raises:
        DataError: A prompt is empty or fills the context, or an argument is out of its range.
    """
    sampling = Sampling(**settings)
    room_left(model, prompts, sampling.max_new_tokens)  # before any work is done
    limits = Limits() if batch_size is None else Limits(rows=batch_size)
    with open_engine(model, tokenizer, limits) as engine:
        answers = engine.answers(prompts, sampling, log_probs=False, on_answer=on_answer)
    return [answer.ids for (answer,) in answers]


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int] | Mapping[str, Tensor],
    **settings: Any,
) -> Iterator[str]:
    """Yield the text that follows a prompt as it is made; arguments as in `generate_ids`.

    Args:
        prompt: Token ids; or all inputs of one prompt, whose input_ids are (1, T).

    The model runs in a thread. Leaving the loop early, by `break` or Ctrl-C, stops it at the next
    token.
    """
    sampling = Sampling(**settings)
    ids = prompt["input_ids"][0].tolist() if isinstance(prompt, Mapping) else list(prompt)
    room_left(model, [ids], sampling.max_new_tokens)
    told: SimpleQueue[Running | Exception | None] = SimpleQueue()
    inputs = prompt if isinstance(prompt, Mapping) else None
    request = Request(ids, sampling, seed_of(sampling, 0), on_token=told.put, inputs=inputs)
    asked = threading.Event()
    running: list[Running] = []

    def work() -> None:
        try:
            with (open_engine if inputs is None else PlainEngine)(model, tokenizer) as engine:
                running.append(engine.submit(request))
                asked.set()
                engine.run()
        except Exception as error:  # raised again below, in the thread that reads
            told.put(error)
        finally:
            asked.set()
            told.put(None)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    text = TextStream(tokenizer)
    try:
        while (what := told.get()) is not None:
            if isinstance(what, Exception):
                raise what
            if piece := text.take(what):
                yield piece
    finally:
        asked.wait()
        for one in running:
            one.finish()
        thread.join()
