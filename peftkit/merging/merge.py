"""Merging an adapter into its base, which gives an ordinary model.

The default target is the original 16- or 32-bit weights: W' = method.merged_weight(W) in float32,
one tensor at a time over the base's files (over_files.py). If the files do not allow this, the
model is merged in memory (fold.py). Either way the result is loaded and compared with base and
adapter on a few prompts.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from peftkit.base.load import local_folder
from peftkit.base.locate import locate
from peftkit.base.new_tokens import own_of
from peftkit.base.pretrained import published
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.base.request import DTYPES, fits_device
from peftkit.base.skeleton import read_config, skeleton, weight_bytes
from peftkit.config.schema import from_dict
from peftkit.data.style import Style
from peftkit.errors import MergeError, OutputError, first_few
from peftkit.events import Listener, Notice, Saved, Stage, Table, ignore
from peftkit.execution.environment import free_now
from peftkit.execution.out_of_memory import release_memory
from peftkit.execution.plan import compute_dtype
from peftkit.figures import dtype_name, size
from peftkit.files.disk import new_folder
from peftkit.formats.card import Card, write_card
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.folders import PROOF
from peftkit.formats.open_adapter import Opened, open_adapter, task_of
from peftkit.formats.peft.load import AdapterFile, read_adapter
from peftkit.merging.fold import (
    Tally,
    check_mergeable,
    check_original,
    dequantised_note,
    precision_note,
    write_in_memory,
)
from peftkit.merging.over_files import FLOATS, Shards, changes_of, files_of, write_over_files
from peftkit.merging.prompt_format import frames, prompt_note, write_format, write_template
from peftkit.merging.verify import (
    PROMPTS,
    Merged,
    agreement,
    facts_of,
    precision,
    reference_of,
    verified,
)
from peftkit.settings import BaseConfig

Dtype = Literal["bf16", "fp16", "fp32"]
PACKING_FIELDS = ("quantize", "double_quant", "quantize_towers", "quantize_embeddings")
"""Recorded loading settings that determine which weights are packed, and their format."""
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
FROM_QUANTIZED = (
    "With --from-quantized the merged model keeps the rounding that the adapter was trained over."
)


def merge(
    adapter: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    dtype: Dtype | None = None,
    from_quantized: bool = False,
    verify: bool = True,
    prompts: Sequence[str] = PROMPTS,
    force: bool = False,
    overwrite: bool = False,
    on_event: Listener = ignore,
) -> Merged:
    """Merge an adapter folder into its base and write an ordinary model folder, or a GGUF file.

    Args:
        adapter: An adapter folder of peftkit or PEFT.
        out: The new folder, which appears after everything is written and verified. If the base is
            a GGUF file, also FILE.gguf: a file of the same types.
        base: The base's location, if it is not the recorded one.
        dtype: Dtype of all written weights; None keeps each weight's dtype.
        from_quantized: Merge into the dequantised weights that the adapter was trained over. This
            is the default for pre-quantised bases (AWQ, FP8 and others), whose unquantised original
            can be given as `base`.
        verify: Load base and adapter, then the result, and compare them. Only this step needs
            memory for the model. Without it shapes are checked, but not whether the adapter was
            trained on these weights.
        prompts: Inputs of the comparison.
        force: Accept a base with other weights than in training, and a GGUF file that loses more
            than half of the update in rounding.
        overwrite: Replace the model in `out`. A folder with other weights, or with files but no
            model, is refused.

    Raises:
        AdapterError: There is no adapter, or it belongs to another base.
        MergeError: Method, base or dtype do not allow it, or the merged model would equal its base.
        OutputError: The folder is not empty or cannot be written.
        RunError: The disk is full, or the merged model differs from base and adapter.
    """
    file = read_adapter(adapter_folder(adapter))
    check_mergeable(file.method)
    check_original(file.method, from_quantized)
    if Path(out).suffix == ".gguf":
        from peftkit.merging.into_gguf import merge_into_gguf  # the optional package gguf

        if dtype is not None:
            reason = "Its weights keep the types of the base's file."
            raise MergeError("a GGUF file takes no --dtype", found=reason, fix="Leave it out.")
        if from_quantized:
            raise MergeError(
                "a GGUF file takes no --from-quantized",
                found="The merge is into the weights of the base's file.",
                fix="Merge with --from-quantized into a folder, or leave it out.",
            )
        how: dict[str, Any] = {"base": base, "verify": verify, "prompts": prompts}
        how |= {"force": force, "overwrite": overwrite, "on_event": on_event}
        return merge_into_gguf(file, out, **how)
    name, revision = file.base_or(base)
    out, tally, purpose = Path(out).expanduser(), Tally(), task_of(file).purpose
    trained_over = _trained_over(file)
    stored = DTYPES[dtype] if dtype else trained_over
    files = files_of(name, revision)
    checkpoint = published(read_config(name, revision, purpose))
    is_quantized = from_quantized or (checkpoint is not None and checkpoint.has_codes)
    same_config = not is_quantized and not file.provenance.loading.get("rope_scaling")
    load = partial(open_adapter, file.folder, base, force=force, on_event=on_event)
    with new_model_folder(out, overwrite, (file.folder, Path(name))) as folder:
        changes = reference = effect = agreed = None
        own = own_of(file.folder, name, revision)
        # the file may have another tokenizer
        if files is not None and same_config and not own.tokens:
            empty = skeleton(name, revision=revision, purpose=purpose)
            changes = changes_of(file, files, empty, stored, tally, trained_over)
        if files is not None and changes is not None:
            if verify:
                opened = load(quantize="none", dtype=precision(empty))
                reference = reference_of(opened, prompts)
                del opened
            write_over_files(files, folder, changes, dtype=stored, on_event=on_event)
        else:
            if from_quantized:
                load = partial(load, device=_device_for_both(file, base, stored, on_event))
            opened, usual = _open_to_merge(load, files, from_quantized, is_quantized)
            if trained_over is not None:
                _round_base(opened, trained_over)
            reference = reference_of(opened, prompts) if verify else None
            write_in_memory(opened, folder, stored or usual, tally, on_event)
            del opened
        tally.check()
        if reference is not None:
            on_event(Stage("Comparing the merged model with base and adapter"))
            effect = agreement(reference.adapted, reference.bare)
            release_memory()  # reference cycles keep an adapted model alive: two may not fit
            proof = file.folder / PROOF
            agreed = verified(folder, purpose, reference, tally, prompts, effect, proof)
        if (file.folder / PROOF).is_file():
            shutil.copyfile(file.folder / PROOF, folder / PROOF)
        config = skeleton(str(folder), purpose=purpose).config
        task_of(file).write_beside(folder, config, local_folder(name, revision))
        write_format(own, config, folder)
        write_template(_style(file), folder)
        kind = _quantized_as(file)
        other_precision = "" if is_quantized or kind == "none" else kind
        merged = Merged(out, name, tally, effect, agreed, other_precision)
        hub_id = locate(name, revision).hub_id
        write_card(_card(merged, file, purpose, is_quantized, hub_id), folder)
    on_event(Table("The merged model", ("", ""), tuple(facts_of(merged).items())))
    if other_precision:
        on_event(Notice(f"{precision_note(other_precision)} {FROM_QUANTIZED}"))
    if note := _prompt_note(file):
        on_event(Notice(f"{note} The card has the details."))
    on_event(Saved("merged model", out))
    return merged


def _open_to_merge(
    load: Callable[..., Opened], files: Shards | None, from_quantized: bool, is_quantized: bool
) -> tuple[Opened, torch.dtype]:
    """Load base and adapter for a merge; return them and the dtype of most base weights.

    Args:
        load: Loads them. files: The base's files, if they are on this machine.
        from_quantized: Merge into the base as loaded for training.
        is_quantized: Whether the base is quantised, on request or in its files.

    Raises:
        MergeError: The base is quantised without `from_quantized`; or the reverse.
    """
    # quantised weights as in training; others in float32, to round only once
    how = {} if from_quantized else {"quantize": "none", "dtype": "fp32", "device": "cpu"}
    opened = load(**how)
    _check_kind(opened, is_quantized)
    usual = compute_dtype(opened.base.model) if from_quantized else _usual_dtype(files)
    if not free_now(opened.base.device).on_gpu:
        opened.base.model.float()  # also the dtype of dequantised weights
    return opened, usual


def _trained_over(file: AdapterFile) -> torch.dtype | None:
    """Return the dtype that a base had in quantisation-aware training; None without it.

    A merge starts from the same values and rounds to the same dtype: its weights, quantised, are
    then those of the last evaluation to the bit (forward/fake_quantized.py).
    """
    if file.provenance.loading.get("quantize_for", "none") == "none":
        return None
    plan = file.provenance.plan or {}
    return {dtype_name(d): d for d in DTYPES.values()}.get(str(plan.get("dtype")))


@torch.no_grad()
def _round_base(opened: Opened, dtype: torch.dtype) -> None:
    for module in opened.adapter.modules.values():
        for weight in module.base.parameters():
            if weight.is_floating_point():
                weight.copy_(weight.to(dtype))


def _device_for_both(
    file: AdapterFile, base: str | None, stored: torch.dtype | None, on_event: Listener
) -> torch.device | None:
    """Return the device for a quantised base together with its dequantised model.

    None means the default device; a GPU must have room for both.

    Args:
        stored: The dtype of the dequantised model; None means 16 bits.
    """
    memory = free_now()
    if not memory.on_gpu:
        return None
    name, revision = file.base_or(base)
    loading, purpose = file.provenance.loading, task_of(file).purpose
    recorded = {field: loading[field] for field in PACKING_FIELDS if field in loading}
    settings = from_dict(BaseConfig, {"model": name, **recorded}, str(file.folder))
    dtype = stored or torch.bfloat16
    packed = weight_bytes(read_config(name, revision, purpose), settings, purpose, dtype)
    empty = skeleton(name, revision=revision, purpose=purpose)
    dequantised = sum(parameter.numel() * dtype.itemsize for parameter in empty.parameters())
    if fits_device(packed + dequantised, memory.usable):
        return None
    on_event(
        Notice(
            "Merged on the CPU: the quantised base and its dequantised weights take "
            f"{size(packed + dequantised, 2)} together; the GPU has "
            f"{size(memory.usable, 2)} free."
        )
    )
    return torch.device("cpu")


def _usual_dtype(shards: Shards | None) -> torch.dtype:
    sizes: Counter[str] = Counter()
    for entry in shards.entries.values() if shards else ():
        sizes[entry.dtype] += entry.end - entry.start
    return next((FLOATS[d] for d, _ in sizes.most_common() if d in FLOATS), torch.float32)


def _check_kind(opened: Opened, from_quantized: bool) -> None:
    kind = opened.base.audit.quantized_as
    if (kind != "none") == from_quantized:
        return
    if from_quantized:
        raise MergeError(
            "there are no quantised weights to merge into",
            found=f"the adapter was trained over {opened.base.name} in 16 or 32 bits",
            fix="Merge without --from-quantized.",
        )
    raise MergeError(
        f"the base {opened.base.name} has no 16-bit weights to merge into",
        found=f"Its weights are stored in {kind}.",
        fix="Name its original with --base MODEL. Or merge with --from-quantized: the model then "
        "takes 16 bits for each weight or more, and keeps the rounding of the quantised ones.",
    )


@contextmanager
def new_model_folder(out: Path, overwrite: bool, sources: Sequence[Path]) -> Iterator[Path]:
    """Yield an empty folder; its files move to `out` when the block succeeds.

    Args:
        overwrite: Replace the model in `out`; other files stay.

    Raises:
        OutputError: `out` is a source folder, cannot be written, or holds files but no model to
            replace, or weights with names that a merged model does not have.
    """
    message = f"cannot write the merged model to {out}"
    if any(out.resolve() == source.resolve() for source in sources):
        reason = "it is one of the source folders"
        raise OutputError(message, found=reason, fix="Choose another folder.")
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if overwrite and "config.json" in names:  # programs load weights of any name in a folder
        names = [n for n in names if n.endswith(WEIGHTS) and not _is_models_weights(n)]
    if names:
        raise OutputError(
            message,
            found=f"it holds {first_few(names, 5, ', ')}",
            fix="Choose a new or an empty folder.",
        )
    with new_folder(out, last="config.json", replaced=_is_models_weights) as folder:
        yield folder


def _is_models_weights(name: str) -> bool:
    return name.endswith(WEIGHTS) and name.startswith(("model.", "model-", "pytorch_model"))


def _quantized_as(file: AdapterFile) -> str:
    """Return the quantisation of an adapter's base in training; "none" without any."""
    loading = file.provenance.loading
    return str(loading.get("stored") or loading.get("quantize", "none"))


