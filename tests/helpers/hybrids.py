"""Tiny models that mix tokens outside of attention too, and other recent families.

HYBRIDS have convolutions, state spaces or linear attention beside attention, or instead of it.
RECENT have attention alone. Both complement `families`, with the same sizes and vocabulary.
"""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from tests.helpers.families import (
    _EXPERTS,
    _GROUPED,
    _HEADS,
    _LATENT,
    _ROPE,
    _SHARED,
    FURTHER,
    VOCAB,
    _builder,
    _causal,
)

# fmt: off
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}
_SSD: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2,
    "mamba_chunk_size": 4, "mamba_expand": 2,
}

HYBRIDS: dict[str, Callable[[], PreTrainedModel]] = {
    **{n: FURTHER[n] for n in (
        "qwen3_next", "jamba", "lfm2", "mamba", "mamba2", "recurrent_gemma", "rwkv")},
    "minimax": _causal("MiniMax", num_local_experts=4, num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"], block_size=16),
    "qwen3_5": _builder("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **_GROUPED, **_HEADS, **_DELTA,
        rope_parameters={**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}),
    "qwen3_5_moe": _builder("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", **_GROUPED, **_HEADS,
        **_DELTA, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=48,
        rope_parameters={**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}),
    "kimi_linear": _causal("KimiLinear", {**_LATENT, "num_local_experts": 4}, linear_num_heads=4,
        q_lora_rank=None, linear_head_dim=8, layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"], n_group=1),
    "nemotron_h": _causal("NemotronH", layers_block_type=["linear_attention", "moe",
        "full_attention", "mlp"], num_hidden_layers=4, head_dim=8, ssm_state_size=8,
        mamba_num_heads=8, mamba_head_dim=8, n_groups=2, chunk_size=4, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=48, moe_shared_expert_intermediate_size=48),
    "granitemoehybrid": _causal("GraniteMoeHybrid", **_SSD, num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=48,
        layer_types=["linear_attention", "full_attention"]),
    "granitehybrid_dense": _causal("GraniteMoeHybrid", **_SSD, num_local_experts=0,
        num_experts_per_tok=0, shared_intermediate_size=48,
        layer_types=["linear_attention", "full_attention"]),
    "falcon_h1": _causal("FalconH1", **_SSD, mamba_d_ssm=64, mamba_rms_norm=True, head_dim=8),
    "bamba": _causal("Bamba", **_SSD, attn_layer_indices=[1]),
    "zamba": _causal("Zamba", n_mamba_heads=2, mamba_d_state=4, mamba_dt_rank=4,
        num_hidden_layers=3, layers_block_type=["linear_attention", "hybrid", "hybrid"],
        attention_head_dim=16),
    "zamba2": _causal("Zamba2", mamba_d_state=8, mamba_ngroups=1, n_mamba_heads=8, chunk_size=4,
        num_hidden_layers=3, layers_block_type=["linear_attention", "hybrid", "hybrid"],
        num_key_value_heads=4, num_mem_blocks=1, adapter_rank=4, use_shared_attention_adapter=True),
    "olmo_hybrid": _causal("OlmoHybrid", **_DELTA | {"linear_num_key_heads": 4}),
    "lfm2_moe": _causal("Lfm2Moe", **_EXPERTS, num_experts=4, num_dense_layers=1,
        layer_types=["conv", "full_attention"]),
    "lfm3": _causal("Lfm3", **_HEADS, num_hidden_layers=3, sliding_window=4,
        layer_types=["conv", "full_attention", "sliding_attention"]),
    "bailing_hybrid": _causal("BailingHybrid", {**_LATENT, "num_local_experts": 4}, head_dim=8,
        layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
        num_mtp_layers=0, n_group=1, q_lora_rank=None),
    "falcon_mamba": _causal("FalconMamba", _SHARED, initializer_range=0.2, hidden_size=32,
        num_hidden_layers=2, state_size=4),
    "zaya": _causal("Zaya", **_HEADS, moe_intermediate_size=48, num_experts=4,
        num_experts_per_tok=1, router_hidden_size=16),
    "inkling": _builder("InklingForCausalLM", "InklingTextConfig", **_GROUPED, **_HEADS,
        swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8,
        sliding_window_size=8, d_rel=4, rel_extent=16, moe_intermediate_size=48,
        n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        layer_types=["hybrid_sliding", "hybrid"], mlp_layer_types=["dense", "sparse"],
        logits_mup_width_multiplier=1.0),
    "qwen4_exp": _builder("Qwen4ExpForCausalLM", "Qwen4ExpTextConfig", **_GROUPED, **_HEADS,
        **_DELTA, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=48, hc_count=2,
        hc_lowrank=8, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8,
        indexer_compress_ratio=4, rope_parameters={**_ROPE, "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0]}),
}
"""Name -> builder."""

RECENT: dict[str, Callable[[], PreTrainedModel]] = {
    "minimax_m2": _causal("MiniMaxM2", **_HEADS, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v4": _causal("DeepseekV4", **_EXPERTS | {"n_routed_experts": 4}, head_dim=16,
        q_lora_rank=24, n_shared_experts=1, sliding_window=8, o_groups=2, o_lora_rank=8,
        index_n_heads=2, index_head_dim=16, index_topk=8, hc_mult=2, num_nextn_predict_layers=0,
        layer_types=["sliding_attention", "heavily_compressed_attention"],
        mlp_layer_types=["moe", "moe"], compress_rates={"heavily_compressed_attention": 4,
        "compressed_sparse_attention": 2}),
    "glm_moe_dsa": _causal("GlmMoeDsa", _LATENT, n_group=1, mlp_layer_types=["dense", "sparse"],
        index_n_heads=2, index_head_dim=16, index_topk=8),
    "mistral4": _causal("Mistral4", _LATENT, n_group=1),
    "gemma4": _builder("Gemma4ForCausalLM", "Gemma4TextConfig", **_GROUPED, **_HEADS,
        sliding_window=4, layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB),
    "gemma4_moe": _builder("Gemma4ForCausalLM", "Gemma4TextConfig", **_GROUPED, **_HEADS,
        sliding_window=4, layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=4, top_k_experts=2,
        moe_intermediate_size=48),
    "gpt_oss": _causal("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8,
        rope_parameters=_ROPE),
    "hy_v3": _causal("HYV3", **_HEADS, **_EXPERTS, num_experts=4, num_shared_experts=1,
        mlp_layer_types=["dense", "sparse"]),
    "hy_v4": _causal("HYV4", _LATENT, n_group=1, head_dim=20, mlp_layer_types=["dense", "sparse"],
        index_n_heads=2, index_head_dim=16, index_topk=8, hc_mult=2),
    "mimo_v2_flash": _causal("MiMoV2Flash", **_EXPERTS, n_routed_experts=4, head_dim=12,
        v_head_dim=8, sliding_window=4, layer_types=["full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse"]),
    "longcat_flash": _causal("LongcatFlash", {k: v for k, v in _LATENT.items()
        if k not in ("num_hidden_layers", "intermediate_size", "n_group", "topk_group",
        "first_k_dense_replace", "moe_intermediate_size", "num_experts_per_tok",
        "n_shared_experts")}, num_layers=2, ffn_hidden_size=64, expert_ffn_hidden_size=48,
        moe_topk=2, zero_expert_num=2, head_dim=8),
    "afmoe": _causal("Afmoe", **_HEADS, **_EXPERTS, num_experts=4, num_shared_experts=1,
        num_dense_layers=1, sliding_window=8),
    "exaone_moe": _causal("ExaoneMoe", **_HEADS, **_EXPERTS, num_experts=4, num_shared_experts=1,
        first_k_dense_replace=1, sliding_window=8),
}
"""Name -> builder. gpt_oss is also in ARCHITECTURES: it is here for its attention sinks."""
# fmt: on
