"""The estimated memory, time and disk of a run, and a change of settings if it does not fit.

Only the config of the model is read. A training step runs on tensors without data
(`planning/step.py`), which takes the same code paths as the run.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from peftkit.base.pretrained import published_codes
from peftkit.config.schema import from_dict
from peftkit.defaults import anchors_per_step, should_pack
from peftkit.errors import ConfigError
from peftkit.execution.environment import gpu_of_size, this_machine
from peftkit.execution.plan import ExecutionPlan, plan_of
from peftkit.figures import dtype_name, rough_duration, size
from peftkit.kernels.device import launch_seconds, local_gpu
from peftkit.planning.memory import CARDS, LINK, STEP, DeviceEstimate, MemoryEstimator, Strategy
from peftkit.planning.resolve import as_continued, config_of, tokens_of_first
from peftkit.recipe import Recipe, load
from peftkit.train.optim import STATE_BYTES

BYTES_PER_TOKEN = 4
"""Approximate bytes of text per token, for rows that cannot be encoded without the base."""
MAX_ENCODED = 1_000
"""Maximum number of rows that are encoded to count their tokens."""
ANCHOR_TOKENS = 60
"""Tokens of a row that `task.anchor` adds to a step: a short answer and its prompt."""
NUM_CARDS = (1, 2, 4, 8)
ANSWER_LENGTHS = (1024, 4096, 16384)
"""Context lengths for which `peftkit plan --json` counts concurrent completions."""
MEASURE_SECONDS = 0.5
"""Approximate duration of the speed measurement."""
FEW_SECONDS = 10.0
"""Runs below it are estimated as a few seconds: the estimate counts arithmetic and memory only."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 1 << (10 * n) for n, unit in enumerate("KMGT", 1)}


@dataclass(frozen=True, slots=True)
class Plan:
    """The estimated costs of a run.

    Attributes:
        stored: The format of the base's files, if their codes are kept, or "".
        ways: All strategies, fastest first.
        chosen: The first strategy that fits, or the one with the lowest peak.
        cards: Estimates for the base sharded over 1, 2, 4 and 8 GPUs (train.shard: base).
        link: GB/s from main memory to the device.
        rows, length: Rows of a micro-batch, and tokens of each of their texts.
        memory_bytes, usable_bytes: Memory of the planned machine.
        fits: Whether a row of the requested length fits with any strategy.
        change: If it does not fit: arguments to add to the command line, or "".
        execution: The run's execution plan.
        seconds_here, seconds_now: Time of the run (or a batch) on this machine if it is idle, and
            with the current load.
        answers: Context length to the number of concurrent completions that fit on the device with
            the base (serve, generate, eval); empty if the config lacks the sizes.
        num_rows, num_tokens: Of the data file, exact up to MAX_ENCODED rows; None without a file.
        host_seconds: Time in which Python launches the kernels of the run, or of a batch, on a GPU.
        launch_seconds: Of it, the time of a block: measured if this machine has CUDA.
    """

    model: str
    on_gpu: bool
    dtype: str
    quantize: str
    stored: str
    num_parameters: int
    num_trained: int
    rows: int
    length: int
    memory_bytes: int
    usable_bytes: int
    ways: tuple[Strategy, ...]
    chosen: Strategy
    cards: tuple[DeviceEstimate, ...]
    link: float
    fits: bool
    change: str
    execution: ExecutionPlan
    adapter_bytes: int
    disk_bytes: int
    num_rows: int | None
    num_tokens: int | None
    run_tokens: int | None
    seconds_here: float | None
    seconds_now: float | None
    seconds_on: Mapping[str, float]
    host_seconds: float
    launch_seconds: float
    answers: Mapping[int, int]

    def as_json(self) -> dict[str, object]:
        """Return all fields, and those of the chosen strategy on top."""
        fields = {name: value for name, value in asdict(self).items() if name != "chosen"}
        return {**asdict(self.chosen), **fields, "fits": self.fits}

    def facts(self) -> dict[str, str]:
        """Return the estimates as texts, by their label."""
        chosen = self.chosen
        facts = {
            "batch": f"{chosen.step_flops / 1e12:,.2f} TFLOP ({chosen.activations})",
            **self._streamed(),
            "adapter file": size(self.adapter_bytes, 2),
            "disk, checkpoints and all": size(self.disk_bytes, 2),
        }
        work = "the run" if self.run_tokens else "a batch"
        if self.run_tokens:
            about = "about " * ((self.num_rows or 0) > MAX_ENCODED)
            facts["data"] = f"{about}{self.num_tokens:,} tokens in {self.num_rows:,} rows"
            ratio = self.num_trained / max(self.num_tokens or 1, 1)
            ratio_text = f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"
            facts["trained parameters per token"] = ratio_text
        if self.seconds_here is not None and self.seconds_now is not None:
            idle, now = map(rough_duration, (self.seconds_here, self.seconds_now))
            load = f" idle, {now} at the current load" if now != idle else " once loaded"
            facts[f"{work} here"] = f"about {idle}{load}"
        names: dict[str, list[str]] = {}  # of devices with the same estimate
        for name, seconds in self.seconds_on.items():
            estimate = rough_duration(seconds) if seconds >= 0.1 else "under 0.1 s"
            if self.run_tokens and seconds < FEW_SECONDS:
                text = "a few seconds once loaded; launches of kernels dominate"
            else:
                text = f"{estimate} once loaded, {self._limit(seconds)}"
            names.setdefault(text, []).append(name)
        return facts | {f"{work} on {', '.join(same)}": text for text, same in names.items()}

    def _limit(self, seconds: float) -> str:
        if seconds > self.host_seconds:
            return "at 40 % of bf16 peak"
        source = "measured" if torch.cuda.is_available() else "assumed"
        return (
            f"limited by Python's launches, {1e3 * self.launch_seconds:.2g} ms a block ({source})"
        )

    def _streamed(self) -> dict[str, str]:
        chosen = self.chosen
        if chosen.placement != "stream":
            return {}
        seconds = chosen.moved_bytes / (self.link * 1e9)
        hidden = f"; {chosen.compute_bound_tokens:,} tokens hide it" if self.on_gpu else ""
        moved = f"{size(chosen.moved_bytes, 2)}, {seconds:.2g} s at {self.link:g} GB/s{hidden}"
        return {
            "in main memory": f"{size(chosen.host_bytes, 2)} of blocks and their inputs",
            "moved in a batch": moved,
        }

    def verdict(self) -> str:
        """Return whether the run fits into memory, and otherwise the change that makes it fit."""
        if self.fits:
            fewer = "" if self.chosen.fits else " with smaller micro-batches"
            return f"It fits into memory{fewer}.\nExecution plan: {self.execution.describe()}."
        several = next((share.cards for share in self.cards if share.fits), 0)
        other = f"\nWith --set train.shard=base, it fits on {several} such GPUs." if several else ""
        if self.change:
            return f"It does not fit into memory. The cheapest fix:\n  {self.change}{other}"
        return f"It does not fit into memory with any setting.{other}"


