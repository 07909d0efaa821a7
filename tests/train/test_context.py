"""Rows whose tokens lie on two processes teach what they teach on one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from peftkit.adapter import attach
from peftkit.config.schema import from_dict
from peftkit.errors import ConfigError, PeftkitError
from peftkit.execution.world import PATIENCE
from peftkit.formats.peft.load import named_tensors
from peftkit.methods.lora import LoRA
from peftkit.recipe import Recipe
from peftkit.run import run
from peftkit.settings import DataConfig
from peftkit.tasks.tokens import CausalLM
from peftkit.train.context_parallel import (
    Context,
    ContextParallel,
    ContextParallelTask,
    own_part,
    unsuited,
)
from tests.families import ARCHITECTURES, FURTHER, tiny_tokenizer
from tests.tasks.test_unpadding import a_row
from tests.train.children import exit_code, start
from tests.train.sharded import together
from tests.train.test_sharding import losses, recipe

MODELS = {**ARCHITECTURES, **FURTHER}
CAN = {*("llama", "qwen2", "qwen3", "mixtral", "gpt2", "gpt_neox", "phi3", "olmo2", "qwen3_moe")}
"""Known to take rows in parts; others may, and are held to the same."""
CANNOT = {*("gemma2", "mistral_swa", "mamba", "jamba", "lfm2", "minimax", "mpt", "bloom")}
"""A window, capped scores, a state, a convolution or distances."""


def in_parts(folder: Path, model: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe of rows on two processes."""
    train = {"context_parallel": 2, "shard": "none", "output_dir": str(folder / "two")}
    train |= sections.get("train", {})
    return recipe(folder, model, **{**sections, "train": train})


def test_groups_of_processes_wait_as_long_as_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of its own has NCCL's ten minutes unless it is given more."""
    given: list[Any] = []

    def new_subgroups(size: int, timeout: Any = None) -> tuple[None, None]:
        given.append(timeout)
        return None, None

    monkeypatch.setattr(dist, "new_subgroups", new_subgroups)
    world: Any = SimpleNamespace(world_size=2, rank=0)
    task: Any = SimpleNamespace(bucket_key=lambda row: 0)
    ContextParallel(world, task, 2, [a_row(3)])
    assert given == [PATIENCE]


def launch(settings: dict[str, Any], world: int = 2) -> None:
    folder = Path(settings["train"]["output_dir"])
    assert together(folder.parent, {folder.name: settings}, world) == {}


def same_as_alone(folder: Path, model: Path, **sections: dict[str, Any]) -> None:
    alone = {**sections.get("train", {}), "output_dir": str(folder / "one")}
    alone |= {"shard": "none", "context_parallel": 1}
    run(from_dict(Recipe, recipe(folder, model, **{**sections, "train": alone}), "test"))
    assert losses(folder / "two") == pytest.approx(losses(folder / "one"), rel=1e-5)
    assert losses(folder / "two", "num_tokens") == losses(folder / "one", "num_tokens")
    ours, theirs = named_tensors(folder / "two"), named_tensors(folder / "one")
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        pytest.param({"train": {"gradient_checkpointing": True}}, marks=pytest.mark.slow),
        pytest.param(
            {"train": {"shard": "base"}, "base": {"quantize": "nf4"}}, marks=pytest.mark.slow
        ),
        pytest.param({"method": {"type": "dora"}}, marks=pytest.mark.slow),
    ],
    ids=["lora", "recomputed", "sharded-nf4", "dora"],
)
def test_rows_on_two_processes_teach_what_they_do_on_one(
    sections: dict[str, dict[str, Any]], tmp_path: Path, model_folder: Path
) -> None:
    launch(in_parts(tmp_path, model_folder, **sections))
    same_as_alone(tmp_path, model_folder, **sections)


@pytest.mark.slow
def test_two_groups_learn_from_rows_of_their_own(tmp_path: Path, model_folder: Path) -> None:
    launch(in_parts(tmp_path, model_folder, train={"shard": "base"}), world=4)
    same_as_alone(tmp_path, model_folder, train={"gradient_accumulation": 2})


