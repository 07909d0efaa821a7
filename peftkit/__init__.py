"""peftkit: parameter-efficient fine-tuning of transformers.

    from peftkit import CausalLM, DataConfig, LoRA, TrainConfig
    from peftkit import attach, fit, load_base, save_adapter

    base = load_base("smollm2-135m", quantize="nf4")
    adapter = attach(base.model, LoRA(rank=16, targets=("q", "v")))
    task = CausalLM(base.model, base.tokenizer, DataConfig(train="train.jsonl"))
    fit(base.model, task, task.load("train.jsonl"), config=TrainConfig(output_dir="runs/demo"))
    save_adapter(adapter, "runs/demo")

Names are imported on first use: `import peftkit` alone loads no torch.
"""

from __future__ import annotations

import ast
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peftkit.adapter import Adapter as Adapter
    from peftkit.adapter import attach as attach
    from peftkit.base.load import Base as Base
    from peftkit.base.load import load_base as load_base
    from peftkit.errors import AdapterError as AdapterError
    from peftkit.errors import BaseError as BaseError
    from peftkit.errors import CheckpointError as CheckpointError
    from peftkit.errors import ConfigError as ConfigError
    from peftkit.errors import DataError as DataError
    from peftkit.errors import MergeError as MergeError
    from peftkit.errors import OutputError as OutputError
    from peftkit.errors import PeftkitError as PeftkitError
    from peftkit.errors import RunError as RunError
    from peftkit.errors import TargetError as TargetError
    from peftkit.evaluation.evaluate import answer as answer
    from peftkit.evaluation.evaluate import evaluate as evaluate
    from peftkit.evaluation.predict import predict as predict
    from peftkit.evaluation.predict import predict_file as predict_file
    from peftkit.events import Sample as Answer
    from peftkit.formats.exchange import export_adapter as export_adapter
    from peftkit.formats.exchange import import_adapter as import_adapter
    from peftkit.formats.hub import pull_adapter as pull_adapter
    from peftkit.formats.hub import push_adapter as push_adapter
    from peftkit.formats.open_adapter import Opened as Opened
    from peftkit.formats.open_adapter import open_adapter as open_adapter
    from peftkit.formats.peft.folder import save_adapter as save_adapter
    from peftkit.formats.peft.load import load_adapter as load_adapter
    from peftkit.formats.peft.load import read_adapter as read_adapter
    from peftkit.formats.peft.notes import Provenance as Provenance
    from peftkit.inference.bank import AdapterBank as AdapterBank
    from peftkit.inference.bank import open_bank as open_bank
    from peftkit.inference.generate import generate as generate
    from peftkit.inference.generate import generate_ids as generate_ids
    from peftkit.inference.generate import stream as stream
    from peftkit.merging.combine import combine as combine
    from peftkit.merging.fold import merge_into as merge_into
    from peftkit.merging.merge import merge as merge
    from peftkit.methods.bottleneck import Bottleneck as Bottleneck
    from peftkit.methods.data_init import eva_starts as eva_starts
    from peftkit.methods.data_init import loftq_starts as loftq_starts
    from peftkit.methods.dora import DoRA as DoRA
    from peftkit.methods.ia3 import IA3 as IA3
    from peftkit.methods.lora import LoRA as LoRA
    from peftkit.methods.own_parameters import BitFit as BitFit
    from peftkit.methods.own_parameters import LNTuning as LNTuning
    from peftkit.methods.prefix import PrefixTuning as PrefixTuning
    from peftkit.methods.prompt import PromptTuning as PromptTuning
    from peftkit.methods.vera import VeRA as VeRA
    from peftkit.model.targets import find_roles as find_roles
    from peftkit.planning.plan import Plan as Plan
    from peftkit.planning.plan import plan_run as plan_run
    from peftkit.proof.files import prove_files as prove_files
    from peftkit.proof.judge import Proof as Proof
    from peftkit.proof.judge import Seen as Seen
    from peftkit.proof.judge import Verdict as Verdict
    from peftkit.proof.judge import judge as judge
    from peftkit.proof.judge import with_rendered as with_rendered
    from peftkit.proof.record import prove as prove
    from peftkit.proof.record import read_proof as read_proof
    from peftkit.proof.record import write_proof as write_proof
    from peftkit.recipe import Recipe as Recipe
    from peftkit.recipe import load as load_recipe
    from peftkit.report.history import list_runs as list_runs
    from peftkit.report.page import write_report as write_report
    from peftkit.run import check as check_recipe
    from peftkit.run import prepare as prepare_recipe
    from peftkit.run import run as run_recipe
    from peftkit.settings import DataConfig as DataConfig
    from peftkit.settings import TrainConfig as TrainConfig
    from peftkit.tasks.classes.sequence_classification import (
        SequenceClassification as SequenceClassification,
    )
    from peftkit.tasks.classes.sequence_classification import (
        SequenceClassificationConfig as SequenceClassificationConfig,
    )
    from peftkit.tasks.classes.token_classification import (
        TokenClassification as TokenClassification,
    )
    from peftkit.tasks.classes.token_classification import (
        TokenClassificationConfig as TokenClassificationConfig,
    )
    from peftkit.tasks.distill.distill import DistillConfig as DistillConfig
    from peftkit.tasks.media.ctc import CTCConfig as CTCConfig
    from peftkit.tasks.media.media_classification import (
        AudioClassificationConfig as AudioClassificationConfig,
    )
    from peftkit.tasks.media.media_classification import ImageClassification as ImageClassification
    from peftkit.tasks.media.media_classification import (
        ImageClassificationConfig as ImageClassificationConfig,
    )
    from peftkit.tasks.media.media_text import AudioTextConfig as AudioTextConfig
    from peftkit.tasks.media.media_text import ImageTextConfig as ImageTextConfig
    from peftkit.tasks.media.media_text import MediaText as ImageText
    from peftkit.tasks.media.media_text import MediaText as MediaText
    from peftkit.tasks.media.transcription import TranscriptionConfig as TranscriptionConfig
    from peftkit.tasks.pairs.preference import PreferenceConfig as PreferenceConfig
    from peftkit.tasks.pairs.reward import RewardConfig as RewardConfig
    from peftkit.tasks.retrieval.embedding import EmbeddingConfig as EmbeddingConfig
    from peftkit.tasks.retrieval.reranker import RerankerConfig as RerankerConfig
    from peftkit.tasks.rewards.grpo_config import GRPOConfig as GRPOConfig
    from peftkit.tasks.rewards.reward_functions import RewardTerm as RewardTerm
    from peftkit.tasks.text.masked_lm import MaskedLM as MaskedLM
    from peftkit.tasks.text.masked_lm import MaskedLMConfig as MaskedLMConfig
    from peftkit.tasks.text.seq2seq import Seq2Seq as Seq2Seq
    from peftkit.tasks.text.seq2seq import Seq2SeqConfig as Seq2SeqConfig
    from peftkit.tasks.tokens import CausalLM as CausalLM
    from peftkit.tasks.tokens import CausalLMConfig as CausalLMConfig
    from peftkit.train.loop import fit as fit


def _homes() -> dict[str, tuple[str, str]]:
    """Map each public name to its module and its name there, from the source of the imports."""
    source = __spec__.loader.get_source(__name__)  # type: ignore[union-attr]
    homes: dict[str, tuple[str, str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (module := node.module or "").startswith(
            "peftkit."
        ):
            homes |= {alias.asname: (module, alias.name) for alias in node.names if alias.asname}
    return homes


_HOMES = _homes()
__all__ = list(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'peftkit' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
