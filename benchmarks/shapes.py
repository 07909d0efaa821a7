"""Models with random weights for benchmarks, and the arithmetic of their shapes.

Dropout is off in all of them: two programs can be compared step by step. Requires only
transformers, because it also runs in the peers' environments.

N parameters of matrix products, the head included; a FLOP of causal attention forward, per token;
P parameters of the adapter; T tokens of a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedTokenizerFast

VOCAB = 32_000
_TOKENS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_BLOCKS: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's class and config; its rows' task."""

    architecture: str
    config: str
    settings: dict[str, Any]
    task: str = "causal_lm"

    def make_config(self, **changes: Any) -> Any:
        """Return the config with some sizes changed."""
        return getattr(transformers, self.config)(**{**self.settings, **changes})


def _llama(
    hidden: int, inner: int, layers: int, heads: int, groups: int, vocab: int, **more: Any
) -> Shape:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "max_position_embeddings": 1 << 20,  # of the rotations: no weight depends on it
        "pad_token_id": 0,
        "eos_token_id": 1,
        **more,
    }
    return Shape("LlamaForCausalLM", "LlamaConfig", sizes)


FAMILIES: dict[str, Shape] = {
    "gpt2": Shape(
        "GPT2LMHeadModel",
        "GPT2Config",
        {**_TOKENS, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "gpt_neox": Shape("GPTNeoXForCausalLM", "GPTNeoXConfig", _BLOCKS),
    "gemma2": Shape(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_BLOCKS, "num_key_value_heads": 4, "head_dim": 64, "query_pre_attn_scalar": 64},
    ),
    "qwen3_moe": Shape(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **_BLOCKS,
            "hidden_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 640,
        },
    ),
    "bert": Shape(
        "BertForMaskedLM",
        "BertConfig",
        {**_TOKENS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        task="masked_lm",
    ),
    "t5": Shape(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **_TOKENS,
            "d_model": 768,
            "d_kv": 64,
            "d_ff": 2048,
            "num_layers": 6,
            "num_heads": 12,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        task="seq2seq",
    ),
}
"""Shapes of about 100M parameters."""

_LINEAR, _FULL = "linear_attention", "full_attention"
_EVERY_FOURTH = [_LINEAR, _LINEAR, _LINEAR, _FULL] * 2
HYBRID_SIZES: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 384}

HYBRIDS: dict[str, Shape] = {
    "qwen3_5": Shape(
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {
            **HYBRID_SIZES,
            "layer_types": _EVERY_FOURTH,
            "head_dim": 64,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "lfm2": Shape(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**HYBRID_SIZES, "layer_types": ["conv", "conv", "conv", _FULL] * 2},
    ),
    "granitemoehybrid": Shape(  # without experts, as Granite 4 H Micro
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **HYBRID_SIZES,
            "layer_types": _EVERY_FOURTH,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 1536,
            "mamba_n_heads": 18,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 64,
        },
    ),
    "nemotron_h": Shape(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **HYBRID_SIZES,
            "layers_block_type": [_LINEAR, "mlp", _LINEAR, "mlp", _FULL, "mlp", _LINEAR, "mlp"],
            "head_dim": 64,
            "mamba_num_heads": 18,
            "mamba_head_dim": 64,
            "ssm_state_size": 64,
            "n_groups": 1,
            "chunk_size": 64,
        },
    ),
    "kimi_linear": Shape(
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            **HYBRID_SIZES,
            **_EXPERTS,
            "layer_types": _EVERY_FOURTH,
            "mlp_layer_types": ["dense", *["sparse"] * 7],
            "num_key_value_heads": 9,
            "linear_num_heads": 9,
            "linear_head_dim": 64,
            "q_lora_rank": None,
            "kv_lora_rank": 192,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "num_local_experts": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "gpt_oss": Shape(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **HYBRID_SIZES,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "intermediate_size": 384,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
"""Shapes of hybrids and of attention with sinks: 8 layers, 25M to 70M parameters."""

LARGE: dict[str, Shape] = {
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, head_dim=128, tie_word_embeddings=True),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "qwen2.5-14b": _llama(5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _llama(5120, 27648, 64, 40, 8, 152064),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 8, 128256),
}
"""Shapes of released models, for a GPU."""

SHAPES = {**FAMILIES, **HYBRIDS, **LARGE}


def build(
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    each_block: Callable[[nn.Module], object] = lambda block: None,
    **changes: Any,
) -> Any:
    """Return a model with random weights, created on its device block by block.

    The largest model never exists in 16 bits as a whole if `each_block` quantises.

    Args:
        each_block: Called with each block when it has its weights; may change it in place.
        changes: Sizes to change.
    """
    config = shape.make_config(**changes)
    architecture = getattr(transformers, shape.architecture)
    default = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            if shape.config != "LlamaConfig":
                return architecture(config).eval()
            first = copy.deepcopy(config)
            first.num_hidden_layers = 1
            model = architecture(first)
            model.config.num_hidden_layers = config.num_hidden_layers
            blocks = model.model.layers
            each_block(blocks[0])
            for number in range(1, config.num_hidden_layers):
                block = type(blocks[0])(model.config, number)
                block.apply(model._init_weights)
                each_block(block)
                blocks.append(block)
    finally:
        torch.set_default_dtype(default)
    return model.eval()


def tokenizer(num_words: int = 1) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few words: rows are tokens already, but tasks need the pad token.

    Args:
        num_words: Number of words; the second has token 5 and is "w5".
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "</s>": 1, "<mask>": 2, "<unk>": 3, "word": 4}
    words |= {f"w{token}": token for token in range(5, 4 + num_words)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="</s>",
        mask_token="<mask>",
        unk_token="<unk>",
        model_max_length=1 << 20,
    )


# ------------------------------------------------------------------- arithmetic


def matmul_parameters(shape: Shape) -> int:
    """Return N of a decoder of Llama's kind: its linear layers and its head."""
    config = shape.make_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    block = config.hidden_size * (heads * head_dim + 3 * config.intermediate_size)
    return config.num_hidden_layers * block + config.vocab_size * config.hidden_size


def attention_flop(shape: Shape, length: int) -> int:
    """Return a: FLOP per token of a row in the forward pass, with half of the square masked."""
    config = shape.make_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * length * config.num_attention_heads * head_dim * config.num_hidden_layers


def adapter_parameters(shape: Shape, rank: int) -> int:
    """Return P of LoRA on all linear layers of the blocks."""
    config = shape.make_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    ends = 2 * (hidden + q) + 2 * (hidden + kv) + 3 * (hidden + inner)
    return rank * ends * config.num_hidden_layers


def lora_flop(shape: Shape, length: int, rank: int) -> int:
    """Return the model's FLOP of a LoRA step per token: 4N + 3a + 6P.

    A frozen weight needs no gradient: 2N forward and 2N backward. Recomputation does not count,
    including the part of the forward pass that flash attention repeats.
    """
    a = attention_flop(shape, length)
    return 4 * matmul_parameters(shape) + 3 * a + 6 * adapter_parameters(shape, rank)
