"""Tiny models of every class that the installed transformers registers for a kind of task.

A config is made small by the names of its fields; SIZES are the rules. Layers are those of the
default config that differ, so that a hybrid has one layer of each kind. BY_HAND names what rules
cannot know, and CANNOT what no config alone can build, each with its reason.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.helpers.families import BOS, EOS, PAD, VOCAB

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "causal": ("AutoModelForCausalLM", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "multimodal": ("AutoModelForMultimodalLM", auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES),
    "seq2seq": ("AutoModelForSeq2SeqLM", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "masked": ("AutoModelForMaskedLM", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "classifier": (
        "AutoModelForSequenceClassification",
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ),
    "encoder": ("AutoModel", auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES),
    "speech": ("AutoModelForSpeechSeq2Seq", auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
    "image": (
        "AutoModelForImageClassification",
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    ),
    "ctc": ("AutoModelForCTC", auto.MODEL_FOR_CTC_MAPPING_NAMES),
}
"""Kind -> its automatic class, and model type -> class. A class counts for its first kind."""

LAYERS = r"num_hidden_layers|n_layers?|num_layers|(.*_)?(en|de)coder_layers|depth|layers|num_blocks"
SIZES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size(_per_layer_input)?|.*_vocab", VOCAB),
    (r"num_kv_shared_layers|num_nextn_predict_layers|num_mtp_layers", 0),
    (r"mamba_(n|num)_heads|n_mamba_heads", 8),
    (r"mamba_(d_head|head_?dim|d_state)|ssm_state_size|state_size|.*chunk_size|conv_L_cache", 8),
    (r"mamba_dt_rank|time_step_rank|.*_rel|hc_lowrank|laurel_rank|gated_norm_rank", 4),
    (r"mamba_d_ssm|attention_hidden_size|(moe_|mlp_)?alignment.*", 64),
    (r"n_groups|mamba_n_?groups", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r".*shared_experts?|.*num_shared.*|n_shared.*", 1),
    (r"(?!index).*(top_?k|per_tok(en)?|moe_k)(_.*)?", 2),
    (r".*num_.*experts|.*n_routed_experts|.*num_local_experts", 4),
    (r"index_n_heads", 16),  # with fewer, many scores are zero and ties decide which keys count
    (r"(?!hidden|image|text|d_model)(.*_)?(heads?|groups|n_head)(_per_layer)?", 4),
    (LAYERS, 2),
    (r".*(_interval|_period|every_n_layers|_step|_pattern|_frequency)|n_layers_per_.*", 2),
    (r"qk_nope_head_dim", 12),
    (r"qk_rope_head_dim|rotary_dim|kv_channels|index_head_dim|linear.*head_dim", 8),
    (r"index_topk|num_latents", 8),
    (r"index_kpool", 4),
    (r"q_lora_rank", 24),
    (r"kv_lora_rank|.*lora_rank", 16),
    (r"(.*_)?(head_dim|d_head|d_kv|head_size|dim_head)|query_pre_attn_scalar|indexer_.*dim", 16),
    (r"(.*moe|.*expert|shared).*(intermediate|ffn).*", 48),
    (r".*(intermediate|ffn|ff_dim|dim_ff|d_ff|dff|d_inner|n_inner|mlp_dim|inner).*", 64),
    (r".*(sliding_window|window|radius|local_attention)(_.*)?", 8),
    (r"(.*_)?max_.*positions?(_.*)?|n_positions|max_seq_len|n_ctx|context_length|seq_len", 256),
    (r".*conv.*kernel_size", 5),  # odd, as default ones are
    (r"image_size|input_size", 16),
    (r"patch_size", 4),
    (r"num_mel_bins|feature_size|input_feat.*", 16),
    (r".*(size|dim|d_model|n_embd|channels?|width|units)(_.*)?", 32),
)
"""Name of a field -> the most that it may be; the first rule that matches holds."""
NOISE = r".*(drop_?out|layerdrop|pdrop|drop_rate|dropout_rate|mask_(time|feature)_prob)(_.*)?"
"""Fields of what is random in training mode."""
TOKENS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
SEVERAL = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads")
"""Heads that several heads of the queries share, if the default config's do."""

