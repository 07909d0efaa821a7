"""Classification heads: their labels in a model's config, and the initial values of new heads.

LABEL_0, ... are the placeholders of transformers and count as no names. A new head has the same
initial values regardless of other random draws, the precision and the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from peftkit.errors import BaseError, first_few
from peftkit.files.tensors import open_tensors

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


MAX_LISTED = 12
SEED = 20_210_617
"""Seed of the initial values of new heads."""
LANGUAGE_HEAD = "lm_head.weight"
POOLER = "pooler"
"""Module of some encoders that only classification heads use; masked language models lack it."""


@dataclass(frozen=True, slots=True)
class ClassHead:
    """A classification head, or a head with one number as output.

    Attributes:
        labels: Names of the outputs, in order.
        problem_type: The field of transformers' configs; None: the value of the base's config.
        fresh: Whether to make a new head even if the base has one.
        words: Two words; a new head of one output starts as the difference of their rows in the
            base's language head. word_ids: Their tokens; None before a tokenizer is loaded.
        is_vocabulary: Whether outputs are tokens, the first of them a blank; without labels, the
            base's vocabulary.
    """

    labels: tuple[str, ...]
    problem_type: ProblemType | None = None
    fresh: bool = False
    words: tuple[str, str] | None = None
    word_ids: tuple[int, int] | None = None
    is_vocabulary: bool = False

    def with_tokens(self, tokenizer: Any) -> ClassHead:
        """Return the head with the tokens of its words.

        Raises:
            BaseError: A word is not a single token.
        """
        if self.words is None:
            return self
        token_ids = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in self.words]
        for word, ids in zip(self.words, token_ids, strict=True):
            if len(ids) != 1:
                raise BaseError(
                    f"A head cannot start from the word {word!r}.",
                    found=f"The tokenizer splits it into {len(ids)} tokens.",
                    fix="Give two words of one token each, such as yes and no.",
                )
        return replace(self, word_ids=(token_ids[0][0], token_ids[1][0]))


def unnamed(count: int) -> tuple[str, ...]:
    """Return transformers' placeholders for unnamed labels."""
    return tuple(f"LABEL_{number}" for number in range(count))


def labels_of(config: Any) -> tuple[str, ...]:
    """Return the labels of a model's config, in the order of its outputs."""
    names: Mapping[Any, str] = config.id2label or {}
    return tuple(str(name) for _, name in sorted(names.items(), key=lambda item: int(item[0])))


def are_named(labels: Sequence[str]) -> bool:
    """Return whether labels have names other than transformers' placeholders."""
    return not all(re.fullmatch(r"LABEL_\d+", label) for label in labels)


def set_head(config: Any, head: ClassHead, name: str) -> None:
    """Write a head into a model's config; label names of the base keep their order.

    Args:
        name: Name of the base, for messages.

    Raises:
        BaseError: The base has a head with other labels.
    """
    if head.is_vocabulary:
        if head.labels:
            config.vocab_size, config.pad_token_id = len(head.labels), 0
        return
    base_labels, labels = labels_of(config), head.labels
    if are_named(base_labels) and not head.fresh:
        if are_named(labels) and not set(labels) <= set(base_labels):
            raise BaseError(
                f"the labels do not agree with the head of {name}.",
                found=f"The head's: {_listed(base_labels)}\nThe task's: {_listed(labels)}",
                fix="Rename the labels in the data, or set task.fresh_head: true to replace the "
                "base's head.",
            )
        if not are_named(labels) and len(labels) != len(base_labels):
            raise BaseError(
                f"the number of labels does not agree with the head of {name}.",
                found=f"The head has {len(base_labels)}: {_listed(base_labels)}. "
                f"{len(labels)} are required.",
                fix="Give the base that the adapter was trained on.",
            )
        labels = base_labels
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    if head.problem_type is not None:
        config.problem_type = head.problem_type


def _listed(labels: Sequence[str]) -> str:
    return first_few(labels, MAX_LISTED, ", ")


def owners(names: Iterable[str], head: Iterable[str]) -> dict[str, str]:
    """Return the path under which each parameter of a head is trained.

    Args:
        names: Names of parameters.
        head: Paths of the head's modules.
    """
    paths = {}
    for name in names:
        segments = name.split(".")
        if POOLER in segments[:-1]:
            paths[name] = ".".join(segments[: segments.index(POOLER) + 1])
        for path in head:
            if name.startswith(f"{path}."):
                paths[name] = path
    return paths


@torch.no_grad()
def renew(model: nn.Module, names: Iterable[str]) -> None:
    """Initialise these parameters: random matrices, zero biases, norm scales of 1."""
    generator = torch.Generator().manual_seed(SEED)
    std = getattr(model.config, "initializer_range", None) or 0.02
    for name in sorted(names):
        parameter = model.get_parameter(name)
        if parameter.ndim > 1:
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


@torch.no_grad()
def start_from_words(
    model: Any, names: Iterable[str], word_ids: tuple[int, int], base_name: str
) -> None:
    """Initialise a head of one output with the difference of two rows of the language head.

    The output is then the log-odds of the first word against the second.

    Args:
        names: Names of the head's parameters. base_name: For messages.

    Raises:
        BaseError: The head has more than one row, or the language head is not available.
    """
    rows = model.get_input_embeddings().weight
    new = {name: model.get_parameter(name) for name in sorted(names)}
    if [tuple(parameter.shape) for parameter in new.values()] != [(1, rows.shape[1])]:
        raise BaseError(
            f"A head of {base_name} cannot start from words.",
            found=f"Its new parameters: {', '.join(new) or 'none, the base has a head already'}.",
            fix="Remove task.answers, or give a decoder without a head.",
        )
    if not model.config.get_text_config().tie_word_embeddings:
        rows = _language_head(Path(str(model.config._name_or_path)), base_name)
    difference = rows[word_ids[0]].float() - rows[word_ids[1]].float()
    for parameter in new.values():
        parameter.copy_(difference[None])


def _language_head(folder: Path, base_name: str) -> Tensor:
    for path in sorted(folder.glob("*.safetensors")):
        with open_tensors(path, error=BaseError) as file:
            if LANGUAGE_HEAD in file.header.tensors:
                return file.tensor(LANGUAGE_HEAD)
    raise BaseError(
        f"A head cannot start from words of {base_name}.",
        found=f"Its safetensors files hold no {LANGUAGE_HEAD}.",
        fix="Remove task.answers, or give the folder of a base that has it.",
    )
