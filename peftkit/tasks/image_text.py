"""Language modelling of conversations with images: learn what the assistant says of what it sees.

Shapes: B rows, T tokens, n learnt tokens of the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from peftkit.base.purpose import Processor
from peftkit.data.image_row import ImageRow
from peftkit.data.image_text import ImageEncoder
from peftkit.data.images import require_pillow
from peftkit.data.lazy_rows import StoredRows
from peftkit.data.load import CHAT, DataConfig
from peftkit.data.pack import IGNORE
from peftkit.errors import BaseError
from peftkit.tasks.isolation import check_causal_answer
from peftkit.tasks.loss import unwrapped
from peftkit.tasks.protocol import Task, TaskConfig
from peftkit.tasks.token_task import AnswerTask


class ImageText(AnswerTask):
    """The task: rows from files, batches from rows and their images, a loss from batches.

    Args:
        processor: The base's, of images and text.
        style: How the adapter in hand was trained to be prompted; None: the rows decide.

    Raises:
        BaseError: The model reads no images, or is an encoder-decoder.
        DataError: A chat template or a length that cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        data: DataConfig,
        config: ImageTextConfig | None = None,
        **more: Any,
    ) -> None:
        require_pillow()
        config = (config or ImageTextConfig()).resolve(data)
        settings = unwrapped(model).config
        image_id = getattr(settings, "image_token_id", None)
        takes = inspect.signature(type(unwrapped(model)).forward).parameters
        why = ""
        if image_id is None or settings.is_encoder_decoder:
            why = "no token for images" if image_id is None else "an encoder and a decoder"
        elif takes["pixel_values"].default is inspect.Parameter.empty:
            why = "no way to read text without an image"
        if why:
            raise BaseError(
                f"Cannot train {type(unwrapped(model)).__name__} on conversations with images.",
                found=f"It has {why}.",
                fix="Give a model that writes text after the images in it.",
            )
        super().__init__(model, processor, config, data, **more)
        self._model, self._is_checked = model, False
        self._image_id = int(settings.image_token_id)
        patch = getattr(getattr(settings, "vision_config", None), "patch_size", 14)
        patch = patch if isinstance(patch, int) else int(patch[0])
        self.encoder = self.row_encoder = ImageEncoder(
            processor,
            self.template,
            data.format,
            image_id=self._image_id,
            max_pixels=config.max_pixels,
            patch_size=patch,
            max_length=self.max_length,
        )

    @property
    def paths(self) -> dict[str, str]:
        """How logits are made, and that rows with images share neither rows nor beginnings."""
        return {**super().paths, "rows": "padded, each with its images (no packing or sharing)"}

    @contextmanager
    def training(self, model: nn.Module) -> Iterator[None]:
        """Train with the fastest attention; rows stay padded, for their images lie in them."""
        with Task.training(self, model):
            yield

    def counts(self, rows: StoredRows) -> list[tuple[str, str]]:
        shown = {"rows without images": "without images", "images": "images"}
        shown |= {"tokens of images": "tokens of images"}
        return [(name, f"{rows.counts[count]:,}") for name, count in shown.items()]

    def check(self, rows: StoredRows) -> None:
        super().check(rows)
        self._check_causal(rows[0])

    def bucket_key(self, row: ImageRow) -> int:
        """Return how many images a row has, as far as rows with others cannot share a batch.

        Where images lie in rows, rows have as many each; a processor takes images for all of its
        texts or for none.
        """
        return self.kind_of(len(row.images))

    def kind_of(self, num_images: int) -> int:
        """Return the `kind` of a row with so many images."""
        return num_images if self.encoder.is_nested else min(num_images, 1)

    def num_positions(self, rows: Sequence[ImageRow]) -> int:
        """Return the tokens of rows, padding included, and those of the vision tower."""
        return super().num_positions(rows) + sum(row.num_patches for row in rows)

    def padded(self, rows: Sequence[ImageRow]) -> dict[str, Tensor]:
        """Return a batch, padded on the right, with all that the processor makes of the images."""
        batch = super().padded(rows)
        kept = ("input_ids", "attention_mask", "target_index", "targets")
        made = self.encoder.inputs(rows, batch["input_ids"].shape[1])
        return {name: batch[name] for name in kept} | made

    def inputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the tokens, their mask, and what goes with them; pixels as the weights are."""
        dtype = unwrapped(model).dtype
        return {
            name: batch[name].to(dtype) if batch[name].is_floating_point() else batch[name]
            for name in batch
            if name not in ("target_index", "targets")
        }

    def spans(self, row: ImageRow) -> list[tuple[str, str]]:
        """Return a row's text in pieces, "learnt" or "" before each, an image as its size."""
        return row.pieces(self._image_id, self._text)

    def answer_length(self, row: ImageRow) -> int:
        """Return how many tokens a row's last learnt answer has."""
        stop = max(n for n, label in enumerate(row.labels) if label != IGNORE) + 1
        return stop - len(self.last_answer(row)[0])

    def _check_causal(self, row: ImageRow) -> None:
        """Ask the model, once, whether it learns to say what it is shown."""
        if self._is_checked:
            return
        device = unwrapped(self._model).device
        batch = {name: value.to(device) for name, value in self.collate([row]).items()}
        last = max(place for place, label in enumerate(row.labels) if label != IGNORE)
        usual = (self.tokenizer.eos_token_id, *self.tokenizer("a b c")["input_ids"])
        other = next(token for token in usual if token not in (None, row.labels[last]))
        check_causal_answer(self._model, self.inputs(self._model, batch), last, other)
        self._is_checked = True


class ImageTextConfig(TaskConfig):
    """Conversations with images: what the assistant says of what it sees."""

    task_type: ClassVar[None] = None
    auto_class: ClassVar[str] = "AutoModelForImageTextToText"
    processor: ClassVar[Processor] = "multimodal"
    generates: ClassVar[bool] = True
    command: ClassVar[str] = "peftkit generate {folder} --image FILE --prompt TEXT"
    data_fields: ClassVar[frozenset[str]] = frozenset(
        {"format", "max_length", "max_pixels", *CHAT, "max_dropped"}
    )

    type: Literal["image_text"] = "image_text"
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    """What data.max_pixels was: kept with the adapter, so that it is shown images as it learnt."""

    def resolve(self, data: DataConfig) -> ImageTextConfig:
        require_pillow()
        kept = self.max_pixels if data.max_pixels is None else data.max_pixels
        return self.model_copy(update={"max_pixels": kept})

    @staticmethod
    def task(
        model: nn.Module, processor: Any, config: ImageTextConfig, data: DataConfig, **more: Any
    ) -> ImageText:
        return ImageText(model, processor, data, config, **more)
