"""Whether to compile a model's blocks, and the attempt.

Compiling takes ten to twenty seconds for each kind of block, whatever the run. It is repaid by what
each token saves, which grows with the model: so it is done where tokens times parameters come to at
least WORTH for each kind (most decoders have one, T5 four). The blocks are compiled on the first
rows of the data, with sizes left open: the code does not depend on the step that a run begins or
resumes at. Evaluations run as they are written: code for them would have to be compiled besides.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from peftkit.data.pack import tokens_of_each
from peftkit.errors import RunError
from peftkit.events import Notice, Stage
from peftkit.execution import rng
from peftkit.execution.out_of_memory import (
    is_compile_error,
    is_out_of_memory,
    one_line,
    release_memory,
)
from peftkit.quant.audit import audit
from peftkit.settings import TrainConfig
from peftkit.train.step import Trainer

WORTH = {"cpu": 1.2e13, "cuda": 4e16}
"""Tokens of the whole run times parameters of the model, over the kinds of its blocks."""

COMPILERS = ("c++", "g++", "clang++")


def is_worth_it(config: TrainConfig, work: float, device: str) -> bool:
    """Tell whether to try: as the config says, or as the run's length does.

    Args:
        work: Tokens of the whole run times parameters of the model, over the kinds of its blocks.
        device: Its kind.
    """
    if config.compile != "auto":
        return config.compile
    return work >= WORTH.get(device, float("inf"))


def cpp_compiler() -> str | None:
    """Return the C++ compiler that torch.compile would find for a CPU."""
    names = (os.environ.get("CXX", ""), *COMPILERS)
    return next((path for name in names if name and (path := shutil.which(name))), None)


def compile_blocks(trainer: Trainer, num_steps: int) -> None:
    """Compile the blocks if the plan says so, or if it leaves that open and the run repays it.

    Raises:
        RunError: Blocks that have to be compiled cannot be.
    """
    run, config = trainer.run, trainer.run.config
    if trainer.plan.compile is None:
        work = work_of(trainer, num_steps) / trainer.blocks.num_kinds
        trainer.run.state.plan = replace(
            trainer.plan, compile=is_worth_it(config, work, trainer.plan.device)
        )
    if not trainer.plan.compile:
        return
    run.say(Stage("Compiling the model's blocks"))
    problem = _try_to_compile(trainer, run.rows[: config.batch_size])
    if trainer.world.max(int(problem != "")) == 0:
        return
    problem = problem or "another process could not."
    if config.compile is True:
        raise RunError(
            "train.compile: true is not possible here",
            found=problem,
            fix="Set it to auto or false: the run is the same, and slower.",
        )
    trainer.stop_compiling()
    run.say(Notice(f"Blocks are not compiled, which only takes longer. {problem}"))


def _try_to_compile(trainer: Trainer, rows: Sequence[Any]) -> str:
    """Run a forward and a backward pass with compiled blocks; return why that does not work."""
    blocks, device = trainer.blocks, trainer.world.device
    if blocks.are_streamed:
        return "Their weights are streamed (base.placement), each block's when it is entered."
    if not blocks.blocks:
        return f"{type(trainer.model).__name__} has no blocks that transformers marks as such."
    if not trainer.plan.on_gpu and cpp_compiler() is None:
        return "There is no C++ compiler here (CXX, c++, g++, clang++)."
    try:
        blocks.compile()
        first = trainer.run.micro_batches(rows)[0]
        with rng.untouched(trainer.model, device):
            trainer.loss(first).backward()
    except Exception as error:
        if is_out_of_memory(error) and not is_compile_error(error):
            release_memory()  # the first step will find what fits
            return ""
        return one_line(error)
    finally:
        trainer.optimizer.zero_grad(set_to_none=True)
    return ""


def work_of(trainer: Trainer, num_steps: int) -> float:
    """Return the tokens of the whole run times the parameters of the model."""
    rows = trainer.run.rows
    per_step = trainer.run.config.rows_per_step(trainer.world.world_size)
    tokens = int(tokens_of_each(rows).sum()) * num_steps * min(per_step / len(rows), 1.0)
    return tokens * audit(trainer.model).num_parameters
