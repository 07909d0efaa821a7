"""Check that the policy which samples rollouts is the policy that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from peftkit.data.pack import answered_row
from peftkit.errors import RunError
from peftkit.events import Notice
from peftkit.inference.engine import Limits
from peftkit.inference.open_engine import open_engine
from peftkit.inference.sampling import Sampling
from peftkit.model.modes import adapters_off, evaluating
from peftkit.tasks.batches import OnDevice
from peftkit.tasks.run_hooks import Run

NUM_PROMPTS, NEW_TOKENS = 2, 16
SMALL = 0.02
"""Largest difference of a log-probability in nats that rounding explains."""


@torch.no_grad()
def check_sampler(
    task: Any, stops: Sequence[int], prompts: Sequence[Sequence[int]], run: Run
) -> bool:
    """Report how sampler and trainer differ; return whether the adapter is large enough to tell.

    Args:
        task: The `DocumentTask` that computes the log-probabilities of the rows of a rollout.
        stops: Tokens that end an answer.
        prompts: Tokens of this process's prompts, possibly none.

    Raises:
        RunError: The sampler's log-probabilities are the base's, and the trainer's are not.
    """
    if not prompts:
        return False
    ids = [list(prompt) for prompt in prompts[:NUM_PROMPTS]]
    task.layout.forget()
    with evaluating(run.model), run.world.autocast():
        sampling = Sampling(max_new_tokens=NEW_TOKENS, stops=tuple(stops))
        with open_engine(run.model, task.tokenizer, Limits(rows=len(ids))) as engine:
            groups = engine.answers(ids, sampling, log_probs=True)
        chosen = [group[0].chosen for group in groups]
        sampled = torch.tensor([token.log_prob for tokens in chosen for token in tokens])
        rows = [
            answered_row(start, [token.token for token in tokens], "a rollout")
            for start, tokens in zip(ids, chosen, strict=True)
        ]
        batch = OnDevice(task.padded(rows), run.world.device)
        trained = task.token_log_probs(run.model, batch).cpu()
        with adapters_off(run.model):
            bare = task.token_log_probs(run.model, batch).cpu()
    task.layout.forget()
    differs, moved = _largest(sampled, trained), _largest(trained, bare)
    if moved <= SMALL:
        return False
    if differs > SMALL and _largest(sampled, bare) < differs / 4:
        raise RunError(
            "rollouts are sampled from the base, not from the adapter",
            found=f"Log-probabilities of sampler and trainer differ by up to {differs:.3g} nats, "
            f"and those of sampler and base by {_largest(sampled, bare):.3g}.",
            fix="Report this with the output of: peftkit env",
        )
    text = f"Sampler and trainer differ by up to {differs:.2g} nats in {len(sampled)} tokens"
    run.say(Notice(f"{text}; the adapter changes them by up to {moved:.2g}."))
    return True


def _largest(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
