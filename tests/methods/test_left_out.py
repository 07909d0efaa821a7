"""What a group of targets leaves out, and who is told of it."""

import pytest

from peftkit.adapter import attach
from peftkit.config.schema import from_dict
from peftkit.errors import TargetError
from peftkit.formats.card import adapter_table
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from peftkit.model.targets import resolve
from peftkit.recipe import Recipe
from peftkit.run import prepare
from tests.helpers.families import ARCHITECTURES, FAMILIES
from tests.helpers.hybrids import FURTHER
from tests.helpers.kinds import inputs, loss


def test_layers_that_only_choose_are_adapted_only_when_named():
    model = FURTHER["deepseek_v32"]()
    for group in ("all-linear", "attention", "self_attention"):
        assert not [site.path for site in resolve(model, group) if "indexer" in site.path]
    named = {site.path.rpartition(".")[2] for site in resolve(model, "indexer")}
    assert named == {"wq_b", "wk", "weights_proj"}


@pytest.mark.parametrize("name", ["deepseek_v32", "jetmoe", "doge"])
def test_a_gradient_reaches_all_that_all_linear_adapts(name):
    model = FURTHER[name]()
    adapter = attach(model, LoRA(rank=2))
    loss(model, inputs(model)).backward()
    learning = [p.grad for p in adapter.parameters() if p.grad is not None and p.grad.any()]
    assert len(learning) * 2 == len(list(adapter.parameters()))  # each B: A has none at first


@pytest.mark.parametrize("method", [LoRA(rank=4), DoRA(rank=4)])
def test_a_layer_smaller_than_the_rank_is_left_out_of_a_group_by_name(method):
    model = FURTHER["doge"]()  # its dt_proj has two rows
    adapter = attach(model, method)
    assert len(adapter.modules) == 14
    assert not any(path.endswith("dt_proj") for path in adapter.modules)
    rows = {row[1]: row for row in adapter_table(adapter).rows}
    assert rows["dt_proj"][2] == "2"
    assert rows["dt_proj"][3].startswith("left out")
    smaller = adapter_table(attach(FURTHER["doge"](), method.model_copy(update={"rank": 2})))
    assert {row[1]: row for row in smaller.rows}["dt_proj"][3].isdigit()


def test_a_layer_smaller_than_the_rank_is_refused_when_it_is_named():
    for targets in (("all-linear", "dt_proj"), ("*.dt_proj",), ("q", "other")):
        with pytest.raises(TargetError, match=r"rank 4 is larger than the matrix of .*dt_proj"):
            attach(FURTHER["doge"](), LoRA(rank=4, targets=targets))


def test_towers_are_left_out_where_no_targets_are_named():
    model = ARCHITECTURES["llava"]()
    adapter = attach(model, LoRA(rank=2))
    assert adapter.method.targets == ("language.all-linear",)
    assert len(adapter.modules) == 14
    assert not any("vision" in path or "projector" in path for path in adapter.modules)
    adapter.detach()
    assert len(attach(model, LoRA(rank=2, targets="all-linear")).modules) > 14


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ({"targets": ["q", "q_porj"]}, "Did you mean 'q_proj'"),
        ({"rank": 4096}, "rank 4096 is larger than the matrix of"),
        ({"rank": 4096, "init": "eva"}, "rank 4096 is larger than the matrix of"),
        ({"train_fully": ["lm_haed"]}, "Did you mean 'lm_head'"),
    ],
)
def test_targets_are_checked_before_loading(method, found, tmp_path):
    model = FAMILIES["llama"]()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "base")  # and no weights
    rows = tmp_path / "train.jsonl"
    rows.write_text('{"prompt": "one", "completion": "two"}\n')
    recipe = from_dict(
        Recipe,
        {
            "base": {"model": str(tmp_path / "base")},
            "method": {"type": "lora", **method},
            "data": {"train": str(rows)},
            "train": {"output_dir": str(tmp_path / "run"), "max_steps": 1},
        },
        "test",
    )
    with pytest.raises(TargetError, match=found):
        prepare(recipe)
