"""PEFT loads what is saved here and computes the same, and the reverse."""

import copy
import json
from itertools import cycle, product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from peftkit.adapter import attach
from peftkit.errors import AdapterError
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.formats.peft.targets import selected, shortest_endings
from peftkit.methods.base import Method
from peftkit.methods.dora import DoRA
from peftkit.methods.ia3 import IA3
from peftkit.methods.lora import LoRA
from peftkit.methods.own_parameters import LNTuning
from peftkit.methods.vera import VeRA
from tests.helpers import grid, laws
from tests.helpers.adapters import logits, perturb
from tests.helpers.families import ARCHITECTURES, FAMILIES
from tests.helpers.folders import change_json

pytestmark = pytest.mark.filterwarnings(
    # PEFT asks transformers by an old name
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    # PEFT knows no sizes of norms, and does not need them
    "ignore:Unsupported layer type .*Norm'>' encountered:UserWarning",
    # PEFT applies patterns to stacks of experts, but looks for modules of that name
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning",
)
TOLERANCE = 1e-5
"""float32 sums in another order; logits are of order one."""

ROLES = ("q", "v", "o", "down")
OURS = {
    "alpha-float": LoRA(rank=4, alpha=2.5, targets=ROLES),
    "patterns": LoRA(
        rank=4,
        alpha=8,
        targets=ROLES,
        rslora=True,
        rank_pattern={"o": 2, r"layers\.1\.mlp\.down_proj": 3},
        alpha_pattern={"v": 5},
    ),
    "pissa-rslora": LoRA(rank=4, alpha=8, targets=ROLES, init="pissa", rslora=True),
    "dora-patterns": DoRA(rank=4, alpha=8, targets=ROLES, rslora=True, rank_pattern={"o": 2}),
    "ia3-outputs": IA3(targets=("q", "v", "up"), feedforward=()),
    "vera-seed-only": VeRA(rank=8, targets=("k", "down"), projection_seed=3, save_projection=False),
    "ln-tuning-some": LNTuning(targets=("input_layernorm",)),
}
OURS_FUSED = {
    "lora-qv": LoRA(rank=4, alpha=8, targets=("q", "v")),
    "ia3": IA3(),
    "vera": VeRA(rank=8, targets=("q", "v")),
}
OURS_EXPERTS = {
    "mixtral": LoRA(rank=3, alpha=6, targets=("experts",)),
    "qwen3_moe": LoRA(rank=3, alpha=6, targets=("expert_up", "q")),
    "deepseek_v3": LoRA(rank=3, alpha=6, rslora=True, targets=("experts",)),
    "gpt_oss": LoRA(
        rank=3,
        alpha=6,
        rank_pattern={"expert_down": 2, "down_proj": 2, "gate_proj": 5},
        alpha_pattern={"o": 5},
    ),
}
COMMON: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
}
IN = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
THEIRS: dict[str, peft.PeftConfig] = {
    name: peft.LoraConfig(**(COMMON | fields))
    for name, fields in {
        "patterns": {
            "rank_pattern": {"v_proj": 2},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 3},
        },
        "gaussian": {"init_lora_weights": "gaussian"},
        "regex": {"target_modules": r".*layers\.1.*(q_proj|up_proj)"},
        "some-layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
        "without": {"exclude_modules": ["layers.0.mlp.down_proj"]},
        "without-a-target": {"exclude_modules": ["down_proj"]},
        "all-without-a-target": {"target_modules": "all-linear", "exclude_modules": r".*up_proj"},
    }.items()
} | {
    "ia3-regex": peft.IA3Config(**IN, feedforward_modules=r".*\.1\.mlp\.down_proj"),
    "vera-seed": peft.VeraConfig(**IN, r=8, projection_prng_key=11),
    "ln-tuning": peft.LNTuningConfig(target_modules=["input_layernorm", "model.norm"]),
}
THEIRS_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "qwen3_moe": {"target_parameters": ["experts.down_proj"], "target_modules": []},
    "deepseek_v3": {"target_parameters": ["mlp.experts.gate_up_proj"], "use_rslora": True},
    "gpt_oss": {
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "rank_pattern": {"experts.down_proj": 2},
        "alpha_pattern": {"gate_up_proj": 5},
    },
}


def nudge(model: nn.Module) -> None:
    """Stand in for training: move every trainable value a little."""
    perturb([p for p in model.parameters() if p.requires_grad], seed=7)


