"""What a model of any kind is given, and what it gives back, so that one grid runs over all.

Shapes: B rows, T tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_ROWS, NUM_TOKENS = 2, 12


def words(seed: int = 0, length: int = NUM_TOKENS) -> Tensor:
    """Return token ids (B, length), none of them special."""
    return (torch.arange(NUM_ROWS * length) * 7 + seed).remainder(61).view(NUM_ROWS, length) + 5


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers that stand for pixels or sound."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def images(model: nn.Module, seed: int = 0) -> Tensor:
    """Return pixels (B, 3, side, side) of the size that the model wants."""
    config: Any = model.config
    side = getattr(config, "vision_config", config).image_size
    return noise(NUM_ROWS, 3, side, side, seed=seed)


def inputs(model: nn.Module, seed: int = 0) -> dict[str, Any]:
    """Return everything that one forward pass with a loss needs; other seeds are other data."""
    config: Any = model.config
    name, special = type(model).__name__, SPECIAL.get(config.model_type)
    if special:
        return special(model, seed)
    if name.endswith("ForImageClassification"):
        return {"pixel_values": images(model, seed), "labels": torch.arange(NUM_ROWS)}
    if name.endswith("ForSequenceClassification"):
        return {"input_ids": words(seed), "labels": torch.arange(NUM_ROWS)}
    if config.is_encoder_decoder:
        return {"input_ids": words(seed), "labels": words(seed + 3, NUM_TOKENS // 2)}
    given = {"input_ids": words(seed), "labels": words(seed)}
    return given | ({"use_cache": False} if name.endswith("ForCausalLM") else {})


def outputs(model: nn.Module, given: dict[str, Any] | None = None) -> Tensor:
    """Return all logits of a model, in one row after the other."""
    given = dict(given or inputs(model))
    given.pop("labels" if model.config.model_type == "idefics" else "", None)
    with torch.no_grad():
        made = model(**given)
    if "logits_per_image" in made:
        return torch.cat([made.logits_per_image.flatten(), made.image_embeds.flatten()])
    return made.logits if "logits" in made else made.last_hidden_state


def loss(model: nn.Module, given: dict[str, Any] | None = None) -> Tensor:
    """Return the model's own loss, to be differentiated."""
    given = dict(given or inputs(model))
    if model.config.model_type != "idefics":
        made = model(**given)
        if "loss" in made:
            return made.loss
        return (made.logits if "logits" in made else made.last_hidden_state).logsumexp(-1).mean()
    # transformers forgets the words that Idefics has beside its vocabulary
    labels = given.pop("labels")[:, 1:].flatten()
    return functional.cross_entropy(model(**given).logits[:, :-1].flatten(0, 1), labels)


# ------------------------------------------------------------------- kinds of their own


def _clip(model: nn.Module, seed: int) -> dict[str, Any]:
    return {"input_ids": words(seed), "pixel_values": images(model, seed), "return_loss": True}


def _whisper(model: nn.Module, seed: int) -> dict[str, Any]:
    config: Any = model.config
    shape = (NUM_ROWS, config.num_mel_bins, 2 * config.max_source_positions)
    labels = words(seed + 3, NUM_TOKENS // 2)
    return {"input_features": noise(*shape, seed=seed), "labels": labels}


def _text(seed: int) -> dict[str, Any]:
    return {"input_ids": words(seed), "labels": words(seed), "use_cache": False}


def _marked(seed: int, token: int, count: int) -> dict[str, Any]:
    """Return text of which some tokens after the first are places of an image."""
    text = _text(seed)
    text["input_ids"][:, 1 : 1 + count] = token
    return text


def _llava(model: nn.Module, seed: int) -> dict[str, Any]:
    config: Any = model.config
    patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    text = _marked(seed, config.image_token_id, patches)
    return text | {"pixel_values": images(model, seed)}


def _qwen2_vl(model: nn.Module, seed: int) -> dict[str, Any]:
    config: Any = model.config
    vision, patches = config.vision_config, 4 * 4
    text = _marked(seed, config.image_token_id, patches // vision.spatial_merge_size**2)
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return text | {
        "pixel_values": noise(NUM_ROWS * patches, size, seed=seed),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * NUM_ROWS),
        "mm_token_type_ids": (text["input_ids"] == config.image_token_id).long(),
    }


def _mllama(model: nn.Module, seed: int) -> dict[str, Any]:
    tiles = 2  # of one image
    return _text(seed) | {
        "pixel_values": images(model, seed)[:, None, None].repeat(1, 1, tiles, 1, 1, 1),
        "aspect_ratio_ids": torch.full((NUM_ROWS, 1), 2),
        "aspect_ratio_mask": torch.ones(NUM_ROWS, 1, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(NUM_ROWS, NUM_TOKENS, 1, tiles, dtype=torch.long),
    }


def _idefics(model: nn.Module, seed: int) -> dict[str, Any]:
    mask = torch.ones(NUM_ROWS, NUM_TOKENS, 1, dtype=torch.long)
    pixels = images(model, seed)[:, None]
    return _text(seed) | {"pixel_values": pixels, "image_attention_mask": mask}


def _blip(model: nn.Module, seed: int) -> dict[str, Any]:
    return {"input_ids": words(seed), "labels": words(seed), "pixel_values": images(model, seed)}


SPECIAL = {
    "clip": _clip,
    "siglip": _clip,
    "blip": _blip,
    "whisper": _whisper,
    "llava": _llava,
    "qwen2_vl": _qwen2_vl,
    "mllama": _mllama,
    "idefics": _idefics,
}
