"""What to change of a recipe whose step does not fit: the change that costs the least time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from peftkit.planning.memory import STEP, MemoryEstimator, Strategy
from peftkit.run.config import Recipe

Changes = tuple[str, ...]


def cheapest_change(costs: MemoryEstimator, chosen: Strategy) -> str:
    """Return the cheapest change that lets one row through, as arguments; "" if none does.

    Of those that leave rows as they are the one with which a token takes the least time, where two
    take the same the first of `_tried`; only then shorter rows.

    Args:
        chosen: What is planned without a change.
    """
    found: list[tuple[float, Changes]] = []
    best, with_it = chosen.longest_row, Changes()
    trial = costs
    for changes in _tried(costs.recipe):
        changed = _changed(costs.recipe, changes)
        link, like = costs.link, trial if changed.base.quantize != costs.recipe.base.quantize else costs
        trial = MemoryEstimator(changed, costs.config, costs.environment, link=link, like=like)
        ways = list(trial.ways())
        through = [trial.seconds(way) for way in ways if way.longest_row >= trial.length]
        if through:
            found.append((round(min(through), 9), changes))
        longest = max(way.longest_row for way in ways)
        if longest > best:
            best, with_it = longest, changes
    if found:
        return _arguments(min(found, key=lambda each: each[0])[1])
    return _arguments((*with_it, f"data.max_length={best}")) if best >= STEP else ""


def _tried(recipe: Recipe) -> Iterator[Changes]:
    """Yield changes, alone and then together."""
    beside: list[str] = []
    if recipe.train.optimizer == "adamw":
        beside.append("train.optimizer=adamw_8bit")
    if recipe.train.gradient_checkpointing is False:
        beside.append("train.gradient_checkpointing=auto")
    if recipe.base.quantize in ("none", "int8"):
        beside.append("base.quantize=nf4")
    yield from ((change,) for change in beside)
    if len(beside) > 1:
        yield tuple(beside)
    if recipe.base.placement != "device":
        return
    needed = [change for change in beside if "optimizer" not in change]
    yield (*needed, "base.placement=stream")
    if len(needed) < len(beside):
        yield (*beside, "base.placement=stream")


def _changed(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    for change in changes:
        name, _, value = change.partition("=")
        section, field = name.split(".")
        part = getattr(recipe, section).model_copy(update={field: value})
        recipe = recipe.model_copy(update={section: part})
    return recipe


def _arguments(changes: Changes) -> str:
    return " ".join(f"--set {change}" for change in changes)
