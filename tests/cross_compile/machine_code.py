"""The machine code of a Triton kernel for a card, on a machine without one."""

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

READER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    fixed: Mapping[str, Any],
    card: int,
    *,
    aligned: Collection[str] = (),
    **options: Any,
) -> Any:
    """Compile a kernel.

    Args:
        types: Triton's type of each argument that is not `fixed`.
        aligned: Arguments that are multiples of 16, as a launch sees of torch's arrays.
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(fixed), attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)


def resources(made: Any) -> dict[str, int]:
    """Return the registers of compiled code, and the bytes that they spill to."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        command = [READER, "-res-usage", file.name]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {n: int(size) for n, size in re.findall(r"(REG|STACK|LOCAL):(\d+)", shown)}
