"""A merged model in 4 bits: codes by rounding, or by GPTQ with the inputs of the task's rows.

The folder is in the format of compressed-tensors (pack-quantized), which vLLM, transformers and
peftkit read. The embedding, the head and norms keep their dtype. GPTQ needs X'X of each layer's
inputs: the rows go through the merged model once for each group of layers whose X'X fits in memory.

Shapes: weight (out, in), gram = X'X (in, in).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.base.load import Base, load_base
from peftkit.base.purpose import CAUSAL_LM
from peftkit.data.records import check_exists
from peftkit.data.style import Style
from peftkit.errors import MergeError, first_few
from peftkit.events import Event, Listener, Notice, Progress, Saved, Stage, ignore
from peftkit.files.strict_json import Json
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.open_adapter import task_of
from peftkit.formats.peft.load import read_adapter
from peftkit.kernels.fake_quantize import FORMATS, Coded, gptq, packed
from peftkit.merging.advice import advice
from peftkit.merging.merge import merge, new_model_folder
from peftkit.model.modes import evaluating
from peftkit.settings import DataConfig
from peftkit.tasks.tokens import CausalLMConfig

KINDS = ("int4_32", "int4_128")
NUM_ROWS = 128
"""Rows of the file that are read, as in the paper."""
GRAM_BYTES = 2 << 30
"""Memory for X'X of the layers of one pass."""


def merge_quantized(
    adapter: str | Path,
    out: str | Path,
    kind: str,
    *,
    calibrate: str | None = None,
    base: str | None = None,
    force: bool = False,
    overwrite: bool = False,
    on_event: Listener = ignore,
) -> Path:
    """Merge an adapter into its base, and write the model in 4 bits.

    Args:
        kind: int4_32 or int4_128: one scale for 32 or 128 columns.
        calibrate: Rows of the task, for GPTQ; None: round to nearest.
        base, force, overwrite: As in `merge`.

    Raises:
        MergeError: The model's layers cannot be stored in this format; and as `merge`.
    """
    source, out = adapter_folder(adapter), Path(out).expanduser()
    check_exists(*filter(None, [calibrate]))
    file = read_adapter(source)
    if task_of(file).purpose != CAUSAL_LM:
        raise MergeError(
            f"cannot quantise the merged model to {kind}",
            found=f"The adapter was trained for the task {task_of(file).type}.",
            fix="Merge without --quantize; only language models are quantised here.",
        )
    if text := advice(file, file.base_or(base)[0], kind):
        on_event(Notice(text))

    def without_saved(event: Event) -> None:
        if not isinstance(event, Saved):
            on_event(event)

    with (
        new_model_folder(out, overwrite, (source,)) as folder,
        tempfile.TemporaryDirectory(dir=folder, prefix="merged-") as scratch,
    ):
        plain = Path(scratch, "model")
        merge(source, plain, base=base, force=force, on_event=without_saved)
        loaded = load_base(str(plain), device="cpu", on_event=on_event)
        layers = _layers(loaded.model, kind)
        style = file.provenance.prompt_style
        in_words = {
            path: _Packed(coded, shape, layers[path].bias)
            for path, coded, shape in _coded(loaded, layers, kind, calibrate, style, on_event)
        }
        for path, layer in in_words.items():  # after the last forward pass
            loaded.model.set_submodule(path, layer)
        loaded.model.config.quantization_config = _settings(loaded.model, layers, kind)
        loaded.model.save_pretrained(folder)
        loaded.processor.save_pretrained(folder)
    on_event(Saved(f"merged model in {kind}", out))
    return out


def gguf_codes(
    folder: Path, kind: str, rows_file: str, style: Style | None, on_event: Listener
) -> dict[str, Tensor]:
    """Return the packed rows of a merged model's linear layers, chosen by GPTQ, by GGUF names.

    Args:
        folder: The merged model. kind: q4_0 or q4_1.

    Raises:
        BaseError: The model's layout in llama.cpp is unknown.
        MergeError: The type cannot hold a layer.
    """
    from peftkit.formats.gguf.convert import architecture_of, find_layers, rotary_rows

    base = load_base(str(folder), device="cpu")
    named = find_layers(base.model, architecture_of(base.model, folder.name))
    layers = {
        path: layer
        for path, layer in _layers(base.model, kind).items()
        if named[path].name and not named[path].refusal
    }
    codes = {}
    for path, coded, shape in _coded(base, layers, kind, rows_file, style, on_event):
        rows = packed(coded, kind).view(shape[0], -1)
        codes[named[path].name] = rotary_rows(rows, named[path].heads).contiguous()
    return codes


