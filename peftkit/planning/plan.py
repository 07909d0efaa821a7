"""What a run will cost, before it runs: memory, time, disk; and what to change if it does not fit.

Of a model only the config is read. The step that trains is counted on tensors without data
(`counting/step.py`), so that the plan and the run take the same paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from peftkit.base.load import DTYPES, fast_dtype
from peftkit.base.shapes import read_config
from peftkit.config.schema import from_dict
from peftkit.counting.machines import CARDS, measured_rate, parse_size, this_machine, usable
from peftkit.counting.reckon import Reckoner
from peftkit.counting.step import Setup, StepCount, plain_purpose
from peftkit.run.config import Recipe, load
from peftkit.train.memory.blocks import Activations
from peftkit.train.optim import STATE_BYTES

BYTES_PER_TOKEN = 4
"""Of text in most languages and most vocabularies, about; data is not tokenised for a plan."""
LONGEST = 1 << 20
STEP = 64
"""Rows' lengths are told in multiples of it."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of keeping activations.

    Attributes:
        peak_bytes: Of a step of the rows that go through the model at once.
        by_category: The same: weights, adapters, gradients, optimizer, activations.
        fits: Whether it is within the memory that is usable.
        longest_row: Tokens of the longest single row that fits; 0: none does.
        most_rows: Rows of the asked length that fit at once.
        step_flops: Of forward and backward pass of one batch.
    """

    activations: Activations
    peak_bytes: int
    by_category: Mapping[str, int]
    fits: bool
    longest_row: int
    most_rows: int
    step_flops: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The costs of a run.

    Attributes:
        ways: Every way of keeping activations, the fastest first.
        chosen: The first one that fits, else the one that takes least.
        rows, length: That go through the model at once.
        memory_bytes, usable_bytes: Of the machine asked about.
        fits: Whether at least one row of the asked length does, in some way.
        change: If it does not: what to add to the command line, or "".
        num_rows, num_tokens: Of the data, by its size; None where it is not at hand.
    """

    model: str
    on_gpu: bool
    dtype: str
    quantize: str
    num_parameters: int
    num_trained: int
    rows: int
    length: int
    memory_bytes: int
    usable_bytes: int
    ways: tuple[Way, ...]
    chosen: Way
    fits: bool
    change: str
    adapter_bytes: int
    disk_bytes: int
    num_rows: int | None
    num_tokens: int | None
    run_tokens: int | None
    seconds_here: float | None
    seconds_on: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return all of it, and the chosen way's figures on top."""
        found = {name: value for name, value in asdict(self).items() if name != "chosen"}
        return {**asdict(self.chosen), **found, "fits": self.fits}


def plan_run(
    target: Recipe | str | Path,
    *,
    memory: str | int | None = None,
    overrides: Sequence[str] = (),
    measure: bool = True,
) -> Plan:
    """Tell what a run will cost, from the model's config alone.

    Args:
        target: A recipe, its file, or a model (trained as a recipe's defaults say).
        memory: Of the GPU that is asked about ("8GB", or bytes); None: this machine's.
        overrides: "section.key=value" each.
        measure: Measure for a moment how fast this machine multiplies.

    Raises:
        PeftkitError: The recipe, the model's config or the size is of no use.
    """
    recipe = _recipe(target, overrides)
    if memory is None:
        memory_bytes, on_gpu = this_machine()
    else:
        memory_bytes, on_gpu = parse_size(memory) if isinstance(memory, str) else memory, True
    config = read_config(recipe.base.model, recipe.base.revision, plain_purpose(recipe.task))
    setup = _setup(recipe, config, on_gpu)
    reckoner = Reckoner(setup)
    rows, length = _at_once(recipe, config, on_gpu)
    left = usable(memory_bytes, on_gpu)
    ways = tuple(_way(reckoner, recipe, way, rows, length, left) for way in _ways(recipe, reckoner))
    chosen = next((w for w in ways if w.fits), None)
    chosen = chosen or next((w for w in ways if w.longest_row >= length), None)
    fits = chosen is not None
    chosen = chosen or min(ways, key=lambda w: w.peak_bytes)
    change = "" if fits else _change(recipe, config, on_gpu, chosen, left)
    weights = reckoner.weights
    num_rows, num_tokens = _data(recipe, length)
    run_tokens = None if num_tokens is None else round(num_tokens * recipe.train.epochs)
    per_token = chosen.step_flops / max(rows * length, 1)
    work = per_token * (run_tokens or rows * length)
    batches = work / max(chosen.step_flops, 1)
    state = STATE_BYTES[recipe.train.optimizer] * weights.num_trained
    return Plan(
        model=recipe.base.model,
        on_gpu=on_gpu,
        dtype=str(setup.dtype).removeprefix("torch."),
        quantize=recipe.base.quantize,
        num_parameters=weights.num_parameters,
        num_trained=weights.num_trained,
        rows=rows,
        length=length,
        memory_bytes=memory_bytes,
        usable_bytes=left,
        ways=ways,
        chosen=chosen,
        fits=fits,
        change=change,
        adapter_bytes=weights.adapter_bytes,
        disk_bytes=weights.adapter_bytes
        + (recipe.train.keep_checkpoints + 1) * (weights.adapter_bytes + state),
        num_rows=num_rows,
        num_tokens=num_tokens,
        run_tokens=run_tokens,
        seconds_here=work / (0.7 * measured_rate(setup.dtype)) if measure else None,
        seconds_on={
            card.name: card.seconds(work, 2 * batches * weights.base_bytes) for card in CARDS
        },
    )


