"""Tiny models with random weights, built from their config classes.

FAMILIES are those that grids run over; ARCHITECTURES are these and others whose structure is known
by hand (role_facts.py). installed.py builds every class of transformers, hybrids.py others of them.

All share one vocabulary, that of `tiny_tokenizer`. Weights are drawn wide (standard deviation 0.2),
so that logits are of order one and a wrong layer shows. Seed torch before building.
"""

from collections.abc import Callable
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "<|im_end|>", "<|im_start|>", "<unk>"]
PAD, BOS, EOS, IM_START, UNK = range(len(SPECIAL))
VOCAB = 384

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}"""

_CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other dog over the fox",
    "what is the answer? the answer is in the question, as in all the other questions",
    '{"name": "Anna", "item": "pizza", "quantity": 3, "extras": ["cheese", "olives"]}',
    "user assistant system instruction input output prompt completion messages content",
]

# fmt: off
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS,
}
_SIZES: dict[str, Any] = {
    **_SHARED, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.2,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}


def _builder(architecture: str, config: str, **settings: Any) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        return getattr(transformers, architecture)(getattr(transformers, config)(**settings))

    return build


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _builder("LlamaForCausalLM", "LlamaConfig", **_GROUPED),
    "qwen2": _builder("Qwen2ForCausalLM", "Qwen2Config", **_GROUPED),
    "qwen3": _builder("Qwen3ForCausalLM", "Qwen3Config", **_GROUPED, head_dim=8),
    "gemma2": _builder("Gemma2ForCausalLM", "Gemma2Config", **_GROUPED, head_dim=8,
        query_pre_attn_scalar=8),
    "phi3": _builder("Phi3ForCausalLM", "Phi3Config", **_GROUPED),
    "mixtral": _builder("MixtralForCausalLM", "MixtralConfig", **_GROUPED, num_local_experts=4,
        num_experts_per_tok=2),
    "gpt2": _builder("GPT2LMHeadModel", "GPT2Config", **_SHARED, n_embd=32, n_layer=2, n_head=4,
        n_inner=64, n_positions=256, initializer_range=0.2),
    "gpt_neox": _builder("GPTNeoXForCausalLM", "GPTNeoXConfig", **_SIZES),
    "bert": _builder("BertForMaskedLM", "BertConfig", **_SIZES),
    "t5": _builder("T5ForConditionalGeneration", "T5Config", **_SHARED, d_model=32, d_kv=8, d_ff=64,
        num_layers=2, num_heads=4, initializer_factor=1.0, decoder_start_token_id=PAD),
}

# ------------------------------------------------------------------- all architectures

_WIDE = {"initializer_range": 0.2}
_VISION: dict[str, Any] = {
    **_WIDE, "image_size": 8, "patch_size": 4, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}
_SEQ2SEQ: dict[str, Any] = {
    **_SHARED, "init_std": 0.2, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "decoder_start_token_id": PAD,
}
_T5: dict[str, Any] = {
    **_SHARED, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "feed_forward_proj": "gated-gelu", "decoder_start_token_id": PAD,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT: dict[str, Any] = {
    **_GROUPED, **_EXPERTS, "num_key_value_heads": 4, "first_k_dense_replace": 1,
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
}
_FALCON: dict[str, Any] = {**_SIZES, "ffn_hidden_size": 64, "new_decoder_architecture": False}
_GPT: dict[str, Any] = {
    **_SHARED, **_WIDE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64, "n_positions": 256,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_IMAGE: dict[str, Any] = {"vision_config": _VISION}


def _causal(stem: str, sizes: dict[str, Any] = _GROUPED, **settings: Any) -> Any:
    return _builder(f"{stem}ForCausalLM", f"{stem}Config", **{**sizes, **settings})


def _masked(stem: str, **settings: Any) -> Any:
    return _builder(f"{stem}ForMaskedLM", f"{stem}Config", **{**_SIZES, **settings})


def _conditional(stem: str, sizes: dict[str, Any], **settings: Any) -> Any:
    architecture = f"{stem}ForConditionalGeneration"
    return _builder(architecture, f"{stem}Config", **{**sizes, **settings})


def half_open(closed: Callable[[], PreTrainedModel]) -> Callable[[], PreTrainedModel]:
    """Build with every gate half open, as trained ones are: at zero nothing passes, and trains."""

    def build() -> PreTrainedModel:
        model = closed()
        for name, parameter in model.named_parameters():
            if "gate" in name and parameter.numel() == 1:
                parameter.data.fill_(0.5)
        return model

    return build


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    **FAMILIES,
    "mistral": _causal("Mistral"),
    "mistral_swa": _causal("Mistral", sliding_window=4),
    "gemma": _causal("Gemma", head_dim=8),
    "gemma3_text": _builder("Gemma3ForCausalLM", "Gemma3TextConfig", **_GROUPED, head_dim=8,
        sliding_window=4),
    "phi": _causal("Phi"),
    "olmo2": _causal("Olmo2"),
    "granite": _causal("Granite"),
    "cohere": _causal("Cohere"),
    "stablelm": _causal("StableLm"),
    "starcoder2": _causal("Starcoder2"),
    "gpt_neo": _causal("GPTNeo", {**_SHARED, **_WIDE}, hidden_size=32, num_layers=2, num_heads=4,
        intermediate_size=64, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=256),
    "gptj": _causal("GPTJ", _GPT, rotary_dim=8),
    "gpt_bigcode": _causal("GPTBigCode", _GPT),
    "gpt_bigcode_mha": _causal("GPTBigCode", _GPT, multi_query=False),
    "codegen": _causal("CodeGen", _GPT, rotary_dim=8),
    "opt": _causal("OPT", _SIZES, init_std=0.2, ffn_dim=64, word_embed_proj_dim=32),
    "bloom": _causal("Bloom", {**_SHARED, **_WIDE}, hidden_size=32, n_layer=2, n_head=4),
    "falcon_mq": _causal("Falcon", _FALCON, multi_query=True),
    "falcon_new": _causal("Falcon", _FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_mha_alibi": _causal("Falcon", _FALCON, multi_query=False, alibi=True),
    "mpt": _causal("Mpt", {**_SHARED, **_WIDE}, d_model=32, n_layers=2, n_heads=4,
        expansion_ratio=2),
    "xglm": _causal("XGLM", _SHARED, init_std=0.2, d_model=32, num_layers=2, attention_heads=4,
        ffn_dim=64),
    "minimax": _causal("MiniMax", num_local_experts=4, num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"]),
    "deepseek_v2": _causal("DeepseekV2", _LATENT),
    "deepseek_v3": _causal("DeepseekV3", _LATENT),
    "qwen2_moe": _causal("Qwen2Moe", **_EXPERTS, num_experts=4, shared_expert_intermediate_size=48),
    "qwen3_moe": _causal("Qwen3Moe", **_EXPERTS, num_experts=4, head_dim=8),
    "gpt_oss": _causal("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8,
        rope_parameters=_ROPE),
    "olmoe": _causal("Olmoe", num_experts=4, num_experts_per_tok=2),
    "granitemoe": _causal("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    "roberta": _masked("Roberta"),
    "electra": _masked("Electra", embedding_size=32),
    "deberta_v1": _masked("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta_v2": _masked("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "modernbert": _masked("ModernBert", global_attn_every_n_layers=2, local_attention=8,
        cls_token_id=BOS, sep_token_id=EOS),
    "distilbert": _masked("DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    "bert_cls": _builder("BertForSequenceClassification", "BertConfig", **_SIZES, num_labels=3),
    "t5_gated": _conditional("T5", _T5),
    "mt5": _conditional("MT5", _T5),
    "bart": _conditional("Bart", _SEQ2SEQ),
    "pegasus": _conditional("Pegasus", _SEQ2SEQ),
    "whisper": _conditional("Whisper", _SEQ2SEQ, num_mel_bins=8, max_source_positions=32,
        max_target_positions=64),
    "vit": _builder("ViTForImageClassification", "ViTConfig", **_VISION, num_labels=3),
    "swin": _builder("SwinForImageClassification", "SwinConfig", image_size=16, patch_size=2,
        embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=2, num_labels=3, **_WIDE),
    "clip": _builder("CLIPModel", "CLIPConfig", text_config=_GROUPED, vision_config=_VISION,
        projection_dim=16),
    "llava": _conditional("Llava", _IMAGE, text_config={**_GROUPED, "model_type": "llama"},
        vision_config={**_VISION, "model_type": "clip_vision_model"}, image_token_index=VOCAB - 1,
        vision_feature_layer=-1),
    "qwen2_vl": _conditional("Qwen2VL", _IMAGE, image_token_id=VOCAB - 1, video_token_id=VOCAB - 2,
        vision_start_token_id=VOCAB - 3, vision_end_token_id=VOCAB - 4, text_config={**_GROUPED,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4,
        "mlp_ratio": 2, "patch_size": 4, **_WIDE}),
    "mllama": half_open(_conditional("Mllama", _IMAGE,
        text_config={**_GROUPED, "cross_attention_layers": [1]},
        vision_config={**_VISION, "attention_heads": 4, "num_global_layers": 1,
        "vision_output_dim": 64, "intermediate_layers_indices": [0], "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2]]})),
    "idefics": _builder("IdeficsForVisionText2Text", "IdeficsConfig", **_SIZES,
        additional_vocab_size=4, cross_layer_interval=1, alpha_initializer="ones",
        vision_config={**_VISION, "embed_dim": 32}),
}
"""Name -> builder. Some are in no table of supported models: codegen and minimax have layouts of
their own."""
# fmt: on


def tiny_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """Return a real byte-level BPE tokenizer with a ChatML template, trained in memory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
        **settings,
    )


TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
}


def llama(**changes: int) -> transformers.LlamaConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 5}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048}
    return transformers.LlamaConfig(**sizes | changes, attn_implementation="sdpa")
