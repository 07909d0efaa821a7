"""What Triton's interpreter lacks of what is written: functions of CUDA's libdevice, and rounding.

It cuts float32 off where a GPU rounds to bfloat16, whose subnormal values it misreads.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in ("exp", "tanh", "sqrt", "sin", "cos", "log")},
    "abs": np.abs,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


def _of_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, _semantic: Any = None) -> Any:
        first = args[0]
        found = function(*(arg.handle.data for arg in args))
        data = found.astype(first.handle.data.dtype)
        return tl.tensor(TensorHandle(data, first.handle.dtype), first.type)

    return call


for _name, _function in FUNCTIONS.items():
    setattr(libdevice, _name, _of_blocks(_function))

_cast = InterpreterBuilder.cast_impl


def _cast_exactly(self: InterpreterBuilder, src: TensorHandle, dst_type: Any) -> TensorHandle:
    kinds = src.dtype.scalar, dst_type.scalar
    if kinds == (tl.bfloat16, tl.float32):
        bits = src.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)
    if kinds != (tl.float32, tl.bfloat16):
        return _cast(self, src, dst_type)
    bits = np.ascontiguousarray(src.data).view(np.uint32)
    found = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return TensorHandle(found.astype(np.uint16), tl.bfloat16)


InterpreterBuilder.cast_impl = _cast_exactly
