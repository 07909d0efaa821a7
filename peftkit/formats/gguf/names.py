"""llama.cpp's names of transformers' layers, and which rows its converter permutes.

The names come from the gguf library, the permuted rows from the table below.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from peftkit.errors import AdapterError, BaseError
from peftkit.model.places import is_linear, linear_shape


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp's converter treats an architecture.

    Attributes:
        name: Its general.architecture.
        rotary: The rows of q_proj and k_proj are permuted, head by head.
        moved: The rows of this tensor are permuted in a way that is not supported here.
    """

    name: str
    rotary: bool = False
    moved: str = "\0"


# transformers' model_type -> what it is there. Each row was read in llama.cpp's conversion/: one
# that moves rows and is not marked so would turn an adapter into noise without any error.
ARCHITECTURES: dict[str, Architecture] = {
    **{name: Architecture("llama", rotary=True) for name in ("llama", "mistral", "mixtral")},
    "granite": Architecture("granite", rotary=True),
    "smollm3": Architecture("smollm3", rotary=True),
    **{name: Architecture(name) for name in ("qwen2", "qwen3", "gemma", "gemma2", "phi3", "gpt2")},
    **{name: Architecture(name) for name in ("starcoder2", "olmo2", "stablelm")},
    "qwen2_moe": Architecture("qwen2moe"),
    "qwen3_moe": Architecture("qwen3moe"),
    "gemma3": Architecture("gemma3"),
    "gemma3_text": Architecture("gemma3"),
    "phi": Architecture("phi2"),
    "cohere": Architecture("command-r"),
    "gpt_neox": Architecture("gptneox", moved=".attn_qkv."),
    "falcon": Architecture("falcon", moved=".attn_qkv."),
}


@dataclass(frozen=True, slots=True)
class GGUFLayer:
    """A linear layer of the base as llama.cpp knows it.

    Attributes:
        name: Of its weight there; "" if it has none.
        shape: (out, in). heads: Whose rows are permuted; 0: none are.
        refusal: Why it cannot have a LoRA there.
    """

    name: str
    shape: tuple[int, int]
    heads: int = 0
    refusal: str = ""


def architecture_of(model: Any, name: str) -> Architecture:
    """Return how llama.cpp's converter treats a model; BaseError if that is not known."""
    model_type = model.config.model_type
    if model_type not in ARCHITECTURES:
        raise BaseError(
            f"cannot tell how llama.cpp lays out {name}.",
            found=f"It is of type {model_type!r}. Known are {', '.join(sorted(ARCHITECTURES))}.",
            fix="Merge the adapter, and convert the merged model: peftkit merge",
        )
    return ARCHITECTURES[model_type]


def find_places(model: Any, architecture: Architecture) -> dict[str, GGUFLayer]:
    """Return each linear layer of a model as llama.cpp knows it, by module path."""
    import gguf

    config = model.config.get_text_config()
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    known = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    counts = {"q_proj": config.num_attention_heads}
    counts["k_proj"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    places = {}
    for path, module in model.named_modules():
        if not is_linear(module):
            continue
        key = f"{path}.weight".replace("language_model.", "")
        name = known.get_name(key, try_suffixes=(".weight",)) or ""
        heads = counts.get(path.rpartition(".")[2], 0) if architecture.rotary else 0
        num_in, num_out = linear_shape(module)
        refusal = ""
        if not name:
            refusal = f"llama.cpp's {architecture.name} has no name for it"
        elif name == "output.weight" and config.tie_word_embeddings:
            refusal = "the base ties it to its embedding, so llama.cpp has no such tensor"
        elif architecture.moved in name:
            refusal = "a fused layer whose rows llama.cpp orders otherwise"
        elif heads and num_out % (2 * heads):
            refusal = f"its {num_out} rows are no {heads} heads"
        places[path] = GGUFLayer(name, (num_out, num_in), heads, refusal)
    return places


def rotary_rows(b: Tensor, heads: int, *, back: bool = False) -> Tensor:
    """Move rows (out, r) from two halves of each head to pairs of one row of each, or back."""
    if not heads:
        return b
    half = b.shape[0] // heads // 2
    parts = (heads, half, 2) if back else (heads, 2, half)
    return b.reshape(*parts, -1).transpose(1, 2).reshape(b.shape)


def require_gguf() -> None:
    """Raise AdapterError with the pip command if the gguf library is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise AdapterError(
            "GGUF files need the package gguf",
            found="It is not installed.",
            fix='pip install "gguf>=0.17"',
        )
