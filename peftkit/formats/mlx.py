"""Reads and writes adapter folders of mlx-lm.

adapters.safetensors holds `<module>.lora_a` (in, r), `<module>.lora_b` (r, out) and, for DoRA,
`<module>.m` (out,). A layer computes y + scale * (x @ a) @ b; all layers share one rank and one
scale, from `lora_parameters` of adapter_config.json
(https://github.com/ml-explore/mlx-lm, mlx_lm/tuner/utils.py: load_adapters).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from torch import Tensor

from peftkit.base.request import DTYPES
from peftkit.errors import AdapterError, first_few
from peftkit.events import Listener
from peftkit.files.disk import write_json
from peftkit.files.tensors import write_tensors
from peftkit.formats.folders import CONFIG, new_adapter_folder
from peftkit.formats.guard import read_json, read_tensors
from peftkit.formats.peft.load import AdapterFile
from peftkit.formats.peft.low_rank import LowRank, by_module, read_low_rank, uniform

MLX_TENSORS = "adapters.safetensors"
_A, _B, _M = "lora_a", "lora_b", "m"
_BLOCK = re.compile(r"model\.layers\.\d+\.(?P<key>.+)")


def export_mlx(
    source: Path, out: Path, *, base: str | None, dtype: str, force: bool, on_event: Listener
) -> dict[str, str]:
    """Write an adapter folder that mlx-lm reads.

    Raises:
        AdapterError: It adapts modules that mlx-lm lacks or names differently.
        OutputError: `out` exists or cannot be written.
    """
    with new_adapter_folder(out, force=force, sources=[source]) as folder:
        file, modules = read_low_rank(source)
        _check_names(file, modules)
        even, rank, scaling = uniform(modules)
        tensors: dict[str, Tensor] = {}
        for path, module in even.items():
            tensors[f"{path}.{_A}"] = module.a.T.contiguous()
            tensors[f"{path}.{_B}"] = module.b.T.contiguous()
            if module.magnitude is not None:
                tensors[f"{path}.{_M}"] = module.magnitude
        cast = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
        write_tensors(cast, folder / MLX_TENSORS)
        keys = {match["key"] for path in even if (match := _BLOCK.fullmatch(path))}
        has_magnitude = any(name.endswith(f".{_M}") for name in tensors)
        name = file.provenance.hub_id or file.provenance.base
        config = {
            "fine_tune_type": "dora" if has_magnitude else "lora",
            "model": name,
            "num_layers": -1,  # all layers
            "lora_parameters": {
                "rank": rank,
                "scale": scaling,
                "dropout": 0.0,
                "keys": sorted(keys),
            },
        }
        write_json(config, folder / CONFIG)
    model, path = quote(base or name or "BASE"), quote(str(out))
    return {"mlx-lm": f'mlx_lm.generate --model {model} --adapter-path {path} --prompt "..."'}


def _check_names(file: AdapterFile, modules: Mapping[str, LowRank]) -> None:
    message = f"cannot write {file.folder} for mlx-lm"
    if file.fields.get("fan_in_fan_out"):
        raise AdapterError(
            message,
            found="its base has Conv1D layers (GPT-2), which mlx-lm names differently",
            fix="Merge it into its base, and convert that: peftkit merge ADAPTER --out DIR",
        )
    unsupported = sorted(path for path in modules if not _BLOCK.fullmatch(path))
    if unsupported:
        raise AdapterError(
            message,
            found=first_few((f"{p} is not in model.layers" for p in unsupported), 8),
            fix="Train it without these targets, or merge it: peftkit merge ADAPTER --out DIR",
        )


def read_mlx(folder: Path, tensors_name: str = MLX_TENSORS) -> dict[str, LowRank]:
    """Read an adapter of mlx-lm: module path to update.

    Raises:
        AdapterError: The folder has another format; lists every missing or misshapen tensor.
    """
    rank, scale, is_dora = _parameters(folder)
    names = (_A, _B, _M) if is_dora else (_A, _B)
    parts, problems = by_module(read_tensors(folder / tensors_name), names)
    modules = {}
    for path, part in sorted(parts.items()):
        a, b, magnitude = part[_A], part[_B], part.get(_M)
        fits = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0] == rank
        if fits and (magnitude is None or magnitude.shape == b.shape[1:]):
            modules[path] = LowRank(a.T, b.T, scale, magnitude)
        else:
            shapes = [tuple(part[name].shape) for name in names]
            problems.append(f"misshapen: {path} has {shapes}, but rank {rank}")
    if problems or not modules:
        raise AdapterError(
            f"the tensors of {folder / tensors_name} do not match its config",
            found="\n".join(problems) or "it has none",
            fix="Download the adapter again; experts and embeddings cannot be imported.",
        )
    return modules


def _parameters(folder: Path) -> tuple[int, float, bool]:
    """Return the rank, the scale, and whether the adapter is DoRA."""
    config = read_json(folder / CONFIG)
    message = f"cannot read {folder} as an adapter of mlx-lm"
    kind: Any = config.get("fine_tune_type", "dora" if config.get("use_dora") else "lora")
    if kind not in ("lora", "dora"):
        raise AdapterError(
            message,
            found=f"its fine_tune_type is {kind!r}",
            fix="Only lora and dora are adapters; 'full' has full weights.",
        )
    given = config.get("lora_parameters")
    given = given if isinstance(given, dict) else {}
    rank: Any = given.get("rank")
    scale: Any = given.get("scale")
    if type(rank) is not int or rank < 1 or type(scale) not in (int, float) or not scale > 0:
        raise AdapterError(
            message,
            found=f"lora_parameters has rank {rank!r}, scale {scale!r}",
            fix="It needs a positive rank and a positive scale, as mlx-lm writes them.",
        )
    return rank, float(scale), kind == "dora"
