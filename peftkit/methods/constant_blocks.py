"""Checks of `method.constant_in`: A constant in blocks of columns (QA-LoRA, arXiv:2309.14717).

With A constant in a block, B A adds one number to all weights of the block. Types with a minimum
per block (Q4_1, Q5_1) then change the minimum and keep the codes, so a merge keeps the update.
"""

from __future__ import annotations

from peftkit.errors import TargetError


def check_blocks(constant_in: int, num_columns: int, path: str, kind: str, init: str) -> None:
    """Check that A of a layer can be constant in blocks of columns.

    Args:
        num_columns: Columns of the layer's weight. kind, init: The method's type and init.

    Raises:
        TargetError: The columns are not a whole number of blocks, or the method or its initial
            values of A are not constant in them.
    """
    if kind != "lora" or init not in ("default", "gaussian"):
        raise TargetError(
            f"constant_in {constant_in} is not possible for {path}",
            found=f"method.type is '{kind}', method.init '{init}'",
            fix="Use type 'lora' with init 'default' or 'gaussian', or remove constant_in.",
        )
    if num_columns % constant_in:
        raise TargetError(
            f"constant_in {constant_in} does not divide the columns of {path}",
            found=f"its weight has {num_columns} columns",
            fix="Remove this layer from the targets, or choose a divisor.",
        )