def _prompt_note(file: AdapterFile) -> str:
    """Return a note on prompting a causal model without a chat template, or ""."""
    return prompt_note(_style(file)) if task_of(file).generates else ""


def _style(file: AdapterFile) -> Style | None:
    """Return the prompt style of an adapter; templates of media cannot hold its system prompt."""
    style = file.provenance.prompt_style
    if style is None or task_of(file).processor == "tokenizer":
        return style
    return replace(style, system=None)


def _card(
    merged: Merged, file: AdapterFile, purpose: Purpose, from_quantized: bool, hub_id: str | None
) -> Card:
    notes = [f"The adapter {file.folder.name} ({file.method.type}), merged into its base."]
    if from_quantized:
        notes.append(dequantised_note(_quantized_as(file)))
    elif merged.other_precision:
        notes.append(precision_note(merged.other_precision))
    notes += filter(None, (_prompt_note(file), frames(file.provenance.prompt_style)))
    name = merged.folder.name
    kind = purpose.auto_class
    code = f'from transformers import {kind}\n\nmodel = {kind}.from_pretrained("{name}")'
    usage = [("transformers", "python", code)]
    if purpose == CAUSAL_LM:
        usage.append(("vLLM", "bash", f"vllm serve {name}"))
    return Card(
        title=name,
        base=hub_id or merged.base,
        facts=facts_of(merged),
        usage=usage,
        notes=notes,
        library="transformers",
    )
