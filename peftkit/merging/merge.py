"""Merging an adapter into its base, which gives an ordinary model.

By default into the original 16- or 32-bit weights: W' = method.merged_weight(W) in float32, one
tensor at a time over the base's files, without building the model. Where there are no such files
(GGUF), or their names are not those of the modules, the model is loaded and saved whole. Either way
the result is loaded again and compared with base and adapter on a few prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from peftkit.base.load import local_folder
from peftkit.base.locate import locate
from peftkit.base.published import published
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.base.request import DTYPES
from peftkit.base.skeleton import read_config, skeleton
from peftkit.events import Listener, Saved, Stage, Table, ignore
from peftkit.execution.environment import free_now
from peftkit.formats.card import Card, write_card
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.open_adapter import Opened, open_adapter, task_of
from peftkit.formats.peft.folder import AdapterFile, read_adapter
from peftkit.formats.shards import Shards
from peftkit.merging.fold import Tally, check_mergeable
from peftkit.merging.verify import (
    PROMPTS,
    Agreement,
    Reference,
    agreement,
    precision,
    reference_of,
    verified,
)
from peftkit.merging.write import (
    check_kind,
    check_original,
    cost_of,
    files_of,
    new_model_folder,
    plan_stream,
    usual_dtype,
    write_streamed,
    write_whole,
)
from peftkit.train.memory.out_of_memory import release_memory

Dtype = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge.

    Attributes:
        folder: The new model, which plain transformers loads.
        base: What it was merged into.
        tally: How much the weights changed.
        effect: Compares the base with and without the adapter. agreement: Compares the merged
            model with base and adapter. Both are None without `verify`.
    """

    folder: Path
    base: str
    tally: Tally
    effect: Agreement | None
    agreement: Agreement | None


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
    """Merge an adapter folder into its base and write an ordinary model folder.

    Args:
        adapter: A folder made by peftkit or by PEFT.
        out: The new folder; nothing appears in it before all of it is written and verified.
        base: Where the base is, if elsewhere than recorded.
        dtype: Of all weights written; None keeps each weight's own (GGUF: fp32, because no 16-bit
            dtype holds its values).
        from_quantized: Merge into the dequantised weights that the adapter was trained over. This
            is done without asking where the base's own files are quantised (AWQ, FP8 and others);
            its original is named by `base`.
        verify: Load base and adapter, then the result, and compare them. This is the only step that
            needs the memory of a whole model. Without it shapes are checked, but not whether these
            are the weights that the adapter was trained on.
        prompts: Inputs of that comparison.
        force: Accept a base whose weights are not those that the adapter was trained on.
        overwrite: Write into a folder that is not empty; a model there is replaced.

    Raises:
        AdapterError: No adapter there, or it belongs to another base.
        MergeError: It cannot be merged as asked, or the merged model would be its base.
        OutputError: The folder is taken or cannot be written.
        RunError: The disk is full, or the merged model does not compute what it should.
    """
    file = read_adapter(adapter_folder(adapter))
    check_mergeable(file.method)
    check_original(file.method, from_quantized)
    name, revision = file.base_or(base)
    out, tally, purpose = Path(out).expanduser(), Tally(), task_of(file).purpose
    keeps_bits = published(read_config(name, revision, purpose)) is not None
    job = _Job(
        file,
        files_of(name, revision),
        DTYPES[dtype] if dtype else None,
        prompts if verify else None,
        as_trained=from_quantized,
        into_codes=from_quantized or keeps_bits,
        bones=partial(skeleton, name, revision=revision, purpose=purpose),
        load=partial(open_adapter, file.folder, base, force=force, on_event=on_event),
    )
    with new_model_folder(out, overwrite, (file.folder, Path(name))) as folder:
        reference = _write(job, folder, tally, on_event)
        tally.check()
        effect = agreed = None
        if reference is not None:
            on_event(Stage("Comparing the merged model with base and adapter"))
            effect = agreement(reference.adapted, reference.bare)
            release_memory()  # an adapted model is in cycles: two of them may be too much
            agreed = verified(folder, purpose, reference, tally, prompts, effect)
        config = skeleton(str(folder), purpose=purpose).config
        task_of(file).write_beside(folder, config, local_folder(name, revision))
        merged = Merged(out, name, tally, effect, agreed)
        hub_id = locate(name, revision).hub_id
        write_card(_card(merged, file, purpose, job.into_codes, hub_id), folder)
    on_event(Table("The merged model", ("", ""), tuple(_facts(merged).items())))
    on_event(Saved("merged model", out))
    return merged


