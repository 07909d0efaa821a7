"""Reads and writes LoRA in llama.cpp's format GGUF.

llama.cpp adds alpha / rank * B A with one alpha for all layers. Its names differ from transformers'
("blk.0.attn_q.weight"), and in models like Llama it permutes the rows of q and k to interleave the
halves of the rotary embedding. Therefore names come from the gguf library, rows of B are permuted
like the base's, scales that one alpha cannot express (rsLoRA, rank and alpha patterns) are
multiplied into B, and lower ranks are padded. Unsupported layers are errors that name them. Source:
src/llama-adapter.cpp and conversion/ of llama.cpp.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.base.locate import gguf_of
from peftkit.base.skeleton import skeleton
from peftkit.errors import AdapterError, BaseError, OutputError, did_you_mean, first_few
from peftkit.events import Listener, Notice, ignore
from peftkit.files import disk
from peftkit.files.strict_json import shown
from peftkit.formats.gguf.header import GGUFHeader, read_header, read_values
from peftkit.formats.guard import check_finite
from peftkit.formats.peft.low_rank import LowRank, read_low_rank, uniform
from peftkit.model.places import is_linear, linear_shape

DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
ALPHA = "adapter.lora.alpha"
INVOCATION = "adapter.alora.invocation_tokens"
A, B = ".lora_a", ".lora_b"


def export_gguf(
    source: Path,
    out: Path,
    *,
    base: str | None = None,
    dtype: str = "fp32",
    force: bool = False,
    on_event: Listener = ignore,
) -> dict[str, str]:
    """Write an adapter folder as a GGUF file with the same effect in llama.cpp.

    Args:
        source: A LoRA of peftkit or PEFT.
        base: Its base; by default the recorded one. Only the config is read.
        dtype: "fp32", "fp16", "bf16" or "q8_0".
        force: Replace an existing file.

    Raises:
        AdapterError: The format does not support the adapter; lists the layers.
        BaseError: The base is not found, or its architecture is not supported.
        OutputError: The file exists, or cannot be written.
    """
    require_gguf()
    if out.is_dir() or (out.exists() and not force):
        state = "It is a folder." if out.is_dir() else "It exists."
        raise OutputError(
            f"cannot write {out}", found=state, fix="Choose a new file, or add --force."
        )
    file, modules = read_low_rank(source)
    name, revision = file.base_or(base)
    model = skeleton(name, revision=revision)
    architecture = architecture_of(model, name)
    layers = find_layers(model, architecture)
    if problems := _unfit(modules, layers):
        raise AdapterError(
            f"llama.cpp does not support the adapter {file.folder}",
            found="\n".join(problems),
            fix="Train without these, or merge it and convert the merged model: peftkit merge",
        )
    modules, rank, scaling = uniform(modules)
    tensors = {}
    for path, module in modules.items():
        layer = layers[path]
        tensors[layer.name + A] = module.a
        tensors[layer.name + B] = rotary_rows(module.b, layer.heads)
    assert len(tensors) == 2 * len(modules), "two layers of one name"
    disk.writable_folder(out.parent)
    hub_id = file.provenance.hub_id
    if num_wider := _write(out, tensors, scaling * rank, architecture, dtype, hub_id):
        shares = f"{num_wider} of {len(tensors)} tensors are in fp16"
        on_event(Notice(f"{shares}: {dtype} takes rows of a multiple of 32 numbers."))
    base_file = quote(str(gguf_of(name) or "BASE.gguf"))
    return {"llama.cpp": f"llama-server -m {base_file} --lora {quote(str(out))}"}


def read_gguf(path: Path, model: nn.Module, base: str) -> dict[str, LowRank]:
    """Read a GGUF LoRA: module path to update.

    Args:
        model: The skeleton of the adapter's `base`.

    Raises:
        AdapterError: The file is not a GGUF LoRA, is damaged, or does not fit the base: lists the
            tensors.
        BaseError: The base has an unknown architecture.
    """
    require_gguf()
    with disk.open_regular(path) as file:
        header = read_header(path, file)
        _check_kind(path, header)
        architecture = architecture_of(model, base)
        recorded = header.keys.get("general.architecture")
        if recorded != architecture.name:
            raise AdapterError(
                f"{path} belongs to another architecture than {base}",
                found=f"The file has {shown(recorded)}; {base} is {architecture.name!r}.",
                fix="Name the base it was trained on with --base MODEL.",
            )
        layers = find_layers(model, architecture)
        paths = _paired(path, header, layers, base)
        tensors = {name: read_values(path, file, entry) for name, entry in header.tensors.items()}
    check_finite(tensors, path)
    alpha = header.keys.get(ALPHA, 0.0)  # llama.cpp takes 0 or a missing alpha as a scale of 1
    modules = {}
    for name, module_path in paths.items():
        a, b = tensors[name + A], tensors[name + B]
        b = rotary_rows(b, layers[module_path].heads, back=True)
        modules[module_path] = LowRank(a, b, alpha / a.shape[0] if alpha else 1.0)
    return modules


def _unfit(modules: Mapping[str, LowRank], layers: Mapping[str, GGUFLayer]) -> list[str]:
    problems = []
    for path, module in modules.items():
        layer = layers.get(path)
        if module.magnitude is not None:
            problems.append(f"{path}: DoRA; llama.cpp adds low-rank updates only")
        elif layer is None:
            problems.append(f"{path}: no linear layer of this base")
        elif layer.refusal:
            problems.append(f"{path}: {layer.refusal}")
        elif (module.b.shape[0], module.a.shape[1]) != layer.shape:
            has = (module.b.shape[0], module.a.shape[1])
            problems.append(f"{path}: for a layer of shape {has}; this base's is {layer.shape}")
    return problems


def _write(
    out: Path,
    tensors: Mapping[str, Tensor],
    alpha: float,
    architecture: Architecture,
    dtype: str,
    hub_id: str | None,
) -> int:
    """Write the file atomically; return the number of tensors wider than `dtype`."""
    import gguf

    message, plain = gguf.GGMLQuantizationType[DTYPES[dtype]], gguf.GGMLQuantizationType.F16
    per_block, _ = gguf.GGML_QUANT_SIZES[message]
    num_wider = 0
    total = sum(tensor.numel() * 4 for tensor in tensors.values())
    # the library only writes to a path: write to a temporary file, then replace `out`
    with (
        disk.replacing(out, total) as file,
        contextlib.closing(gguf.GGUFWriter(Path(file.name), architecture.name)) as writer,
    ):
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
        file_type = "ALL_F32" if dtype == "fp32" else f"MOSTLY_{DTYPES[dtype]}"
        writer.add_file_type(gguf.LlamaFileType[file_type])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        if hub_id:
            writer.add_base_model_count(1)
            writer.add_base_model_name(0, hub_id.rpartition("/")[2])
            writer.add_base_model_repo_url(0, f"https://huggingface.co/{hub_id}")
        for name, tensor in tensors.items():
            kind = message if tensor.shape[-1] % per_block == 0 else plain
            num_wider += kind != message
            array = tensor.detach().float().contiguous().numpy()
            _check_range(name, tensor, kind.name)
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return num_wider


def _check_range(name: str, tensor: Tensor, kind: str) -> None:
    """Raise AdapterError if a number overflows in the dtype (the scales of Q8_0 are float16)."""
    largest = float(tensor.abs().max()) / (127 if kind == "Q8_0" else 1)
    if kind in ("F16", "Q8_0") and largest > torch.finfo(torch.float16).max:
        raise AdapterError(
            f"cannot write {name} as {kind.lower()}",
            found=f"Its largest number is {float(tensor.abs().max()):.3g}.",
            fix="Write fp32 or bf16.",
        )


def _check_kind(path: Path, header: GGUFHeader) -> None:
    message = f"cannot read {path} as a LoRA"
    kind = header.keys.get("adapter.type")
    if kind != "lora":
        raise AdapterError(message, found=f"Its adapter.type is {shown(kind)}, not 'lora'.")
    if INVOCATION in header.keys:
        raise AdapterError(
            message,
            found=f"It is an activated LoRA ({INVOCATION}): it is switched on by certain tokens.",
        )
    alpha = header.keys.get(ALPHA, 0.0)
    if not isinstance(alpha, float) or not 0 <= alpha < 1e30:
        raise AdapterError(message, found=f"Its {ALPHA} is {shown(alpha)}.")


def _paired(
    path: Path, header: GGUFHeader, layers: Mapping[str, GGUFLayer], base: str
) -> dict[str, str]:
    """Return llama.cpp's name -> module path of the layers in the file."""
    paths_by_name: dict[str, list[str]] = {}
    for module_path, layer in layers.items():
        paths_by_name.setdefault(layer.name, []).append(module_path)
    stems = {name.removesuffix(A).removesuffix(B): None for name in header.tensors}
    pairs, problems = {}, []
    for stem in stems:
        missing = [stem + end for end in (A, B) if stem + end not in header.tensors]
        module_paths = paths_by_name.get(stem, []) if stem else []
        if len(missing) == 2 or len(module_paths) != 1:
            problems.append(f"{stem}: {_no_layer(stem, paths_by_name, module_paths)}")
        elif missing:
            problems.append(f"missing: {missing[0]}")
        elif problem := _misplaced(stem, header, layers[module_paths[0]]):
            problems.append(f"{stem}: {problem}")
        else:
            pairs[stem] = module_paths[0]
    if problems:
        raise AdapterError(
            f"{path} does not fit {base}",
            found=first_few(problems, 10),
            fix="Name the base it was trained on with --base MODEL.",
        )
    return pairs