def _recipe(target: Recipe | str | Path, overrides: Sequence[str]) -> Recipe:
    if isinstance(target, Recipe):
        return target
    if str(target).endswith((".yaml", ".yml")):
        return load(target, overrides)
    bare = {"base": {"model": str(target)}, "data": {"train": ""}}
    return from_dict(Recipe, bare, "peftkit plan", overrides)


def _setup(recipe: Recipe, config: Any, on_gpu: bool) -> Setup:
    fast = torch.bfloat16 if on_gpu else fast_dtype(torch.device("cpu"))
    dtype = DTYPES.get(recipe.base.dtype) or fast
    base = recipe.base
    return Setup(
        config,
        recipe.task,
        recipe.method,
        base.quantize,
        base.double_quant,
        dtype,
        on_gpu,
        base.quantize_towers,
    )


def _at_once(recipe: Recipe, config: Any, on_gpu: bool) -> tuple[int, int]:
    """Return the rows and their tokens that go through the model at once: the longest ones."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST
    length = min(recipe.data.max_length or longest, longest)
    rows, tokens = recipe.train.batch_size, recipe.train.tokens_at_once("cuda" if on_gpu else "cpu")
    if tokens is not None:
        rows = max(1, min(rows, tokens // length))
    return rows, length


def _ways(recipe: Recipe, reckoner: Reckoner) -> tuple[Activations, ...]:
    wish = recipe.train.gradient_checkpointing
    if wish is True:
        return tuple(w for w in reckoner.ways if w != "keep") or reckoner.ways
    return reckoner.ways if wish == "auto" else ("keep",)


def _way(
    reckoner: Reckoner, recipe: Recipe, way: Activations, rows: int, length: int, left: int
) -> Way:
    state = STATE_BYTES[recipe.train.optimizer] * reckoner.weights.num_trained
    # a second batch of a step runs beside the gradients of the first
    again = recipe.train.gradient_accumulation > 1

    def total(count: StepCount) -> dict[str, int]:
        found = {**count.peak, "optimizer": state}
        if again:
            found["gradients"] = max(found["gradients"], reckoner.weights.adapter_bytes)
        return found

    count = reckoner.count(rows, length, way)
    found = {**count.peak, "optimizer": state}
    if recipe.train.gradient_accumulation > 1:  # a second batch runs beside the first's gradients
        found["gradients"] = max(found["gradients"], reckoner.weights.adapter_bytes)
    peak, slope = sum(found.values()), max(reckoner.bytes_per_token(rows, length, way), 1.0)
    tokens = max(int(rows * length + (left - peak) / slope), 0)
    limit = getattr(reckoner.setup.config.get_text_config(), "max_position_embeddings", None)
    longest = min(tokens // STEP * STEP, limit or LONGEST)
    return Way(way, peak, found, peak <= left, longest, tokens // length, count.flops)


def _change(recipe: Recipe, config: Any, on_gpu: bool, chosen: Way, left: int) -> str:
    """Return the cheapest change that lets one row through, as arguments; "" if none does."""
    tried: list[tuple[str, ...]] = []
    if recipe.train.gradient_checkpointing is False:
        tried.append(("train.gradient_checkpointing=auto",))
    if recipe.train.optimizer == "adamw":
        tried.append(("train.optimizer=adamw_8bit",))
    if recipe.base.quantize in ("none", "int8"):
        tried.append(("base.quantize=nf4",))
    tried.append(tuple(change for one in tried for change in one))
    best = 0
    for changes in filter(None, tried):
        changed = _changed(recipe, changes)
        reckoner = Reckoner(_setup(changed, config, on_gpu))
        rows, length = _at_once(changed, config, on_gpu)
        for way in reversed(_ways(changed, reckoner)):
            found = _way(reckoner, changed, way, rows, length, left)
            if found.longest_row >= length:
                return " ".join(f"--set {change}" for change in changes)
            if found.longest_row > best:
                best, with_it = found.longest_row, changes
    if chosen.longest_row >= STEP:
        return f"--set data.max_length={chosen.longest_row}"
    if best >= STEP:
        return " ".join(f"--set {c}" for c in (*with_it, f"data.max_length={best}"))
    return ""


def _changed(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    for change in changes:
        name, _, value = change.partition("=")
        section, field = name.split(".")
        part = getattr(recipe, section).model_copy(update={field: value})
        recipe = recipe.model_copy(update={section: part})
    return recipe


def _data(recipe: Recipe, length: int) -> tuple[int | None, int | None]:
    """Return about how many rows and tokens a data file has, by its size; None if not at hand."""
    if not isinstance(recipe.data.train, str):
        return None, None
    path = Path(recipe.data.train).expanduser()
    if not recipe.data.train or not path.is_file() or path.suffix != ".jsonl":
        return None, None
    rows = tokens = 0
    with open(path, "rb") as file:
        for line in file:
            if line.strip():
                rows += 1
                tokens += min(len(line) // BYTES_PER_TOKEN, length)
    return rows, tokens