def plan_run(
    target: Recipe | str | Path,
    *,
    memory: str | int | None = None,
    overrides: Sequence[str] = (),
    link: float = LINK,
    measure: bool = True,
) -> Plan:
    """Estimate the costs of a run from the model's config alone.

    Args:
        target: A recipe, its file, or a model (trained with a recipe's defaults).
        memory: Memory of the GPU to plan for ("8GB", or bytes); None: this machine.
        overrides: "section.key=value" each.
        link: GB/s from main memory to the GPU, for streamed blocks.
        measure: Whether to measure the speed of this machine's matrix products.

    Raises:
        PeftkitError: The recipe, the model's config or the size is invalid.
    """
    recipe = _recipe(target, overrides)
    if folder := recipe.method.start_from:
        recipe = as_continued(recipe, folder)
    environment = this_machine()
    if memory is not None:
        environment = gpu_of_size(parse_size(memory) if isinstance(memory, str) else memory)
    config = config_of(recipe)
    num_rows, num_tokens, longest = _data(recipe)
    if longest is not None and not _packs(recipe, num_tokens or 0):
        shorter = {"max_length": min(longest, recipe.data.max_length or longest)}
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=shorter)})
    estimator = MemoryEstimator(recipe, config, environment, link=link)
    rows, length, steps = estimator.rows, estimator.length, estimator.steps
    strategies = tuple(estimator.strategies())
    chosen = _chosen(strategies, rows, length, estimator.busy_tokens)
    fits = chosen is not None
    chosen = chosen or min(strategies, key=lambda s: s.peak_bytes)
    codes = published_codes(config, recipe.base)
    run_tokens = _run_tokens(recipe, num_rows, num_tokens, length)
    batches = (run_tokens or 1) / (rows * length * recipe.task.texts_per_row) if run_tokens else 1.0
    work = batches * chosen.step_flops
    adapter = sum(p.nbytes for p in steps.trained)
    state = STATE_BYTES[recipe.train.optimizer] * steps.num_trained
    launch = launch_seconds()
    host = batches * steps.num_blocks * launch
    rates = [0.7 * rate for rate in measured_rates(steps.dtype)] if measure else []
    seconds_here, seconds_now = (work / rate for rate in rates) if rates else (None, None)
    return Plan(
        model=recipe.base.model,
        on_gpu=environment.on_gpu,
        dtype=dtype_name(steps.dtype),
        quantize=recipe.base.quantize,
        stored=codes.description if codes is not None else "",
        num_parameters=steps.num_parameters,
        num_trained=steps.num_trained,
        rows=rows,
        length=length,
        memory_bytes=environment.memory or 0,
        usable_bytes=environment.room,
        ways=strategies,
        chosen=chosen,
        cards=tuple(estimator.share(number) for number in NUM_CARDS) if environment.on_gpu else (),
        link=link,
        fits=fits,
        change="" if fits else cheapest_change(estimator, chosen),
        execution=_execution(estimator, chosen),
        adapter_bytes=adapter,
        disk_bytes=adapter + (recipe.train.keep_checkpoints + 1) * (adapter + state),
        num_rows=num_rows,
        num_tokens=num_tokens,
        run_tokens=run_tokens,
        seconds_here=seconds_here,
        seconds_now=seconds_now,
        answers=estimator.num_completions(ANSWER_LENGTHS),
        seconds_on={
            card.name: max(
                card.seconds(work, 2 * batches * steps.weights),
                batches * chosen.moved_bytes / (link * 1e9),
                host,
            )
            for card in CARDS
        },
        host_seconds=host,
        launch_seconds=launch,
    )