@dataclass(frozen=True, slots=True)
class _Job:
    """What is merged into what.

    Attributes:
        files: The base's, if they are on this machine.
        dtype: Of all weights written; None: each in its own.
        prompts: On which the result is to be compared; None: it is not.
        as_trained: Into the base as it was loaded for training.
        into_codes: Into the dequantised weights of a quantised base: so, or because its files are.
        bones: Makes the base without weights. load: Makes base and adapter.
    """

    file: AdapterFile
    files: Shards | None
    dtype: torch.dtype | None
    prompts: Sequence[str] | None
    as_trained: bool
    into_codes: bool
    bones: Callable[[], nn.Module]
    load: Callable[..., Opened]


def _write(job: _Job, folder: Path, tally: Tally, on_event: Listener) -> Reference | None:
    """Write the merged model; return what base and adapter compute on the prompts, if any."""
    reference = plan = None
    copies_config = not job.file.provenance.loading.get("rope_scaling")
    if job.files is not None and not job.into_codes and copies_config:
        bones = job.bones()
        plan = plan_stream(job.file, job.files, bones, job.dtype, tally)
    if plan is not None:
        if job.prompts is not None:
            opened = job.load(quantize="none", dtype=precision(bones))
            reference = reference_of(opened, job.prompts)
            del opened
        write_streamed(*plan, folder, job.dtype, on_event)
        return reference
    # quantised weights as they were trained over; others in float32, to round only once
    how = {} if job.as_trained else {"quantize": "none", "dtype": "fp32", "device": "cpu"}
    opened = job.load(**how)
    check_kind(opened, job.into_codes)
    own = opened.base.model.dtype if job.as_trained else usual_dtype(job.files)
    if not free_now(opened.base.device).on_gpu:
        opened.base.model.float()  # also what comes out of quantised weights
    if job.prompts is not None:
        reference = reference_of(opened, job.prompts)
    write_whole(opened, folder, job.dtype or own, tally, on_event)
    return reference


def _facts(merged: Merged) -> dict[str, str]:
    tally = merged.tally
    facts = {
        "base": merged.base,
        "weights changed": f"{tally.num_weights:,}",
        "size of the update": f"{tally.relative_update:.3g} of these weights' own",
        "lost in rounding": f"{tally.relative_rounding:.3g} of the update",
    }
    if merged.agreement is None or merged.effect is None:
        return facts | {"verified": "no"}
    agreed, effect = merged.agreement, merged.effect
    return facts | {
        "verified": f"on {agreed.num_positions} positions, against base and adapter",
        "largest difference of a logit": f"{agreed.max_difference:.3g} (of {agreed.largest:.3g})",
        "same next token": f"{agreed.top1:.1%}",
        "largest change by the adapter": f"{effect.max_difference:.3g}",
    }


def _card(
    merged: Merged,
    file: AdapterFile,
    purpose: Purpose,
    from_quantized: bool,
    hub_id: str | None,
) -> Card:
    loading = file.provenance.loading
    kind = str(loading.get("stored") or loading.get("quantize", "none"))
    notes = [f"The adapter {file.folder.name} ({file.method.type}), merged into its base."]
    if from_quantized:
        notes.append(cost_of(kind))
    elif kind != "none":
        notes.append(
            f"It was trained over the base in {kind} and merged into the original weights, so that "
            "it computes a little otherwise than it did in training."
        )
    name = merged.folder.name
    kind = purpose.auto_class
    processor = {
        "tokenizer": "AutoTokenizer",
        "image_processor": "AutoImageProcessor",
        "multimodal": "AutoProcessor",
        "audio": "AutoProcessor",
        "feature_extractor": "AutoFeatureExtractor",
    }[purpose.processor]
    code = (
        f"from transformers import {kind}, {processor}\n\n"
        f'model = {kind}.from_pretrained("{name}")\n'
        f'processor = {processor}.from_pretrained("{name}")'
    )
    usage = [("transformers", "python", code)]
    if purpose == CAUSAL_LM:
        usage.append(("vLLM", "bash", f"vllm serve {name}"))
    return Card(
        title=name,
        base=hub_id or merged.base,
        facts=_facts(merged),
        usage=usage,
        notes=notes,
        library="transformers",
    )