@pytest.fixture
def base() -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES["llama"]().eval()


@pytest.mark.filterwarnings("ignore:Specified to not (save|load) vera_A")
@pytest.mark.parametrize("name", OURS)
def test_peft_computes_the_same_from_our_file(name, base, tmp_path):
    check_writing(base, OURS[name], tmp_path)


@pytest.mark.filterwarnings("ignore:Specified to not (save|load) vera_A")
@pytest.mark.parametrize("name", THEIRS)
def test_we_compute_the_same_from_their_file(name, base, tmp_path):
    config = copy.deepcopy(THEIRS[name])
    if isinstance(config, peft.VeraConfig):
        config.save_projection = False  # made again from the seed
    check_reading(base, config, tmp_path)


@pytest.mark.parametrize("family", THEIRS_EXPERTS)
def test_we_compute_the_same_from_their_experts(family, tmp_path):
    torch.manual_seed(0)
    fields = {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]} | THEIRS_EXPERTS[family]
    check_reading(ARCHITECTURES[family]().eval(), peft.LoraConfig(**fields), tmp_path)


def check_reading(base: nn.Module, config: peft.PeftConfig, folder: Path) -> None:
    ours = copy.deepcopy(base)
    config.task_type = "CAUSAL_LM"
    theirs = peft.get_peft_model(base, config).eval()
    nudge(theirs)
    theirs.save_pretrained(folder)
    adapter = load_adapter(ours, folder)
    torch.testing.assert_close(logits(ours), logits(theirs), atol=TOLERANCE, rtol=0)
    save_adapter(adapter, folder / "again")
    adapter.detach()
    load_adapter(ours, folder / "again")
    torch.testing.assert_close(logits(ours), logits(theirs), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", OURS_FUSED)
def test_peft_computes_the_same_from_roles_of_a_fused_layer(name, tmp_path):
    torch.manual_seed(0)
    check_writing(FAMILIES["gpt2"]().eval(), OURS_FUSED[name], tmp_path)


@pytest.mark.parametrize("family", OURS_EXPERTS)
def test_peft_computes_the_same_from_our_experts(family, tmp_path):
    torch.manual_seed(0)
    check_writing(ARCHITECTURES[family]().eval(), OURS_EXPERTS[family], tmp_path)


def check_writing(base: nn.Module, method: Method, tmp_path: Path) -> None:
    model, theirs = base, copy.deepcopy(base)
    adapter = attach(model, method)
    nudge(model)
    save_adapter(adapter, tmp_path)
    assert not torch.allclose(logits(model), logits(theirs), atol=1e-3)
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path).eval()
    torch.testing.assert_close(logits(loaded), logits(model), atol=TOLERANCE, rtol=0)


PATHS = [
    f"{trunk}{numbered}.{name}"
    for trunk in ("", "model.", "model.decoder.")
    for numbered in ("layers.0", "layers.12", "h.2", "layers.1.experts.0")
    for name in ("self_attn.q_proj", "mlp.up_proj", "q")
] + ["lm_head", "model.embed_tokens", "up_proj"]
TARGETS = (["q_proj", "up_proj"], ["q", "model.layers.0.mlp.up_proj"], r".*\.(q_proj|up_proj)")
EXCLUDED = (None, ["up_proj"], ["layers.0.self_attn.q_proj", "q"], r".*layers\.\d.*", r"up_proj")
LAYERS_OF: tuple[dict[str, Any], ...] = (
    {},
    {"layers_to_transform": []},
    {"layers_to_transform": 0},
    {"layers_to_transform": [0, 2]},
    {"layers_to_transform": [1, 12], "layers_pattern": "layers"},
    {"layers_to_transform": [2, 0], "layers_pattern": ["h", "experts"]},
)


@pytest.mark.parametrize(
    ("targets", "excluded", "layers"),
    [
        case
        for case in product(TARGETS, EXCLUDED, LAYERS_OF)
        if isinstance(case[0], list) or not case[2]  # PEFT refuses layers for a pattern
    ],
)
def test_a_config_selects_the_modules_that_peft_selects(targets, excluded, layers):
    fields = {"target_modules": targets, "exclude_modules": excluded, **layers}
    config = peft.LoraConfig(**copy.deepcopy(fields))
    assert selected(PATHS, fields) == [p for p in PATHS if check_target_module_exists(config, p)]


