"""Merging an adapter into its base, which gives an ordinary model.

By default into the original 16- or 32-bit weights: W' = method.merged_weight(W) in float32, one
tensor at a time over the base's files, without building the model. Where there are no such files
(GGUF), or their names are not those of the modules, the model is loaded and saved whole. Either way
the result is loaded again and compared with base and adapter on a few prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from peftkit.base.load import load_base, local_folder
from peftkit.base.locate import locate
from peftkit.base.placement import ROOM
from peftkit.base.published import published
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.base.request import DTYPES
from peftkit.base.skeleton import read_config, skeleton
from peftkit.errors import RunError
from peftkit.events import Listener, Saved, Stage, Table, ignore
from peftkit.execution.environment import free_now
from peftkit.files.disk import is_finite
from peftkit.formats.card import Card, write_card
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.open_adapter import Opened, open_adapter, task_of
from peftkit.formats.peft.folder import AdapterFile, read_adapter
from peftkit.merging.agreement import PROMPTS, Agreement, agreement, logits_on
from peftkit.merging.fold import Tally, check_mergeable, too_large_values
from peftkit.merging.output import new_model_folder
from peftkit.merging.stream import base_of, files_of, plan_stream, usual_dtype, write_streamed
from peftkit.merging.whole import check_kind, check_original, cost_of, write_whole
from peftkit.train.memory.out_of_memory import release_memory

Dtype = Literal["bf16", "fp16", "fp32"]

LARGEST_DIFFERENCE = 1e-3
"""Allowed difference of logits in float32, relative to the largest: rounding explains no more."""
EXACT = 1e-3
"""Up to this relative rounding error, the merged model must agree within that difference."""
STEPS = 8
"""Of a 16-bit number's precision: what rounding in all layers may do to a logit, at most."""
SHARE = 0.5
"""Of the adapter's own effect, up to which a merged model that is rounded may miss it. One that
leaves the adapter out misses all of it, one that subtracts it twice as much."""
FLOAT32_ROOM = 1.3
"""Times the weights in float32: what must be free to compute in it."""


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


@dataclass(frozen=True, slots=True)
class _Reference:
    """Logits on the prompts, with the adapter and without; the device and dtype they come from."""

    adapted: Sequence[Tensor]
    bare: Sequence[Tensor]
    device: torch.device
    dtype: torch.dtype


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
    name, revision = base_of(file, base)
    out, tally, purpose = Path(out).expanduser(), Tally(), task_of(file).purpose
    stored = DTYPES[dtype] if dtype else None
    keeps_bits = not from_quantized and published(read_config(name, revision, purpose)) is not None

    def load(**how: Any) -> Opened:
        return open_adapter(file.folder, base, force=force, on_event=on_event, **how)

    with new_model_folder(out, overwrite, (file.folder, Path(name))) as folder:
        source = None if from_quantized or keeps_bits else files_of(name, revision)
        reference = effect = agreed = plan = None
        if source:
            bones = skeleton(name, revision=revision, purpose=purpose)
            plan = plan_stream(file, source, bones, stored, tally)
        if plan:
            if verify:
                computing = _precision(bones)
                reference = _reference(load(quantize="none", dtype=computing), prompts)
            write_streamed(*plan, folder, stored, on_event)
        else:
            # quantised weights as they were trained over; others in float32, to round only once
            how = {} if from_quantized else {"quantize": "none", "dtype": "fp32", "device": "cpu"}
            files = files_of(name, revision) if keeps_bits else source
            kept = stored or (None if from_quantized else usual_dtype(files))
            asked = prompts if verify else None
            packed = from_quantized or keeps_bits
            reference = _whole(load(**how), folder, kept, packed, asked, tally, on_event)
        tally.check()
        if reference is not None:
            on_event(Stage("Comparing the merged model with base and adapter"))
            effect = agreement(reference.adapted, reference.bare)
            release_memory()  # an adapted model is in cycles: two of them may be too much
            agreed = _verified(folder, purpose, reference, tally, prompts, effect)
        config = skeleton(str(folder), purpose=purpose).config
        task_of(file).write_beside(folder, config, local_folder(name, revision))
        merged = Merged(out, name, tally, effect, agreed)
        packed = from_quantized or keeps_bits
        card = _card(merged, file, purpose, packed, locate(name, revision).hub_id)
        write_card(card, folder)
    on_event(_table(merged))
    on_event(Saved("merged model", out))
    return merged


def _whole(
    opened: Opened,
    folder: Path,
    dtype: torch.dtype | None,
    from_quantized: bool,
    prompts: Sequence[str] | None,
    tally: Tally,
    on_event: Listener,
) -> _Reference | None:
    """Merge a model in memory; return what it computed before, on prompts if there are any.

    Args:
        dtype: Of all weights written; None: the one that the model computes in.
    """
    check_kind(opened, from_quantized)
    kept = dtype or opened.base.model.dtype
    if opened.base.device.type == "cpu":
        opened.base.model.float()  # also what comes out of quantised weights
    reference = None if prompts is None else _reference(opened, prompts)
    write_whole(opened, folder, kept, tally, on_event)
    return reference


def _reference(opened: Opened, prompts: Sequence[str]) -> _Reference:
    base, purpose = opened.base, opened.task.purpose
    adapted = logits_on(base, prompts, purpose)
    with opened.adapter.disabled():
        bare = logits_on(base, prompts, purpose)
    if all(map(is_finite, bare)) and not all(map(is_finite, adapted)):
        raise too_large_values()
    return _Reference(adapted, bare, base.device, base.model.dtype)


def _precision(bones: nn.Module) -> str:
    """Return the dtype to compare in: float32, where every difference shows, if there is room.

    A model that a GPU does not hold in 16 bits either is loaded onto the CPU.
    """
    number, main = sum(p.numel() for p in bones.parameters()), torch.device("cpu")
    here = free_now()
    if here.on_gpu and 2 * number > ROOM * here.usable:
        here = free_now(main)
    fits = here.memory is None or FLOAT32_ROOM * 4 * number < here.usable
    return "fp32" if fits else "auto"


def _verified(
    folder: Path,
    purpose: Purpose,
    reference: _Reference,
    tally: Tally,
    prompts: Sequence[str],
    effect: Agreement,
) -> Agreement:
    """Load the merged model as anyone would, and compare.

    Raises:
        RunError: It computes something else than base and adapter.
    """
    computing = next(name for name, kind in DTYPES.items() if kind == reference.dtype)
    if purpose.head is not None:  # it has one now
        purpose = replace(purpose, head=replace(purpose.head, fresh=False))
    base = load_base(str(folder), dtype=computing, purpose=purpose, device=reference.device)
    found = agreement(logits_on(base, prompts, purpose), reference.adapted)
    limit = LARGEST_DIFFERENCE * found.largest
    if reference.dtype != torch.float32 or tally.relative_rounding >= EXACT:
        step = max(torch.finfo(reference.dtype).eps, 2**-7 if tally.relative_rounding else 0.0)
        limit += STEPS * step * found.largest + SHARE * effect.max_difference
    if not found.max_difference <= limit:
        raise RunError(
            "the merged model does not compute what base and adapter compute",
            found=f"logits differ by up to {found.max_difference:.3g}, more than {limit:.3g}; "
            f"{found.top1:.1%} of the next tokens agree",
            fix="Use the adapter unmerged, and report this with the output of: peftkit env",
        )
    return found


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


def _table(merged: Merged) -> Table:
    rows = tuple(_facts(merged).items())
    return Table("The merged model", ("", ""), rows)


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