@pytest.mark.slow
def test_a_process_may_have_nothing_to_learn(tmp_path: Path, model_folder: Path) -> None:
    settings = in_parts(tmp_path, model_folder, train={"batch_size": 1})
    rows = [{"instruction": "Say " * (4 + n % 3), "output": "yes"} for n in range(8)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    Path(settings["data"]["train"]).write_text(text)
    launch(settings)
    alone = {**settings["train"], "output_dir": str(tmp_path / "one"), "context_parallel": 1}
    run(from_dict(Recipe, {**settings, "train": alone}, "test"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def each_model(rank: int, folder: Path) -> None:
    """Write for each model why it is refused, or how far it is in parts from in one piece."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    context, row, results = Context(dist.group.WORLD, 2, rank), a_row(37), {}
    data = DataConfig(train="", max_length=64, packing=False)
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model = build().eval()
        if not any(kind in type(model).__name__ for kind in ("CausalLM", "LMHead")):
            continue
        try:
            attach(model, LoRA(rank=3))
            task = CausalLM(model, tiny_tokenizer(), data)
        except PeftkitError:
            continue  # is no causal language model
        trained = [p for p in model.parameters() if p.requires_grad]
        torch.nn.init.normal_(trained[-1], std=0.1)
        expected = task.loss(model, task.collate([row]))[0]
        expected_grads = torch.autograd.grad(expected, trained, allow_unused=True)
        parts = ContextParallelTask(task, context)
        try:
            with parts.training(model):
                loss = parts.loss(model, parts.collate([row]))[0]
                grads = torch.autograd.grad(loss, trained, allow_unused=True)
        except ConfigError as error:
            results[name] = str(error.found)
            continue
        sums = [loss.detach(), *(torch.zeros(()) if g is None else g for g in grads)]
        for each in sums:
            dist.all_reduce(each)
        expected_all = [
            expected.detach(),
            *(torch.zeros(()) if g is None else g for g in expected_grads),
        ]
        largest = max(float(w.abs().max()) for w in expected_all[1:])
        differs = max(
            float((a - w).abs().max()) for a, w in zip(sums[1:], expected_all[1:], strict=True)
        )
        results[name] = [float((sums[0] - expected) / expected), differs / largest]
    (folder / f"{rank}.json").write_text(json.dumps(results))
    os._exit(0)


@pytest.mark.slow
def test_each_model_is_the_same_in_parts_or_refused(tmp_path: Path) -> None:
    children = [start(each_model, rank, tmp_path) for rank in range(2)]
    assert [exit_code(child, 400) for child in children] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    taken = {name: value for name, value in first.items() if not isinstance(value, str)}
    assert taken.keys() >= CAN
    assert first.keys() - taken.keys() >= CANNOT
    assert {name: value for name, value in taken.items() if max(map(abs, value)) > 1e-5} == {}


REFUSED: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({}, "There is one process"),
    ({"train": {"context_parallel": 3}}, "There are 2 processes"),
    ({"train": {"sample_every": 2}}, "sample_every"),
    ({"method": {"type": "prompt_tuning"}}, "virtual tokens"),
    ({"data": {"packing": True}}, "one document each"),
    ({"task": {"type": "embedding"}}, "The task is embedding"),
]


@pytest.mark.parametrize(("sections", "reason"), REFUSED)
def test_what_cannot_be_in_parts_is_refused_before_anything_is_loaded(
    sections: dict[str, dict[str, Any]],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = in_parts(tmp_path, Path("nowhere"), **sections)
    if "method" in sections:
        settings["method"] = sections["method"]
    if "task" in sections:
        settings["task"] = sections["task"]
        settings["data"] = {"train": "pairs.jsonl"}
    if sections:
        monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(ConfigError) as error:
        run(from_dict(Recipe, settings, "test"))
    assert reason in str(error.value)
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_parts_of_a_batch_are_all_of_it(size: int) -> None:
    ids = torch.arange(3, 49).view(2, 23)
    index = torch.tensor([4, 17, 21, 23, 30, 44])
    batch = {"input_ids": ids, "target_index": index, "targets": ids.flatten()[index + 1]}
    counts = torch.zeros_like(ids)
    targets = 0
    for place in range(size):
        part = own_part(batch, Context(None, size, place))
        assert part["input_ids"].shape[1] == 2 * -(-23 // (2 * size))
        for row, where in enumerate(part["position_ids"]):
            real = part["input_ids"][row] != 0  # of the padding
            assert torch.equal(ids[row, where[real]], part["input_ids"][row, real])
            counts[row, where[real]] += 1
        tokens = part["input_ids"].flatten()[part["target_index"]]
        assert torch.equal(tokens + 1, part["targets"])
        targets += len(tokens)
    assert torch.equal(counts, torch.ones_like(ids))
    assert targets == len(index)


@pytest.mark.parametrize(("kind", "is_refused"), [("dynamic", True), ("linear", False)])
def test_rotations_that_depend_on_the_length_are_refused(kind: str, is_refused: bool) -> None:
    rotation = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
    config = LlamaConfig(rope_parameters=rotation, num_hidden_layers=1, vocab_size=8)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert bool(unsuited(model)) is is_refused
