"""LoRA as GGUF, llama.cpp's format, both ways.

llama.cpp adds alpha / rank * B A with one alpha for the whole file. Its names differ from
transformers' ("blk.0.attn_q.weight"), and in models like Llama it permutes the rows of q and k, so
that the halves of the rotary embedding alternate. So names come from the gguf library, rows of B
are permuted like the base's, and what one alpha cannot express (rsLoRA, rank and alpha patterns) is
multiplied into B, and lower ranks are padded. What the format cannot hold is refused by name.
Facts of the format: src/llama-adapter.cpp and conversion/ of llama.cpp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from peftkit.base.skeleton import skeleton
from peftkit.errors import AdapterError, OutputError, did_you_mean, first_few
from peftkit.files import disk
from peftkit.files.strict_json import shown
from peftkit.files.tensors import non_finite
from peftkit.formats.gguf.header import GGUFHeader, read_header, read_values
from peftkit.formats.gguf.names import (
    Architecture,
    GGUFLayer,
    architecture_of,
    find_places,
    require_gguf,
    rotary_rows,
)
from peftkit.formats.peft.low_rank import LowRank, read_low_rank, uniform

DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
ALPHA = "adapter.lora.alpha"
INVOCATION = "adapter.alora.invocation_tokens"
A, B = ".lora_a", ".lora_b"


def export_gguf(
    folder: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    dtype: str = "fp32",
    force: bool = False,
) -> str:
    """Write an adapter folder as a GGUF file with which llama.cpp computes the same.

    Args:
        folder: Of a LoRA, made here or by PEFT.
        base: Where its base is; by default the one recorded. Only its config is read.
        dtype: "fp32", "fp16", "bf16" or "q8_0".
        force: Replace a file that is there.

    Returns:
        A note for the user, or "".

    Raises:
        AdapterError: The format cannot hold it; lists every layer concerned.
        BaseError: The base is not found, or its architecture is not supported.
        OutputError: There is such a file already, or it cannot be written.
    """
    out = Path(out).expanduser()
    require_gguf()
    if out.is_dir() or (out.exists() and not force):
        found = "It is a folder." if out.is_dir() else "It exists."
        raise OutputError(
            f"cannot write {out}", found=found, fix="Choose a new file, or add --force."
        )
    file, modules = read_low_rank(folder)
    name, revision = file.base_or(base)
    model = skeleton(name, revision=revision)
    architecture = architecture_of(model, name)
    places = find_places(model, architecture)
    if problems := _unfit(modules, places):
        raise AdapterError(
            f"llama.cpp cannot hold the adapter {file.folder}",
            found="\n".join(problems),
            fix="Train without these, or merge it and convert the merged model: peftkit merge",
        )
    modules, rank, scaling = uniform(modules)
    tensors = {}
    for path, module in modules.items():
        place = places[path]
        tensors[place.name + A] = module.a
        tensors[place.name + B] = rotary_rows(module.b, place.heads)
    assert len(tensors) == 2 * len(modules), "two layers of one name"
    disk.writable_folder(out.parent)
    return _write(out, tensors, scaling * rank, architecture, dtype, file.provenance.hub_id)


def read_gguf(path: Path, model: nn.Module, base: str) -> dict[str, LowRank]:
    """Read a GGUF LoRA: module path to update.

    Args:
        model: The skeleton of `base`, which it belongs to.

    Raises:
        AdapterError: It is no GGUF LoRA, is damaged, or does not fit the base: every tensor in
            question is listed.
        BaseError: The base is of an architecture that is not known here.
    """
    require_gguf()
    with disk.open_regular(path) as file:
        header = read_header(path, file)
        _check_kind(path, header)
        architecture = architecture_of(model, base)
        said = header.keys.get("general.architecture")
        if said != architecture.name:
            raise AdapterError(
                f"{path} belongs to another architecture than {base}",
                found=f"The file says {shown(said)}; {base} is {architecture.name!r}.",
                fix="Name the base it was trained on with --base MODEL.",
            )
        places = find_places(model, architecture)
        paths = _paired(path, header, places, base)
        tensors = {name: read_values(path, file, entry) for name, entry in header.tensors.items()}
    if bad := non_finite(tensors):
        raise AdapterError(
            f"cannot use {path}",
            found=f"{len(bad)} of {len(tensors)} tensors hold NaN or Infinity, as {bad[0]}",
        )
    alpha = header.keys.get(ALPHA, 0.0)  # 0, or none, is a scale of 1 to llama.cpp
    modules = {}
    for name, module_path in paths.items():
        a, b = tensors[name + A], tensors[name + B]
        b = rotary_rows(b, places[module_path].heads, back=True)
        modules[module_path] = LowRank(a, b, alpha / a.shape[0] if alpha else 1.0)
    return modules


def _unfit(modules: Mapping[str, LowRank], places: Mapping[str, GGUFLayer]) -> list[str]:
    problems = []
    for path, module in modules.items():
        place = places.get(path)
        if module.magnitude is not None:
            problems.append(f"{path}: DoRA; llama.cpp adds low-rank updates only")
        elif place is None:
            problems.append(f"{path}: no linear layer of this base")
        elif place.refusal:
            problems.append(f"{path}: {place.refusal}")
        elif (module.b.shape[0], module.a.shape[1]) != place.shape:
            has = (module.b.shape[0], module.a.shape[1])
            problems.append(f"{path}: for a layer of shape {has}; this base's is {place.shape}")
    return problems


def _write(
    out: Path,
    tensors: Mapping[str, Tensor],
    alpha: float,
    architecture: Architecture,
    dtype: str,
    hub_id: str | None,
) -> str:
    """Write the file whole or not at all; return a note if some tensors are not in `dtype`."""
    import gguf

    asked, plain = gguf.GGMLQuantizationType[DTYPES[dtype]], gguf.GGMLQuantizationType.F16
    per_block, _ = gguf.GGML_QUANT_SIZES[asked]
    num_wider = 0
    total = sum(tensor.numel() * 4 for tensor in tensors.values())
    # the library writes to a path only: to the same file, which is then put in its place
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
            kind = asked if tensor.shape[-1] % per_block == 0 else plain
            num_wider += kind != asked
            array = tensor.detach().float().contiguous().numpy()
            _check_range(name, tensor, kind.name)
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    if not num_wider:
        return ""
    told = f"{num_wider} of {len(tensors)} tensors are in fp16"
    return f"{told}: {dtype} takes rows of a multiple of {per_block} numbers."


def _check_range(name: str, tensor: Tensor, kind: str) -> None:
    """Refuse a dtype in which a number would overflow (the scales of Q8_0 are float16)."""
    largest = float(tensor.abs().max()) / (127 if kind == "Q8_0" else 1)
    if kind in ("F16", "Q8_0") and largest > torch.finfo(torch.float16).max:
        raise AdapterError(
            f"cannot write {name} as {kind.lower()}",
            found=f"Its largest number is {float(tensor.abs().max()):.3g}.",
            fix="Write fp32 or bf16.",
        )


def _check_kind(path: Path, header: GGUFHeader) -> None:
    asked = f"cannot read {path} as a LoRA"
    kind = header.keys.get("adapter.type")
    if kind != "lora":
        raise AdapterError(asked, found=f"Its adapter.type is {shown(kind)}, not 'lora'.")
    if INVOCATION in header.keys:
        raise AdapterError(
            asked,
            found=f"It is an activated LoRA ({INVOCATION}): it is switched on by certain tokens.",
        )
    alpha = header.keys.get(ALPHA, 0.0)
    if not isinstance(alpha, float) or not 0 <= alpha < 1e30:
        raise AdapterError(asked, found=f"Its {ALPHA} is {shown(alpha)}.")


def _paired(
    path: Path, header: GGUFHeader, places: Mapping[str, GGUFLayer], base: str
) -> dict[str, str]:
    """Return llama.cpp's name -> module path of the layers in the file."""
    known: dict[str, list[str]] = {}
    for module_path, place in places.items():
        known.setdefault(place.name, []).append(module_path)
    stems = {name.removesuffix(A).removesuffix(B): None for name in header.tensors}
    found, problems = {}, []
    for stem in stems:
        missing = [stem + end for end in (A, B) if stem + end not in header.tensors]
        module_paths = known.get(stem, []) if stem else []
        if len(missing) == 2 or len(module_paths) != 1:
            problems.append(f"{stem}: {_no_layer(stem, known, module_paths)}")
        elif missing:
            problems.append(f"missing: {missing[0]}")
        elif problem := _misplaced(stem, header, places[module_paths[0]]):
            problems.append(f"{stem}: {problem}")
        else:
            found[stem] = module_paths[0]
    if problems:
        raise AdapterError(
            f"{path} does not fit {base}",
            found=first_few(problems, 10),
            fix="Name the base it was trained on with --base MODEL.",
        )
    return found


def _no_layer(stem: str, known: Iterable[str], module_paths: list[str]) -> str:
    """Say why a name in the file is not a layer that can be adapted."""
    if len(module_paths) > 1:
        return "the base has more than one layer of that name: " + ", ".join(module_paths)
    if stem.startswith("token_embd") or "_exps." in stem or "_norm." in stem:
        return "an embedding, a norm or a stack of experts, which cannot be imported"
    if stem in known:
        return "no tensor of a LoRA"
    return f"the base has no such layer. {did_you_mean(stem, filter(None, known))}".rstrip()


def _misplaced(stem: str, header: GGUFHeader, place: GGUFLayer) -> str:
    a, b = header.tensors[stem + A].shape, header.tensors[stem + B].shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return f"A {a} and B {b} are no pair"
    if (b[0], a[1]) != place.shape:
        return f"for a layer of shape {(b[0], a[1])}; this base's is {place.shape}"
    return place.refusal