UNSET = {
    **dict.fromkeys(("head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("num_key_value_heads", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    "n_shared_experts": 1,
    "vocab_size": VOCAB,
}
"""Fields whose default is None and that some models need."""

_EMU: dict[str, Any] = {"vocabulary_map": {"<image>": VOCAB - 1}}
_CONV = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
_ZAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "num_key_value_heads": 4,
}
BY_HAND: dict[str, dict[str, Any]] = {
    # lists and sums that have to agree with other fields
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_offset": 1, "expert_layer_offset": 1},
    "reformer": {"axial_pos_embds": False, "attention_head_size": 8, "hash_seed": 0},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "funnel": {"block_sizes": [1, 1], "block_repeats": [1, 1]},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "lilt": {"hidden_size": 48},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "apertus1p5": {"image_token_offset": VOCAB - 64, "audio_token_offset": VOCAB - 32},
    "chameleon": _EMU,
    "emu3": _EMU,
    # a block that two layers share needs both
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA,
    # None by default, and needed, or of one kind of layer
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "step3p5": {"sliding_window": 8},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "radio": {"video_temporal_patch_size": 2},
    # no fields, and needed
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "esm": {"vocab_size": VOCAB, "mask_token_id": 4, "pad_token_id": PAD},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [48, 40]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xmod": {"default_language": "en_XX"},
    "helium": {"head_dim": 8},
    "longcat_flash": {"head_dim": 8},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "fun_asr_nano": {
        "adaptor_config": {"hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 4}
    },
}
"""Model type -> fields that rules cannot know."""


@dataclass(frozen=True, slots=True)
class Family:
    """A class of transformers.

    Attributes:
        kind: A key of KINDS.
        type: Its config's model type.
        name: Of the class.
    """

    kind: str
    type: str
    name: str

    def __str__(self) -> str:
        return self.name

    def build(self, **changes: Any) -> PreTrainedModel:
        """Return a tiny model with random weights in eval mode.

        Args:
            changes: Fields of its config that the rules do not set.
        """
        torch.manual_seed(0)
        kind = getattr(transformers, self.name)
        config: Any = shrunk(kind.config_class(), {}, changes)
        if self.kind == "causal" and hasattr(config, "is_decoder"):
            config.is_decoder = True  # as a task sets it: an encoder sees later tokens otherwise
        if self.name.endswith("EncoderModel"):
            config.is_encoder_decoder = False
        if config.is_encoder_decoder:
            config.decoder_start_token_id = PAD
        model: PreTrainedModel = kind(config).eval()
        if config.is_encoder_decoder and model.can_generate():
            model.generation_config.decoder_start_token_id = PAD
        for parameter in model.parameters():
            if not parameter.any():  # a gate, a scale or a bias that training has opened
                torch.nn.init.normal_(parameter, 0.0, 0.2)
        return model


def installed() -> Iterator[Family]:
    """Yield every class of KINDS once."""
    found: dict[str, Family] = {}
    for kind, (_, classes) in KINDS.items():
        for model_type, names in classes.items():
            stem = CONFIG_MAPPING_NAMES[model_type].removesuffix("Config")
            for name in names if isinstance(names, tuple | list) else [names]:
                if name not in found or (found[name].kind == kind and name.startswith(stem)):
                    found[name] = Family(kind, model_type, name)
    yield from found.values()


def shrunk(config: Any, tokens: dict[int, int], changes: Mapping[str, Any] | None = None) -> Any:
    """Return a config of the same class with small sizes.

    Args:
        tokens: Special token -> its replacement, shared by nested configs.
        changes: Fields that the rules do not set.
    """
    fixed = {**BY_HAND.get(config.model_type, {}), **(changes or {})}
    defaults = {field.name: field.default for field in fields(config)}
    values = dict(vars(config))  # a field with an alias has its value there
    values |= {name: getattr(config, name) for name in config.attribute_map if name not in values}
    values = {name: value for name, value in values.items() if name in defaults}
    small = _layers(values, defaults)
    for name, value in values.items():
        if name in small or name in fixed:
            continue
        if isinstance(value, PreTrainedConfig):
            small[name] = shrunk(value, tokens)
        elif defaults[name] is not None and name.endswith(("token_id", "token_index")):
            small[name] = _token(name, value, tokens)
        elif name in TOKENS:
            small[name] = TOKENS[name]
        elif value is None and name in UNSET:
            small[name] = UNSET[name]
        elif isinstance(value, int) and not isinstance(value, bool) and defaults[name] is not None:
            small[name] = _size(name, value, values)
        elif name in ("initializer_range", "init_std") and isinstance(value, float):
            small[name] = 0.2
        elif re.fullmatch(NOISE, name) and isinstance(value, float):
            small[name] = 0.0
        elif name in ("num_heads", "num_attention_heads") and isinstance(value, list | tuple):
            small[name] = [2 if heads < 4 else 4 for heads in value]
    small |= fixed
    if isinstance(rope := values.get("rope_parameters"), dict):
        module = type(config).__module__.replace(".configuration_", ".modeling_")
        code = inspect.getsource(import_module(module)) if find_spec(module) else ""
        if "mrope_section" in code and "rope_type" in rope:  # and not of each kind of layer
            rope = {"mrope_section": [1, 1, 1], **rope}
        small.setdefault("rope_parameters", _rope(rope, small))
    return type(config)(**small)


def _size(name: str, value: int, values: dict[str, Any]) -> int:
    if name in SEVERAL:
        queries = values.get(name.replace("key_value", "attention").replace("key_", "value_"))
        return 4 if value == queries else min(value, 2)
    if "depths" in values and name in ("image_size", "window_size"):
        return 64 if name == "image_size" else 2  # each of four stages halves an image's sides
    most = next((most for pattern, most in SIZES if re.fullmatch(pattern, name)), value)
    return most if name == "vocab_size" else min(value, most)


def _token(name: str, value: Any, tokens: dict[int, int]) -> int:
    if name in TOKENS:
        return TOKENS[name]
    if not isinstance(value, int) or value < 0:
        return PAD if value is None else value
    return tokens.setdefault(value, VOCAB - 1 - len(tokens))


def _layers(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that describe layers, of the first layer of each kind and at least two."""
    count = next((n for n in values if re.fullmatch(LAYERS, n) and isinstance(values[n], int)), "")
    number = values.get(count, 0)
    lists = {
        name: list(value)
        for name, value in values.items()
        if isinstance(value, list | tuple) and value and name not in ("id2label", "label2id")
    }
    chosen = {
        name: value
        for name, value in lists.items()
        if len({*map(str, value)}) == len(value)
        and re.search(r"layers|ind(ex|ic)es|idxs|layer_ids", name)
        and all(isinstance(index, int) and 0 <= index < number for index in value)
    }
    each = {n: v for n, v in lists.items() if len(v) == number > 2 and n not in chosen}
    first = {n: v for n, v in values.items() if n in ("first_k_dense_replace", "num_dense_layers")}
    kinds: list[tuple[str, Any]] = []
    kept: list[int] = []
    for layer in range(number):
        here = [(name, str(value[layer])) for name, value in each.items()]
        here += [(name, layer in value) for name, value in chosen.items()]
        here += [(name, layer < value) for name, value in first.items()]
        if new := [kind for kind in here if kind not in kinds]:
            kinds += new
            kept.append(layer)
    kept += [layer for layer in range(number) if layer not in kept][: max(2 - len(kept), 0)]
    small: dict[str, Any] = {count: len(kept)} if count else {}
    small |= {
        name: [_size(name, v, values) if type(v) is int else v for v in (value[k] for k in kept)]
        for name, value in each.items()
    }
    small |= {
        name: [n for n, layer in enumerate(kept) if layer in value]
        for name, value in chosen.items()
        if defaults[name] is not None
    }
    return small | {name: sum(k < value for k in kept) for name, value in first.items()}


def _rope(rope: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Return rotary embeddings whose sections fit the head."""
    made = {key: _rope(v, small) if isinstance(v, dict) else v for key, v in rope.items()}
    if "qk_nope_head_dim" in small:
        made.pop("partial_rotary_factor", None)  # a share of the default heads
    if "mrope_section" in made:
        heads = small.get("num_attention_heads", 4)
        head_dim = small.get("qk_rope_head_dim") or small.get("head_dim")
        head_dim = head_dim or small.get("hidden_size", 32) // heads
        half = int(head_dim * made.get("partial_rotary_factor", 1.0)) // 2
        sections: Sequence[int] = made["mrope_section"]
        made["mrope_section"] = [half // 3] * (len(sections) - 1)
        made["mrope_section"] += [half - sum(made["mrope_section"])]
    return made
