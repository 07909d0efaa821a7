"""Tiny models of architectures that no table here names: what structure alone says must do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from tests import families
from tests.families import _builder, _causal, _conditional, _masked

_SIZES, _SHARED, _VISION = families._SIZES, families._SHARED, families._VISION
_BARE: dict[str, Any] = {**_SHARED, "initializer_range": 0.2}
_SEQ2SEQ, _T5, _EXPERTS = families._SEQ2SEQ, families._T5, families._EXPERTS
_HEADS = {"head_dim": 8}


def _image(stem: str, **settings: Any) -> Callable[[], PreTrainedModel]:
    sizes = {**_VISION, "num_labels": 3, **settings}
    return _builder(f"{stem}ForImageClassification", f"{stem}Config", **sizes)


FURTHER: dict[str, Callable[[], PreTrainedModel]] = {
    # dense decoders
    "nemotron": _causal("Nemotron"),
    "exaone4": _causal("Exaone4", sliding_window=4, sliding_window_pattern=2),
    "glm4": _causal("Glm4", **_HEADS),
    "smollm3": _causal("SmolLM3", no_rope_layers=[1, 0]),
    "hunyuan": _causal("HunYuanDenseV1", **_HEADS),
    "ernie4_5": _causal("Ernie4_5", **_HEADS),
    "persimmon": _causal("Persimmon", _SIZES),
    "openai_gpt": _builder(
        "OpenAIGPTLMHeadModel",
        "OpenAIGPTConfig",
        vocab_size=families.VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.2,
    ),
    "gemma3n": _builder(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        **families._GROUPED | {"intermediate_size": [64, 64]},
        **_HEADS,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=families.VOCAB,
        laurel_rank=4,
        altup_num_inputs=4,
        activation_sparsity_pattern=[0.0, 0.0],
    ),
    # mixtures of experts
    "glm4_moe": _causal(
        "Glm4Moe",
        **_HEADS,
        **_EXPERTS,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "hunyuan_moe": _causal(
        "HunYuanMoEV1", **_HEADS, num_experts=4, moe_topk=2, moe_intermediate_size=48
    ),
    "ernie4_5_moe": _causal(
        "Ernie4_5_Moe",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=48,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "phimoe": _causal("Phimoe", num_local_experts=4, num_experts_per_tok=2),
    "llama4": _builder(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        **families._GROUPED,
        **_HEADS,
        intermediate_size_mlp=64,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=8,
    ),
    "jetmoe": _causal("JetMoe", kv_channels=8, num_local_experts=4, num_experts_per_tok=2),
    "doge": _causal("Doge", keep_window_size=64),
    # attention that chooses what it looks at
    "deepseek_v32": _causal(
        "DeepseekV32",
        families._LATENT,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
    ),
    # mixers that are no attention
    "mamba": _causal("Mamba", _SIZES, state_size=4),
    "mamba2": _causal(
        "Mamba2",
        _BARE,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        chunk_size=4,
    ),
    "jamba": _causal(
        "Jamba",
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "lfm2": _causal("Lfm2", layer_types=["conv", "full_attention"]),
    "qwen3_next": _causal(
        "Qwen3Next",
        **_HEADS,
        **_EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=48,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "recurrent_gemma": _causal(
        "RecurrentGemma",
        **_HEADS,
        lru_width=32,
        attention_window_size=8,
        block_types=["recurrent", "attention"],
    ),
    "rwkv": _causal(
        "Rwkv",
        _SHARED,
        hidden_size=32,
        attention_hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        context_length=64,
    ),
    # encoders
    "camembert": _masked("Camembert"),
    "xlm_roberta": _masked("XLMRoberta"),
    "albert": _masked("Albert", embedding_size=16),
    "longformer": _masked("Longformer", attention_window=[4, 4]),
    "funnel": _builder(
        "FunnelForMaskedLM",
        "FunnelConfig",
        **_SHARED,
        block_sizes=[1, 1],
        num_decoder_layers=1,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
    ),
    "xlnet": _builder(
        "XLNetLMHeadModel", "XLNetConfig", **_SHARED, d_model=32, n_layer=2, n_head=4, d_inner=64
    ),
    # encoder-decoders
    "led": _conditional(
        "LED",
        _SEQ2SEQ,
        attention_window=[4, 4],
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    "m2m_100": _conditional("M2M100", _SEQ2SEQ),
    "marian": _builder("MarianMTModel", "MarianConfig", **_SEQ2SEQ),
    "longt5": _conditional("LongT5", _T5, local_radius=4, encoder_attention_type="local"),
    "umt5": _conditional("UMT5", _T5),
    # images
    "beit": _image("Beit"),
    "deit": _image("DeiT"),
    "dinov2": _image("Dinov2", mlp_ratio=2),
    "convnext": _image(
        "ConvNext",
        image_size=32,
        num_stages=2,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_scale_init_value=1.0,
    ),
    "siglip": _builder(
        "SiglipModel", "SiglipConfig", text_config=_SIZES, vision_config={**_VISION}
    ),
    "blip": _conditional(
        "Blip",
        {"vision_config": _VISION},
        text_config={**_SIZES, "encoder_hidden_size": 32},
        image_text_hidden_size=16,
    ),
}

WITHOUT_QUERY = ("jetmoe", "mamba", "mamba2", "rwkv", "xlnet", "convnext")
"""No linear layer of these is a query."""
