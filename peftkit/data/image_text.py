"""Conversations with images as tokens, and what a model's processor makes of them in a batch.

The processor is asked, and nothing is known of any model here: which text it writes for an image,
which inputs go along with the tokens, whether images lie in rows. An image's tokens replace its
mark in the rendered text, and the learnt characters move with them, so that labels are exact. What
it makes of a batch is held against the tokens of the rows: no image may be cut or moved.

Shapes: B rows, T tokens of the longest row, rounded up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from peftkit.data.cache import tokenizer_key
from peftkit.data.chat import Chat, Rendered, Span
from peftkit.data.columns import Dropped
from peftkit.data.documents import agreed_style
from peftkit.data.encode import Encoder, Style, require_template, row_of, with_bos
from peftkit.data.encoding import EncodedRows, RowEncoder
from peftkit.data.format import Completion, Conversation, Example, Instruction, ParsedRow
from peftkit.data.image_processor import Asked, ImageTemplate, expanded
from peftkit.data.image_row import ImageRow
from peftkit.data.image_rows import MARK, parse_with_images
from peftkit.data.images import Picture
from peftkit.data.load import Record
from peftkit.data.messages import Message
from peftkit.data.pack import Row, cut_document
from peftkit.errors import DataError

NOTHING, TOO_LONG = 0, 1
"""Why a row is dropped; see `ImageEncoder.drops`."""
Read = tuple[ParsedRow, list[tuple[Picture, ...]]]


class ImageEncoder(RowEncoder):
    """Turns examples with images into rows, and rows into the inputs of a model.

    No pixels are kept. Each image is decoded once, so that a damaged one shows now. A processor
    computes with torch, which no process that is forked can.

    Args:
        form: data.format.
        image_id: The token that stands for what the model sees of an image.
        patch_size: Of the vision tower, for the cost of an image.

    Raises:
        DataError: The chat template writes no images.
        BaseError: The processor does not say how it marks an image, or cannot read one.
    """

    kind: ClassVar[type[ImageRow]] = ImageRow
    in_processes: ClassVar[bool] = False
    at_once: ClassVar[int] = 100
    drops: Mapping[str, str] = {
        "nothing to learn": "give these rows an answer",
        "an image or the answer beyond the cut": "raise data.max_length or lower data.max_pixels",
    }

    def __init__(
        self,
        processor: Any,
        template: str | None,
        form: Any,
        *,
        image_id: int,
        max_pixels: int | None,
        patch_size: int,
        max_length: int,
    ) -> None:
        self._told = (template, form, max_pixels, patch_size, max_length)
        self._form, self._max_length = form, max_length
        self._processor, self._tokenizer = processor, processor.tokenizer
        self._image_id, self._max_pixels = image_id, max_pixels
        self._asked = Asked(processor, image_id=image_id, patch_size=patch_size)
        self._template = ImageTemplate(processor, template)
        self._given = template
        self._chat = Chat(self._tokenizer, self._template.chat_template, self._template)
        self._encoder = Encoder(self._tokenizer, self._template.chat_template)
        self.num_off_prompt = 0
        """Conversations whose last turn begins otherwise than the generation prompt ends."""

    def key(self, where: str) -> object:
        folder, processor = str(Path(where).absolute().parent), self._processor
        known = (type(processor).__name__, processor.to_json_string(), processor.chat_template)
        return (folder, *tokenizer_key(processor.tokenizer), *known, *self._told)

    def read(self, records: Sequence[Record], where: str) -> Read:
        return parse_with_images(records, self._form, where=where)

    def rows(self, read: Read) -> EncodedRows:
        parsed, pictures = read
        counts = Counter[str]()
        before, style = self.num_off_prompt, self.style(parsed.examples[0])
        rows: list[ImageRow | Dropped] = []
        for example, images in zip(parsed.examples, pictures, strict=True):
            agreed_style(style, self.style(example), example.source)
            row = self._cut(self.encode(example, images), counts)
            rows.append(row)
            if isinstance(row, ImageRow):
                counts.update(
                    {
                        "without images": not row.images,
                        "images": len(row.images),
                        "tokens of images": sum(row.image_tokens),
                        "targets": row.num_targets,
                    }
                )
        counts["off_prompt"] = self.num_off_prompt - before
        agreed = {"format": str(parsed.format), "style": str(style.kind)}
        return EncodedRows(rows, agreed, counts, parsed.unused)

    def _cut(self, row: ImageRow, counts: Counter[str]) -> ImageRow | Dropped:
        """Return a row of at most max_length tokens; none where it would be cut in an image."""
        if row.num_targets == 0:
            return Dropped(row.source, NOTHING)
        if len(row.input_ids) <= self._max_length:
            return row
        cut = cut_document(row, self._max_length)
        if cut.num_targets == 0 or self._image_id in row.input_ids[self._max_length :]:
            return Dropped(row.source, TOO_LONG)
        counts["cut"] += 1
        return cut

    @property
    def is_nested(self) -> bool:
        """Whether images lie in rows, (B, images, ...), rather than one after the other."""
        return self._asked.is_nested

    def style(self, example: Example) -> Style:
        """Return how generation has to prompt a model that learnt from such an example.

        Raises:
            DataError: A conversation, and no chat template, nor a processor of prompt and answer.
        """
        if isinstance(example, Completion) or (
            self._asked.takes_suffix and not self._template.chat_template
        ):
            return Style("plain")
        require_template(self._processor, self._template.chat_template)
        return Style("chat", self._given)

    def encode(self, example: Example, pictures: Sequence[Picture]) -> ImageRow:
        """Return an example's tokens, uncut; no label counts where there is nothing to learn.

        Raises:
            DataError: An image does not decode, the template or the processor refuses the row, or
                its learnt tokens cannot be told for certain.
        """
        if isinstance(example, Instruction):
            turns = (
                {"role": "user", "content": example.request},
                {"role": "assistant", "content": example.output},
            )
            example = Conversation(turns, (1,), (), example.source)
        if isinstance(example, Conversation) and self.style(example).kind == "plain":
            example = _as_completion(example)
        if isinstance(example, Completion):
            return self._completion(example, pictures)
        assert isinstance(example, Conversation)
        # what stands after the last learnt turn is seen by nothing that is learnt
        stop = example.learnt[-1] + 1 if example.learnt else len(example.messages)
        used = sum(m.get("content", "").count(MARK) for m in example.messages[:stop] if m)
        messages = example.messages[:stop]
        example = Conversation(messages, example.learnt, example.tools, example.source)
        rendered = self._chat.spans(example)
        self.num_off_prompt += not rendered.as_generated
        return self._row(rendered, pictures[:used], example.source, ends=True)

    def prompt(self, prompt: str | Sequence[Message], style: Style) -> str:
        """Return the text that generation starts from, with the processor's marks.

        Args:
            prompt: What the user says, or a conversation; their texts have MARK for an image.

        Raises:
            DataError: The template cannot write it.
        """
        if style.kind == "plain":
            if not isinstance(prompt, str):
                raise DataError(
                    "Cannot put a conversation to this model.",
                    found="Its adapter learnt from single prompts.",
                    fix="Give one prompt as text.",
                )
            return self._begun(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        require_template(self._processor, self._template.chat_template)
        return self._chat.render(messages, (), "the prompt", generation=True)

    def stop_ids(self, style: Style) -> list[int]:
        """Return the tokens that end an answer: what a row teaches last, and eos."""
        eos = self._tokenizer.eos_token_id
        found = set() if eos is None else {int(eos)}
        if style.kind == "chat":
            turns = [{"role": role, "content": "Hello"} for role in ("user", "assistant")]
            example = Conversation(tuple(turns), (1,), (), "the chat template")
            found.add(self.encode(example, ()).labels[-1])
        return sorted(found)

    def generated(self, texts: Sequence[str], images: Sequence[Sequence[Picture]]) -> Any:
        """Return what the model is given to go on from some texts, padded on the left.

        Args:
            images: Of each text. Either all texts have some or none.
        """
        decoded = [[p.decode("RGB", self._max_pixels) for p in row] for row in images]
        made = self._asked.made(texts, decoded, "the prompt", padding=True, padding_side="left")
        return {name: value for name, value in made.items() if name != "labels"}

    def inputs(self, rows: Sequence[ImageRow], width: int) -> dict[str, Tensor]:
        """Return what goes into the model beside tokens and mask, for rows padded to a width.

        Inputs that go along with the tokens (B, T, ...) go on after the processor's last one as
        they were there: over what of an answer it was not asked for.

        Raises:
            DataError: The processor makes other tokens of a row than it was encoded with.
        """
        decoded = [[p.decode("RGB", self._max_pixels) for p in row.images] for row in rows]
        suffix = {"suffix": [row.suffix for row in rows]} if rows[0].suffix is not None else {}
        sources = ", ".join(row.source for row in rows)
        made = self._asked.made(
            [row.text for row in rows],
            decoded,
            sources,
            padding=True,
            padding_side="right",
            **suffix,
        )
        found: dict[str, Tensor] = {}
        shared = [
            _common(row, ids, mask, self._image_id)
            for row, ids, mask in zip(rows, made["input_ids"], made["attention_mask"], strict=True)
        ]
        for name, value in made.items():
            if name in ("input_ids", "attention_mask", "labels"):
                continue
            if name not in self._asked.of_tokens:
                found[name] = value
                continue
            carried = value.new_zeros(len(rows), width, *value.shape[2:])
            for number, (row, same) in enumerate(zip(rows, shared, strict=True)):
                length = len(row.input_ids)
                carried[number, :same] = value[number, :same]
                carried[number, same:length] = value[number, max(same - 1, 0)]
            found[name] = carried
        return found

    # ------------------------------------------------------------------- one row

    def _completion(self, example: Completion, pictures: Sequence[Picture]) -> ImageRow:
        prompt = example.prompt.replace(MARK, self._template.mark)
        if self._asked.takes_suffix:
            return self._with_suffix(prompt, example, pictures)
        prompt = self._begun(example.prompt)
        text = prompt + example.completion
        spans = (Span(len(prompt), len(text), False),) if example.completion.strip() else ()
        return self._row(Rendered(text, spans, True), pictures, example.source, ends=True)

    def _begun(self, prompt: str) -> str:
        """Return a prompt with the processor's marks, and what its tokenizer begins a text with."""
        if self._asked.takes_suffix:
            return prompt.replace(MARK, self._template.mark)
        bare = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        lead = with_bos(self._tokenizer, "a")[: -len(bare)]
        text = "".join(self._tokenizer.convert_ids_to_tokens(lead))
        return text + prompt.replace(MARK, self._template.mark)

    def _with_suffix(
        self, prompt: str, example: Completion, pictures: Sequence[Picture]
    ) -> ImageRow:
        """Encode with a processor that is told the answer; its second segment is what is learnt."""
        self._check_marks(prompt, pictures, example.source)
        images = [p.decode("RGB", self._max_pixels) for p in pictures]
        made = self._asked.made([prompt], [images], example.source, suffix=[example.completion])
        ids, kinds = made["input_ids"][0].tolist(), made["token_type_ids"][0].tolist()
        learnt = [kind == 1 and bool(example.completion.strip()) for kind in kinds]
        row = row_of(ids, learnt, example.source)
        seen = _Seen(
            pictures,
            images,
            (ids.count(self._image_id) // max(len(images), 1),) * len(images),
            self._asked.num_patches(made),
        )
        return seen.row(row, prompt, prompt, example.completion)

    def _row(
        self, rendered: Rendered, pictures: Sequence[Picture], source: str, *, ends: bool
    ) -> ImageRow:
        text = rendered.text
        self._check_marks(text, pictures, source)
        images = [p.decode("RGB", self._max_pixels) for p in pictures]
        written, num_patches = self._asked.written(text, images, source)
        whole = expanded(rendered, self._template.mark, written)
        row = self._encoder.rendered(whole, source, ends=ends)
        tokens = self._asked.tokens_in(written)
        if sum(tokens) != row.input_ids.count(self._image_id) or self._image_id in row.labels:
            raise DataError(
                f"Cannot tell which tokens of {source} are those of its images.",
                found=f"They are {sum(tokens)} tokens, and the row has "
                f"{row.input_ids.count(self._image_id)} of that kind.",
                fix=f"Take {self._template.mark} out of its texts.",
            )
        prompt = text[: rendered.spans[-1].start] if rendered.spans else text
        return _Seen(pictures, images, tokens, num_patches).row(row, text, prompt, None)

    def _check_marks(self, text: str, pictures: Sequence[Picture], source: str) -> None:
        """Refuse texts that hold the processor's own mark besides, or lost one."""
        count = text.count(self._template.mark)
        if count != len(pictures):
            raise DataError(
                f"Cannot tell where the images of {source} stand.",
                found=f"It has {len(pictures)} images, and its text has {count} of the "
                f"processor's marks {self._template.mark}.",
                fix="Take the marks out of the row's texts, or mend the chat template.",
            )


@dataclass(frozen=True, slots=True)
class _Seen:
    """The images of a row."""

    pictures: Sequence[Picture]
    images: Sequence[Any]
    tokens: tuple[int, ...]
    num_patches: int

    def row(self, row: Row, text: str, prompt: str, suffix: str | None) -> ImageRow:
        """Return a row of tokens with its images."""
        return ImageRow(
            row.input_ids,
            row.labels,
            row.lengths,
            row.source,
            text=text,
            suffix=suffix,
            images=tuple(self.pictures),
            sizes=tuple(image.size for image in self.images),
            image_tokens=self.tokens,
            num_patches=self.num_patches,
            prompt=prompt,
        )


def _as_completion(example: Conversation) -> Completion:
    """Return a question and its answer as prompt and completion, for a model without turns."""
    roles = [message["role"] for message in example.messages]
    if roles != ["user", "assistant"] or example.tools or example.learnt != (1,):
        raise DataError(
            f"Cannot write the conversation of {example.source} for this base.",
            found="Its processor has no chat template; it takes one prompt and one answer.",
            fix="Give rows of one question and one answer, or set data.chat_template.",
        )
    asked, said = (message.get("content", "") for message in example.messages)
    return Completion(asked, said, example.source)


def _common(row: ImageRow, ids: Tensor, mask: Tensor, image_id: int) -> int:
    """Return how many tokens a row begins with that the processor makes of it too."""
    made, own = ids[mask.bool()].tolist(), list(row.input_ids)
    pairs = zip(made, own, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(made), len(own)))
    if image_id in own[same:] or image_id in made[same:]:
        raise DataError(
            f"The processor makes other tokens of {row.source} than its text has.",
            found=f"They differ from token {same} on, before its last image.",
            fix="Take what looks like a special token out of the row, or mend the chat template.",
        )
    return same
