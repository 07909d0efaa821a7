"""The model card: describes an adapter, its training, and how to load it with each tool."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from peftkit.adapter import Adapter
from peftkit.base.load import Base
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.errors import is_url
from peftkit.events import Table
from peftkit.figures import metric, metric_name
from peftkit.files.disk import write_text
from peftkit.formats.folders import CARD
from peftkit.formats.peft.targets import refused_by_peft
from peftkit.methods.base import AdapterModule
from peftkit.model.places import is_linear, linear_shape, stacked_shape
from peftkit.model.roles import ALL_LINEAR, ATTENTION, MIXERS
from peftkit.model.targets import find_roles
from peftkit.quant.audit import Audit

PROOF_CHECK = (
    "Is it applied? The first values equal the second, or without the adapter the third",
    "python",
    'import json, torch\n\nproof = json.load(open("proof.json"))\n'
    'ids, place = proof["prompts"][0]["ids"], proof["positions"][0]\n'
    'found = model(torch.tensor([ids])).logits[0, place["at"] - 1].log_softmax(-1)[place["ids"]]\n'
    'print(found, *(proof["log_probs"][name][0] for name in ("adapter", "base")))',
)
"""How to check an adapter without peftkit: heading, language, code."""
SMALL_REACH = 0.5
"""Share of the base's matrices below which all-linear gives a warning."""


EVAL = "eval_"
"""Prefix of the names of metrics on the eval rows."""
PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForAudioClassification": "audio-classification",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSeq2SeqLM": "text2text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForTokenClassification": "token-classification",
}
"""The hub's name of a task, by transformers' class of its models."""


@dataclass(frozen=True, slots=True)
class Card:
    """The contents of a card; empty fields are left out.

    Attributes:
        title: First line.
        base: Hub id or path of the base.
        facts: Rows of the table: name to value.
        metrics: Name to value, from the last evaluation.
        recipe: The recipe as YAML.
        usage: Heading, language and code of each way to load it.
        notes: Warnings, one sentence each.
        eval_data: Name of the eval rows, for the hub's evaluation results; "": none.
        pipeline: The hub's name of the task, for the same.
    """

    title: str
    base: str | None
    facts: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    recipe: str = ""
    usage: Sequence[tuple[str, str, str]] = ()
    notes: Sequence[str] = ()
    library: str = "peft"
    eval_data: str = ""
    pipeline: str = "other"


def adapter_usage(
    base: str | None,
    folder: str,
    *,
    rank: int = 0,
    command: str = "peftkit chat {folder}",
    purpose: Purpose = CAUSAL_LM,
) -> list[tuple[str, str, str]]:
    """Return code that loads an adapter in peftkit, PEFT and vLLM: heading, language, code.

    Args:
        base: Hub id or path of the base.
        rank: The adapter's rank if vLLM serves it (`served_rank`), else 0.
        command: A command line that uses it.
        purpose: The purpose of the base.
    """
    model, auto_class = base or "BASE", purpose.auto_class
    labels = f", num_labels={len(purpose.head.labels)}" if purpose.head else ""
    usage = [
        (
            "peftkit",
            "bash",
            f"{command.format(folder=folder)}\npeftkit merge {folder} --out merged",
        ),
        (
            "PEFT",
            "python",
            "from peft import PeftModel\n"
            f"from transformers import {auto_class}\n\n"
            f'base = {auto_class}.from_pretrained("{model}"{labels})\n'
            f'model = PeftModel.from_pretrained(base, "{folder}")',
        ),
    ]
    if purpose == CAUSAL_LM and rank:
        from peftkit.formats.serving import vllm_serve

        usage.append(("vLLM", "bash", vllm_serve(model, rank, f"adapter={folder}")))
    return usage


def render_card(card: Card) -> str:
    """Return the card as Markdown, with the front matter of model hubs."""
    front = ["---", f"library_name: {card.library}", "tags:", "- peftkit"]
    if card.base and not card.base.startswith(("/", ".", "~")) and not is_url(card.base):
        front.insert(1, f"base_model: {card.base}")
    lines = [*front, *_eval_results(card), "---", "", f"# {card.title}", ""]
    if card.facts:
        lines += ["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in card.facts.items()), ""]
    for note in card.notes:
        lines += [note, ""]
    if card.metrics:
        lines += ["## Measured", "", "| metric | value |", "|---|---|"]
        values = card.metrics.items()
        lines += [f"| {metric_name(name)} | {metric(name, value)} |" for name, value in values]
        lines += [""]
    if card.usage:
        lines += ["## Use", ""]
        for heading, language, code in card.usage:
            lines += [f"{heading}:", f"```{language}", code, "```", ""]
    if card.recipe:
        lines += ["## Recipe", "", "```yaml", card.recipe.rstrip(), "```", ""]
    return "\n".join(lines)


def _eval_results(card: Card) -> list[str]:
    """Return the lines of `model-index`, which hubs read as evaluation results."""
    metrics = {
        name.removeprefix(EVAL): value
        for name, value in card.metrics.items()
        if name.startswith(EVAL) and math.isfinite(value)
    }
    if not (metrics and card.eval_data):
        return []
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type=card.pipeline,
            dataset_type=card.eval_data,
            dataset_name=card.eval_data,
            metric_type=name,
            metric_name=metric_name(f"{EVAL}{name}"),
            metric_value=value,
        )
        for name, value in metrics.items()
    ]
    return ModelCardData(model_name=card.title, eval_results=results).to_yaml().splitlines()


