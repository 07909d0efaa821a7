"""Tiny vision-language models with random weights, each with a processor, without a hub.

The tokenizer of `tests.helpers.families` with each family's tokens for images; the image
processors are transformers' own, computed by Pillow, at sizes of a few pixels. Where a processor
also wants one for videos, which needs torchvision, it gets one that knows none.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import PreTrainedModel
from transformers.processing_utils import ProcessorMixin

from peftkit.base.processors import UnreadVideos, without_video_support
from peftkit.tasks.media.media_text import ImageTextConfig, MediaTextConfig
from tests.helpers.families import _GROUPED, half_open, tiny_tokenizer
from tests.helpers.families import _VISION as _TOWER
from tests.helpers.families import _WIDE as WIDE
from tests.helpers.folders import write_rows

VOCAB = 448
TEXT: dict[str, Any] = {**_GROUPED, "vocab_size": VOCAB, "max_position_embeddings": 512}

_TEMPLATE = """\
{%- set marks = MARKS -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- for part in message['content'] -%}
{{ marks[part['type']] if part['type'] in marks else part['text'] }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


Q, A = "user", "assistant"


def dialog(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    """Return turns as messages."""
    return [{"role": role, "content": content} for role, content in turns]


def conversations(kind: str, ending: str, nothing: str) -> list[dict[str, Any]]:
    """Return rows about images or sounds, of which the replies are ANSWERS."""
    a, b = f"a.{ending}", f"b.{ending}"
    first = [{"type": kind, kind: a}, {"type": "text", "text": "what is it?"}]
    marked = f"see <{kind}> the <{kind}> dog"
    turns = ((Q, marked), (A, "the lazy dog over"), (Q, "and then?"), (A, "the answer"))
    return [
        {"messages": dialog((Q, first), (A, [{"type": "text", "text": "the fox"}]))},
        {"messages": dialog(*turns), f"{kind}s": [b, a]},
        {"messages": dialog((Q, nothing), (A, "in the question"))},
        {kind: b, "messages": dialog((Q, "the other"), (A, "quick fox"))},
    ]


CONVERSATIONS = conversations("image", "png", "no picture")
ANSWERS = [["the fox"], ["the lazy dog over", "the answer"], ["in the question"], ["quick fox"]]
"""What is learnt of CONVERSATIONS."""
QUESTIONS: list[dict[str, Any]] = [
    {"image": "a.png", "prompt": "what is it?", "completion": "the fox"},
    {"image": "b.png", "prompt": "what is the answer?", "completion": "the other dog over"},
]
"""For a processor that takes a prompt and an answer."""


@dataclass(frozen=True, slots=True)
class Family:
    """How to build a family, and what is particular to it.

    Args:
        extras: Inputs beside the tokens and the pixels whose absence must change the logits.
        config: Of the task. rows: What is learnt of it is `ANSWERS`, or the completions.
    """

    model: Callable[[], PreTrainedModel]
    processor: Callable[[], ProcessorMixin]
    extras: tuple[str, ...] = ()
    has_template: bool = True
    config: type[MediaTextConfig] = ImageTextConfig
    rows: Sequence[dict[str, Any]] = ()

    def examples(self) -> Sequence[dict[str, Any]]:
        """Return rows that it can be taught."""
        return self.rows or (CONVERSATIONS if self.has_template else QUESTIONS)

    def build(self) -> tuple[Any, Any]:
        """Return a model in eval mode, and its processor."""
        torch.manual_seed(0)
        return self.model().eval(), self.processor()


def picture(colour: Any = (200, 30, 60), size: tuple[int, int] = (9, 12)) -> Image.Image:
    """Return a picture that is not the same everywhere."""
    image = Image.new("RGB", size, colour)
    for x in range(size[0]):
        image.putpixel((x, x % size[1]), (17 * x % 255, 40, 255 - 9 * x % 255))
    return image


def png(colour: Any = (200, 30, 60), size: tuple[int, int] = (9, 12)) -> bytes:
    """Return `picture` as a file."""
    return _as_png(picture(colour, size))


def tokenizer(*tokens: str, **named: str) -> Any:
    """Return the tiny tokenizer with further special tokens."""
    tokenizer = tiny_tokenizer(**({"extra_special_tokens": named} if named else {}))
    tokenizer.chat_template = None
    tokenizer.model_max_length = 512
    missing = [t for t in (*named.values(), *tokens) if t not in tokenizer.get_vocab()]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *missing]})
    return tokenizer


