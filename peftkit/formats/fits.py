"""Whether an adapter sits on layers that a base has."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from peftkit.anatomy import is_linear, linear_shape, walk
from peftkit.errors import AdapterError
from peftkit.formats.endings import unmatched
from peftkit.formats.low_rank import LowRank
from peftkit.formats.peft import AdapterFile


def layers_of(
    file: AdapterFile, modules: Mapping[str, LowRank], model: nn.Module
) -> dict[str, nn.Module]:
    """Return the bare linear layers that an adapter's updates belong to, by path.

    Raises:
        AdapterError: Lists every layer that is missing or of another shape, and every target of
            the config without tensors.
    """
    linears = {path: module for path, module, _ in walk(model) if is_linear(module)}
    problems = [f"no such layer: {path}" for path in modules if path not in linears]
    for path in modules.keys() & linears.keys():
        shape, update = linear_shape(linears[path]), modules[path]
        given = (update.a.shape[1], update.b.shape[0])
        if given != shape:
            problems.append(f"misshapen: {path} is {_arrow(given)}, not {_arrow(shape)}")
    missing = unmatched(file.fields.get("target_modules"), modules)
    problems += [f"no tensors for the target: {target}" for target in missing]
    if problems:
        raise AdapterError(
            f"the adapter in {file.folder} does not fit {type(model).__name__}",
            found="\n".join(sorted(problems)),
            fix="Use the base it was trained on: peftkit inspect ADAPTER",
        )
    return {path: linears[path] for path in modules}


def _arrow(shape: tuple[int, int]) -> str:
    return f"{shape[0]} -> {shape[1]}"
