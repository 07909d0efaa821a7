"""What the user names is what is adapted, on any architecture, or an error says why not."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from peftkit.errors import TargetError
from peftkit.methods.lora import LoRA
from peftkit.model import roles as table
from peftkit.model.blocks import blocks
from peftkit.model.places import FrozenWrapper, find_places, is_linear
from peftkit.model.targets import Site, find_roles, resolve
from tests.helpers.families import ARCHITECTURES
from tests.helpers.hybrids import FURTHER, small
from tests.helpers.spread import spread


def paths(model: nn.Module, *targets: str) -> list[str]:
    return [site.path for site in resolve(model, targets)]


def facts(sites: list[Site]) -> list[tuple[object, ...]]:
    """Return sites as things that can be compared."""
    return [(s.path, s.roles, s.parameter, rows_of(s.rows)) for s in sites]


def rows_of(rows: Mapping[str, Tensor] | None) -> dict[str, list[int]] | None:
    return rows and {role: indices.tolist() for role, indices in rows.items()}


def build(name: str) -> nn.Module:
    return ARCHITECTURES[name]()


# ------------------------------------------------------------------- roles and groups


def test_roles_of_a_fused_layer_are_one_site_with_the_rows_asked_for():
    first, _ = resolve(build("gpt2"), ["v", "q"])
    assert (first.path, first.roles) == ("transformer.h.0.attn.c_attn", ("q", "v"))
    assert first.parameter is None
    assert rows_of(first.rows) == {"q": [*range(32)], "v": [*range(64, 96)]}


def test_groups_are_their_roles():
    model = build("t5_gated")
    self_attention = facts(resolve(model, ["q", "k", "v", "o"]))
    cross_attention = facts(resolve(model, ["cross_q", "cross_k", "cross_v", "cross_o"]))
    assert facts(resolve(model, "self_attention")) == self_attention
    assert facts(resolve(model, "cross_attention")) == cross_attention
    both = facts(resolve(model, "attention"))
    assert len(both) == len(self_attention) + len(cross_attention)
    assert facts(resolve(model, "ffn")) == facts(resolve(model, ["gate", "up", "down"]))


@pytest.mark.parametrize("name", spread(ARCHITECTURES, 3))
def test_all_linear_is_every_linear_layer_but_heads_and_routers(name):
    model = build(name)
    sites = resolve(model, "all-linear")
    linears = {path for path, module in model.named_modules() if is_linear(module)}
    named_only = {
        site.path
        for role, found in find_roles(model).items()
        if role in table.NAMED_ONLY
        for site in found
    }
    assert {site.path for site in sites if site.parameter is None} == linears - named_only
    stacks = {(place.path, place.parameter) for place in find_places(model) if place.parameter}
    routers = {(path, "weight") for path in named_only}
    assert {(s.path, s.parameter) for s in sites if s.parameter} == stacks - routers
    assert all(site.rows is None for site in sites)


def test_heads_and_routers_are_found_when_named():
    model = build("mixtral")
    assert paths(model, "head") == ["lm_head"]
    assert paths(model, "lm_head") == ["lm_head"]
    router = ("model.layers.0.mlp.gate", ("router",), "weight", None)
    assert facts(resolve(model, "router"))[0] == router
    assert paths(build("qwen2_moe"), "shared_router")[0] == "model.layers.0.mlp.shared_expert_gate"


# ------------------------------------------------------------------- sides and halves


def test_plain_roles_of_a_vision_language_model_are_the_language_side():
    model = build("mllama")
    language, tower = "model.language_model.", "model.vision_model."
    assert all(path.startswith(language) for path in paths(model, "attention", "ffn"))
    assert all(path.startswith(tower) for path in paths(model, "vision.attention", "vision.ffn"))
    assert facts(resolve(model, "vision.q")) == facts(resolve(model, "vision_q"))
    assert facts(resolve(model, "language.q")) == facts(resolve(model, "q"))
    assert paths(model, "projector") == ["model.multi_modal_projector"]
    sides = [paths(model, target) for target in ("vision.all-linear", "language.all-linear")]
    whole = paths(model, "all-linear")
    assert sorted([*sides[0], *sides[1], "model.multi_modal_projector"]) == sorted(whole)


def test_plain_roles_of_two_equal_towers_are_both():
    model = build("clip")
    text, image = (f"{tower}_model.encoder.layers." for tower in ("text", "vision"))
    assert [path[: len(image)] for path in paths(model, "vision.q")] == [image] * 2
    assert [path[: len(text)] for path in paths(model, "language.q")] == [text] * 2
    assert len(paths(model, "q")) == 4


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_encoder_and_decoder_are_targets_of_their_own(name):
    model = build(name)
    for half in ("encoder", "decoder"):
        found = paths(model, f"{half}.q")
        assert len(found) == 2
        assert all(path.removeprefix("model.").startswith(f"{half}.") for path in found)
    assert paths(model, "decoder.cross_attention") == paths(model, "cross_attention")
    assert len(paths(model, "encoder.q", "decoder.q")) == len(paths(model, "q")) == 4


# ------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("q_proj", 2),
        ("self_attn.q_proj", 2),
        ("model.layers.0.self_attn.q_proj", 1),
        ("layers.[01].*.?_proj", 8),
        ("layers.1.*", 7),
        ("*_proj", 14),
        ("lm_head", 1),
    ],
)
def test_a_pattern_is_the_end_of_a_path_from_a_dot_on(pattern, count):
    sites = resolve(build("llama"), [pattern])
    assert len(sites) == count
    assert all(site.roles == () and site.rows is None for site in sites)


def test_a_pattern_and_a_role_of_one_fused_layer_are_the_whole_layer():
    whole = ("transformer.h.0.attn.c_attn", (), None, None)
    assert facts(resolve(build("gpt2"), ["q", "c_attn"]))[0] == whole
    assert facts(resolve(build("gpt2"), ["all-linear", "q"]))[0] == whole


def test_a_word_that_is_a_role_and_a_name_is_the_role():
    assert all("SelfAttention" in path for path in paths(build("t5"), "q"))
    assert len(paths(build("t5"), "EncDecAttention.q")) == 2


# ------------------------------------------------------------------- live modules


class Wrapped(FrozenWrapper):
    """What an adapter of ours looks like."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__(base)
        self.lora_A = nn.Linear(2, 2)


