"""What Triton's interpreter lacks of what Inductor writes: functions of CUDA's libdevice."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle

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
