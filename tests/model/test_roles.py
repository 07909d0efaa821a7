"""The table of roles against the facts of every architecture, and the rows of fused weights proven.

A layout is proven on the running model: noise is put on the output rows of one role at one token,
and attention itself says whether they were its query, its keys or its values.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.glm.modeling_glm import GlmMLP
from transformers.models.moonshine.modeling_moonshine import MoonshineDecoderMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalAudioMLP

from peftkit.model.blocks import blocks
from peftkit.model.places import ModelWeight, find_places, is_linear, is_transposed, stacked_shape
from peftkit.model.targets import find_roles
from tests.helpers.families import ARCHITECTURES, VOCAB
from tests.helpers.role_facts import FACTS
from tests.helpers.speech import hears_frames, moonshine, wav2vec2
from tests.helpers.spread import spread

SOUND: dict[str, Callable[[], Any]] = {
    "moonshine": lambda: moonshine()[0],
    "wav2vec2": lambda: wav2vec2()[0],
    "wav2vec2_bert": lambda: hears_frames("Wav2Vec2Bert")[0],
    "parakeet": lambda: hears_frames("Parakeet")[0],
}
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8  # of every tiny model
NOPE, V_DIM = 12, 16  # multi-head latent attention: a head's rows of the key and of the value

# Role letters in the order of the output rows; "n" of them for the halves of a gated layer.
LAYOUTS: dict[str, Callable[[int], str]] = {
    "blk3": lambda n: "q" * 32 + "k" * 32 + "v" * 32,
    "blkgqa": lambda n: "q" * 32 + "k" * 16 + "v" * 16,
    "head3": lambda n: ("q" * 8 + "k" * 8 + "v" * 8) * HEADS,
    "mqa": lambda n: "q" * 8 * HEADS + "k" * 8 + "v" * 8,
    "group": lambda n: ("q" * 8 * (HEADS // KV_HEADS) + "k" * 8 + "v" * 8) * KV_HEADS,
    "mp4": lambda n: ("q" * 8 + "v" * 8 + "k" * 8) * 4,
    "mla_kvb": lambda n: ("k" * NOPE + "v" * V_DIM) * HEADS,
    "glu2": lambda n: "g" * (n // 2) + "u" * (n // 2),
    "glu2_up": lambda n: "u" * (n // 2) + "g" * (n // 2),
    "glu_il": lambda n: "gu" * (n // 2),
}


def parse_facts() -> dict[str, dict[tuple[str, str], str]]:
    """Return architecture -> (role, starred path) -> layout or ""."""
    facts: dict[str, dict[tuple[str, str], str]] = {}
    current: dict[tuple[str, str], str] = {}
    for line in FACTS.splitlines():
        prefix, *words = line.split()
        if prefix == "==":
            current = {}
            facts |= dict.fromkeys(words, current)
            continue
        for word in words:
            roles, _, rest = word.partition("=")
            name, _, layout = rest.partition("@")
            path = name if prefix == "-" else f"{prefix}.{name}"
            current |= {(role, path): layout for role in roles.split(",")}
    return facts


KNOWN = parse_facts()


def starred(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *SOUND])
def test_every_weight_has_the_role_that_a_person_gave_it(name):
    model = (ARCHITECTURES | SOUND)[name]()
    fused: dict[tuple[str, str], str] = {}
    for role, sites in find_roles(model).items():
        for site in sites:
            path = site.path + (f":{site.parameter}" if site.parameter else "")
            fused[role, starred(path)] = ""
            layout = KNOWN[name].get((role, starred(path)), "")
            if layout:
                drawn = LAYOUTS[layout](num_rows(model, site.path, site.parameter))
                letter = role.split("_")[-1][0]
                assert site.rows is not None
                assert site.rows.keys() == {role}
                rows = site.rows[role]
                assert rows.dtype == torch.int64
                assert rows.tolist() == [i for i, owner in enumerate(drawn) if owner == letter]
                fused[role, starred(path)] = layout
            else:
                assert site.rows is None
            assert site.roles == (role,)
    assert fused == KNOWN[name]
    named = {place.path for place in find_places(model)}
    linear = {path for path, module in model.named_modules() if is_linear(module)}
    assert linear <= named or name in SOUND


def num_rows(model: nn.Module, path: str, parameter: str | None) -> int:
    module = model.get_submodule(path)
    if parameter is None:
        return int(module(torch.zeros(1, first_axis(module))).shape[-1])
    return stacked_shape(module, parameter)[2]


def first_axis(module: Any) -> int:
    return int(module.in_features if hasattr(module, "in_features") else module.weight.shape[0])


@pytest.mark.parametrize("name", spread(ARCHITECTURES, 3))
def test_blocks_are_the_layers_that_checkpointing_wraps(name):
    model = ARCHITECTURES[name]()
    expected = [
        path
        for path, module in model.named_modules()
        if any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)
        or type(module).__name__ == "MllamaVisionEncoderLayer"  # transformers cannot recompute it
        if type(module).__name__ != "SwinStage"  # it holds blocks
    ]
    assert [path for path, _ in blocks(model)] == expected
    assert all(model.get_submodule(path) is module for path, module in blocks(model))


# ------------------------------------------------------------------- proofs of attention layouts

TOKENS, TOKEN = 7, 3
FUSED_ATTENTION = [
    *("gpt2", "gpt_neox", "gpt_bigcode", "gpt_bigcode_mha", "bloom", "falcon_mq", "falcon_new"),
    *("falcon_mha_alibi", "phi3", "mpt", "modernbert", "deberta_v1", "codegen", "minimax"),
    *("deepseek_v2", "deepseek_v3", "qwen2_vl"),
]


def fused_place(model: nn.Module, *, role: str) -> ModelWeight:
    """Return the last fused place of a role, so that nothing after it mixes tokens."""
    fused = [place for place in find_places(model) if place.repeats and role in place.roles]
    return fused[-1]


@contextmanager
def edited(module: nn.Module, edit: Callable[[Tensor], None]) -> Iterator[None]:
    """Edit a copy of a module's output in place."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        edit(output)
        return output

    handle = module.register_forward_hook(hook)
    yield
    handle.remove()


