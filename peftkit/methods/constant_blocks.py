"""Checks of `method.constant_in`: A constant in blocks of columns (QA-LoRA, arXiv:2309.14717).

With A constant in a block, B A adds one number to all weights of the block. Types with a minimum
per block (Q4_1, Q5_1) then change the minimum and keep the codes, so a merge keeps the update.
"""

from __future__ import annotations

from peftkit.errors import ConfigError, TargetError


def check_blocks(constant_in: int, kind: str, init: str) -> None:
    """Raise ConfigError for methods and initial values of A that are not constant in blocks."""
    if kind != "lora" or init not in ("default", "gaussian"):
        raise ConfigError(
            f"constant_in: {constant_in} is not possible with this method.",
            found=f"type '{kind}', init '{init}'",
            fix="Use type 'lora' with init 'default' or 'gaussian', or remove constant_in.",
        )


def check_columns(constant_in: int, num_columns: int, path: str) -> None:
    """Raise TargetError for a layer whose columns are not a whole number of blocks."""
    if num_columns % constant_in:
        raise TargetError(
            f"constant_in {constant_in} does not divide the columns of {path}",
            found=f"its weight has {num_columns} columns",
            fix="Remove this layer from the targets, or choose a divisor.",
        )
