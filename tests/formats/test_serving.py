"""What vLLM would refuse is refused here, tensor by tensor; the rest is written as it wants it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.errors import AdapterError
from peftkit.events import Event, Notice
from peftkit.formats.card import adapter_usage, render_card, training_card
from peftkit.formats.exchange import export_adapter
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.formats.peft.low_rank import LowRank, save_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.formats.serving import MAX_LORA_RANKS, check_serving, max_lora_rank, served_rank
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from tests.helpers.adapters import logits, model_with_adapter
from tests.helpers.folders import change_json, change_tensors


def test_a_card_names_the_hub_id_and_the_rank(model_folder):
    base = replace(load_base(str(model_folder)), name="tiny", hub_id="org/tiny")
    adapter = attach(base.model, LoRA(rank=12))
    usage = adapter_usage("org/tiny", "run", rank=served_rank(adapter.method))
    card = training_card(base, adapter, data="rows", steps="1", metrics={}, recipe="", usage=usage)
    text = render_card(card)
    assert "base_model: org/tiny" in text
    assert "vllm serve org/tiny --enable-lora --max-lora-rank 16 " in text
    assert "vLLM" not in [name for name, _, _ in adapter_usage("b", "run")]
    assert [served_rank(DoRA(rank=4)), served_rank(LoRA(rank=600))] == [0, 0]


def test_a_hub_reads_the_metrics_of_the_eval_rows(model_folder):
    base = load_base(str(model_folder))
    adapter = attach(base.model, LoRA(rank=2))
    metrics = {"loss": 2.0, "eval_loss": 1.5, "eval_exact_match": 0.25, "eval_perplexity": math.inf}
    card = training_card(
        base,
        adapter,
        data="rows",
        steps="1",
        metrics=metrics,
        recipe="",
        usage=[],
        eval_data=str(model_folder / "config.json"),
        auto_class="AutoModelForCausalLM",
    )
    read = ModelCard(render_card(card)).data
    assert read.tags == ["peftkit"]
    found = {each.metric_type: each.metric_value for each in read.eval_results}
    assert found == {"loss": 1.5, "exact_match": 0.25}
    assert {each.task_type for each in read.eval_results} == {"text-generation"}
    assert {each.dataset_name for each in read.eval_results} == {"config.json"}
    assert "model-index" not in render_card(replace(card, eval_data=""))


PATTERNS = LoRA(rank=4, alpha=8, rslora=True, rank_pattern={"o": 2, "layers.1.mlp.up_proj": 1})


def change(folder: Path, fields: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Let a folder look as another tool could have written it."""
    (folder / "peftkit.json").unlink()
    change_json(folder / "adapter_config.json", **fields)
    change_tensors(folder / "adapter_model.safetensors", lambda own: own.update(tensors))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    _, adapter = model_with_adapter("llama", LoRA(rank=4, alpha=8, targets=("q", "v")))
    return save_adapter(adapter, tmp_path / "plain")


def test_one_rank_and_one_alpha_compute_the_same(tmp_path):
    model, adapter = model_with_adapter("llama", PATTERNS)
    expected = logits(model)
    save_adapter(adapter, tmp_path / "one")
    done = export_adapter(tmp_path / "one", tmp_path / "served", to="peft", serving=True)
    config = json.loads((tmp_path / "served" / "adapter_config.json").read_text())
    assert config["r"] == 4
    assert not {"rank_pattern", "alpha_pattern", "use_rslora"} & config.keys()
    for name, tensor in load_file(tmp_path / "served" / "adapter_model.safetensors").items():
        assert name.endswith((".lora_A.weight", ".lora_B.weight"))
        assert tensor.shape[0 if ".lora_A." in name else 1] == 4
    assert "--enable-lora --max-lora-rank 8 --lora-modules served=" in done.commands["vLLM"]
    adapter.detach()
    load_adapter(model, tmp_path / "served")
    # each scale is rounded once in float32; logits are of order one
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)
    (tmp_path / "served" / "peftkit.json").unlink()
    check_serving(tmp_path / "served")


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, {"lm_head.weight": torch.ones(2, 2)}, "lm_head.weight"),
        ({"lora_bias": True}, {"q_proj.lora_B.bias": torch.ones(2)}, "q_proj.lora_B.bias: a bias"),
        ({"bias": "all"}, {}, "bias is 'all'"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights is 'pissa'"),
        ({"use_qalora": True}, {}, "use_qalora"),
        ({"alora_invocation_tokens": [1]}, {}, "alora_invocation_tokens"),
        ({}, {"embed_tokens.lora_embedding_A": torch.ones(2, 2)}, "of an embedding"),
        ({}, {"mlp.experts.lora_A.weight": torch.ones(2, 2)}, "of experts"),
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'"),
    ],
)
def test_what_is_not_served_is_named(fields, tensors, message, plain, tmp_path):
    change(plain, fields, tensors)
    with pytest.raises(AdapterError) as error:
        export_adapter(plain, tmp_path / "served", to="peft", serving=True)
    assert message in error.value.found
    assert "peftkit merge" in error.value.fix
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize("serving", [False, True])
def test_another_precision_than_in_training_is_reported(tmp_path, serving):
    _, adapter = model_with_adapter("llama", LoRA(rank=4, targets=("q", "v")))
    folder, notices = tmp_path / "nf4", []
    for kind in ("nf4", "none"):
        save_adapter(adapter, folder, Provenance(base="org/base", loading={"quantize": kind}))
        events: list[Event] = []
        export_adapter(
            folder, tmp_path / f"out-{kind}", to="peft", serving=serving, on_event=events.append
        )
        notices.append([event.text for event in events if isinstance(event, Notice)])
    ((notice,), unquantized) = notices
    assert unquantized == []
    assert "trained over the base in nf4" in notice
    assert f"peftkit merge {folder} --from-quantized" in notice


def test_servers_read_no_other_format(plain, tmp_path):
    with pytest.raises(AdapterError, match="read PEFT's format"):
        export_adapter(plain, tmp_path / "served", to="mlx", serving=True)


def test_dora_is_refused_tensor_by_tensor(tmp_path):
    _, adapter = model_with_adapter("llama", DoRA(rank=2, targets=("q", "v")))
    save_adapter(adapter, tmp_path / "dora")
    with pytest.raises(AdapterError) as error:
        check_serving(tmp_path / "dora")
    assert error.value.found.count("the magnitude of DoRA") == 4


def test_a_rank_over_the_limit_is_refused(tmp_path):
    update = LowRank(torch.ones(513, 600), torch.ones(600, 513), 1.0)
    save_low_rank({"model.layers.0.self_attn.q_proj": update}, tmp_path, Provenance())
    with pytest.raises(AdapterError, match="rank 513; the limit is 512") as error:
        check_serving(tmp_path)
    assert "--method svd --rank 512" in error.value.fix


def test_the_bucket_is_the_next_that_vllm_has():
    assert [max_lora_rank(r) for r in (1, 2, 8, 9, 129, 321)] == [1, 8, 8, 16, 256, 512]
    assert max(MAX_LORA_RANKS) == 512