def write_card(card: Card, folder: Path) -> None:
    """Write the card into a folder."""
    write_text(render_card(card), folder / CARD)


def adapter_table(adapter: Adapter) -> Table:
    """Return one row per kind of adapted layer: roles, name, number of layers, trained values."""
    kinds: dict[tuple[str, str], tuple[int, int]] = {}
    for path, module in adapter.modules.items():
        kind = (", ".join(module.site.roles) or "-", path.rpartition(".")[2])
        number, values = kinds.get(kind, (0, 0))
        num_values = sum(p.numel() for p in module.parameters() if p.requires_grad)
        kinds[kind] = (number + 1, values + num_values)
    rows = [(*kind, str(n), f"{values:,}") for kind, (n, values) in kinds.items()]
    left_out = Counter(
        (", ".join(site.roles) or "-", site.path.rpartition(".")[2])
        for site in adapter.method.left_out(adapter.model)
    )
    rows += [
        (role, name, str(n), "left out: smaller than the rank")
        for (role, name), n in left_out.items()
    ]
    total = ("all", "", str(len(adapter.modules)), f"{adapter.num_trainable:,}")
    columns = ("role", "module", "layers", "trained values")
    title = f"Adapter: {adapter.method.type}"
    summary = f"{title}, {adapter.num_trainable:,} values in {len(adapter.modules)} modules"
    return Table(title, columns, (*rows, total), summary)


def small_reach(adapter: Adapter, base: Audit) -> str:
    """Return a warning if targets reach less than their names suggest; else "".

    all-linear may reach less than half of the base's matrices, and roles of attention no mixers.

    Args:
        base: The audit of the model without the adapter.
    """
    targets = adapter.method.targets
    requested = [targets] if isinstance(targets, str) else targets
    if {*ATTENTION} & {*requested} and (left_out := _mixers_left_out(adapter)):
        return left_out
    modules = adapter.method_modules.values()
    reached = sum(shape.numel() for module in modules for shape in _matrices(module))
    share = reached / max(base.num_in_matrices, 1)
    if ALL_LINEAR not in requested or share >= SMALL_REACH:
        return ""
    return (
        f"{ALL_LINEAR} reaches {share:.0%} of the values in this base's matrices: the rest is in "
        "parameters of an unknown form. peftkit inspect lists the recognised layers."
    )


def _mixers_left_out(adapter: Adapter) -> str:
    """Return which layers of mixers have no adapter, in words; "" if there are none."""
    roles = find_roles(adapter.model)
    sites = {role: [site.path for site in roles.get(role, [])] for role in MIXERS}
    names = [role for role, paths in sites.items() if not {*paths} <= adapter.modules.keys()]
    if not names:
        return ""
    total = sum(map(len, sites.values()))
    left_out = sum(path not in adapter.modules for paths in sites.values() for path in paths)
    return (
        f"method.targets leaves out {left_out} of {total} layers that lead into and out of this "
        f"base's mixers (linear attention, state spaces, convolutions). To adapt them, add "
        f"{' and '.join(names)}, or use {ALL_LINEAR}."
    )


def _matrices(module: AdapterModule) -> list[torch.Size]:
    """Return the shapes of the matrices that an adapter module changes."""
    if module.stacked:
        return [torch.Size(stacked_shape(module.base, name)) for name in module.stacked]
    return [torch.Size(linear_shape(module.base))] if is_linear(module.base) else []


def training_card(
    base: Base,
    adapter: Adapter,
    *,
    data: str,
    steps: str,
    metrics: Mapping[str, float],
    recipe: str,
    usage: Sequence[tuple[str, str, str]],
    eval_data: str | float | None = None,
    auto_class: str = "",
) -> Card:
    """Return the card of a trained adapter.

    Args:
        eval_data: The recipe's `data.eval`. auto_class: transformers' class of the base.
        data: Description of the training data. usage: Code that loads the adapter, by tool.
        recipe: The recipe as YAML.
    """
    share = adapter.num_trainable / base.audit.num_parameters
    refused = refused_by_peft(adapter)
    return Card(
        title=f"{adapter.method.type} adapter for {base.name}",
        base=base.hub_id or base.name,
        facts={
            "base": base.name + (f" @ {base.revision}" if base.revision else ""),
            **({"base format": base.stored} if base.stored else {}),
            "base weights": base.fingerprint,
            "method": adapter.method.type,
            "trained values": f"{adapter.num_trainable:,} ({share:.2%} of the base)",
            "data": data,
            "steps": steps,
        },
        metrics=metrics,
        recipe=recipe,
        usage=[tool for tool in usage if not (refused and tool[0] == "PEFT")],
        notes=[refused] if refused else [],
        eval_data=_name_of(eval_data),
        pipeline=PIPELINES.get(auto_class, "other"),
    )


def _name_of(eval_data: str | float | None) -> str:
    """Return the name of eval rows without the folders of this machine."""
    if isinstance(eval_data, float):
        return f"{eval_data:.3g} of the training rows"
    is_local = eval_data is not None and Path(eval_data).expanduser().exists()
    return Path(eval_data).name if eval_data and is_local else eval_data or ""