def template(image: str | None = None, **marks: str) -> str:
    """Return a chat template that writes a mark for each part of a type."""
    marks |= {} if image is None else {"image": image}
    told = ", ".join(f"'{kind}': '{mark}'" for kind, mark in marks.items())
    return _TEMPLATE.replace("MARKS", f"{{{told}}}")


def token_id(token: str, *tokens: str, **named: str) -> int:
    """Return a token's number in the tokenizer with these."""
    return int(tokenizer(*tokens, **named).convert_tokens_to_ids(token))


def made(stem: str, kind: str = "ForConditionalGeneration", **settings: Any) -> Any:
    """Return what builds a model of transformers from its config's settings."""

    def build() -> PreTrainedModel:
        made: Any = getattr(transformers, f"{stem}{kind}")
        return made(getattr(transformers, f"{stem}Config")(**settings))

    return build


def _size(side: int = 8) -> dict[str, Any]:
    return {"size": {"height": side, "width": side}}


# ------------------------------------------------------------------- LLaVA and its kin


def _llava_processor(stem: str, images: Any) -> Any:
    return getattr(transformers, f"{stem}Processor")(
        image_processor=images,
        tokenizer=tokenizer("<image>"),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template("<image>\\n"),
    )


_LLAVA: dict[str, Any] = {
    "text_config": {**TEXT, "model_type": "llama"},
    "vision_config": {**_TOWER, "model_type": "clip_vision_model"},
    "image_token_index": token_id("<image>", "<image>"),
    "vision_feature_layer": -1,
}

LLAVA = Family(
    made("Llava", **_LLAVA),
    lambda: _llava_processor(
        "Llava",
        transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}
        ),
    ),
)
_PINPOINTS = [[8, 16], [16, 8], [16, 16]]
LLAVA_NEXT = Family(
    made("LlavaNext", **_LLAVA, image_grid_pinpoints=_PINPOINTS),
    lambda: _llava_processor(
        "LlavaNext",
        transformers.LlavaNextImageProcessorPil(
            size={"shortest_edge": 8},
            crop_size={"height": 8, "width": 8},
            image_grid_pinpoints=_PINPOINTS,
        ),
    ),
)

# ------------------------------------------------------------------- Qwen

QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_QWEN_IDS = dict(
    zip(
        ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id"),
        [token_id(token, *QWEN) for token in QWEN],
        strict=True,
    )
)
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2]}
MROPE_TEXT = {**TEXT, "rope_parameters": _MROPE}


def qwen_images() -> Any:
    """Return the image processor of Qwen's families."""
    size = {"shortest_edge": 64, "longest_edge": 1024}
    return transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size)


QWEN_TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, **WIDE}
QWEN_WIDE = {**QWEN_TOWER, "out_hidden_size": 32, "intermediate_size": 64}


def _qwen(stem: str, tower: dict[str, Any], **text: Any) -> Family:
    return Family(
        made(stem, **_QWEN_IDS, text_config={**MROPE_TEXT, **text}, vision_config=tower),
        lambda: without_video_support(getattr(transformers, f"{stem}Processor"))(
            image_processor=qwen_images(),
            tokenizer=tokenizer(*QWEN),
            video_processor=UnreadVideos({}),
            chat_template=template("<|vision_start|><|image_pad|><|vision_end|>"),
        ),
        ("mm_token_type_ids",),
    )


# ------------------------------------------------------------------- Gemma

