"""Language modelling of conversations with images: learn what the assistant says of what it sees.

Shapes: B rows, T tokens, n learnt tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from peftkit.base.purpose import Processor
from peftkit.data.chat import choose_template
from peftkit.data.documents import style_of
from peftkit.data.encode import Style
from peftkit.data.image_row import ImageRow
from peftkit.data.image_text import ImageEncoder
from peftkit.data.images import require_pillow
from peftkit.data.load import DataConfig
from peftkit.data.pack import IGNORE, collate, last_answer
from peftkit.data.stored import StoredRows
from peftkit.errors import BaseError
from peftkit.events import Listener, Notice, ignore
from peftkit.tasks.head import TokenTask, head_of
from peftkit.tasks.image_text_rows import NOTHING, TOO_LONG, ImageTextEncoder
from peftkit.tasks.isolation import check_causal_answer
from peftkit.tasks.length import exact_length
from peftkit.tasks.loss import unwrapped
from peftkit.tasks.measure import mean_loss
from peftkit.tasks.protocol import Task, TaskConfig
from peftkit.tasks.rows import agreed_style, check_dropped, named, off_prompt
from peftkit.train.metrics import perplexity


class ImageText(TokenTask):
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
        config: DataConfig,
        *,
        style: Style | None = None,
        on_event: Listener = ignore,
    ) -> None:
        require_pillow()
        self.config, self.processor, self.tokenizer = config, processor, processor.tokenizer
        settings = unwrapped(model).config
        image_id = getattr(settings, "image_token_id", None)
        if image_id is None or settings.is_encoder_decoder:
            why = "no token for images" if image_id is None else "an encoder and a decoder"
            raise BaseError(
                f"Cannot train {type(unwrapped(model)).__name__} on conversations with images.",
                found=f"It has {why}.",
                fix="Give a model that writes text after the images in it.",
            )
        self.max_length = exact_length(model, self.tokenizer, config.max_length)
        self._head, self._model, self._is_checked = head_of(model), model, False
        template = choose_template(self.tokenizer, config.chat_template)
        if style is not None and style.kind == "chat":
            template = style.chat_template
        patch = getattr(getattr(settings, "vision_config", None), "patch_size", 14)
        patch = patch if isinstance(patch, int) else int(patch[0])
        self.encoder = ImageEncoder(
            processor,
            template,
            image_id=int(image_id),
            max_pixels=config.max_pixels,
            patch_size=patch,
        )
        self.row_encoder = ImageTextEncoder(
            processor,
            self.encoder,
            config.format,
            (template, config.max_pixels, patch),
            image_id=int(image_id),
            max_length=self.max_length,
        )
        self._template, self._style, self._on_event = template, style, on_event
        self._image_id = int(image_id)
        pads = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        self._pad_id: int = next(token for token in pads if token is not None)

    @property
    def paths(self) -> dict[str, str]:
        """How logits are made, and that rows with images share neither rows nor beginnings."""
        return {**super().paths, "rows": "padded, each with its images (no packing or sharing)"}

    @property
    def style(self) -> Style:
        """How generation has to prompt a model that learnt from the rows encoded so far."""
        assert self._style is not None, "no rows have been encoded"
        return self._style

    @contextmanager
    def training(self, model: nn.Module) -> Iterator[None]:
        """Train with the fastest attention; rows stay padded, for their images lie in them."""
        with Task.training(self, model):
            yield

    def counts(self, rows: StoredRows) -> list[tuple[str, str]]:
        counts = rows.counts
        return [
            ("format", rows.agreed["format"]),
            ("rows read", f"{rows.num_read:,}"),
            ("rows kept", f"{len(rows):,}"),
            (f"cut at {self.max_length:,} tokens, after all images", f"{counts['cut']:,}"),
            ("dropped: nothing to learn", named(rows.dropped(NOTHING))),
            ("dropped: an image or the answer beyond the cut", named(rows.dropped(TOO_LONG))),
            ("rows without images", f"{counts['without images']:,}"),
            ("images", f"{counts['images']:,}"),
            ("tokens of images", f"{counts['tokens of images']:,}"),
            ("tokens", f"{int(rows.num_tokens.sum()):,}"),
            ("learnt tokens", f"{counts['targets']:,}"),
        ]

    def check(self, rows: StoredRows) -> None:
        style = style_of(rows.agreed, self._template)
        self._style = agreed_style(self._style, style, rows.where)
        masked, too_long = rows.dropped(NOTHING), rows.dropped(TOO_LONG)
        beyond = f"Too long: an image or the answer lies beyond {self.max_length} tokens"
        why = {"Nothing to learn (no answer)": masked, beyond: too_long}
        fix = "Raise data.max_length, or lower data.max_pixels"
        fix = fix if too_long else "Give these rows an answer"
        check_dropped(rows.where, rows.num_read, why, self.config, fix)
        self._check_causal(rows[0])
        if number := rows.counts["off_prompt"]:
            self._on_event(Notice(off_prompt(rows.where, number)))

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
        batch = collate(rows, self._pad_id, self.max_length)
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

    def metrics(
        self, model: nn.Module, rows: Sequence[ImageRow], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return loss (nats per learnt token) and perplexity."""
        loss, num_tokens = mean_loss(self, model, rows, on_event=on_event)
        return {"loss": loss, "perplexity": perplexity(loss), "num_tokens": num_tokens}

    def last_answer(self, row: ImageRow) -> tuple[int, str]:
        """Return how many tokens a row's last learnt answer has, and its text."""
        prompt, answer = last_answer(self.tokenizer, row)
        stop = max(n for n, label in enumerate(row.labels) if label != IGNORE) + 1
        return stop - len(prompt), answer

    def _text(self, ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

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
        {"format", "max_length", "max_pixels", "chat_template", "max_dropped"}
    )

    type: Literal["image_text"] = "image_text"
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    """What data.max_pixels was: kept with the adapter, so that it is shown images as it learnt."""

    def resolve(self, data: DataConfig) -> ImageTextConfig:
        require_pillow()
        kept = self.max_pixels if data.max_pixels is None else data.max_pixels
        return self.model_copy(update={"max_pixels": kept})

    def on(
        self,
        model: nn.Module,
        processor: Any,
        data: DataConfig,
        *,
        style: Style | None = None,
        on_event: Listener = ignore,
    ) -> ImageText:
        max_pixels = self.max_pixels if data.max_pixels is None else data.max_pixels
        data = data.model_copy(update={"max_pixels": max_pixels})
        return ImageText(model, processor, data, style=style, on_event=on_event)
