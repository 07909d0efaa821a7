"""peftkit: parameter-efficient fine-tuning of transformers, by roles.

    from peftkit import CausalLM, DataConfig, LoRA, TrainConfig
    from peftkit import attach
    from peftkit import fit
    from peftkit import load_base
    from peftkit import save_adapter

    base = load_base("smollm2-135m", quantize="nf4")
    adapter = attach(base.model, LoRA(rank=16, targets=("q", "v")))
    task = CausalLM(base.model, base.tokenizer, DataConfig(train="train.jsonl"))
    fit(base.model, task, task.load("train.jsonl"), config=TrainConfig(output_dir="runs/demo"))
    save_adapter(adapter, "runs/demo")

Names are imported when they are first used, so that importing peftkit itself costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peftkit.adapter import Adapter as Adapter
    from peftkit.adapter import attach as attach
    from peftkit.base.load import Base as Base
    from peftkit.base.load import load_base as load_base
    from peftkit.data.load import DataConfig as DataConfig
    from peftkit.errors import PeftkitError as PeftkitError
    from peftkit.formats.open_adapter import open_adapter as open_adapter
    from peftkit.formats.peft.folder import (
        Provenance as Provenance,
    )
    from peftkit.formats.peft.folder import (
        load_adapter as load_adapter,
    )
    from peftkit.formats.peft.folder import (
        save_adapter as save_adapter,
    )
    from peftkit.inference.bank import AdapterBank as AdapterBank
    from peftkit.inference.evaluate import evaluate as evaluate
    from peftkit.inference.evaluate import predict as predict
    from peftkit.inference.generate import generate as generate
    from peftkit.merging.fold import merge_into as merge_into
    from peftkit.merging.merge import merge as merge
    from peftkit.methods.dora import DoRA as DoRA
    from peftkit.methods.lora import LoRA as LoRA
    from peftkit.recipe import Recipe as Recipe
    from peftkit.tasks.causal_lm import CausalLM as CausalLM
    from peftkit.train.config import TrainConfig as TrainConfig
    from peftkit.train.loop import fit as fit

_HOME = {
    "Adapter": "adapter",
    "AdapterBank": "inference.bank",
    "Base": "base.load",
    "CausalLM": "tasks.causal_lm",
    "DataConfig": "data.load",
    "DoRA": "methods.dora",
    "LoRA": "methods.lora",
    "PeftkitError": "errors",
    "Provenance": "formats.peft.folder",
    "Recipe": "recipe",
    "TrainConfig": "train.config",
    "attach": "adapter",
    "evaluate": "inference.evaluate",
    "fit": "train.loop",
    "generate": "inference.generate",
    "load_adapter": "formats.peft.folder",
    "load_base": "base.load",
    "merge": "merging.merge",
    "merge_into": "merging.fold",
    "open_adapter": "formats.open_adapter",
    "predict": "inference.evaluate",
    "save_adapter": "formats.peft.folder",
}
"""Public name to the module that defines it."""

__all__ = list(_HOME)  # the names and their homes are one table
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'peftkit' has no attribute {name!r}")
    return getattr(import_module(f"peftkit.{_HOME[name]}"), name)