def _chosen(strategies: Sequence[Strategy], rows: int, length: int, busy: int) -> Strategy | None:
    """Return the strategy that a run would choose (train/fitting.py); None: no row fits.

    Args:
        rows, length: The batch that the recipe requests.
        busy: Tokens per micro-batch below which the device waits for Python.
    """
    for strategy in strategies:
        if strategy.fits or strategy.most_rows * length >= min(max(length, busy), rows * length):
            return strategy
    return next((s for s in reversed(strategies) if s.longest_row >= length), None)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 8GB, 12 GiB or 16; a bare number is in GB.

    Raises:
        ConfigError: It is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?(B?)\s*", text, re.IGNORECASE)
    value = float(match[1]) if match else 0.0
    if match is None or value <= 0 or (match[3] and not match[2]):
        raise ConfigError(
            f"--memory {text!r} is not a size.",
            found="Expected a number of GB above zero.",
            fix="Write it as 8GB, 24GB or 7.5GiB.",
        )
    return int(value * _UNITS[(match[2] or "G").upper()])


def measured_rates(dtype: torch.dtype) -> tuple[float, float]:
    """Return the FLOP/s of matrix products on this machine: if it is idle, and now.

    On a CPU, the idle rate follows from the processor time of the fastest product: other programs
    lengthen its duration. On a GPU, it is the rate of the fastest product.
    """
    gpu = local_gpu()
    device, size = (gpu[0], 4096) if gpu else (torch.device("cpu"), 512)
    wait = torch.get_device_module(device).synchronize if gpu else lambda: None
    a = torch.ones(size, size, dtype=dtype, device=device)
    clock = time.perf_counter if gpu else time.process_time
    best, num_done = float("inf"), 0
    a @ a  # loads the kernel
    wait()
    start = time.perf_counter()
    while num_done < 2 or time.perf_counter() < start + MEASURE_SECONDS:
        began = clock()
        a @ a
        wait()
        best, num_done = min(best, clock() - began), num_done + 1
    idle = best if gpu else best / torch.get_num_threads()
    now = max((time.perf_counter() - start) / num_done, idle)
    return 2 * size**3 / idle, 2 * size**3 / now


def _recipe(target: Recipe | str | Path, overrides: Sequence[str]) -> Recipe:
    if isinstance(target, Recipe):
        return target
    if str(target).endswith((".yaml", ".yml")):
        return load(target, overrides)
    bare = {"base": {"model": str(target)}, "data": {"train": ""}}
    return from_dict(Recipe, bare, "peftkit plan", overrides)


def _execution(estimator: MemoryEstimator, chosen: Strategy) -> ExecutionPlan:
    """Return the plan of a run with a strategy."""
    dtype = dtype_name(estimator.steps.dtype)
    device, num_processes = estimator.environment.kind, estimator.environment.world_size
    plan = plan_of(
        estimator.recipe.train, device, num_processes, placement=chosen.placement, dtype=dtype
    )
    plan = replace(plan, activations=chosen.activations)
    if chosen.fits or plan.tokens is None:
        return plan if chosen.fits else replace(plan, rows=max(chosen.most_rows, 1))
    return replace(plan, tokens=max(chosen.most_rows, 1) * estimator.length)