def _no_layer(stem: str, names: Iterable[str], module_paths: list[str]) -> str:
    """Return the reason why a name in the file is not an adaptable layer."""
    if len(module_paths) > 1:
        return "the base has more than one layer of that name: " + ", ".join(module_paths)
    if stem.startswith("token_embd") or "_exps." in stem or "_norm." in stem:
        return "an embedding, a norm or a stack of experts, which cannot be imported"
    if stem in names:
        return "no tensor of a LoRA"
    return f"the base has no such layer. {did_you_mean(stem, filter(None, names))}".rstrip()


def _misplaced(stem: str, header: GGUFHeader, layer: GGUFLayer) -> str:
    a, b = header.tensors[stem + A].shape, header.tensors[stem + B].shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return f"the shapes A {a} and B {b} do not match"
    if (b[0], a[1]) != layer.shape:
        return f"for a layer of shape {(b[0], a[1])}; this base's is {layer.shape}"
    return layer.refusal


@dataclass(frozen=True, slots=True)
class Architecture:
    """The treatment of an architecture by llama.cpp's converter.

    Attributes:
        name: Its general.architecture.
        rotary: Whether the rows of q_proj and k_proj are permuted, head by head.
        moved: Tensor with an unsupported permutation of its rows.
    """

    name: str
    rotary: bool = False
    moved: str = "\0"


