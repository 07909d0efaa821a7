"""The grid: every method on every architecture, and what is known of each cell beforehand.

COLUMNS come from the table of methods: a new method is a column by itself, with its defaults, until
VARIANTS names configs of it; a new architecture is a row. Where a method has no form for an
architecture it must refuse, and REFUSALS says why: what it does not name must work.
"""

from typing import Any

from torch import nn

from peftkit.methods.base import Method
from peftkit.methods.bottleneck import Bottleneck
from peftkit.methods.dora import DoRA
from peftkit.methods.ia3 import IA3
from peftkit.methods.lora import LoRA
from peftkit.methods.own_parameters import BitFit, LNTuning
from peftkit.methods.prefix import PrefixTuning
from peftkit.methods.prompt import PromptTuning
from peftkit.methods.table import METHODS
from peftkit.methods.vera import VeRA
from peftkit.model.targets import find_roles

LOW_RANK: Any = {"rank": 3, "alpha": 6}
VARIANTS: dict[str, Method] = {
    "lora": LoRA(**LOW_RANK),
    "rslora": LoRA(**LOW_RANK, rslora=True),
    "dora": DoRA(**LOW_RANK),
    "pissa": LoRA(**LOW_RANK, init="pissa"),
    "olora": LoRA(**LOW_RANK, init="olora"),
    "loftq": LoRA(**LOW_RANK, init="loftq"),
    "eva": LoRA(**LOW_RANK, init="eva"),
    "ia3": IA3(),
    "vera": VeRA(rank=16, d_initial=1.0),
    "ln_tuning": LNTuning(),
    "bitfit": BitFit(),
    "houlsby": Bottleneck(style="houlsby", size=8),
    "pfeiffer": Bottleneck(style="pfeiffer", size=8),
    "parallel": Bottleneck(style="parallel", size=8),
    "prompt_tuning": PromptTuning(num_virtual_tokens=4),
    "prefix_tuning": PrefixTuning(num_virtual_tokens=4),
    "train_fully": LoRA(**LOW_RANK, targets=("attention",), train_fully=("head",)),
    "token_rows": LoRA(**LOW_RANK, targets=("attention",), token_rows=(5, 12, 19)),
}
"""Column -> config; small ranks for small models."""

COLUMNS: dict[str, Method] = VARIANTS | {
    name: method()
    for name, method in METHODS.items()
    if not any(type(variant) is method for variant in VARIANTS.values())
}

NOTES = {
    "x": "without the experts: the method has no form for stacked ones, and says so when asked",
    "u": "but for modules that the architecture never calls: nothing in them could train",
    "t": "not merged: the head shares its weight with the embedding, and merging says so",
    "p": "PEFT does not load it: it takes some linear layers of this model for its experts",
    "h": "PEFT does not load it: it finds no number of heads in the model's config",
    "o": "PEFT does not load it: it takes rows for columns in these stacks of experts",
    "s": "PEFT does not load it: it takes no LoRA on out_proj in models of this type",
    "v": "PEFT puts no virtual tokens into this kind of model",
    "a": "PEFT's own file is refused: its `bias: all` also means biases that BitFit leaves out",
}
"""Code after `pass` -> what it means."""

REASONS = {
    "b": "there is no bias but the head's",
    "q": "there is nothing to make up for in a base that is not quantised",
    "e": "it embeds no tokens, or has two equal towers: there is no input to put them before",
    "m": "its blocks also look at images, through masks that count the real tokens",
    "k": "it keeps no keys and values, or not those that attention reads, or of several sizes",
}
"""Code of a cell that is none -> why the method has no form for the architecture."""

PEFT_LIMITS = {
    r"lora\.ParamWrapper does not work with use_dora=True": "p",
    r"Please specify `num_attention_heads`": "h",
    r"'out_proj' is incompatible with Mamba-based models": "s",
    r"size mismatch for .*\.experts\.(base_layer\.)?lora_A": "o",
}
"""What PEFT says of a file of ours that is right -> code of NOTES."""

READING_LIMITS = {r"unexpected: .*(router|predictions|lm_head|conv\d|projection)\.bias": "a"}
"""What is said here of a file of PEFT's -> code of NOTES."""

_IMAGES = "vit swin clip"
_CROSS = "mllama idefics"
REFUSALS: dict[str, dict[str, str]] = {
    "bitfit": {
        "b": "llama mistral mistral_swa qwen3 gemma gemma2 gemma3_text phi3 olmo2 granite cohere "
        "mpt mixtral minimax deepseek_v2 deepseek_v3 qwen3_moe olmoe granitemoe t5 t5_gated mt5 "
        "modernbert"
    },
    "prompt_tuning": {"e": f"{_IMAGES} whisper", "m": _CROSS},
    "prefix_tuning": {
        "e": _IMAGES,
        "m": _CROSS,
        "k": "minimax deepseek_v2 deepseek_v3 deberta_v1 deberta_v2 modernbert distilbert",
    },
    "token_rows": {"e": _IMAGES},
}
"""Column -> code of REASONS -> architectures that the method must refuse."""

UNUSED: dict[str, tuple[str, ...]] = {
    # both are read before the last norm of the vision tower, which is only the pooled image's
    "llava": ("vision_tower.post_layernorm",),
    "idefics": ("vision_model.post_layernorm",),
    # multiplied by a scale that starts at zero
    "gemma3n": ("per_layer_",),
}
"""Architecture -> modules whose output the model does not use."""


def fitted(method: Method, model: nn.Module) -> Method:
    """Return a column's method with targets that this model has."""
    roles = find_roles(model)
    if isinstance(method, IA3):  # its defaults are roles, and no model has to have all of them
        present = tuple(role for role in method.targets if role in roles)
        return method.model_copy(update={"targets": present})
    if method.train_fully == ("head",):
        heads = [site.path for site in roles["head"]]
        outer = [h for h in heads if not any(h.startswith(f"{other}.") for other in heads)]
        return method.model_copy(update={"train_fully": tuple(outer)})
    return method


def without_experts(method: Method, model: nn.Module) -> Method:
    """Return a method that leaves the stacks of experts out of its targets."""
    sites = method.sites(model)
    paths = dict.fromkeys(site.path for site in sites if site.parameter is None)
    return method.model_copy(update={"targets": tuple(paths)})


def refusal(column: str, architecture: str, quantize: str) -> str:
    """Return the code of why a method must refuse an architecture, "" where it must not."""
    if COLUMNS[column].initializer == "loftq_starts" and quantize == "none":
        return "q"
    refusals = REFUSALS.get(column, {})
    return next((code for code, names in refusals.items() if architecture in names.split()), "")