KINDS = ("gpt2", "falcon_new", "deepseek_v3", "mixtral", "bert", "t5", "whisper", "vit", "mllama")


SMALL = ("gpt2", "mixtral", "bert", "vit", "falcon_new")
PAIRS = {*zip(grid.COLUMNS, cycle(SMALL)), *product(["lora"], KINDS)}
"""Every method once, and every kind of model."""


def _pair(column: str, architecture: str) -> Any:
    marks = () if (column, architecture) in PAIRS else (pytest.mark.slow,)
    return pytest.param(column, architecture, marks=marks)


@pytest.mark.parametrize(
    ("column", "architecture"), [_pair(*pair) for pair in product(grid.COLUMNS, KINDS)]
)
def test_both_ways_agree_on_every_kind_of_model(column, architecture):
    outcome = laws.check(column, architecture, laws=[laws.peft_agrees])
    assert not outcome.failures, "\n".join(outcome.failures)


def test_the_config_is_the_oldest_keys_and_what_differs(base, tmp_path):
    save_adapter(attach(base, LoRA(rank=4, alpha=8, targets=("q", "v"))), tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == {
        "auto_mapping": None,
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "revision": None,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 8}, "was changed after the adapter was saved"),
        ({"lora_alpha": 16}, "was changed after the adapter was saved"),
        ({"use_rslora": True}, "features|changed|differ"),
        ({"bias": "all"}, "was changed after the adapter was saved"),
        ({"lora_bias": True}, "features that peftkit does not read"),
        ({"modules_to_save": ["lm_head"]}, "was changed after the adapter was saved"),
        ({"layer_replication": [[0, 2]]}, "features that peftkit does not read"),
        ({"peft_type": "LOHA"}, "no method reads an adapter of type 'LOHA'"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "no tensors for the target 'k_proj'"),
        ({"target_modules": ["q_proj"]}, "tensors for modules that its config does not target"),
    ],
    ids=str,
)
def test_a_config_that_contradicts_its_tensors_is_refused(change, message, base, tmp_path):
    adapter = attach(base, LoRA(rank=4, alpha=8, targets=("q", "v")))
    save_adapter(adapter, tmp_path)
    adapter.detach()
    change_json(tmp_path / "adapter_config.json", **change)
    with pytest.raises(AdapterError, match=message):
        load_adapter(base, tmp_path)
    assert not any("lora" in name for name, _ in base.named_parameters())


def test_a_deeper_and_a_shallower_base_are_refused_with_the_list(tmp_path):
    two = FAMILIES["llama"]()
    adapter = attach(two, LoRA(rank=2, targets=("q",)))
    save_adapter(adapter, tmp_path)
    adapter.detach()
    del two.model.layers[1]
    with pytest.raises(AdapterError, match=r"unexpected: model\.layers\.1\.self_attn\.q_proj"):
        load_adapter(two, tmp_path)
    three = FAMILIES["llama"]()
    three.model.layers.append(copy.deepcopy(three.model.layers[0]))
    for notes in (True, False):
        if not notes:
            (tmp_path / "peftkit.json").unlink()
        with pytest.raises(AdapterError, match=r"missing: model\.layers\.2\.self_attn\.q_proj"):
            load_adapter(three, tmp_path)


def test_another_base_of_equal_shapes_requires_force(base, tmp_path):
    from peftkit.formats.peft.notes import Provenance

    adapter = attach(base, LoRA(rank=2, targets=("q",)))
    save_adapter(adapter, tmp_path, Provenance(base="one", fingerprint="sha256:" + "1" * 64))
    adapter.detach()
    other = "sha256:" + "2" * 64
    with pytest.raises(AdapterError, match="trained on another base"):
        load_adapter(base, tmp_path, fingerprint=other)
    load_adapter(base, tmp_path, fingerprint=other, force=True)


@pytest.mark.parametrize(
    ("paths", "others", "endings"),
    [
        (["a.0.q", "a.1.q"], ["a.0.k"], ["q"]),
        (["a.0.x.c", "a.1.x.c"], ["a.0.y.c"], ["x.c"]),
        (["a.0.q"], ["a.1.q"], ["0.q"]),
        (["a.0.q", "b.0.q"], ["c.0.q"], ["a.0.q", "b.0.q"]),
        (["q"], ["a.q"], ["q"]),
    ],
)
def test_targets_are_short_endings(paths, others, endings):
    assert shortest_endings(paths, others) == endings
