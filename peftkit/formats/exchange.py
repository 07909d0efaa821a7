"""Adapters exported to the formats of other programs.

An export computes what the adapter computes: ranks, scales and layouts that the format lacks are
folded in, and what it cannot hold is an error that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from peftkit.base.purpose import rope_notice
from peftkit.base.request import DTYPES
from peftkit.errors import AdapterError
from peftkit.events import Listener, Notice, Saved, Stage, ignore
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.open_adapter import task_of
from peftkit.formats.peft.folder import read_adapter
from peftkit.tasks.media_text import MediaTextConfig

Format = Literal["peft", "gguf", "mlx"]
Dtype = Literal["fp32", "fp16", "bf16", "q8_0"]

EXPORTERS = {
    "peft": "peftkit.formats.serving:export_peft",
    "serving": "peftkit.formats.serving:export_for_server",
    "gguf": "peftkit.formats.gguf.convert:export_gguf",
    "mlx": "peftkit.formats.mlx:export_mlx",
}
"""Format to "module:function", imported for an export. Each takes the adapter's folder, what to
write, and by keyword base, dtype, force and on_event; it returns the commands of `Exported`."""


@dataclass(frozen=True, slots=True)
class Exported:
    """An adapter in another format.

    Attributes:
        commands: Program to the lines that run the adapter in it.
    """

    path: Path
    commands: Mapping[str, str]


def export_adapter(
    adapter: str | Path,
    out: str | Path,
    *,
    to: Format,
    serving: bool = False,
    base: str | None = None,
    dtype: Dtype = "fp32",
    force: bool = False,
    on_event: Listener = ignore,
) -> Exported:
    """Write an adapter in the format of another program.

    Args:
        adapter: A folder of an adapter, or its name on the hub.
        out: A folder for PEFT and MLX, a file for GGUF.
        serving: Write the PEFT folder that vLLM accepts, or raise an error with the reasons.
        base: Where its base is, for GGUF; by default the one recorded.
        dtype: Of the tensors; q8_0 is GGUF's own.
        force: Replace what is there.

    Raises:
        AdapterError: The format cannot hold it: each layer in question is listed.
        OutputError: `out` is taken or cannot be written.
    """
    source, out = adapter_folder(adapter), Path(out).expanduser()
    if serving and to != "peft":
        raise AdapterError(
            f"cannot export {source} to {to} for a server",
            found="The servers (vLLM, LoRAX) read PEFT's format.",
            fix="Export with to='peft', or without serving.",
        )
    if to != "gguf" and dtype not in DTYPES:
        fix = f"One of: {', '.join(DTYPES)}."
        raise AdapterError(f"there is no dtype {dtype} in {to}", fix=fix)
    if to != "peft" and isinstance(task_of(read_adapter(source)), MediaTextConfig):
        raise AdapterError(
            f"cannot export {source} to {to}",
            found="It was trained over a model of media and text, whose language side is only a "
            "part: the format has no place for the rest.",
            fix=f"peftkit merge {source} --out merged, and convert the merged model; or --to peft.",
        )
    on_event(Stage(f"Exporting {source} to {to}"))
    module, _, function = EXPORTERS["serving" if serving else to].partition(":")
    export: Callable[..., Mapping[str, str]] = getattr(import_module(module), function)
    commands = export(source, out, base=base, dtype=dtype, force=force, on_event=on_event)
    if scaling := read_adapter(source).provenance.loading.get("rope_scaling"):
        on_event(Notice(rope_notice(scaling)))
    on_event(Saved(f"{to} adapter", out))
    return Exported(out, commands)