_GEMMA3 = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"} | {
    "image_token": "<image_soft_token>"
}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model"}
_GEMMA3_FAMILY = Family(
    made(
        "Gemma3",
        text_config={**TEXT, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
        vision_config=_SIGLIP,
        mm_tokens_per_image=4,
        boi_token_index=token_id(_GEMMA3["boi_token"], **_GEMMA3),
        eoi_token_index=token_id(_GEMMA3["eoi_token"], **_GEMMA3),
        image_token_index=token_id(_GEMMA3["image_token"], **_GEMMA3),
    ),
    lambda: transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessorPil(**_size()),
        tokenizer=tokenizer(**_GEMMA3),
        chat_template=template("<start_of_image>"),
        image_seq_length=4,
    ),
    ("token_type_ids",),
)
_PALIGEMMA = Family(
    made(
        "PaliGemma",
        text_config={**TEXT, "vocab_size": 1664, "head_dim": 8, "model_type": "gemma"},
        vision_config={**_SIGLIP, "projection_dim": 32},
        projection_dim=32,
        image_token_index=token_id("<image>", "<image>"),
    ),
    lambda: transformers.PaliGemmaProcessor(
        image_processor=_with_length(transformers.SiglipImageProcessorPil(**_size()), 4),
        tokenizer=tokenizer(),
    ),
    ("token_type_ids",),
    has_template=False,
)


def _with_length(images: Any, length: int) -> Any:
    images.image_seq_length = length
    return images


# ------------------------------------------------------------------- Idefics3, SmolVLM, InternVL

_IDEFICS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
_IDEFICS += tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))


def _idefics_processor() -> Any:
    return transformers.Idefics3Processor(
        image_processor=transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": 16}, max_image_size={"longest_edge": 8}
        ),
        tokenizer=tokenizer(*_IDEFICS),
        image_seq_len=1,
        chat_template=template("<image>"),
    )


_IDEFICS_CONFIG: dict[str, Any] = {
    "text_config": {**TEXT, "model_type": "llama"},
    "vision_config": _TOWER,
    "scale_factor": 2,
    "image_token_id": token_id("<image>", *_IDEFICS),
}
_INTERN = {"start_image_token": "<img>", "end_image_token": "</img>"}
_INTERN |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
_INTERNVL = Family(
    made(
        "InternVL",
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**_TOWER, "image_size": [8, 8], "patch_size": [4, 4]},
        image_token_id=token_id("<IMG_CONTEXT>", **_INTERN),
        downsample_ratio=0.5,
    ),
    lambda: without_video_support(transformers.InternVLProcessor)(
        image_processor=transformers.GotOcr2ImageProcessorPil(
            **_size(), crop_to_patches=True, min_patches=1, max_patches=4
        ),
        tokenizer=tokenizer(**_INTERN),
        video_processor=UnreadVideos({}),
        image_seq_length=1,
        chat_template=template("<IMG_CONTEXT>\\n"),
    ),
)

# ------------------------------------------------------------------- mllama

_MLLAMA_ID = token_id("<|image|>", "<|image|>")
_MLLAMA = Family(
    half_open(
        made(
            "Mllama",
            text_config={
                **TEXT,
                "cross_attention_layers": [1],
                "num_hidden_layers": 3,
                "vocab_size": _MLLAMA_ID,  # of which the head has no row
            },
            vision_config={
                **_TOWER,
                "attention_heads": 4,
                "num_global_layers": 1,
                "max_num_tiles": 2,
                "vision_output_dim": 64,
                "intermediate_layers_indices": [0],
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            },
            image_token_index=_MLLAMA_ID,
        )
    ),
    lambda: transformers.MllamaProcessor(
        image_processor=transformers.MllamaImageProcessorPil(**_size(), max_image_tiles=2),
        tokenizer=tokenizer("<|image|>"),
        chat_template="{{ bos_token }}" + template("<|image|>"),
    ),
    ("cross_attention_mask", "aspect_ratio_ids"),
)

# ------------------------------------------------------------------- Gemma 4

