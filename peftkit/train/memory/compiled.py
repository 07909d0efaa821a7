"""Whether to compile a model's blocks.

Compiling takes ten to twenty seconds for each kind of block, whatever the run. It is repaid by what
each token saves, which grows with the model: so it is done where tokens times parameters come to at
least WORTH for each kind (most decoders have one, T5 four). The blocks are compiled on the first
rows of the data, with sizes left open: the code does not depend on the step that a run begins or
resumes at. Evaluations run as they are written: code for them would have to be compiled besides.
"""

from __future__ import annotations

import os
import shutil

from peftkit.train.config import TrainConfig

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


def is_compile_error(error: BaseException) -> bool:
    """Tell whether an error is of the compiler rather than of the model."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def told(error: BaseException) -> str:
    """Return an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:240]}"  # whose fault, and what it was
