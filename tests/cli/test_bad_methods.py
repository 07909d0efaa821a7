"""Methods and targets that this model cannot have: each one error, exit 2, before any training."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GPT2LMHeadModel

from tests.cli.conftest import Run
from tests.families import FAMILIES

ROLES = "Roles found: q, k, v, o, gate, up, down (2 layers), head, embed."


def refused(peftkit: Run, *settings: str) -> str:
    """Check and train a recipe with some settings; return what both say on stderr."""
    changes = [part for setting in settings for part in ("--set", setting)]
    checked = peftkit("check", "recipe.yaml", *changes)
    trained = peftkit("train", "recipe.yaml", *changes)
    for done in (checked, trained):
        assert done.code == 2
        assert "Traceback" not in done.err
    assert not Path("runs/demo/adapter_model.safetensors").exists()
    told = checked.err[checked.err.index("Error:") :].strip()
    assert told in trained.err
    return checked.err


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        ("[cross_q]", ["TargetError: no linear layer matches target 'cross_q' in LlamaFor", ROLES]),
        ("[experts]", ["no linear layer matches target 'experts' in LlamaForCausalLM.", ROLES]),
        ("[vision.q]", ["no linear layer matches target 'vision.q' in LlamaForCausalLM.", ROLES]),
        ("[q_porj]", ["no linear layer matches target 'q_porj'", "Did you mean 'q_proj'?"]),
        ('["layers.7.*"]', ["no linear layer matches target 'layers.7.*'", ROLES]),
        ("[q, input_layernorm]", ["'input_layernorm' matches modules, but none of them is linear"]),
        ('["*norm"]', ["none of them is linear", "LlamaRMSNorm"]),
        ("[embed_tokens]", ["none of them is linear: 1 Embedding"]),
        ("[]", ["no targets are given for LlamaForCausalLM."]),
    ],
)
def test_targets_that_name_nothing(
    targets: str, told: list[str], project: Path, peftkit: Run
) -> None:
    error = refused(peftkit, f"method.targets={targets}")
    for part in told:
        assert part in error
    assert "List every layer with: peftkit inspect" in error


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_rank_larger_than_a_matrix(kind: str, project: Path, peftkit: Run) -> None:
    error = refused(peftkit, f"method.type={kind}", "method.rank=17", "method.targets=[q, k]")
    assert "rank 17 is larger than the matrix of model.layers.0.self_attn.k_proj" in error
    assert "its shape is 32 x 16" in error
    assert "Use a rank of at most 16" in error


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("{type: bitfit}", "there is no bias to train in LlamaForCausalLM"),
        ("{type: ln_tuning, targets: [q_proj]}", "no normalisation layer matches 'q_proj'"),
        ("{type: bottleneck, reduction: 64}", "reduction 64 does not fit"),
        ("{type: lora, train_fully: [clasifier]}", "no module is called 'clasifier'"),
        (
            "{type: lora, rank: 2, targets: [q], init: loftq}",
            "method.init: loftq makes up for what quantising",
        ),
    ],
)
def test_methods_that_do_not_suit_the_model(
    method: str, told: str, project: Path, peftkit: Run
) -> None:
    recipe = project / "recipe.yaml"
    lines = recipe.read_text(encoding="utf-8").splitlines()
    lines[1] = f"method: {method}"
    recipe.write_text("\n".join(lines), encoding="utf-8")
    assert told in refused(peftkit)


def test_a_method_of_another_name_is_near_to_one(project: Path, peftkit: Run) -> None:
    assert "Did you mean 'ia3'?" in refused(peftkit, "method.type=ia4")


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("bottleneck", "it adds layers with a nonlinearity"),
        ("prompt_tuning", "it adds tokens to the input"),
        ("prefix_tuning", "it adds tokens to the input"),
    ],
)
def test_merging_what_no_weight_can_hold(
    method: str, reason: str, project: Path, peftkit: Run
) -> None:
    recipe = project / "recipe.yaml"
    lines = recipe.read_text(encoding="utf-8").splitlines()
    lines[1] = f"method: {{type: {method}}}"
    recipe.write_text("\n".join(lines), encoding="utf-8")
    settings = ("--set", "train.max_steps=1", "--set", "data.packing=false")
    trained = peftkit("train", "recipe.yaml", *settings)
    assert trained.code == 0, trained.err
    done = peftkit("merge", "runs/demo", "--out", "merged")
    assert (done.code, done.out) == (2, "")
    assert f"MergeError: an adapter of type '{method}' cannot be merged" in done.err
    assert reason in done.err
    assert not Path("merged").exists()


def test_a_role_of_a_fused_layer_that_a_start_cannot_split(
    project: Path, peftkit: Run, tokenizer, tmp_path: Path
) -> None:
    model = FAMILIES["gpt2"]()
    assert isinstance(model, GPT2LMHeadModel)
    model.save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    error = refused(peftkit, f"base.model={tmp_path / 'gpt2'}", "method.init=pissa")
    assert "init 'pissa' is not possible for a part of the fused layer transformer.h.0" in error
