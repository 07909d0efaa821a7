"""Roles of weights by the names of modules: the table and its lookup.

A role is the function of a weight, independent of an architecture's names:

- self-attention: q, k, v, o; kv is the joint latent of multi-head latent attention; qkv is a fused
  projection with unknown row order, which can only be targeted as a whole
- mixers of tokens other than attention (state spaces, linear attention, convolutions): mixer_in,
  mixer_out, their projections from and to the hidden states, unless these are q, k, v and o
- cross-attention: cross_q, cross_k, cross_v, cross_o, cross_kv, cross_qkv
- feed-forward: gate, up, down; without a gate, up and down; gate_up is fused in an unknown order
- mixture of experts: expert_gate, expert_up, expert_down (the routed ones, often stacked into one
  3-D parameter), shared_gate, shared_up, shared_down, router, shared_router
- mixture of attention experts (JetMoE): expert_q, expert_o
- indexer: chooses the tokens that sparse attention attends to
- outside the blocks: embed, pos_embed, head (LM or classification), projector (from a vision or
  audio tower into the language model), other (poolers, transforms before a head)

Names are read in their context, the segments of the path between the block and the leaf:
`attn.c_proj` is o and `mlp.c_proj` is down.

The row order of a fused layer follows from the class of its owner, the number and width of heads
from the owner and its config. The rows must add up to the layer's; otherwise the layer is not
split.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

ATTENTION = ("q", "k", "v", "kv", "qkv", "o")
CROSS_ATTENTION = tuple(f"cross_{role}" for role in ATTENTION)
MIXERS = ("mixer_in", "mixer_out")
FFN = ("gate", "up", "gate_up", "down")
SHARED = tuple(f"shared_{role}" for role in FFN)
EXPERTS = tuple(f"expert_{role}" for role in FFN)
ATTENTION_EXPERTS = ("expert_q", "expert_o")
FFN_LIKE = FFN + SHARED + EXPERTS
CHOOSING = ("router", "shared_router", "indexer")
"""Roles whose output only selects experts or tokens; often they get no gradient."""
NAMED_ONLY = (*CHOOSING, "head")
"""Linear roles in no group: they are adapted only if targeted explicitly."""
UNSIDED = ("projector", "other", "head")
"""Roles with the same name on every side of a model."""
OUTSIDE = ("projector", "other", "embed", "pos_embed")
_EXPERTS = EXPERTS + ATTENTION_EXPERTS
ROLES = (*ATTENTION, *MIXERS, *CROSS_ATTENTION, *FFN, *SHARED, *_EXPERTS, *NAMED_ONLY, *OUTSIDE)

ALL_LINEAR = "all-linear"
GROUPS: dict[str, tuple[str, ...]] = {
    "attention": ATTENTION + MIXERS + ATTENTION_EXPERTS + CROSS_ATTENTION,
    "self_attention": ATTENTION + MIXERS + ATTENTION_EXPERTS,
    "cross_attention": CROSS_ATTENTION,
    "ffn": FFN + SHARED,
    "experts": _EXPERTS,
    ALL_LINEAR: tuple(role for role in ROLES if role not in (*NAMED_ONLY, "embed", "pos_embed")),
}

# Sides of a model. The text side of a vision-language model has no prefix.
TOWERS = {"vision": r"vision|visual|image", "audio": r"audio|speech"}
"""Side -> pattern in a segment of the path."""
EQUAL_TOWERS = "logit_scale"
"""A parameter of models that compare two towers (CLIP), where neither is the main model."""
PROJECTOR = (
    "projector|merger|connector|aligner|resampler|perceiver|qformer|abstractor"
    "|language_projection|vision_projection|image_to_text_projection|vision_adapter"
)
HALVES = ("encoder", "decoder")
QUALIFIERS = ("language", *TOWERS, *HALVES)

# Context: patterns in the lower-cased segments between the block and the leaf or, if none matches,
# in the name of the numbered list. The first match wins.
CONTEXTS = (
    ("indexer", r"indexer"),
    ("shared_router", r"^shared_expert_gate$"),
    ("router", r"router|^gate_linear$|^wg$"),
    ("shared", r"shared_?(expert|mlp)"),
    ("expert", r"^experts?(_\d+)?$"),
    ("cross", r"cross|^encoder_attn$|^encdecattention$|^encoder_(decoder_)?attention$"),
    ("attention", r"attn|attention|^self$"),
    ("ffn", r"mlp|ffn|feed_?forward|^ff\d?$|^densereludense$"),
)

ATTENTION_LEAVES: dict[str, str] = {
    **dict.fromkeys(("q_proj", "query", "query_proj", "q_lin", "q", "wq", "Wq", "to_q"), "q"),
    **dict.fromkeys(("q_a_proj", "q_b_proj", "q_attn", "linear_q", "q_head", "project_q"), "q"),
    **dict.fromkeys(("k_proj", "key", "key_proj", "k_lin", "k", "wk", "Wk", "to_k"), "k"),
    **dict.fromkeys(("linear_k", "k_head", "project_k"), "k"),
    **dict.fromkeys(("v_proj", "value", "value_proj", "v_lin", "v", "wv", "Wv", "to_v"), "v"),
    **dict.fromkeys(("linear_v", "v_head", "project_v"), "v"),
    **dict.fromkeys(("o_proj", "out_proj", "out_lin", "dense", "c_proj", "proj", "o", "wo"), "o"),
    **dict.fromkeys(("Wo", "to_out", "output", "projection", "projection_layer", "post_proj"), "o"),
    "linear_out": "o",
    **dict.fromkeys(("kv_a_proj_with_mqa", "kv_a_proj", "kv_b_proj", "kv_proj", "to_kv"), "kv"),
    **dict.fromkeys(("c_attn", "query_key_value", "qkv_proj", "qkv", "Wqkv", "wqkv"), "qkv"),
    **dict.fromkeys(("qkv_linear", "in_proj", "W_pack", "to_qkv"), "qkv"),
}
MIXER_SEGMENT = r"linear_attn|mamba\d?|mixer|(short_?)?conv|temporal_block"
"""The segment before the leaf in a mixer."""
MIXER_LEAVES = {r"in_proj(_\w+)?|linear_[xy]": "mixer_in", r"out_proj|linear_out": "mixer_out"}
PLAIN_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "query", "key", "value", "qkv_proj")
"""Leaves in a block that determine their role without an attention context."""
FFN_LEAVES: dict[str, str] = {
    **dict.fromkeys(("gate_proj", "wi_0", "w1", "c_fc_0", "gate", "linear_gate"), "gate"),
    **dict.fromkeys(("up_proj", "wi", "wi_1", "w3", "c_fc", "c_fc_1", "fc1", "fc_in"), "up"),
    **dict.fromkeys(("lin1", "dense_h_to_4h", "intermediate.dense", "intermediate_dense"), "up"),
    **dict.fromkeys(("linear1", "linear_1", "linear_fc1", "dense1", "ffn", "proj_up"), "up"),
    **dict.fromkeys(("down_proj", "wo", "Wo", "w2", "c_proj", "fc2", "fc_out", "lin2"), "down"),
    **dict.fromkeys(("dense_4h_to_h", "output.dense", "output_dense", "output_linear"), "down"),
    **dict.fromkeys(("linear2", "linear_2", "linear_fc2", "dense2", "ffn_output"), "down"),
    **dict.fromkeys(("proj_down",), "down"),
    **dict.fromkeys(("gate_up_proj", "Wi", "input_linear"), "gate_up"),
}
STACKED_LEAVES = {"gate_up_proj": "gate_up", "gate_proj": "gate", "up_proj": "up"} | {
    "down_proj": "down"
}
"""Names of 3-D expert parameters."""
STACKED_MODULES = {
    "mlp.input_linear": "expert_gate_up",
    "mlp.output_linear": "expert_down",
    "experts.input_linear": "expert_q",
    "experts.output_linear": "expert_o",
}
"""End of a module's path -> role of its 3-D `weight` (JetMoE)."""
ROUTER_LEAVES = ("gate", "router")
"""Modules with a weight (experts, hidden) that are not linear layers."""