def test_adapters_of_ours_are_seen_through():
    model = build("gpt2")
    before = {role: facts(sites) for role, sites in find_roles(model).items()}
    for _, block in blocks(model):
        block.attn.c_attn = Wrapped(block.attn.c_attn)
    assert {role: facts(sites) for role, sites in find_roles(model).items()} == before
    assert [path for path, _ in blocks(model)] == ["transformer.h.0", "transformer.h.1"]


def test_an_adapter_of_peft_is_refused():
    model = build("llama")
    layer = model.get_submodule("model.layers.0.self_attn")
    layer.q_proj = nn.ModuleDict({"base_layer": layer.q_proj})
    with pytest.raises(TargetError, match="carries an adapter of PEFT at model"):
        resolve(model, "q")


# ------------------------------------------------------------------- unknown architectures


class Unknown(nn.Module):
    """Blocks with names that say nothing, one in which they do, and no config."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.stack = nn.ModuleList([nn.ModuleDict(layers), nn.ModuleDict(layers)])
        self.norm = nn.LayerNorm(4)


def test_a_role_of_an_unknown_architecture_lists_its_layers_with_shapes():
    model = nn.ModuleList([Unknown(alpha=nn.Linear(4, 8), beta=nn.Linear(8, 4)) for _ in range(3)])
    assert (
        message(model, "q")
        == """\
no linear layer matches target 'q' in ModuleList.
  No roles are known in it. Its linear layers:
    *.stack.*.alpha (4 -> 8) x 3
    *.stack.*.beta (8 -> 4) x 3
  List every layer with: peftkit inspect MODEL"""
    )


def test_a_fused_layer_of_unknown_order_is_never_split():
    attention = nn.ModuleDict({"qkv": nn.Linear(8, 24), "proj": nn.Linear(8, 8)})
    model = Unknown(attn=attention, mlp=nn.ModuleDict({"fc1": nn.Linear(8, 8)}))
    assert facts(resolve(model, "attention"))[0] == ("stack.0.attn.qkv", ("qkv",), None, None)
    assert (
        "'q' may be in stack.0.attn.qkv, fused in an order that peftkit does not know: "
        "target the whole as 'qkv'."
    ) in message(model, "q")


def test_a_role_is_refused_when_some_of_it_is_in_a_fused_layer_of_unknown_order():
    model = Unknown(attn=nn.ModuleDict({"q_proj": nn.Linear(8, 8), "qkv": nn.Linear(8, 24)}))
    assert paths(model, "q_proj") == ["stack.0.attn.q_proj"]
    assert "'q' may be in stack.0.attn.qkv" in message(model, "q")


# ------------------------------------------------------------------- errors


def message(model: nn.Module, *targets: str) -> str:
    with pytest.raises(TargetError) as caught:
        resolve(model, targets)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "target", "told"),
    [
        ("gpt2", "gate", "no linear layer matches target 'gate' in GPT2LMHeadModel."),
        ("llama", "cross_attention", "Roles found: q, k, v, o, gate, up, down (2 layers)"),
        ("t5", "encoder.cross_q", "cross_q, cross_k, cross_v, cross_o, pos_embed (2 layers)"),
        ("llama", "vision.q", "'vision.q' in LlamaForCausalLM"),
        ("llama", "*norm*", "'*norm*' matches modules, but none of them is linear: 5 Llama"),
        ("llama", "embed_tokens", "matches modules, but none of them is linear: 1 Embedding."),
        (
            "llama",
            r".*\.(q|v)_proj$",
            "looks like a regular expression; patterns use shell wildcards",
        ),
        ("llama", "", "no linear layer matches target '' in LlamaForCausalLM."),
    ],
)
def test_a_target_that_names_nothing_says_so(name, target, told):
    assert told in message(build(name), target)


def test_a_layer_that_shares_the_weight_of_an_embedding_is_a_head():
    model = FURTHER["blip"]()  # which does not say which its output layer is
    assert model.get_output_embeddings() is None
    head = "text_decoder.cls.predictions.decoder"
    assert [site.path for site in resolve(model, "head")] == [head]
    assert head not in {site.path for site in resolve(model, "all-linear")}


def test_a_layer_whose_weight_is_only_read_is_no_target():
    torch.manual_seed(0)
    for name in ("mamba", "jamba"):
        model = FURTHER[name]()
        assert not any("dt_proj" in site.path for site in resolve(model, "all-linear"))
        with pytest.raises(TargetError, match="'dt_proj'"):
            LoRA(rank=2, targets=("dt_proj",)).sites(model)
    model = small("WavLMForCTC", "ctc")()  # torch's attention function reads q, k, v and out_proj
    assert not {"q", "k", "v", "o"} & find_roles(model).keys()
    assert {"up", "down"} < find_roles(model).keys()
