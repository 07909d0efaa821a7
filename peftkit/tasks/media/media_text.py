"""Language modelling of conversations with media: train on the assistant's answers.

One implementation under two names: `image_text` and `audio_text` differ in the class of the model,
and in what conversations are about. A model that takes more kinds of media takes them in a row.

Shapes: B rows, T tokens, n target tokens of the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Unpack

from pydantic import Field
from torch import Tensor, nn

from peftkit.base.purpose import Processor
from peftkit.data.media.files import KINDS, Audio, Limits, Media, MediaClass, Picture
from peftkit.data.media.processor import MediaProcessor, media_id
from peftkit.data.media.text import MediaEncoder, MediaRow
from peftkit.data.pack import IGNORE, collate
from peftkit.data.tokens import decoded
from peftkit.errors import BaseError
from peftkit.execution.out_of_memory import NO_ROOM
from peftkit.forward.batch_layout import BatchLayout
from peftkit.forward.loss import unwrapped
from peftkit.forward.probes import check_causal_answer
from peftkit.inference.generate import PromptFormat
from peftkit.model.blocks import is_sharded
from peftkit.settings import CHAT, DataConfig
from peftkit.tasks.batches import BATCH_SIZE, batches_that_fit, equal_parts
from peftkit.tasks.completions import CompletingTask, Options, longest_answer
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.row_loader import exact_length
from peftkit.tasks.tokens import TokenTask

if TYPE_CHECKING:
    from peftkit.inference.engine import OnAnswer, OnFewer

MAX_SECONDS = 30.0
"""Longest audio clip where neither the recipe nor the processor sets one."""
VIDEO_FRAMES = 16
"""Frames of a video where the recipe sets no number."""


@dataclass(frozen=True, slots=True)
class MediaPrompt:
    """A prompt with media.

    Attributes:
        text: With the processor's mark for each medium, as from `MediaEncoder.prompt`.
    """

    text: str
    media: tuple[Media, ...] = ()


class MediaText(CompletingTask, TokenTask):
    """A loss over the assistant's tokens in conversations with media.

    Raises:
        BaseError: The model takes no such media, or is an encoder-decoder.
        DataError: A chat template or a length that cannot be used.
    """

    def build(self, model: nn.Module) -> None:
        rows = self.rows
        config = self.config = self.config.resolve(rows.data)
        _check_model(model, config.media)
        super().build(model)
        self.layout = BatchLayout(padded=True)  # rows hold media
        rows.max_length = exact_length(model, self.tokenizer, rows.data.max_length)
        rows.check_first = self._check_causal
        self._model, self._is_checked = model, False
        settings = unwrapped(model).config
        patch = getattr(getattr(settings, "vision_config", None), "patch_size", 14)
        patch = patch if isinstance(patch, int) else int(patch[0])
        limits = _limits(self.processor, config)
        media_processor = MediaProcessor(
            self.processor, settings, config.media, limits, patch_size=patch
        )
        self.encoder = rows.encoder = MediaEncoder(
            media_processor,
            config.media,
            rows.template,
            rows.data.format,
            max_length=rows.max_length,
        )

    @property
    def paths(self) -> dict[str, str]:
        """How logits are computed, and that rows with media are padded."""
        rows = f"padded, each with its {self.config.media.kind}s (no packing or sharing)"
        return {**super().paths, "rows": rows}

    @property
    def prompt_format(self) -> PromptFormat:
        def encode(prompt: str) -> Sequence[int]:
            row: MediaRow = self.encoder.prompt_row(prompt, self.rows.prompt_style, "the prompt")
            return row.input_ids

        return PromptFormat(encode, self.encoder.stop_ids(self.rows.prompt_style))

    def bucket_key(self, row: MediaRow) -> str:
        return self.kind_of(row.media)

    def kind_of(self, media: Sequence[Media]) -> str:
        """Return the bucket key of rows with these media.

        A processor takes a kind of media for all of its texts or for none. If it nests images in
        lists, all texts need the same number.
        """
        counts = []
        for kind in KINDS:
            count = sum(isinstance(one, kind) for one in media)
            nested = kind is Picture and self.encoder.media_processor.is_nested
            counts.append(str(count if nested else min(count, 1)))
        return " ".join(counts)

    def num_positions(self, rows: Sequence[MediaRow]) -> int:
        """Return the tokens of rows, padding included, plus the patches of media encoders."""
        return super().num_positions(rows) + sum(row.num_patches for row in rows)

    def collate(self, rows: Sequence[MediaRow]) -> dict[str, Tensor]:
        """Return a batch, padded on the right, with the processor's inputs of media."""
        batch = collate(rows, self.pad_id, self.rows.max_length)
        names = ("input_ids", "attention_mask", "target_index", "targets")
        inputs = self.encoder.inputs(rows, batch["input_ids"].shape[1])
        return {name: batch[name] for name in names} | inputs

    def inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the tokens, their mask, and what goes with them; pixels as the weights are."""
        dtype = unwrapped(model).dtype
        return {
            # one number for each, such as seconds, is no feature
            name: value.to(dtype) if value.is_floating_point() and value.ndim > 1 else value
            for name, value in batch.items()
            if name not in ("target_index", "targets")
        }

    def spans(self, row: MediaRow) -> list[tuple[str, str]]:
        """Return a row's text in labelled segments ("learnt" or ""), with media as sizes."""
        return row.segments(self.encoder.media_processor.media_ids, self.text)

    def prompt_text(self, row: MediaRow) -> str:
        return row.prompt.strip()

    def completions(
        self, model: nn.Module, rows: Sequence[MediaRow], **options: Unpack[Options]
    ) -> list[str]:
        options["max_new_tokens"] = options.get("max_new_tokens") or longest_answer(rows)
        options.pop("batch_size", None)  # media take memory, too
        prompts = [MediaPrompt(row.prompt, row.media) for row in rows]
        completions = self.complete(model, prompts, **options)
        return [decoded(self.tokenizer, ids) for ids in completions]

    def complete(
        self,
        model: nn.Module,
        prompts: Sequence[MediaPrompt],
        *,
        batch_size: int | None = None,
        on_answer: OnAnswer | None = None,
        on_fewer: OnFewer | None = None,
        **settings: Any,
    ) -> list[list[int]]:
        """Return the token ids that follow each prompt; arguments as in `generate_ids`."""
        from peftkit.inference.engine import Completion, Request, log_fewer
        from peftkit.inference.plain_engine import PlainEngine
        from peftkit.inference.sampling import Sampling, seed_of

        sampling = Sampling(**settings, stops=self.encoder.stop_ids(self.rows.prompt_style))
        answers: dict[int, list[int]] = {}
        groups: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            groups.setdefault(self.kind_of(prompt.media), []).append(index)
        with PlainEngine(model, self.tokenizer) as engine:

            def answered(part: Sequence[int]) -> list[Completion]:
                inputs = self.generation_inputs(model, [prompts[index] for index in part])
                rows = [
                    engine.completion(Request(ids, sampling, seed_of(sampling, index)))
                    for index, ids in zip(part, inputs["input_ids"].tolist(), strict=True)
                ]
                engine.answer(rows, inputs)
                return rows

            for group in groups.values():
                for part, rows, _ in batches_that_fit(
                    group,
                    batch_size or BATCH_SIZE,
                    equal_parts,
                    answered,
                    fix=NO_ROOM,
                    on_fewer=on_fewer or log_fewer,
                    is_shared=is_sharded(model),
                ):
                    answers |= {index: row.ids for index, row in zip(part, rows, strict=True)}
                    if on_answer is not None:
                        on_answer(len(answers))
        return [answers[index] for index in range(len(prompts))]

    def generation_inputs(
        self, model: nn.Module, prompts: Sequence[MediaPrompt]
    ) -> dict[str, Tensor]:
        """Return the model's inputs for prompts, padded on the left."""
        texts, media = [prompt.text for prompt in prompts], [prompt.media for prompt in prompts]
        return self.inputs(model, self.encoder.generation_inputs(texts, media))

    def prompt_row(self, model: nn.Module, text: str, where: str) -> MediaRow:
        return self.encoder.prompt_row(text, self.rows.prompt_style, where)

    def _check_causal(self, row: MediaRow) -> None:
        """Check once that the model is causal in its answers."""
        if self._is_checked:
            return
        device = unwrapped(self._model).device
        batch = {name: value.to(device) for name, value in self.collate([row]).items()}
        last = max(place for place, label in enumerate(row.labels) if label != IGNORE)
        usual = (self.tokenizer.eos_token_id, *self.tokenizer("a b c")["input_ids"])
        other = next(token for token in usual if token not in (None, row.labels[last]))
        check_causal_answer(self._model, self.inputs(self._model, batch), last, other)
        self._is_checked = True