# transformers' model_type -> architecture in llama.cpp. Each entry was checked in its conversion/:
# a missed permutation of rows would turn an adapter into noise without any error.
ARCHITECTURES: dict[str, Architecture] = {
    **{name: Architecture("llama", rotary=True) for name in ("llama", "mistral", "mixtral")},
    "granite": Architecture("granite", rotary=True),
    "smollm3": Architecture("smollm3", rotary=True),
    **{name: Architecture(name) for name in ("qwen2", "qwen3", "gemma", "gemma2", "phi3", "gpt2")},
    **{name: Architecture(name) for name in ("starcoder2", "olmo2", "stablelm")},
    "qwen2_moe": Architecture("qwen2moe"),
    "qwen3_moe": Architecture("qwen3moe"),
    "gemma3": Architecture("gemma3"),
    "gemma3_text": Architecture("gemma3"),
    "phi": Architecture("phi2"),
    "cohere": Architecture("command-r"),
    "gpt_neox": Architecture("gptneox", moved=".attn_qkv."),
    "falcon": Architecture("falcon", moved=".attn_qkv."),
}


@dataclass(frozen=True, slots=True)
class GGUFLayer:
    """A linear layer of the base in llama.cpp.

    Attributes:
        name: llama.cpp's name of the weight, or "".
        shape: (out, in). heads: Number of heads with permuted rows; 0 without a permutation.
        refusal: Reason why it cannot have a LoRA in llama.cpp.
    """

    name: str
    shape: tuple[int, int]
    heads: int = 0
    refusal: str = ""


def architecture_of(model: Any, name: str) -> Architecture:
    """Return the architecture of a model in llama.cpp; raise BaseError if it is unknown."""
    model_type = model.config.model_type
    if model_type not in ARCHITECTURES:
        raise BaseError(
            f"the layout of {name} in llama.cpp is unknown.",
            found=f"Its type is {model_type!r}. Supported: {', '.join(sorted(ARCHITECTURES))}.",
            fix="Merge the adapter, and convert the merged model: peftkit merge",
        )
    return ARCHITECTURES[model_type]


def find_layers(model: Any, architecture: Architecture) -> dict[str, GGUFLayer]:
    """Return the linear layers of a model in llama.cpp, by module path."""
    import gguf

    config = model.config.get_text_config()
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    counts = {"q_proj": config.num_attention_heads}
    counts["k_proj"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    layers = {}
    for path, module in model.named_modules():
        if not is_linear(module):
            continue
        key = f"{path}.weight".replace("language_model.", "")
        name = names.get_name(key, try_suffixes=(".weight",)) or ""
        heads = counts.get(path.rpartition(".")[2], 0) if architecture.rotary else 0
        num_in, num_out = linear_shape(module)
        refusal = ""
        if not name:
            refusal = f"llama.cpp's {architecture.name} has no name for it"
        elif name == "output.weight" and config.tie_word_embeddings:
            refusal = "the base ties it to its embedding, so llama.cpp has no such tensor"
        elif architecture.moved in name:
            refusal = "a fused layer whose rows llama.cpp orders otherwise"
        elif heads and num_out % (2 * heads):
            refusal = f"its {num_out} rows cannot be split into {heads} heads"
        layers[path] = GGUFLayer(name, (num_out, num_in), heads, refusal)
    return layers


def rotary_rows(b: Tensor, heads: int, *, back: bool = False) -> Tensor:
    """Interleave the rows (out, r) of the two halves of each head, or undo it."""
    if not heads:
        return b
    half = b.shape[0] // heads // 2
    parts = (heads, half, 2) if back else (heads, 2, half)
    return b.reshape(*parts, -1).transpose(1, 2).reshape(b.shape)


def require_gguf() -> None:
    """Raise AdapterError with the pip command if the gguf library is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise AdapterError(
            "GGUF files need the package gguf",
            found="It is not installed.",
            fix='pip install "gguf>=0.18"',
        )
