"""How many recipes over one base can be trained in one pass: the base and the activations of a pass
are there once, adapters, gradients and optimizer states as often as there are members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peftkit.base.skeleton import read_config
from peftkit.events import Listener, Notice
from peftkit.execution.environment import Environment, free_now
from peftkit.planning.memory import MemoryEstimator
from peftkit.planning.resolve import SMALL
from peftkit.planning.step import plain_purpose
from peftkit.planning.step_estimator import CountError
from peftkit.run.config import Recipe


def rounds(recipes: Sequence[Recipe], on_event: Listener) -> list[range]:
    """Return which recipes are trained at once, in their order: as many as there is memory for.

    Raises:
        PeftkitError: The base's config is of no use.
    """
    first = recipes[0]
    environment = free_now()
    if environment.memory is None:
        return [range(len(recipes))]
    config: Any = read_config(first.base.model, first.base.revision, plain_purpose(first.task))
    try:
        found = split(recipes, config, environment)
    except CountError as error:
        on_event(Notice(f"{error} So all members are trained at once."))
        return [range(len(recipes))]
    if len(found) > 1:
        on_event(
            Notice(
                f"Memory ({environment.usable / 1e9:.1f} GB) holds {len(found[0])} of the "
                f"{len(recipes)} members at once: they are trained in {len(found)} rounds."
            )
        )
    return found


def split(recipes: Sequence[Recipe], config: Any, environment: Environment) -> list[range]:
    """Return the rounds for a machine; one recipe is always taken, for its run says what lacks.

    Args:
        config: The model's.
    """
    known: dict[str, MemoryEstimator] = {}
    own = []
    for recipe in recipes:
        method = recipe.method.model_dump_json()
        if method not in known:
            known[method] = MemoryEstimator(_without_groups(recipe), config, environment)
        own.append(known[method].member_bytes(recipe.train.optimizer))
    largest = max(known.values(), key=lambda costs: costs.reckoner.num_trained)
    if largest.reckoner.base.resident + sum(own) <= SMALL * environment.usable:
        return [range(len(recipes))]
    left = environment.usable - largest.pass_bytes(sum(r.train.batch_size for r in recipes))
    found, start, taken = [], 0, 0
    for number, size in enumerate(own):
        if taken + size > left and number > start:
            found.append(range(start, number))
            start, taken = number, 0
        taken += size
    return [*found, range(start, len(own))]


def _without_groups(recipe: Recipe) -> Recipe:
    train = recipe.train.model_copy(update={"group_layers": False})
    return recipe.model_copy(update={"train": train})