def _check_model(model: nn.Module, needed: type[Media]) -> None:
    """Refuse a model that cannot write text after media, and without them."""
    bare = unwrapped(model)
    takes = inspect.signature(type(bare).forward).parameters.values()
    asks = [p for p in takes if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    why = ""
    if bare.config.is_encoder_decoder:
        why = "an encoder and a decoder"
    elif media_id(bare.config, needed) is None:
        why = f"no token for {needed.kind}s"
    elif {p.name for p in asks} - {"self", "input_ids"}:
        why = f"no way to read text without {needed.kind}s"
    if why:
        raise BaseError(
            f"Cannot train {type(bare).__name__} on conversations with {needed.kind}s.",
            found=f"It has {why}.",
            fix=f"Use a model that generates text from {needed.kind}s.",
        )


def _limits(processor: object, config: MediaTextConfig) -> Limits:
    """Return how media are read, as the recipe says and the processor takes them."""
    reader = next((getattr(processor, n) for n in Audio.readers if hasattr(processor, n)), None)
    at_once = getattr(reader, "chunk_length", None) or MAX_SECONDS
    return Limits(
        max_pixels=config.max_pixels,
        rate=int(getattr(reader, "sampling_rate", 16_000)),
        max_seconds=float(config.max_seconds or at_once),
        video_frames=config.video_frames or VIDEO_FRAMES,
    )


class MediaTextConfig(TaskConfig):
    """Conversations with media."""

    media: ClassVar[MediaClass]
    """What conversations are about."""
    task_type: ClassVar[None] = None
    processor: ClassVar[Processor] = "multimodal"
    generates: ClassVar[bool] = True
    writes_text: ClassVar[bool] = True
    evaluates_answers: ClassVar[bool] = True
    data_fields: ClassVar[frozenset[str]] = frozenset(
        {"format", "max_length", "max_pixels", "video_frames", *CHAT}
    )
    task = MediaText

    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Longest audio clip in seconds; null: the processor's chunk length, or 30."""
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    """data.max_pixels of the training, stored with the adapter."""
    video_frames: Annotated[int, Field(ge=1)] | None = None
    """data.video_frames of the training, stored with the adapter."""

    @property
    def prompt_media(self) -> str:
        return self.media.kind

    def resolve(self, data: DataConfig) -> MediaTextConfig:
        self.media.require()
        names = ("max_pixels", "video_frames")
        given = {name: getattr(data, name) for name in names}
        return self.model_copy(update={n: v for n, v in given.items() if v is not None})


class ImageTextConfig(MediaTextConfig):
    """Conversations with images."""

    media: ClassVar[MediaClass] = Picture
    auto_class: ClassVar[str] = "AutoModelForImageTextToText"
    command: ClassVar[str] = "peftkit generate {folder} --image FILE --prompt TEXT"

    type: Literal["image_text"] = "image_text"


class AudioTextConfig(MediaTextConfig):
    """Conversations with audio."""

    media: ClassVar[MediaClass] = Audio
    auto_class: ClassVar[str] = "AutoModelForMultimodalLM"
    command: ClassVar[str] = "peftkit generate {folder} --audio FILE --prompt TEXT"

    type: Literal["audio_text"] = "audio_text"
