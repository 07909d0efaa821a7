"""Tiny models that tests name, built by the rules of installed.py.

HYBRIDS have convolutions, state spaces or linear attention beside attention, or instead of it.
RECENT have attention alone. FURTHER are others that tests name.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from tests.helpers.installed import Family


def small(name: str, kind: str = "causal", **changes: Any) -> Callable[[], PreTrainedModel]:
    """Return a builder of a class of transformers with some fields of its config given."""
    return partial(Family(kind, "", name).build, **changes)


# fmt: off
_TWO: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2}
_SSD: dict[str, Any] = {"mamba_chunk_size": 4, "mamba_n_groups": 2}

HYBRIDS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_next": small("Qwen3NextForCausalLM"),
    "jamba": small("JambaForCausalLM", use_mamba_kernels=False),
    "lfm2": small("Lfm2ForCausalLM"),
    "mamba": small("MambaForCausalLM"),
    "mamba2": small("Mamba2ForCausalLM", chunk_size=4),
    "recurrent_gemma": small("RecurrentGemmaForCausalLM", num_key_value_heads=2),
    "rwkv": small("RwkvForCausalLM"),
    "minimax": small("MiniMaxForCausalLM", block_size=16),
    "qwen3_5": small("Qwen3_5ForCausalLM"),
    "qwen3_5_moe": small("Qwen3_5MoeForCausalLM"),
    "kimi_linear": small("KimiLinearForCausalLM", **_TWO),
    "nemotron_h": small("NemotronHForCausalLM", chunk_size=4),
    "granitemoehybrid": small("GraniteMoeHybridForCausalLM", **_SSD, num_key_value_heads=2),
    "granitehybrid_dense": small("GraniteMoeHybridForCausalLM", **_SSD, num_key_value_heads=2,
        num_local_experts=0, num_experts_per_tok=0),
    "falcon_h1": small("FalconH1ForCausalLM", **_SSD, mamba_rms_norm=True),
    "bamba": small("BambaForCausalLM", **_SSD, attn_layer_indices=[1]),
    "zamba": small("ZambaForCausalLM", num_key_value_heads=2),
    "zamba2": small("Zamba2ForCausalLM", chunk_size=4, use_shared_attention_adapter=True,
        adapter_rank=4),
    "olmo_hybrid": small("OlmoHybridForCausalLM", num_key_value_heads=2),
    "lfm2_moe": small("Lfm2MoeForCausalLM"),
    "lfm3": small("Lfm3ForCausalLM", sliding_window=4),
    "bailing_hybrid": small("BailingHybridForCausalLM", **_TWO),
    "falcon_mamba": small("FalconMambaForCausalLM"),
    "zaya": small("ZayaForCausalLM"),
    "inkling": small("InklingForCausalLM", mlp_layer_types=["dense", "sparse"], rel_extent=16,
        logits_mup_width_multiplier=1.0),
    "qwen4_exp": small("Qwen4ExpForCausalLM", hc_count=2),
}
"""Name -> builder."""

RECENT: dict[str, Callable[[], PreTrainedModel]] = {
    "minimax_m2": small("MiniMaxM2ForCausalLM"),
    "deepseek_v4": small("DeepseekV4ForCausalLM", mlp_layer_types=["moe", "moe"]),
    "glm_moe_dsa": small("GlmMoeDsaForCausalLM"),
    "mistral4": small("Mistral4ForCausalLM", first_k_dense_replace=1),
    "gemma4": small("Gemma4ForCausalLM", sliding_window=4),
    "gemma4_moe": small("Gemma4ForCausalLM", sliding_window=4, hidden_size_per_layer_input=0,
        enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=48),
    "gpt_oss": small("GptOssForCausalLM"),
    "hy_v3": small("HYV3ForCausalLM"),
    "hy_v4": small("HYV4ForCausalLM"),
    "mimo_v2_flash": small("MiMoV2FlashForCausalLM", sliding_window=4, head_dim=12, v_head_dim=8),
    "longcat_flash": small("LongcatFlashForCausalLM", zero_expert_num=2),
    "afmoe": small("AfmoeForCausalLM"),
    "exaone_moe": small("ExaoneMoeForCausalLM"),
}
"""Name -> builder. gpt_oss is also in ARCHITECTURES: it is here for its attention sinks."""

FURTHER: dict[str, Callable[[], PreTrainedModel]] = {
    "openai_gpt": small("OpenAIGPTLMHeadModel"),
    "gemma3n": small("Gemma3nForCausalLM"),
    "phimoe": small("PhimoeForCausalLM"),
    "llama4": small("Llama4ForCausalLM", interleave_moe_layer_step=2, moe_layers=[1]),
    "jetmoe": small("JetMoeForCausalLM"),
    "doge": small("DogeForCausalLM", num_key_value_heads=2, keep_window_size=64),
    "deepseek_v32": small("DeepseekV32ForCausalLM"),
    **{name: HYBRIDS[name] for name in (
        "mamba", "mamba2", "jamba", "lfm2", "qwen3_next", "recurrent_gemma", "rwkv")},
    "xlnet": small("XLNetLMHeadModel"),
    "m2m_100": small("M2M100ForConditionalGeneration", "seq2seq"),
    "marian": small("MarianMTModel", "seq2seq"),
    "siglip": small("SiglipModel", "encoder"),
    "blip": small("BlipForConditionalGeneration", "multimodal"),
}
"""Name -> builder."""
# fmt: on