def owner_output(model: nn.Module, place: ModelWeight, edit: Callable[[Tensor], None]) -> Tensor:
    """Run a model and return (tokens, width) of the module that uses a fused layer's output."""
    seen: list[Tensor] = []
    owner = model.get_submodule(place.path.rpartition(".")[0])
    handle = owner.register_forward_hook(
        lambda module, args, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    with edited(place.module, edit), torch.no_grad():
        run(model, place)
    handle.remove()
    return seen[-1].reshape(TOKENS + 1, -1) if place.side else seen[-1][0]


def run(model: Any, place: ModelWeight) -> None:
    if place.side == "vision":  # an image of 2 x 4 patches
        torch.manual_seed(1)
        model.model.visual(torch.randn(TOKENS + 1, 96), grid_thw=torch.tensor([[1, 2, 4]]))
        return
    input_ids = torch.randint(5, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    model(input_ids=input_ids)


@pytest.mark.parametrize("name", FUSED_ATTENTION)
def test_rows_of_a_fused_projection_act_as_their_role(name):
    model = ARCHITECTURES[name]().eval()
    place = fused_place(model, role="v")
    rows = place.rows(place.roles)
    assert rows is not None
    named = dict(zip(place.roles, rows.values(), strict=True))
    q, k, v = (named.get(role) for role in "qkv")
    assert k is not None
    assert v is not None

    def noise(chosen: Tensor) -> Callable[[Tensor], None]:
        def edit(output: Tensor) -> None:
            output[..., TOKEN, chosen] += 3 * torch.arange(1, len(chosen) + 1).cos()

        return edit

    def without_values(then: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def edit(output: Tensor) -> None:
            output[..., v] = 0
            then(output)

        return edit

    def moved(chosen: Tensor) -> list[int]:
        """Return the tokens whose attention output the noise changes."""
        difference = owner_output(model, place, noise(chosen)) - plain
        return (difference.abs().amax(-1) > 1e-4).nonzero().flatten().tolist()

    plain = owner_output(model, place, lambda output: None)
    # A query moves its own token alone; keys and values those that attend to it.
    assert q is None or moved(q) == [TOKEN]
    assert len(moved(k)) > 1
    assert len(moved(v)) > 1
    # Without values nothing is left of queries and keys: no row of v is among theirs. (In minimax,
    # whose attention is linear, keys could be the values as well; there the order is its code's.)
    silent = owner_output(model, place, without_values(lambda output: None))
    others = k if q is None else torch.cat([q, k])
    assert torch.equal(owner_output(model, place, without_values(noise(others))), silent)


# ------------------------------------------------------------------- proofs of gated layouts


class GatedConfig:
    """What the gated layers below ask of a config."""

    hidden_size, intermediate_size = 32, 64
    hidden_act = activation = "silu"
    dropout_rate = 0.0


def gated(kind: type[nn.Module], *args: str) -> nn.Module:
    """Return a model of one gated layer of a class that no tiny model has."""
    return nn.ModuleDict({"mlp": kind(GatedConfig(), *args)})


GATED: dict[str, Callable[[], nn.Module]] = {
    "phi3": ARCHITECTURES["phi3"],
    "modernbert": ARCHITECTURES["modernbert"],
    "Phi3MLP": lambda: gated(Phi3MLP),
    "GlmMLP": lambda: gated(GlmMLP),
    "MoonshineDecoderMLP": lambda: gated(MoonshineDecoderMLP, "silu"),
    "Phi4MultimodalAudioMLP": lambda: gated(Phi4MultimodalAudioMLP),
}


@pytest.mark.parametrize("name", GATED)
def test_a_gated_layer_is_linear_in_the_rows_of_up_alone(name):
    model = GATED[name]().eval()
    place = fused_place(model, role="up")
    rows = place.rows(place.roles)
    assert rows is not None
    owner = model.get_submodule(place.path.rpartition(".")[0])
    x = torch.randn(5, 32)

    def curvature(role: str) -> float:
        def scaled(factor: float) -> Tensor:
            def edit(output: Tensor) -> None:
                output[..., rows[role]] *= factor

            with edited(place.module, edit), torch.no_grad():
                output: Tensor = owner(x)
            return output

        return second_difference(scaled)

    assert curvature("up") < 1e-5
    assert curvature("gate") > 1e-3


def second_difference(f: Callable[[float], Tensor]) -> float:
    """Return how far a function of a factor is from a straight line, relative to its slope."""
    low, middle, high = f(0.5), f(0.75), f(1.0)
    return float((high - 2 * middle + low).abs().max() / (high - low).abs().max())


STACKED = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "granitemoe"]


@pytest.mark.parametrize("name", STACKED)
def test_experts_are_linear_in_the_rows_of_up_alone(name):
    model = ARCHITECTURES[name]().eval()
    model.set_experts_implementation("eager")
    place = fused_place(model, role="expert_up")
    experts, rows = place.module, place.rows(place.roles)
    assert rows is not None
    x = torch.randn(6, 32)
    index = torch.arange(12).reshape(6, 2) % 4
    weights = torch.full((6, 2), 0.5)
    parameters = [experts.gate_up_proj, getattr(experts, "gate_up_proj_bias", None)]
    start = [None if p is None else p.detach().clone() for p in parameters]
    out_axes = [2 if is_transposed(experts) else 1, 1]

    def curvature(role: str) -> float:
        def scaled(factor: float) -> Tensor:
            with torch.no_grad():
                for parameter, value, axis in zip(parameters, start, out_axes, strict=True):
                    if parameter is not None and value is not None:
                        part = value.index_select(axis, rows[role]) * factor
                        parameter.copy_(value.index_copy(axis, rows[role], part))
                output: Tensor = experts(x, index, weights)
            return output

        return second_difference(scaled)

    assert stacked_shape(experts, "gate_up_proj")[:2] == (4, 32)
    assert stacked_shape(experts, "down_proj")[::2] == (4, 32)
    assert curvature("expert_up") < 1e-5
    assert curvature("expert_gate") > 1e-3