def _layers(model: Any, kind: str) -> dict[str, nn.Linear]:
    """Return the linear layers but the head; raise MergeError if the format cannot hold one."""
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    layers = {
        path: module
        for path, module in modules.items()
        if type(module) is nn.Linear and module is not head
    }
    group = FORMATS[kind].group
    problems = [
        f"{path}: {layer.in_features} columns"
        for path, layer in layers.items()
        if layer.in_features % group
    ]
    stacks = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    problems += [f"{name}: stacked experts" for name in stacks]
    if problems or not layers:
        raise MergeError(
            f"cannot quantise the merged model to {kind}",
            found=first_few(problems, 5) or "It has no linear layers.",
            fix="Use a format with groups of 32, or merge without --quantize.",
        )
    return layers


def _coded(
    base: Base,
    layers: Mapping[str, nn.Linear],
    kind: str,
    calibrate: str | None,
    style: Style | None,
    on_event: Listener,
) -> Iterator[tuple[str, Coded, torch.Size]]:
    doing, done = f"Quantising to {kind}", 0
    for group in _by_memory(layers) if calibrate else [list(layers)]:
        some = {path: layers[path] for path in group}
        grams = {} if calibrate is None else inputs_of(base, some, calibrate, style, on_event)
        for path, layer in some.items():
            weight = layer.weight.detach().float()
            if calibrate is None:
                coded = FORMATS[kind].code(weight.reshape(-1, FORMATS[kind].group))
            else:
                coded = gptq(weight, grams.pop(path), kind)
            done += 1
            on_event(Progress(doing, done, len(layers)))
            yield path, coded, weight.shape


def _by_memory(layers: Mapping[str, nn.Linear]) -> list[list[str]]:
    """Return the layers in groups whose X'X fit into `GRAM_BYTES`."""
    groups: list[list[str]] = [[]]
    left = GRAM_BYTES
    for path, layer in layers.items():
        num_bytes = 4 * layer.in_features**2
        if groups[-1] and num_bytes > left:
            groups.append([])
            left = GRAM_BYTES
        groups[-1].append(path)
        left -= num_bytes
    return groups


@torch.no_grad()
def inputs_of(
    base: Base,
    layers: Mapping[str, nn.Module],
    rows_file: str,
    style: Style | None,
    on_event: Listener = ignore,
) -> dict[str, Tensor]:
    """Return X'X of the inputs of layers over the first rows of a file, on their devices.

    Args:
        layers: Modules of the base's model, by path.
        style: The adapter's prompt format.

    Raises:
        DataError: The file has no usable rows.
    """
    on_event(Stage(f"Measuring the inputs of {len(layers)} layers on {rows_file}"))
    config = DataConfig(train=rows_file, max_length=None, packing=False)
    task = CausalLMConfig().on(base.model, base.processor, config, style=style)
    rows = list(islice(task.load(rows_file), NUM_ROWS))
    grams: dict[str, Tensor] = {}

    def hook_of(path: str) -> Any:
        def hook(_: nn.Module, inputs: Sequence[Tensor]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
            product = x.t() @ x
            grams[path] = grams[path].add_(product) if path in grams else product

        return hook

    handles = [module.register_forward_pre_hook(hook_of(path)) for path, module in layers.items()]
    try:
        with evaluating(base.model):
            for row in rows:  # alone: padding would count as input
                ids = torch.tensor([row.input_ids], device=base.device)
                base.model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return grams


class _Packed(nn.Module):
    """A linear layer in compressed-tensors' names: eight codes in an int32, the first lowest."""

    def __init__(self, coded: Coded, shape: torch.Size, bias: nn.Parameter | None) -> None:
        super().__init__()
        rows = shape[0]
        codes = (coded.codes.view(rows, -1, 8) + 8).long()
        words = (codes << 4 * torch.arange(8)).sum(2)
        words = torch.where(words >= 1 << 31, words - (1 << 32), words)
        self.register_buffer("weight_packed", words.to(torch.int32))
        self.register_buffer("weight_scale", coded.scale.view(rows, -1).to(torch.bfloat16))
        self.register_buffer("weight_shape", torch.tensor(shape))
        self.bias = bias


def _settings(model: nn.Module, layers: Mapping[str, nn.Linear], kind: str) -> Json:
    """Return the model's `quantization_config`."""
    linear = (path for path, module in model.named_modules() if isinstance(module, nn.Linear))
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": FORMATS[kind].group,
        "dynamic": False,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(set(linear) - set(layers)),
    }
