"""What does not go together in a recipe: one table, each line with its reason and what to do.

Read when a recipe is made, and once more where it is run, with the processes that were launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from peftkit.errors import ConfigError
from peftkit.methods.table import METHODS
from peftkit.tasks.table import TASKS
from peftkit.train.config import SHARDED

LAUNCH = "accelerate launch --num_processes {} -m peftkit_cli train RECIPE.yaml"


class Rule(NamedTuple):
    """Two settings that exclude each other.

    Attributes:
        what: What was asked, of the recipe.
        found: Why it does not work, of the recipe and the number of processes; "" where it does.
        fix: What to do, of the recipe.
        launched: Whether it depends on the processes, which are not there when a recipe is read.
    """

    what: Callable[[Any], str]
    found: Callable[[Any, int], str]
    fix: Callable[[Any], str]
    launched: bool = False


def check(recipe: Any, processes: int | None = None) -> None:
    """Make sure that a recipe's settings go together.

    Args:
        processes: That were launched to run it; None where it is only read.

    Raises:
        ConfigError: The first two that do not.
    """
    for error in broken(recipe, processes):
        raise error


def broken(
    recipe: Any, processes: int | None = None, rules: Sequence[Rule] = ()
) -> Iterator[ConfigError]:
    """Yield what `check` raises, for every rule that a recipe breaks.

    Args:
        rules: By default those of every run.
    """
    for rule in rules or RULES:
        if rule.launched and processes is None:
            continue
        if found := rule.found(recipe, processes or 1):
            yield ConfigError(rule.what(recipe), found=found, fix=rule.fix(recipe))


def _context(recipe: Any, processes: int) -> str:
    if recipe.train.context_parallel == 1:
        return ""
    if not recipe.task.takes_parts:
        tasks = ", ".join(task for task, kind in TASKS.items() if kind.takes_parts)
        return f"The task is {recipe.task.type}; tasks that it goes with: {tasks}."
    if recipe.method.acts_on_input:
        return f"method.type: {recipe.method.type} puts virtual tokens before each row."
    if recipe.data.asks_to_pack:
        return "data.packing is true, and rows in parts hold one document each."
    return ""


def _groups(recipe: Any, processes: int) -> str:
    if processes % recipe.train.context_parallel == 0:
        return ""
    return "There is one process." if processes == 1 else f"There are {processes} processes."


def _sharded_method(recipe: Any, processes: int) -> str:
    return _not_beside(recipe, processes) if recipe.train.shard in SHARDED else ""


def _not_beside(recipe: Any, processes: int) -> str:
    if recipe.method.beside_linear_layers:
        return ""
    known = [name for name, kind in METHODS.items() if kind.beside_linear_layers]
    return f"Methods that do: {', '.join(known)}."


def _dense_embeddings(recipe: Any) -> str:
    """Return why the embedding has to stay as it is."""
    if recipe.base.quantize == "none":
        return "base.quantize is none."
    if recipe.base.new_tokens or recipe.method.token_rows:
        return "base.new_tokens or method.token_rows trains rows of it."
    return ""


def _when(holds: bool, found: str) -> str:
    return found if holds else ""


RULES = (
    Rule(
        lambda r: "base.placement: stream recomputes activations.",
        lambda r, _: _when(
            r.base.placement == "stream" and r.train.gradient_checkpointing is False,
            "train.gradient_checkpointing is false, which keeps every block's weights.",
        ),
        lambda r: "Set it to auto or true, or base.placement: device.",
    ),
    Rule(
        lambda r: f"base.placement: stream does not go with train.shard: {r.train.shard}.",
        lambda r, _: _when(
            r.base.placement == "stream" and r.train.shard in SHARDED,
            "Both say where the weights of blocks are.",
        ),
        lambda r: "Leave one of them out; train.shard: offload keeps parts in main memory.",
    ),
    Rule(
        lambda r: f"data.packing does not go with method.type: {r.method.type}.",
        lambda r, _: _when(
            r.packs_beside_virtual_tokens and r.data.asks_to_pack,
            "Every row of text wants virtual tokens of its own before it.",
        ),
        lambda r: "Set data.packing: false.",
    ),
    Rule(
        lambda r: f"train.context_parallel: {r.train.context_parallel} does not go with this.",
        _context,
        lambda r: "Leave one of them out.",
    ),
    Rule(
        lambda r: "method.init: eva reads the training rows.",
        lambda r, _: _when(
            getattr(r.method, "init", "") == "eva" and getattr(r.task, "answers", "") == "teacher",
            "task.answers is teacher, which gives them their answers afterwards.",
        ),
        lambda r: "Set another method.init, or task.answers: data.",
    ),
    Rule(
        lambda r: f"base.quantize_embeddings: {r.base.quantize_embeddings} is not possible here.",
        lambda r, _: _when(r.base.quantize_embeddings != "none", _dense_embeddings(r)),
        lambda r: "Leave one of them out.",
    ),
    Rule(
        lambda r: "base.new_tokens does not go with method.start_from.",
        lambda r, _: _when(
            bool(r.base.new_tokens and r.method.start_from),
            "The adapter that is gone on with has the rows that it has.",
        ),
        lambda r: "Leave base.new_tokens out; tokens that the adapter knows are there.",
    ),
    Rule(
        lambda r: "base.new_tokens says which rows are trained.",
        lambda r, _: _when(
            bool(r.base.new_tokens and r.method.token_rows), "method.token_rows does so too."
        ),
        lambda r: "Leave one of them out.",
    ),
    Rule(
        lambda r: f"train.{r.train.evaluates[0]} needs eval rows.",
        lambda r, _: _when(bool(r.train.evaluates) and not r.data.eval, "data.eval is not set."),
        lambda r: "Set data.eval, or leave it out.",
    ),
    Rule(
        lambda r: f"the task {r.task.type} writes no text to look at.",
        lambda r, _: _when(
            bool(r.train.sample_every or r.train.eval_generate) and not r.task.writes_text,
            "train.sample_every or train.eval_generate is set.",
        ),
        lambda r: "Leave it out.",
    ),
    Rule(
        lambda r: (
            f"train.context_parallel: {r.train.context_parallel} does not go with text that "
            "is generated while it trains"
        ),
        lambda r, _: _when(
            r.train.context_parallel > 1 and bool(r.train.sample_every or r.train.eval_generate),
            "train.sample_every or train.eval_generate is set.",
        ),
        lambda r: "Leave it out; peftkit generate and eval do it afterwards.",
    ),
    Rule(
        lambda r: f"train.shard: {r.train.shard} does not go with method.type: {r.method.type}",
        _sharded_method,
        lambda r: "Set train.shard: none, or use one of these.",
    ),
    Rule(
        lambda r: f"train.shard: {r.train.shard} spreads the base over several processes",
        lambda r, processes: _when(
            r.train.shard in SHARDED and processes < 2, "There is one process."
        ),
        lambda r: LAUNCH.format(2),
        launched=True,
    ),
    Rule(
        lambda r: (
            f"train.context_parallel: {r.train.context_parallel} takes groups of "
            f"{r.train.context_parallel} processes"
        ),
        _groups,
        lambda r: LAUNCH.format(r.train.context_parallel),
        launched=True,
    ),
)

ALONE = "Train it with peftkit train."
SWEPT_TASKS = ("causal_lm", "seq2seq")
"""Tasks whose rows become the same batch whatever stands beside them."""

SWEPT = (
    Rule(lambda r: f"method.type {r.method.type}", _not_beside, lambda r: ALONE),
    Rule(
        lambda r: "modules or rows of tokens that are trained whole",
        lambda r, _: _when(
            bool(r.method.train_fully or r.method.token_rows or r.base.new_tokens),
            "method.train_fully, method.token_rows or base.new_tokens is set.",
        ),
        lambda r: ALONE,
    ),
    Rule(
        lambda r: "text or a loss that is asked for beside its steps",
        lambda r, _: _when(
            bool(r.train.sample_every or r.train.eval_generate or r.train.eval_before),
            "train.sample_every, train.eval_generate or train.eval_before is set.",
        ),
        lambda r: ALONE,
    ),
    Rule(
        lambda r: "its blocks are compiled, or its base is spread over processes",
        lambda r, _: _when(
            r.train.compile is True or r.train.shard in SHARDED,
            "train.compile or train.shard is set.",
        ),
        lambda r: ALONE,
    ),
    Rule(
        lambda r: f"the task {r.task.type}",
        lambda r, _: _when(r.task.type not in SWEPT_TASKS, f"Tasks: {', '.join(SWEPT_TASKS)}."),
        lambda r: ALONE,
    ),
)
"""Of the members of a sweep, which are trained in one pass."""
