"""`peftkit merge` and `combine`: merge adapters into their base, or with each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from peftkit.errors import AdapterError, ConfigError
from peftkit.formats.find_adapter import adapter_folder
from peftkit_cli.arguments import Adapter, Base, OutFolder, Replace, note
from peftkit_cli.prove import note_proof, print_verdict

Combination = Literal["linear", "cat", "svd", "ties", "dare_linear", "dare_ties", "magnitude_prune"]


def merge(
    adapter: Adapter,
    out: Annotated[Path, typer.Option()],
    base: Base = None,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    force: bool = False,
    from_quantized: bool = False,
    overwrite: bool = False,
    quantize: Literal["int4_32", "int4_128"] | None = None,
    calibrate: Path | None = None,
) -> None:
    """Merge an adapter into its base, as an ordinary model. Prints its folder.

    Args:
        out (DIR): New folder; or FILE.gguf if the base is a .gguf file.
        dtype (TYPE): Dtype of the weights: bf16, fp16, fp32. Default: as in the base.
        force: Merge an adapter of another base, or into a GGUF file that loses the update.
        from_quantized: Merge into the quantised weights used in training instead of the originals.
        overwrite: Replace the model in the output folder.
        quantize (FORMAT): Store linear layers in 4 bits for vLLM (compressed-tensors): int4_32,
            int4_128.
        calibrate (ROWS): With --quantize: rows of the task, on which GPTQ chooses codes.
    """
    from peftkit_cli.render import Renderer

    folder = adapter_folder(adapter)
    shared: dict[str, Any] = {"base": base, "force": force, "overwrite": overwrite}
    if quantize is not None:
        if dtype or from_quantized or out.suffix == ".gguf":
            raise ConfigError(
                "--quantize does not go with --dtype, --from-quantized or a .gguf file.",
                fix="For GGUF: peftkit export ADAPTER --to gguf --merged --quantize q4_0 "
                "--out FILE.",
            )
        rows = None if calibrate is None else str(calibrate)
        with Renderer() as on_event:
            from peftkit.merging.quantized import merge_quantized

            merge_quantized(folder, out, quantize, calibrate=rows, **shared, on_event=on_event)
        typer.echo(out)
        note_proof(out, folder, base)
        note(f"Next: vllm serve '{out}'")
        return
    if calibrate is not None:
        raise ConfigError("--calibrate needs --quantize.", fix="Add --quantize int4_128.")
    with Renderer() as on_event:
        from peftkit.merging.merge import merge as merge_adapter

        merged = merge_adapter(
            folder, out, dtype=dtype, from_quantized=from_quantized, **shared, on_event=on_event
        )
    typer.echo(out)
    if out.suffix == ".gguf":
        note_proof(out, folder, base)
        note(f"Next: llama-server -m '{out}'; or FROM '{out}' in a Modelfile of Ollama.")
        return
    if merged.agreement is not None and merged.agreement.proved:
        print_verdict(merged.agreement.proved)
    note(f"Next: load '{out}' in transformers or vLLM, or convert it for llama.cpp.")


def combine(
    adapters: list[str],
    out: OutFolder,
    method: Combination = "linear",
    rank: Annotated[int | None, typer.Option(min=1)] = None,
    density: float | None = None,
    seed: int = 0,
    force: Replace = False,
) -> None:
    """Combine adapters of one base into one. Prints its folder.

    Args:
        adapters (ADAPTER[=WEIGHT]...): Adapter folders and their weights: A=0.7 B=0.3. Default:
            equal weights.
        method (NAME): linear, cat: the exact weighted sum. svd: its best approximation with --rank.
            ties, dare_linear, dare_ties, magnitude_prune: prune each update before summing.
        rank (R): Rank for svd and the pruning methods. Default: the largest rank of the adapters.
        density (D): Fraction of entries that pruning keeps. Default: 0.5.
        seed (N): Seed of the DARE methods.
    """
    weighted = _weighted(adapters)
    from peftkit_cli.render import Renderer

    settings = {"rank": rank, "density": density, "seed": seed, "force": force}
    with Renderer() as on_event:
        from peftkit.merging.combine import combine as combine_adapters

        combine_adapters(weighted, method, out, **settings, on_event=on_event)  # type: ignore[arg-type]
    typer.echo(out)
    note(f"Next: peftkit chat '{out}'")


def _weighted(adapters: list[str]) -> list[tuple[Path, float]]:
    """Split each ADAPTER=WEIGHT at the last equals sign; without weights, all are equal."""
    unweighted = [text for text in adapters if "=" not in text or Path(text).exists()]
    if len(unweighted) == len(adapters):
        return [(adapter_folder(text), 1 / len(adapters)) for text in adapters]
    if unweighted:
        raise AdapterError(
            f"'{unweighted[0]}' has no weight, but others have one.",
            fix=f"Add its weight: {unweighted[0]}=1. Or give no weights, for equal weights.",
        )
    weighted = []
    for text in adapters:
        name, _, number = text.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            raise AdapterError(
                f"the weight '{number}' of {name} is not a number.", fix=f"Write it as: {name}=0.5"
            ) from None
        weighted.append((adapter_folder(name), weight))
    return weighted
