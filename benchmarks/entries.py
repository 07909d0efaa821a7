"""The benchmarks behind the figures in README.md and docs/: commands, and the code they measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ON_A_CPU = ("attention", "block_scaled", "by_row", "cross_entropy", "device", "fused")
KERNELS = tuple(
    f"kernels/{name}.py" for name in (*ON_A_CPU, "lora", "packed", "stacked", "tiled", "varlen")
)
LORA = (*KERNELS, "adapter.py", "methods/base.py", "methods/lora.py", "model", "quant")
"""Files of peftkit/ that every LoRA run on a CPU uses."""
LOADING = ("base/build.py", "base/load.py", "base/pack.py", "base/pretrained.py", "base/store.py")
GGUF = ("base/gguf_file.py", "base/published", "kernels/gguf_blocks.py")


def _tasks(*names: str) -> tuple[str, ...]:
    return tuple(f"tasks/{name}.py" for name in names)


LOSS = ("forward", *_tasks("base", "batches", "row_loader"))
TRAINING = (*LORA, "execution", "train", "data/pack.py", "data/rows/lazy.py", *LOSS)
CAUSAL = (*TRAINING, *_tasks("completions", "metrics", "tokens"))


PAIRS = (
    *CAUSAL,
    *_tasks(
        "documents",
        "pairs/preference",
        "pairs/preference_losses",
        "pairs/preference_rows",
        "run_hooks",
        "whole_step",
    ),
)
REWARDS = (
    *CAUSAL,
    *_tasks("documents", "run_hooks", "rewards/grpo", "rewards/grpo_losses"),
    *_tasks("rewards/grpo_rows", "rewards/reward_functions"),
    "inference",
)
CLASSES = (*TRAINING, *_tasks("classes/labels", "metrics", "texts"))
ANSWERS = (*LORA, "inference")
PEERS = {"PEERS": "trl and peft", "UNSLOTH": "unsloth"}
"""Placeholders in commands for Pythons of other environments -> their packages."""
TRAIN = "python -m benchmarks.train --peers PEERS "
RECIPE = (*CAUSAL, "data", "recipe.py", "run.py")
CARD_SIDES = {
    "ours": "ours",
    "recomputed": "ours-recompute",
    "unsloth": "unsloth",
    "trl": "trl-liger",
}
"""Names of figures -> sides of the part `peers` of benchmarks.card."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark: its commands, and its cells in a table.

    Attributes:
        commands: Shell commands in order, environment variables first, with the placeholders of
            `PEERS`.
        measures: Files and folders of peftkit/ and cli/; figures are stale if they change.
        what, tells: The first two cells of a summary row; {names} are figures.
        shown_rows: Pattern that selects the table rows of a page; by default, all rows.
        reads: Name of a figure -> pattern in the output; several matches are joined by commas.
    """

    commands: tuple[str, ...]
    measures: tuple[str, ...]
    what: str = ""
    tells: str = ""
    reads: Mapping[str, str] = field(default_factory=dict)
    shown_rows: str = ""

    @property
    def needs(self) -> tuple[str, ...]:
        """The placeholders in its commands."""
        words = {word for command in self.commands for word in command.split()}
        return tuple(word for word in PEERS if word in words)


def _trained(options: str) -> Benchmark:
    return Benchmark((TRAIN + options,), CAUSAL)


ENTRIES: Mapping[str, Benchmark] = {
    "quickstart": Benchmark(
        ("python recipes/examples/quickstart.py",),
        (*RECIPE, "inference"),
        "Quickstart: exact match on 64 held-out orders",
        "{before} before training, {after} after; {minutes} minutes in total",
        {
            "before": r"Before: (\S+) exact",
            "after": r"After: (\S+) exact",
            "minutes": r"took (\S+) minutes",
        },
    ),
    "preferences-recipe": Benchmark(
        ("python recipes/examples/preferences.py",),
        (*RECIPE, "inference", *PAIRS),
        "DPO on the quickstart's adapter to omit empty fields: 144 training pairs; 16 pairs and 32 "
        "orders held out",
        "pairs with the chosen answer more likely: {pairs}; exact match on orders without extras: "
        "{without}, with extras: {extras}; valid JSON: {valid}; {minutes} minutes",
        {
            "pairs": r"more probable: (.+)",
            "valid": r"valid JSON: (.+)",
            "without": r"exactly right, where there are no extras: (.+)",
            "extras": r"exactly right, where there are extras: (.+)",
            "minutes": r"([\d.]+) minutes",
        },
    ),
    "hear-digits": Benchmark(
        tuple(f"python recipes/examples/hear_digits.py --seed {seed}" for seed in range(3)),
        (*CLASSES, *_tasks("media/ctc", "media/speech")),
        "CTC model adapted from one voice to another: 6,704 trained parameters, 80 held-out "
        "sentences",
        "WER on the new voice for seeds 0, 1, 2: {before} before, {after} after",
        {"before": r"other voice: WER (\S+) ->", "after": r"other voice: WER \S+ -> ([^\s,]+)"},
    ),
    "calculator": Benchmark(
        ("python recipes/examples/calculator.py",),
        (*RECIPE, *REWARDS, *_tasks("rewards/grpo_tools", "user_code")),
        "GRPO with a calculator tool, SmolLM2-135M, after SFT on six plain products: 32 held-out "
        "word problems",
        "correct answers {right}; correct calls {called}; truncated {cut}; {minutes} minutes",
        {
            "right": r"right answers: (.+)",
            "called": r"right calls: (.+)",
            "cut": r"cut: (.+)",
            "minutes": r"([\d.]+) minutes",
        },
    ),
    "defaults": Benchmark(("python -m benchmarks.defaults",), ("defaults.py",)),
    "parity": Benchmark(
        ("python -m benchmarks.parity", "python -m benchmarks.parity --quantize nf4 --steps 10"),
        (*CAUSAL, *LOADING),
        "Loss compared with PEFT in a plain training loop, SmolLM2-135M: 30 steps (NF4: 10)",
        "maximum difference {fp32} in fp32, {nf4} in NF4",
        {
            "fp32": r"difference (\S+), allowed \S+ \(none\)",
            "nf4": r"difference (\S+), allowed \S+ \(nf4\)",
        },
    ),
    "train": Benchmark(
        (TRAIN + "--against trl,trl-model-loss --repeats 1",),
        CAUSAL,
        "Training compared with TRL + PEFT, and with TRL using the model's own loss: SmolLM2-135M, "
        "160 rows, batch size 8, bf16",
        "{trl} the tokens/s at {memory} the peak memory; {loss} at {loss_memory}",
        {
            "trl": r"\| trl .* (\S+ x) \| +\S+ x \| +\S+ x \|",
            "memory": r"\| trl .* (\S+ x) \|\n",
            "loss": r"\| trl-model-loss .* (\S+ x) \| +\S+ x \| +\S+ x \|",
            "loss_memory": r"\| trl-model-loss .* (\S+ x) \|",
        },
    ),
    "train-2000": _trained("--rows 2000 --repeats 1 --against trl"),
    "train-nf4": _trained(
        "--quantize nf4 --rows 1000 --train '{\"compile\": true}' --against trl --repeats 1"
    ),
    "train-mixed": _trained("--data mixed --rows 96 --against trl,trl-model-loss --repeats 1"),
    "train-unsloth": Benchmark(
        ("python -m benchmarks.train --rows 96 --repeats 1 --against unsloth --unsloth UNSLOTH",),
        CAUSAL,
    ),
    "families": Benchmark(("python -m benchmarks.families --rows 80 --repeats 1",), TRAINING),
    "families-hybrids": Benchmark(
        (
            "python -m benchmarks.families --families qwen3_5,lfm2,granitemoehybrid,nemotron_h,"
            "kimi_linear,gpt_oss --lengths mixed --rows 40 --repeats 1",
        ),
        (*CAUSAL, "kernels/delta_rule.py"),
    ),
    "families-t5": Benchmark(
        (
            "python -m benchmarks.families --families t5 --rows 400 --train '{\"compile\": true}' "
            "--repeats 1",
        ),
        (*CLASSES, *_tasks("completions", "text/seq2seq", "tokens")),
    ),
    "startup": Benchmark(
        ("python -m benchmarks.startup --peers PEERS",), (*LOADING, *LORA, "merging", "formats")
    ),
    "attention": Benchmark(("python -m benchmarks.attention",), ("kernels/attention.py",)),
    "growth": Benchmark(("python -m benchmarks.growth --steps 3",), CAUSAL),
    "generation": Benchmark(
        tuple(
            f"python -m benchmarks.generation --dtype fp32 --layers 4 {options} --repeats 1"
            for options in (
                "--new-tokens 16",
                "--new-tokens 16 --batch-size 64",
                "--scenario mixed --prompts 48",
                "--scenario forks --prompts 8 --new-tokens 16",
            )
        ),
        ANSWERS,
    ),
    "bank": Benchmark(
        ("python -m benchmarks.bank --new-tokens 16",),
        ANSWERS,
        "Generation with 8 adapters in one batch compared with one adapter: SmolLM2-135M, bf16, 8 "
        "rows",
        "{ours} x the tokens/s (PEFT: {peft} x); switching adapters takes {switch}",
        {
            "ours": r"mixed / one: (\S+);",
            "peft": r"PEFT's: (\S+);",
            "switch": r"switch and back: (\S+ us);",
        },
    ),
    "large-7b": Benchmark(
        (
            "python -m benchmarks.large --size 7b --ways "
            "'first start;second start;step, streamed;step, mapped'",
        ),
        (*CAUSAL, *LOADING, "base/streaming.py"),
        "7B base in NF4: second start; one QLoRA step of 512 tokens with streamed weights",
        "{started} s; {step} s with {memory} GB of anonymous memory",
        {
            "started": r"\| second start +\| +(\S+)",
            "step": r"\| step, streamed +\| +(\S+)",
            "memory": r"\| step, streamed +\| +\S+ +\| +(\S+)",
        },
    ),
    "profile": Benchmark(
        ("python -m benchmarks.profile --side peft", "python -m benchmarks.profile"),
        CAUSAL,
        shown_rows="%",
    ),
    "generation-more": Benchmark(
        tuple(
            f"python -m benchmarks.generation --repeats 1 {options}"
            for options in (
                "--dtype fp32 --prompts 32 --new-tokens 16",
                "--dtype fp32 --batch-size 64 --new-tokens 12",
                "--dtype fp32 --scenario forks --prompts 3 --new-tokens 12 --layers 15",
                "--quantize nf4 --prompts 24 --new-tokens 8 --layers 15",
            )
        ),
        ANSWERS,
    ),
    "serving": Benchmark(
        ("OMP_NUM_THREADS=1 python -m benchmarks.serving --requests 1 --longest 16 --peers PEERS",),
        (*ANSWERS, "peftkit_server"),
    ),
    "encoding": Benchmark(
        ("python -m benchmarks.encoding --rows 10000 --against map trl --peers PEERS",),
        ("data", "forward/loss.py", "tasks/tokens.py", "forward/padding_free.py"),
    ),
    "large": Benchmark(("python -m benchmarks.large",), (*CAUSAL, *LOADING)),
    "plan": Benchmark(("python -m benchmarks.plan",), (*CAUSAL, "planning"), shown_rows=r"\b512\b"),
    "sharding": Benchmark(
        ("OMP_NUM_THREADS=1 python -m benchmarks.sharding --peers PEERS",), CAUSAL
    ),
    "preferences": Benchmark(
        (
            "python -m benchmarks.preferences --peers PEERS",
            "OMP_NUM_THREADS=1 python -m benchmarks.preferences --speed --rows 24 --peers PEERS",
        ),
        PAIRS,
    ),
    "rewards": Benchmark(
        (
            "python -m benchmarks.rewards --peers PEERS",
            "OMP_NUM_THREADS=1 python -m benchmarks.rewards --speed --peers PEERS",
        ),
        REWARDS,
    ),
    "tools": Benchmark(
        ("python -m benchmarks.tools --peers PEERS",),
        (*REWARDS, "tasks/rewards/grpo_tools.py"),
    ),
    "gguf": Benchmark(
        ("python -m benchmarks.gguf",),
        (*RECIPE, *LOADING, *GGUF, "inference", "merging"),
    ),
    "streaming": Benchmark(("python -m benchmarks.streaming",), (*CAUSAL, "planning")),
    "fits": Benchmark(("python -m benchmarks.fits",), (*CAUSAL, "planning")),
    "fits-embeddings": Benchmark(
        (
            "python -m benchmarks.fits --models llama-3.1-8b,qwen2.5-14b --cards 6,8,12,16 "
            "--embeddings nf4",
        ),
        (*CAUSAL, "planning"),
    ),
    "card": Benchmark(
        ("python -m benchmarks.card --part first --peers PEERS --unsloth UNSLOTH",),
        (*RECIPE, *LOADING, *REWARDS),
        "QLoRA of an 8B (random weights) on one H100, 4 rows of 2,048 tokens a step",
        "{ours} tokens/s with all activations kept ({ours_gb} GB), {recomputed} recomputed "
        "({recomputed_gb} GB); Unsloth {unsloth} ({unsloth_gb} GB), TRL + Liger {trl} "
        "({trl_gb} GB)",
        {
            f"{name}{suffix}": rf"\| +{side} +\| +run all; tokens/s {number}"
            for name, side in CARD_SIDES.items()
            for suffix, number in (("", r"(\d+)"), ("_gb", r".*?allocated GB ([\d.]+)"))
        },
    ),
    "simulate": Benchmark(("python -m benchmarks.simulate",), CAUSAL),
    "intents": Benchmark(
        ("python recipes/examples/intents.py",),
        (*CLASSES, *_tasks("classes/sequence_classification", "classes/token_classification")),
        "MiniLM-L6: 7 intents, 160 held-out texts; entity tagging",
        "accuracy {accuracy}; entity F1 {f1}",
        {"accuracy": r": accuracy (\S+ -> \S+)", "f1": r": \S*f1 (\S+ -> \S+)"},
    ),
    "digits": Benchmark(
        ("python recipes/examples/digits.py",),
        (*CLASSES, *_tasks("media/media_classification", "media/speech")),
        "Small ViT trained on upright digits, adapted to rotated and inverted ones",
        "accuracy {before} -> {after}",
        {
            "before": r"accuracy on .*: (\S+) before",
            "after": r"accuracy on .* before, (\S+) after",
        },
    ),
    "read-digits": Benchmark(
        ("python recipes/examples/read_digits.py",),
        (*CAUSAL, "tasks/media/media_text.py"),
        "SmolLM2-135M with a small vision tower reads three-digit numbers: 32 held-out images",
        "{before} before; {tower} after training projector and tower; {after} after LoRA on the "
        "language model",
        {
            "before": r"(?m)^before: (\S+)",
            "tower": r"after stage 1 \(vision\): (\S+)",
            "after": r"after stage 2 \(language\): (\S+)",
        },
    ),
    "coverage": Benchmark(
        ("python -m benchmarks.coverage --quantize none,nf4",),
        ("adapter.py", "kernels", "methods", "model", "quant"),
        "Every method on every architecture, 16-bit and NF4",
        "{cells} combinations: {passed} pass, {refused} do not apply and give a reason, {failed} "
        "fail",
        {
            "cells": r"(\d+) cells:",
            "passed": r"cells: (\d+) pass",
            "refused": r"(\d+) n/a",
            "failed": r"(\d+) FAIL",
        },
    ),
}
