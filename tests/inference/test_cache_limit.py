"""What the cache of keys and values allocates stays below its limit, and nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest

from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Limits, Request
from peftkit.inference.open_engine import why_plain
from peftkit.inference.sampling import Sampling

MOST_STEPS = 3000


def finished(engine: CachedEngine) -> bool:
    """Step until all is answered, or so often that it never will be."""
    for _ in range(MOST_STEPS):
        if engine.is_idle:
            return True
        engine.step()
    return engine.is_idle


@pytest.mark.parametrize("tokens", [240, 400, 480, 700])
@pytest.mark.parametrize("kept", [0, 8192])
def test_a_common_beginning_that_fills_the_cache_ends_no_work(
    llama: Any, tokenizer: Any, tokens: int, kept: int
) -> None:
    assert why_plain(llama, tokenizer) is None
    prompt, sampling = [5] * 201, Sampling(max_new_tokens=30)
    with CachedEngine(llama, tokenizer) as engine:
        ((alone,),) = engine.answers([prompt], sampling)
    with CachedEngine(llama, tokenizer, Limits(tokens=tokens, prefix_tokens=kept)) as engine:
        answers = [engine.submit(Request(prompt, sampling)) for _ in range(3)]
        assert finished(engine), (engine.num_waiting, engine.num_running)
    assert [one.ids for one in answers] == [alone.ids] * 3