_GEMMA4 = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
_GEMMA4 |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
_LAYERS = ["sliding_attention", "full_attention"]


def gemma4(audio: dict[str, Any] | None = None, **more: Any) -> Family:
    """Return the family; with an audio tower, it hears too."""
    names, marks = ("image", "boi", "eoi", "audio"), {} if audio is None else {"audio": "<|audio|>"}
    text = {"head_dim": 8, "global_head_dim": 8, "sliding_window": 8, "layer_types": _LAYERS}
    text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512}
    text |= {"vocab_size": 512}
    tower = {"num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2}
    return Family(
        made(
            "Gemma4",
            text_config={**TEXT, **text, "use_bidirectional_attention": "vision"},
            vision_config={**_TOWER, **tower, "position_embedding_size": 64},
            audio_config=audio,
            **{f"{name}_token_id": token_id(_GEMMA4[f"{name}_token"], **_GEMMA4) for name in names},
            video_token_id=500,
        ),
        lambda: without_video_support(transformers.Gemma4Processor)(
            feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
            image_processor=transformers.Gemma4ImageProcessorPil(
                patch_size=4, pooling_kernel_size=2, max_soft_tokens=70
            ),
            tokenizer=tokenizer(**_GEMMA4),
            video_processor=UnreadVideos({}),
            chat_template=template("<|image|>", **marks),
        ),
        **more,
    )


# ------------------------------------------------------------------- Pixtral in Mistral 3

_PIXTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


class PixtralProcessor(ProcessorMixin):
    """What transformers' own does, which needs torchvision: rows of marks with breaks between."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token, self._break, self._end = _PIXTRAL
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)

    def replace_image_token(self, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        height, width = (int(side) // 8 for side in image_inputs["image_sizes"][image_idx])
        return (self._break.join([self.image_token * width] * height)) + self._end


_MISTRAL3 = Family(
    made(
        "Mistral3",
        text_config={**TEXT, "model_type": "mistral", "head_dim": 8},
        vision_config={**_TOWER, "model_type": "pixtral", "image_size": 32, "head_dim": 8},
        image_token_index=token_id("[IMG]", *_PIXTRAL),
        spatial_merge_size=2,
        vision_feature_layer=-1,
    ),
    lambda: PixtralProcessor(
        transformers.PixtralImageProcessorPil(
            size={"longest_edge": 32}, patch_size={"height": 8, "width": 8}
        ),
        tokenizer(*_PIXTRAL),
        template("[IMG]"),
    ),
    ("image_sizes",),
)


def write_image_rows(folder: Path, rows: Any) -> Path:
    """Write rows, and the images that they name, into a folder."""
    (folder / "a.png").write_bytes(png())
    (folder / "b.png").write_bytes(png(size=(20, 9)))
    path = folder / "rows.jsonl"
    write_rows(path, rows)
    return path


FAMILIES: dict[str, Family] = {
    "llava": LLAVA,
    "llava_next": LLAVA_NEXT,
    "qwen2_vl": _qwen("Qwen2VL", {**QWEN_TOWER, "embed_dim": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": _qwen(
        "Qwen2_5_VL", {**QWEN_WIDE, "window_size": 16, "fullatt_block_indexes": [1]}
    ),
    "qwen3_vl": _qwen(
        "Qwen3VL",
        {**QWEN_WIDE, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        head_dim=8,
    ),
    "gemma3": _GEMMA3_FAMILY,
    "paligemma": _PALIGEMMA,
    "idefics3": Family(made("Idefics3", **_IDEFICS_CONFIG), _idefics_processor),
    "smolvlm": Family(made("SmolVLM", **_IDEFICS_CONFIG), _idefics_processor),
    "internvl": _INTERNVL,
    "mllama": _MLLAMA,
    "gemma4": gemma4(extras=("mm_token_type_ids",)),
    "mistral3": _MISTRAL3,
}


COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def solid_png(colour: Any, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> bytes:
    """Return an image of one colour as a PNG file."""
    return _as_png(Image.new(mode, size, colour))


def _as_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
