"""PEFT folders for other programs and for inference servers (vLLM 0.33; LoRAX reads the same).

vLLM serves plain LoRA on linear layers, up to a maximum rank set at startup. It refuses any other
adapter when it loads it, perhaps in production; these checks refuse it beforehand.
Source: vllm/lora/peft_helper.py, vllm/lora/utils.py, vllm/config/lora.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from peftkit.base.published.checkpoint import ROUNDED
from peftkit.base.request import DTYPES
from peftkit.errors import AdapterError, first_few
from peftkit.events import Listener, Notice
from peftkit.files.tensors import write_tensors
from peftkit.formats.folders import (
    CARD,
    CONFIG,
    NOTES,
    START,
    TENSORS,
    TOKENIZER_FILES,
    copy_files,
    new_adapter_folder,
)
from peftkit.formats.guard import check_safetensors, read_json, read_tensors
from peftkit.formats.peft.load import AdapterFile, read_adapter
from peftkit.formats.peft.low_rank import (
    A,
    B,
    read_low_rank,
    rewritten_targets,
    save_low_rank,
    uniform,
)
from peftkit.methods.base import Method
from peftkit.methods.lora import LoRA

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's --max-lora-rank accepts."""

_MERGE = "merge it into its base and serve that: peftkit merge ADAPTER --out DIR"
_NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "lora_bias": (False,),
    "bias": ("none",),
    "modules_to_save": (),
    "trainable_token_indices": (),
    "alora_invocation_tokens": (),
    "layer_replication": (),
    "use_bdlora": (False,),
    "use_qalora": (False,),
    "target_parameters": (),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga"),
}
"""Config field -> allowed nonempty values."""


def max_lora_rank(rank: int) -> int:
    """Return the smallest --max-lora-rank of vLLM for a rank."""
    return next(limit for limit in MAX_LORA_RANKS if limit >= rank)


def vllm_serve(base: str, rank: int, *modules: str) -> str:
    """Return the vLLM command that serves adapters NAME=FOLDER with ranks up to `rank`."""
    quoted = " ".join(map(quote, modules))
    limit = max_lora_rank(rank)
    return f"vllm serve {base} --enable-lora --max-lora-rank {limit} --lora-modules {quoted}"


def served_rank(method: Method) -> int:
    """Return the largest rank of a method's layers; 0 if vLLM does not serve its adapters."""
    if type(method) is not LoRA or method.train_fully or method.token_rows:
        return 0
    rank = max([method.rank, *method.rank_pattern.values()])
    return rank if rank <= MAX_LORA_RANKS[-1] else 0


def served_over(stored: str) -> str:
    """Return a note on serving an adapter over a base with quantised files.

    Args:
        stored: The base's format as recorded in `Provenance.loading`.
    """
    note = f"It was trained over the quantised base ({stored}): serve it over the same repository."
    if stored.startswith("gptq") and "with zeros" in stored:
        note += " vLLM does not serve GPTQ with zeros; it serves AWQ and compressed-tensors."
    elif ROUNDED in stored:
        note += " Unlike training, vLLM also rounds the inputs of layers to 8 bits or fewer."
    else:
        note += " vLLM computes with the same weights; take its --dtype from the base's config."
    return note


def export_peft(
    source: Path, out: Path, *, base: str | None, dtype: str, force: bool, on_event: Listener
) -> dict[str, str]:
    """Write an adapter folder that PEFT reads, with peftkit.json if no tensor changes."""
    tensors, wanted = read_tensors(source / TENSORS), DTYPES[dtype]
    names = [CONFIG, CARD, *TOKENIZER_FILES]
    with new_adapter_folder(out, force=force, sources=[source]) as folder:
        file = read_adapter(source)
        if all(tensor.dtype == wanted for tensor in tensors.values()):
            names += [TENSORS, NOTES, START]
        else:
            cast = {name: tensor.to(wanted) for name, tensor in tensors.items()}
            write_tensors(cast, folder / TENSORS, {"format": "pt"})
        copy_files(source, folder, names)
    return _served_by(file, served_rank(file.method), out, base)


def export_for_server(
    source: Path, out: Path, *, base: str | None, dtype: str, force: bool, on_event: Listener
) -> dict[str, str]:
    """Write the PEFT folder that vLLM accepts: one rank and one alpha for all layers."""
    with new_adapter_folder(out, force=force, sources=[source]) as folder:
        check_serving(source)
        file, modules = read_low_rank(source)
        even, rank, _ = uniform(modules)  # older servers ignore patterns and rsLoRA silently
        save_low_rank(
            even,
            folder,
            file.provenance,
            targets=rewritten_targets(file, modules),
            transposed=bool(file.fields.get("fan_in_fan_out")),
            dtype=DTYPES[dtype],
        )
        copy_files(source, folder)
    if stored := str(file.provenance.loading.get("stored", "")):
        on_event(Notice(served_over(stored)))
    return _served_by(file, rank, out, base)


def _served_by(file: AdapterFile, rank: int, out: Path, base: str | None) -> dict[str, str]:
    """Return the command that serves a folder with vLLM, or none if vLLM cannot serve it."""
    if not 0 < rank <= MAX_LORA_RANKS[-1]:
        return {}
    model = quote(base or file.provenance.hub_id or file.provenance.base or "BASE")
    return {"vLLM": vllm_serve(model, rank, f"{out.resolve().name}={out}")}


def check_serving(folder: Path) -> None:
    """Check that vLLM would accept a PEFT folder.

    Raises:
        AdapterError: vLLM would refuse it; lists every such field and tensor.
    """
    config = read_json(folder / CONFIG)
    problems = []
    if config.get("peft_type") != "LORA":
        problems.append(f"{CONFIG}: peft_type is {config.get('peft_type')!r}; only LORA is served")
    for field, allowed in _NOT_SERVED.items():
        value = config.get(field)
        if value not in (None, [], {}) and value not in allowed:
            problems.append(f"{CONFIG}: {field} is {value!r}")
    too_high, largest = [], MAX_LORA_RANKS[-1]
    for name, entry in check_safetensors(folder / TENSORS).tensors.items():
        if why := _why_not(name):
            problems.append(f"{name}: {why}")
        elif name.endswith(A) and entry.shape[0] > largest:
            too_high.append(f"{name}: rank {entry.shape[0]}; the limit is {largest}")
    if problems or too_high:
        lower = "Reduce the rank; the command reports the loss: peftkit combine ADAPTER=1 "
        lower += f"--method svd --rank {largest} --out LOWER"
        raise AdapterError(
            f"vLLM would refuse {folder}",
            found=first_few(problems + too_high, 60),
            fix=f"Instead, {_MERGE}" if problems else f"{lower}\nOr: {_MERGE}",
        )


def _why_not(name: str) -> str:
    if "lora_embedding" in name:
        return "an update of an embedding"
    if "lora_magnitude_vector" in name:
        return "the magnitude of DoRA"
    if name.endswith(".lora_B.bias"):
        return "a bias of B"
    if ".experts." in name and (".lora_A." in name or ".lora_B." in name):
        return "an update of experts"
    if name.endswith((f".{A}", f".{B}")):
        return ""
    return "not A or B of a LoRA: a whole weight, or another method's"
