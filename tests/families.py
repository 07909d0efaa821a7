"""Tiny models with random weights, one per family, built from their config classes.

All share one vocabulary, that of `tiny_tokenizer`. Weights are drawn wide (standard deviation 0.2),
so that logits are of order one and a wrong layer shows. Seed torch before building.
"""

from __future__ import annotations

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
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_SIZES: dict[str, Any] = {
    **_SHARED,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
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
    "gemma2": _builder(
        "Gemma2ForCausalLM", "Gemma2Config", **_GROUPED, head_dim=8, query_pre_attn_scalar=8
    ),
    "phi3": _builder("Phi3ForCausalLM", "Phi3Config", **_GROUPED),
    "mixtral": _builder(
        "MixtralForCausalLM",
        "MixtralConfig",
        **_GROUPED,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "gpt2": _builder(
        "GPT2LMHeadModel",
        "GPT2Config",
        **_SHARED,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_inner=64,
        n_positions=256,
        initializer_range=0.2,
    ),
    "gpt_neox": _builder("GPTNeoXForCausalLM", "GPTNeoXConfig", **_SIZES),
    "bert": _builder("BertForMaskedLM", "BertConfig", **_SIZES),
    "t5": _builder(
        "T5ForConditionalGeneration",
        "T5Config",
        **_SHARED,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        initializer_factor=1.0,
        decoder_start_token_id=PAD,
    ),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
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
    )