# Names outside the blocks.
HEAD_LEAF = (
    r"(.*_)?head|embed_out|proj_out|output_projection|(text|visual)_projection|logits_(dense|proj)"
)
HEAD_SEGMENTS = ("classifier", "score", "qa_outputs", "classification_head", "lm_heads")
"""Modules of classification heads; every layer inside has the role head."""
NOT_BLOCKS = ("head", "pooler", "lm_head", "predictions")
EMBED_LEAVES = (
    *("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "token_embedding"),
    *("shared", "patch_embedding"),
)
POSITION = r"pos|token_type|relative|wpe"

# Fused projections. The row order does not follow from shapes: each entry was checked in the
# model's code, and the main ones in tests. Layers without an entry are not split.


class Layout(NamedTuple):
    """The order of the output rows of a fused projection.

    Attributes:
        repeats: Repetitions of the sequence of roles along the rows; 0 means once per key-value
            head, each with the head's group of query heads.
        order: The roles of one repetition.
    """

    repeats: int
    order: tuple[str, ...]


_QKV_BLOCKS = (
    "blip blip_2 cohere_compass dbrx decision_transformer deepseek_ocr2 dots3_note "
    "ernie4_5_vl_moe exaone4_5 glm4v glm4v_moe glm5_next glm_image glm_ocr got_ocr2 gpt2 imagegpt "
    "instructblip instructblipvideo layoutlmv2 mgp_str modernbert mpt openai phi3 "
    "phi4_multimodal pp_formulanet pp_ocrv5_mobile_rec pp_ocrv5_server_rec pp_ocrv6_small_rec "
    "qwen2_5_omni qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe qwen3_vl qwen3_vl_moe "
    "qwen4_exp sam sam_hq seggpt slanext timesformer unlimited_ocr vitdet"
)
_QKV_HEADS = "bloom deberta falcon gpt_bigcode gpt_neox gpt_neox_japanese minimax persimmon"
_GATE_UP = (
    "dia dots3_note esmfold2 glm glm4 glm4v glm_image glm_ocr granitemoe_swa granitemoehybrid "
    "granitemoeshared minimax_m3_vl modernbert modernbert_decoder phi3 phi4_multimodal zamba2"
)
# Keys: the class that owns the projection, or the `modeling_<family>` module that defines it.
LAYOUTS: dict[str, dict[str, Layout]] = {
    "qkv": {
        **dict.fromkeys(_QKV_BLOCKS.split(), Layout(1, ("q", "k", "v"))),
        **dict.fromkeys(_QKV_HEADS.split(), Layout(0, ("q", "k", "v"))),
        "codegen": Layout(4, ("q", "v", "k")),
    },
    "kv": dict.fromkeys(
        ("gpt2", "imagegpt", "decision_transformer", "jetmoe"), Layout(1, ("k", "v"))
    ),
    "gate_up": {
        **dict.fromkeys(_GATE_UP.split(), Layout(1, ("gate", "up"))),
        **dict.fromkeys(("moonshine", "moonshine_streaming"), Layout(1, ("up", "gate"))),
        "Phi4MultimodalAudioMLP": Layout(1, ("up", "gate")),
    },
}
WHOLES = dict.fromkeys(("q", "k", "v"), "qkv") | dict.fromkeys(("gate", "up"), "gate_up")
"""Role -> the fused role that may contain it."""
NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
HEAD_DIM = ("head_dim", "head_size", "attention_head_size")
NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
OWN_QUERY = "q_attn"
"""If this layer exists, GPT-2's fused projection holds no query."""


def tail(segments: Sequence[str]) -> list[str]:
    """Return the path segments after the block's number; an expert's number does not count."""
    for index in range(len(segments) - 2, 0, -1):
        if segments[index].isdigit() and segments[index - 1] != "experts":
            return list(segments[index + 1 :])
    return list(segments)


def side(path: str) -> str:
    """Return "projector", "vision", "audio", or "" for the rest of a model."""
    sides = {"projector": PROJECTOR, **TOWERS}
    return next((name for name, pattern in sides.items() if re.search(pattern, path)), "")


def split(role: str) -> tuple[str, str]:
    """Split a role into its context and the rest: ("cross_", "q")."""
    context = next((c for c in ("cross_", "shared_", "expert_") if role.startswith(c)), "")
    return context, role.removeprefix(context)


def linear_role(path: str) -> str:
    """Return the role of a linear layer; of a fused layer, its role as a whole."""
    segments = path.split(".")
    end = tail(segments)
    in_block = len(end) < len(segments)
    # a layer in a Sequential or inside another layer takes the name of its parent
    leaf = next((s for s in reversed(end) if not s.isdigit() and s != "linear"), end[-1])
    if not in_block or set(_before_numbers(segments)) & set(HEAD_SEGMENTS):
        outside = _role_outside(segments, leaf)
        if outside:
            return outside
    parent = end[-2] if len(end) > 1 else ""
    if re.fullmatch(MIXER_SEGMENT, parent):
        for pattern, role in MIXER_LEAVES.items():
            if re.fullmatch(pattern, leaf):
                return role
    context = _context(end)
    if in_block and not context:  # use the name of the numbered list
        context = _context(segments[len(segments) - len(end) - 2 :][:1])
    if context in CHOOSING:
        return context
    if context in ("attention", "cross"):
        role = ATTENTION_LEAVES.get(leaf, "other")
    elif not context and leaf in PLAIN_ATTENTION:
        role = ATTENTION_LEAVES[leaf]
    else:
        role = FFN_LEAVES.get(".".join(end[-2:])) or FFN_LEAVES.get(leaf, "other")
    prefixed = context in ("cross", "shared", "expert") and role != "other"
    return f"{context}_{role}" if prefixed else role


def _role_outside(segments: Sequence[str], leaf: str) -> str:
    """Return head or other for a layer outside all blocks, "" in an unnumbered block."""
    if set(_before_numbers(segments)) & set(HEAD_SEGMENTS):
        return "head"
    if re.fullmatch(HEAD_LEAF, leaf):
        return "head"
    if set(segments) & set(NOT_BLOCKS) or not _context(segments):
        return "other"
    return ""


def _before_numbers(segments: Sequence[str]) -> Sequence[str]:
    return segments[: next((i for i, s in enumerate(segments) if s.isdigit()), len(segments))]


def _context(segments: Sequence[str]) -> str:
    lowered = [segment.lower() for segment in segments]
    contexts = (c for c, pattern in CONTEXTS if any(re.search(pattern, s) for s in lowered))
    return next(contexts, "")


def split_rows(
    kind: str,
    path: str,
    owner: object,
    configs: Sequence[object],
    in_features: int,
    out_features: int,
) -> tuple[int, dict[str, int]] | None:
    """Return the repetitions along the rows of a fused layer, and role -> rows in each of them.

    Args:
        kind: The fused role: qkv, kv, gate_up; other roles are not fused.
        path: Path of the layer.
        owner: The module that holds the layer and uses its output.
        configs: The owner's config, then the model's; either may be None.
        in_features, out_features: Sizes of the layer.
    """
    layout = _layout(kind, owner)
    heads = _fact(NUM_HEADS, owner, *configs)
    totals: dict[str, int] = {}  # role -> total rows, in the order of one repetition
    repeats = 0
    if kind == "kv" and path.endswith("kv_b_proj"):  # multi-head latent attention
        repeats = heads
        totals["k"] = heads * _fact(("qk_nope_head_dim",), owner)
        totals["v"] = heads * _fact(("v_head_dim",), owner)
    elif layout and kind == "qkv" and heads:
        head_dim = _fact(HEAD_DIM, owner, configs[0]) or in_features // heads
        num_kv = (out_features // head_dim - heads) // 2
        if num_kv not in {heads, *_facts(NUM_KV_HEADS, owner, *configs)}:
            return None
        rows = {"q": heads * head_dim, "k": num_kv * head_dim, "v": num_kv * head_dim}
        totals = {role: rows[role] for role in layout.order}
        repeats = layout.repeats or num_kv
    elif layout and kind in ("kv", "gate_up"):
        totals = dict.fromkeys(layout.order, out_features // 2)
        repeats = layout.repeats
    fits = repeats > 0 and all(n > 0 and n % repeats == 0 for n in totals.values())
    if not fits or sum(totals.values()) != out_features:
        return None
    return repeats, {role: n // repeats for role, n in totals.items()}


def _layout(kind: str, owner: object) -> Layout | None:
    """Return the row order of a fused layer by its owner's class, or None if unknown."""
    layouts = LAYOUTS.get(kind, {})
    for cls in type(owner).__mro__:
        if cls.__module__.startswith("transformers.models."):
            for name in (cls.__name__, cls.__module__.rpartition("modeling_")[2]):
                if name in layouts:
                    return layouts[name]
    return None


def _facts(names: Sequence[str], *sources: object) -> list[int]:
    """Return the values of the named attributes that are positive integers."""
    values = (_attribute(source, name) for source in sources for name in names)
    return [value for value in values if isinstance(value, int) and value > 0]


def _attribute(source: object, name: str) -> object:
    try:
        return getattr(source, name, None)
    except RuntimeError:  # transformers does not return a size that differs between layers
        return None


def _fact(names: Sequence[str], *sources: object) -> int:
    return next(iter(_facts(names, *sources)), 0)


def is_role(word: str) -> bool:
    """Return whether a word is a role or a group, with or without a tower's prefix."""
    side, _, role = word.partition("_")
    return (
        word in ROLES
        or word in GROUPS
        or (side in TOWERS and role in ROLES and role not in UNSIDED)
    )


def matches(path: str, pattern: str) -> bool:
    """Return whether a shell pattern matches a path, or a suffix of it that begins after a dot."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")
