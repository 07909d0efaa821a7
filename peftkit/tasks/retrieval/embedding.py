"""Embeddings: vectors of texts, trained contrastively over a whole step.

The loss is sentence-transformers' MultipleNegativesRankingLoss: cross entropy of an anchor's cosine
similarities, times a scale, with all positives and negatives of the step; the target is the
anchor's positive (arXiv:1705.00652). `symmetric` averages it with the loss of each positive over
all anchors. If a step has several micro-batches, gradient caching (arXiv:2101.06983) computes the
gradient of the whole step with the memory of one micro-batch.

Shapes: B rows of a batch, N of the step, m texts of a row (anchor, positive, negatives), D width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from peftkit.data.messages import WrongField, full_text, texts_of
from peftkit.data.records import Record
from peftkit.data.rows.columns import StoredRows
from peftkit.errors import BaseError, DataError
from peftkit.events import Listener, ignore
from peftkit.files.disk import write_json, write_text
from peftkit.forward.loss import accepted, unwrapped
from peftkit.tasks.base import Task, over_batches
from peftkit.tasks.classes.labels import values_in
from peftkit.tasks.config import Predicts, TaskConfig
from peftkit.tasks.texts import TextsEncoder, TextsRow, TextTask, joined_texts
from peftkit.tasks.whole_step import INDEX, WholeStepTask

RECALL_AT = (1, 5, 10)
BITS = 23
"""Of an integer that float32 represents exactly; two of them identify a text."""


@dataclass(frozen=True, slots=True)
class EmbeddingRow(TextsRow):
    """An anchor, a positive and its negatives.

    Args:
        names: A hash of each text, as two numbers.
        source: "train.jsonl:7".
    """

    names: tuple[tuple[int, int], ...]
    source: str


class EmbeddingEncoder(TextsEncoder):
    """Encoder of records with an anchor, a positive and maybe negatives."""

    kind: ClassVar[type[EmbeddingRow]] = EmbeddingRow
    what = "an anchor and a positive"

    def agreed(self, examples: Sequence[EmbeddingRow], form: str) -> dict[str, str]:
        first = examples[0]
        for row in examples:
            if len(row.lengths) != len(first.lengths):
                raise DataError(
                    "Cannot use rows with different numbers of negatives.",
                    found=f"{first.source} has {len(first.lengths) - 2}, "
                    f"{row.source} has {len(row.lengths) - 2}.",
                    fix="Give all rows the same number.",
                )
        return {"number of negatives": str(len(first.lengths) - 2)}

    def parse(self, record: Record, where: str) -> tuple[EmbeddingRow, Sequence[str]]:
        config, fields = self.config, record.fields
        texts = [full_text(fields, name) for name in (config.anchor, config.positive)]
        texts += texts_of(fields, config.negatives) if fields.get(config.negatives) else []
        if texts[1] in texts[2:]:
            raise WrongField(config.negatives, f"one is equal to {config.positive}")
        encoded = [self.texts.encode(text) for text in texts]
        self.counts["cut"] += any(text.is_cut for text in encoded)
        names = tuple(map(_name, texts))
        row = EmbeddingRow(**joined_texts(encoded), names=names, source=record.source)
        return row, (config.anchor, config.positive, config.negatives)

    def summary(self, rows: StoredRows) -> list[tuple[str, str]]:
        return [("negatives per row", rows.agreed["number of negatives"])]


def _name(text: str) -> tuple[int, int]:
    number = int.from_bytes(hashlib.sha256(text.strip().encode()).digest()[:6], "big")
    return number % (1 << BITS), (number >> BITS) % (1 << BITS)


class Embedding(WholeStepTask, TextTask):
    """A contrastive loss over the texts of a whole step, of an encoder or decoder without head."""

    metric_names = ("accuracy", "masked")
    """Share of anchors whose positive is nearest; number of false negatives masked out."""

    def build(self, model: nn.Module) -> None:
        super().build(model)
        self.rows.encoder = EmbeddingEncoder(self.texts, self.config)
        settings = (self.config.pooling, self.config.normalize)
        self.pooled: Pooled = pooling_of(unwrapped(model), *settings)

    @property
    def paths(self) -> dict[str, str]:
        return {"pooling": self.pooled.mode + ", normalized" * self.pooled.normalize}

    def row_batch(self, rows: Sequence[EmbeddingRow]) -> dict[str, Tensor]:
        """Return a batch of tokens (B * m, T), and names (B, m, 2)."""
        names = torch.tensor([row.names for row in rows], dtype=torch.float32)
        return {**self.tokens(rows), "names": names}

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        return len(batch["names"])

    def embed(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors of a batch of texts, in fp32, normalized if configured."""
        hidden = model(**accepted(model, {**batch, "use_cache": False})).last_hidden_state
        return pooled(hidden, batch["attention_mask"], self.pooled)

    @torch.no_grad()
    def row_values(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors of each row's texts, and their names (B, m * (D + 2))."""
        return _joined(self.embed(model, batch), batch["names"])

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the sums of the loss, correct anchors and masked texts.

        The value is the loss of the batch's anchors. The gradient is the gradient of the whole
        step's loss with respect to the batch's vectors, which are negatives of other anchors, too.
        """
        names = batch["names"]
        if self._step is None or self._step.values is None or INDEX not in batch:
            vectors = _joined(self.embed(model, batch), names)
            table, index = vectors, torch.arange(len(vectors), device=vectors.device)
        else:
            self._step.restore_generators(batch)
            vectors = _joined(self.embed(model, batch), names)
            table, index = self._step.values, batch[INDEX]
            table = table.index_copy(0, index, vectors) if vectors.requires_grad else table
        if not vectors.requires_grad:
            measures = self._losses(table, names.shape[1], index)
            return torch.stack([each.sum() for each in measures])
        losses, right, masked = self._losses(table, names.shape[1], None)
        figures = torch.stack([each[index].sum() for each in (losses.detach(), right, masked)])
        total = losses.sum()
        return torch.cat([(figures[0] + total - total.detach())[None], figures[1:]])

    def _losses(
        self, table: Tensor, num_texts: int, only: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of each anchor, whether it is right, and how many texts are masked out.

        Args:
            table: (N, m * (D + 2)). only: Indices of the anchors to compute; None: all.
        """
        vectors, names = _apart(table, num_texts)
        count = len(table)
        anchors_here = torch.arange(count, device=table.device) if only is None else only
        vectors = functional.normalize(vectors, dim=-1)
        texts = vectors[:, 1:].transpose(0, 1).flatten(0, 1)  # all positives, then all negatives
        text_names = names[:, 1:].transpose(0, 1).flatten(0, 1)
        scores = self.config.scale * vectors[anchors_here, 0] @ texts.T
        # no negatives: texts equal to the positive or the anchor, positives of the same anchor
        same = _equal(names[anchors_here, 1], text_names) | _equal(
            names[anchors_here, 0], text_names
        )
        same[:, :count] |= _equal(names[anchors_here, 0], names[:, 0])
        same[torch.arange(len(anchors_here), device=anchors_here.device), anchors_here] = False
        scores = scores.masked_fill(same, -torch.inf)
        losses = functional.cross_entropy(scores, anchors_here, reduction="none")
        if self.config.symmetric:
            anchors = (self.config.scale * vectors[anchors_here, 1] @ vectors[:, 0].T).masked_fill(
                same[:, :count], -torch.inf
            )
            losses = (
                losses + functional.cross_entropy(anchors, anchors_here, reduction="none")
            ) / 2
        right = (scores.argmax(1) == anchors_here).to(losses)
        return losses, right, same.sum(1).to(losses)

    def names(self, row: EmbeddingRow) -> Sequence[str]:
        return ("anchor", "positive", *("negative" for _ in row.lengths[2:]))

    @torch.no_grad()
    def metrics(
        self, model: nn.Module, rows: Sequence[EmbeddingRow], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss among all rows, recall@k and MRR of each positive among all texts."""
        self._step, values = None, partial(self.row_values, model)
        computed = [
            part.cpu()
            for *_, part in over_batches(self, model, rows, "Embedding", on_event, values)
        ]
        table, num_texts = torch.cat(computed), len(rows[0].lengths)
        vectors, names = _apart(table, num_texts)
        vectors = functional.normalize(vectors, dim=-1)
        texts, text_names = vectors[:, 1:].flatten(0, 1), names[:, 1:].flatten(0, 1)
        losses, ranks = [], []
        for numbers in torch.arange(len(table)).split(256):
            losses.append(self._losses(table, num_texts, numbers)[0])
            scores = vectors[numbers, 0] @ texts.T
            answers = _answers(names, text_names, numbers)
            best = scores.masked_fill(~answers, -torch.inf).amax(1, keepdim=True)
            ranks.append(1 + ((scores > best) & ~answers).sum(1))
        rank = torch.cat(ranks).float()
        recalls = {f"recall@{k}": float((rank <= k).float().mean()) for k in RECALL_AT}
        return {"loss": float(torch.cat(losses).mean()), **recalls, "mrr": float((1 / rank).mean())}

    def vectors(
        self, model: nn.Module, texts: Sequence[str], on_event: Listener = ignore
    ) -> list[list[float]]:
        """Return the vector of each text."""
        encoded = [self.texts.encode(text) for text in texts]
        return self.for_each(model, encoded, self.embed, "Embedding", on_event)

    def predict_rows(
        self, model: nn.Module, records: Sequence[Record], on_event: Listener = ignore
    ) -> list[dict[str, object]]:
        """Return the vector of each row's `text`, or of its anchor, as `embedding`."""

        def text(fields: Mapping[str, object]) -> str:
            return full_text(fields, "text" if "text" in fields else self.config.anchor)

        texts = [text_of_row for text_of_row, _ in values_in(records, text)]
        return [{"embedding": vector} for vector in self.vectors(model, texts, on_event)]


def _joined(vectors: Tensor, names: Tensor) -> Tensor:
    rows = vectors.view(*names.shape[:2], -1)
    return torch.cat([rows, names.to(rows)], dim=-1).flatten(1)


def _apart(table: Tensor, num_texts: int) -> tuple[Tensor, Tensor]:
    """Return vectors (N, m, D) and names (N, m, 2)."""
    rows = table.view(len(table), num_texts, -1)
    return rows[..., :-2], rows[..., -2:].detach()


def _equal(names: Tensor, others: Tensor) -> Tensor:
    return (names[:, None] == others[None]).all(-1)


def _answers(names: Tensor, text_names: Tensor, rows: Tensor) -> Tensor:
    """Return which texts are right for each anchor: the positives of equal anchors."""
    same_anchor = _equal(names[rows, 0], names[:, 0]).float()
    is_positive = _equal(names[:, 1], text_names).float()
    return same_anchor @ is_positive > 0


class EmbeddingConfig(TaskConfig):
    """Embeddings: search, similarity, clusters."""

    task_type: ClassVar[str] = "FEATURE_EXTRACTION"
    auto_class: ClassVar[str] = "AutoModel"
    task: ClassVar[Callable[..., Task]] = Embedding
    command: ClassVar[str] = "peftkit predict {folder} --data FILE --out vectors.jsonl"
    num_texts: ClassVar[int] = 2
    predicts: ClassVar[frozenset[Predicts]] = frozenset({"rows"})
    data_fields: ClassVar[frozenset[str]] = frozenset({"max_length"})

    type: Literal["embedding"] = "embedding"
    anchor: str = "anchor"
    """Field with the query."""
    positive: str = "positive"
    """Field with the text to be found."""
    negatives: str = "negatives"
    """Field with one or several other texts; rows may have none."""
    scale: Annotated[float, Field(gt=0)] = 20.0
    """Factor of the cosine similarities: 1 / temperature."""
    symmetric: bool = False
    """Also train each positive to find its anchor."""
    pooling: Literal["auto", "mean", "cls", "last"] = "auto"
    """How a text becomes one vector; auto: as the base's modules.json says, else mean, or last of a
    decoder."""
    normalize: bool | Literal["auto"] = "auto"
    """Whether vectors have length 1; auto: as modules.json says, else true. The loss does not
    depend on it."""

    def write_beside(self, folder: Path, config: object, base: Path | None) -> None:
        write_modules(folder, config, pooling_for(config, base, self.pooling, self.normalize))


# Pooling, as in sentence-transformers: modules.json and the config.json of its Pooling.


Mode = Literal["mean", "cls", "last"]
FLAGS: dict[str, Mode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
NAMES: dict[str, Mode] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class Pooled:
    """How hidden states are pooled, and whether vectors are normalized to length 1."""

    mode: Mode
    normalize: bool


def pooled(hidden: Tensor, mask: Tensor, how: Pooled) -> Tensor:
    """Return the vector of each text (B, D), in fp32.

    Args:
        hidden: (B, T, D). mask: (B, T), 1 where a token is; padding is on the right.
    """
    if how.mode == "mean":
        weights = mask[..., None].to(torch.float32)
        vectors = (hidden.float() * weights).sum(1) / weights.sum(1).clamp(min=1)
    else:
        last = mask.sum(1) - 1 if how.mode == "last" else torch.zeros_like(mask[:, 0])
        vectors = hidden[torch.arange(len(hidden), device=hidden.device), last].float()
    return functional.normalize(vectors, dim=-1) if how.normalize else vectors


def pooling_of(model: Any, mode: str, normalize: bool | str) -> Pooled:
    """Return the pooling; "auto" reads it from the base, which may raise BaseError."""
    return pooling_for(model.config, Path(str(model.config._name_or_path)), mode, normalize)


def pooling_for(config: Any, folder: Path | None, mode: str, normalize: bool | str) -> Pooled:
    """Return the pooling by a model's config and its folder, if it has one; see `pooling_of`."""
    base_mode, base_normalize = _of_files(folder) if folder else (None, None)
    text = config.get_text_config()
    is_decoder = hasattr(text, "num_key_value_heads") or getattr(text, "is_decoder", False)
    default: Mode = "last" if is_decoder else "mean"
    return Pooled(
        mode=(base_mode or default) if mode == "auto" else NAMES.get(mode, "last"),
        normalize=(True if base_normalize is None else base_normalize)
        if normalize == "auto"
        else bool(normalize),
    )


def write_modules(folder: Path, config: Any, how: Pooled) -> None:
    """Write the files that make a model's folder one of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if how.normalize else [])]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    settings: dict[str, Any] = {"word_embedding_dimension": config.hidden_size}
    settings |= {flag: mode == how.mode for flag, mode in FLAGS.items()}
    (folder / "1_Pooling").mkdir()
    write_json(settings, folder / "1_Pooling" / "config.json")
    write_text(json.dumps(modules, indent=2) + "\n", folder / "modules.json")


def _of_files(folder: Path) -> tuple[Mode | None, bool | None]:
    """Return pooling and normalization of a folder of sentence-transformers; else None."""
    file = folder / "modules.json"
    if not file.is_file():
        return None, None
    try:
        modules: list[Mapping[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        kinds = {str(module["type"]).rpartition(".")[2]: module for module in modules}
        settings = json.loads(
            (folder / kinds["Pooling"]["path"] / "config.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise BaseError(
            f"cannot read the pooling of {folder}.",
            found=f"{file}: {problem!r}",
            fix="Set task.pooling and task.normalize, and remove modules.json.",
        ) from None
    modes = {mode for name, mode in FLAGS.items() if settings.get(name)}
    others = [name for name in settings if name.startswith("pooling_mode_") and settings[name]]
    if named := settings.get("pooling_mode"):
        modes, others = {NAMES[named]} if named in NAMES else set(), [named]
    if len(modes) != 1 or len(others) != 1:
        raise BaseError(
            f"the pooling of {folder} is not supported.",
            found=f"1_Pooling: {', '.join(map(str, others)) or 'nothing'}",
            fix=f"Supported: {', '.join(NAMES)}.",
        )
    return modes.pop(), "Normalize" in kinds
