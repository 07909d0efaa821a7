"""Language modelling of conversations with images: learn what the assistant says of what it sees.

Shapes: B rows, T tokens, n learnt tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from peftkit.base.purpose import Processor
from peftkit.data.chat import choose_template
from peftkit.data.encode import Style
from peftkit.data.image_row import ImageRow
from peftkit.data.image_rows import parse_with_images
from peftkit.data.image_text import ImageEncoder
from peftkit.data.images import require_pillow
from peftkit.data.load import DataConfig, read_records
from peftkit.data.pack import IGNORE, collate
from peftkit.errors import BaseError
from peftkit.events import Listener, Notice, Progress, Stage, Table, ignore
from peftkit.tasks.head import TokenTask, head_of
from peftkit.tasks.isolation import check_causal_answer
from peftkit.tasks.length import exact_length
from peftkit.tasks.loss import unwrapped
from peftkit.tasks.protocol import Task, TaskConfig, mean_loss
from peftkit.tasks.rows import agreed_style, check_dropped, named
from peftkit.train.metrics import perplexity

PROGRESS_EVERY = 100


@dataclass(slots=True)
class _Counts:
    """What became of the rows of one file."""

    truncated: int = 0
    masked: list[str] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)


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
        self.encoder = ImageEncoder(
            processor,
            template,
            image_id=int(image_id),
            max_pixels=config.max_pixels,
            patch_size=patch if isinstance(patch, int) else int(patch[0]),
        )
        self._image_id, self._style, self._on_event = int(image_id), style, on_event
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

    def load(self, where: str) -> list[ImageRow]:
        """Read a file or data set (see `DataConfig.train`) with its images; emits the counts.

        Each image is decoded once, so that a damaged one shows now; no pixels are kept.

        Raises:
            DataError: Named rows or images cannot be used; too many rows have nothing to learn.
        """
        self._on_event(Stage(f"Reading {where}"))
        parsed, pictures = parse_with_images(read_records(where), self.config.format, where=where)
        counts = _Counts()
        off_prompt = self.encoder.num_off_prompt
        rows: list[ImageRow] = []
        for number, (example, images) in enumerate(zip(parsed.examples, pictures, strict=True)):
            if number % PROGRESS_EVERY == 0:
                self._on_event(Progress(f"Encoding {where}", number, len(pictures)))
            self._style = agreed_style(self._style, self.encoder.style(example), where)
            row = self._cut(self.encoder.encode(example, images), counts)
            if row is not None:
                rows.append(row)
        self._report(where, parsed.format, parsed.unused, len(pictures), rows, counts)
        why = {
            "Nothing to learn (no answer)": counts.masked,
            f"Too long: an image or the answer lies beyond {self.max_length} tokens": (
                counts.too_long
            ),
        }
        fix = "Raise data.max_length, or lower data.max_pixels"
        check_dropped(
            where,
            len(pictures),
            why,
            self.config,
            fix if counts.too_long else "Give these rows an answer",
        )
        self._check_causal(rows[0])
        if self.encoder.num_off_prompt > off_prompt:
            self._on_event(
                Notice(
                    f"{where}: in {self.encoder.num_off_prompt - off_prompt} rows the answer does "
                    "not begin right after the chat template's generation prompt. Generation "
                    "will start otherwise than training did; data.chat_template can change that."
                )
            )
        return rows

    def kind(self, row: ImageRow) -> int:
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
        stop = max(n for n, label in enumerate(row.labels) if label != IGNORE) + 1
        start = stop
        while start > 0 and row.labels[start - 1] != IGNORE:
            start -= 1
        ids = list(row.input_ids[start:stop])
        return len(ids), str(self.tokenizer.decode(ids, skip_special_tokens=True))

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

    def _cut(self, row: ImageRow, counts: _Counts) -> ImageRow | None:
        """Return a row of at most max_length tokens; None where it would be cut in an image."""
        if row.num_targets == 0:
            counts.masked.append(row.source)
            return None
        if len(row.input_ids) <= self.max_length:
            return row
        cut = replace(
            row,
            input_ids=row.input_ids[: self.max_length],
            labels=row.labels[: self.max_length],
            lengths=(self.max_length,),
        )
        if cut.num_targets == 0 or self._image_id in row.input_ids[self.max_length :]:
            counts.too_long.append(row.source)
            return None
        counts.truncated += 1
        return cut

    def _report(
        self,
        where: str,
        name: str,
        unused: Sequence[str],
        num_read: int,
        rows: Sequence[ImageRow],
        counts: _Counts,
    ) -> None:
        tokens = sum(len(row.input_ids) for row in rows)
        targets = sum(row.num_targets for row in rows)
        lines = [
            ("format", name),
            ("rows read", f"{num_read:,}"),
            ("rows kept", f"{len(rows):,}"),
            (f"cut at {self.max_length:,} tokens, after all images", f"{counts.truncated:,}"),
            ("dropped: nothing to learn", named(counts.masked)),
            ("dropped: an image or the answer beyond the cut", named(counts.too_long)),
            ("rows without images", f"{sum(not row.images for row in rows):,}"),
            ("images", f"{sum(len(row.images) for row in rows):,}"),
            ("tokens of images", f"{sum(sum(row.image_tokens) for row in rows):,}"),
            ("tokens", f"{tokens:,}"),
            ("learnt tokens", f"{targets:,}"),
        ]
        if unused:
            lines.append(("fields not used", ", ".join(unused)))
        self._on_event(Table(f"Data: {where}", ("what", "how many"), tuple(lines)))


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