def _data(recipe: Recipe) -> tuple[int | None, int | None, int | None]:
    """Return the rows and tokens of a local data file, and the longest row; None if unknown.

    The counts of up to MAX_ENCODED rows equal `peftkit check`'s.
    """
    train = recipe.data.train
    path = Path(train if isinstance(train, str) else "").expanduser()
    if not path.is_file() or path.suffix != ".jsonl":
        return None, None, None
    with open(path, "rb") as file:
        sizes = [len(line) for line in file if line.strip()]
    lengths = tokens_of_first(recipe, MAX_ENCODED)
    if not any(lengths):
        longest = recipe.data.max_length or max(sizes, default=0)
        return len(sizes), sum(min(n // BYTES_PER_TOKEN, longest) for n in sizes), None
    if len(sizes) <= MAX_ENCODED:
        return sum(map(bool, lengths)), sum(lengths), max(lengths)
    mean = sum(lengths) / len(lengths)
    return len(sizes), round(mean * len(sizes)), None


def _packs(recipe: Recipe, num_tokens: int) -> bool:
    """Return whether a run packs its rows; by default, few rows are not packed."""
    data = recipe.data
    can_pack = data.packing and "packing" in recipe.task.data_fields and data.max_length
    if not can_pack or data.packing_is_explicit:
        return bool(can_pack)
    return should_pack(math.ceil(num_tokens / (data.max_length or 1)))


def _run_tokens(
    recipe: Recipe, num_rows: int | None, num_tokens: int | None, length: int
) -> int | None:
    """Estimate the tokens that a run reads; None without a data file."""
    train = recipe.train
    if not num_rows or not num_tokens:
        return num_tokens
    share = recipe.data.eval if isinstance(recipe.data.eval, float) else 0.0
    num_rows, num_tokens = (max(round(n * (1 - share)), 1) for n in (num_rows, num_tokens))
    packs = _packs(recipe, num_tokens)
    num_steps = train.num_steps(math.ceil(num_tokens / length) if packs else num_rows)
    row = min(length, num_tokens) if packs else num_tokens / num_rows
    has_anchor = recipe.task.type == "causal_lm" and getattr(recipe.task, "anchor", None)
    per_step = anchors_per_step(train.rows_per_step() * row, ANCHOR_TOKENS)
    anchors = num_steps * per_step * ANCHOR_TOKENS if has_anchor else 0
    if train.max_steps is None:
        return round(num_tokens * train.epochs) + anchors
    return round(train.max_steps * train.rows_per_step() * row) + anchors


Changes = tuple[str, ...]


def cheapest_change(estimator: MemoryEstimator, chosen: Strategy) -> str:
    """Return the first change with which one row fits, as arguments; "" if there is none.

    Shorter rows are the last resort.

    Args:
        chosen: The strategy without a change.
    """
    longest_row, best = chosen.longest_row, Changes()
    codes = published_codes(estimator.config, estimator.recipe.base)
    for changes in _candidates(estimator.recipe, in_codes=codes is not None):
        changed = _changed(estimator.recipe, changes)
        environment, link = estimator.environment, estimator.link
        trial = MemoryEstimator(changed, estimator.config, environment, link=link)
        longest = max((s.longest_row for s in trial.strategies()), default=0)
        if longest >= trial.length:
            return _arguments(changes)
        if longest > longest_row:
            longest_row, best = longest, changes
    return _arguments((*best, f"data.max_length={longest_row}")) if longest_row >= STEP else ""


def _candidates(recipe: Recipe, *, in_codes: bool) -> Iterator[Changes]:
    """Yield changes in the order of their cost in time, alone and then together.

    Args:
        in_codes: Whether the base's files are quantised, and should not be quantised again.
    """
    changes: list[str] = []
    if recipe.train.optimizer == "adamw":
        changes.append("train.optimizer=adamw_8bit")
    if recipe.train.gradient_checkpointing is False:
        changes.append("train.gradient_checkpointing=auto")
    if recipe.base.quantize in ("none", "int8") and not in_codes:
        changes.append("base.quantize=nf4")
    yield from ((change,) for change in changes)
    if len(changes) > 1:
        yield tuple(changes)
    if recipe.base.placement == "stream":
        return
    needed = [change for change in changes if "optimizer" not in change]
    yield (*needed, "base.placement=stream")
    if len(needed) < len(changes):
        yield (*changes, "base.placement=stream")


def _changed(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    for change in changes:
        name, _, value = change.partition("=")
        section, field = name.split(".")
        config = getattr(recipe, section).model_copy(update={field: value})
        recipe = recipe.model_copy(update={section: config})
    return recipe


def _arguments(changes: Changes) -> str:
    return " ".join(f"--set {change}" for change in changes)
