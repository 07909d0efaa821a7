"""The purpose that a base is loaded for: model class, processor, head, rotary positions.

A task says it before anything is loaded. Names of labels that transformers made up (LABEL_0, ...)
count as no names. A new head is the same whatever was drawn before, in whatever precision and on
whatever device.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from peftkit.errors import BaseError, did_you_mean, first_few
from peftkit.files.tensors import open_tensors

Processor = Literal["tokenizer", "image_processor", "feature_extractor", "multimodal", "audio"]
"""multimodal: a processor of images and text, with a tokenizer of its own; audio: of audio and
text; feature_extractor: of audio alone."""
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
RopeScaling = Mapping[str, Any]
"""Fields of a config's `rope_parameters`: rope_type, factor, ..."""
STRETCHED = ("linear", "yarn", "llama3", "longrope")
"""Types whose `factor` multiplies the length of rows."""
MAX_LISTED = 12
SEED = 20_210_617
"""Of every new head."""
LANGUAGE_HEAD = "lm_head.weight"
POOLER = "pooler"
"""Module of some encoders that only classification heads use; masked language models lack it."""


@dataclass(frozen=True, slots=True)
class ClassHead:
    """A classification head, or a head of one number.

    Attributes:
        labels: A name for each of its outputs, in their order.
        problem_type: As transformers' configs say it; None: as the base's own says.
        fresh: Make a new one even where the base has one.
        words: Two words; a new head of one output starts as the difference of their rows in the
            base's language head. word_ids: Their tokens, once a tokenizer is known.
        is_vocabulary: Its outputs are tokens, the first of them a blank; none named: the base's.
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
            BaseError: One is not a single token.
        """
        if self.words is None:
            return self
        token_ids = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in self.words]
        for word, ids in zip(self.words, token_ids, strict=True):
            if len(ids) != 1:
                raise BaseError(
                    f"A head cannot start from the word {word!r}.",
                    found=f"The tokenizer writes it with {len(ids)} tokens.",
                    fix="Give two words of one token each, such as yes and no.",
                )
        return replace(self, word_ids=(token_ids[0][0], token_ids[1][0]))


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a model is loaded for.

    Attributes:
        task: Its name, for messages.
        auto_class: The class of transformers that picks the model's.
        processor: What turns raw inputs into tensors.
        head: The classification head that it needs; None where the model's own output serves.
        rope_scaling: How its rotary positions are scaled, if other than its config says.
    """

    task: str = "causal_lm"
    auto_class: str = "AutoModelForCausalLM"
    processor: Processor = "tokenizer"
    head: ClassHead | None = None
    rope_scaling: RopeScaling | None = None


CAUSAL_LM = Purpose()


def unnamed(count: int) -> tuple[str, ...]:
    """Return the names of labels that have none, as transformers makes them up."""
    return tuple(f"LABEL_{number}" for number in range(count))


def labels_of(config: Any) -> tuple[str, ...]:
    """Return the labels of a model's config, in the order of its outputs."""
    names: Mapping[Any, str] = config.id2label or {}
    return tuple(str(name) for _, name in sorted(names.items(), key=lambda item: int(item[0])))


def are_named(labels: Sequence[str]) -> bool:
    """Tell whether somebody named these labels."""
    return not all(re.fullmatch(r"LABEL_\d+", label) for label in labels)


def set_head(config: Any, head: ClassHead, name: str) -> None:
    """Write a head into a model's config; a base's own names keep their order.

    Args:
        name: Of the base, for messages.

    Raises:
        BaseError: The base has a head whose labels are others.
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
                "base's head by a new one.",
            )
        if not are_named(labels) and len(labels) != len(base_labels):
            raise BaseError(
                f"the number of labels does not agree with the head of {name}.",
                found=f"The head has {len(base_labels)}: {_listed(base_labels)}. "
                f"Needed are {len(labels)}.",
                fix="Give the base that the adapter was trained on.",
            )
        labels = base_labels
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    if head.problem_type is not None:
        config.problem_type = head.problem_type


def _listed(labels: Sequence[str]) -> str:
    return first_few(labels, MAX_LISTED, ", ")


def head_modules(model: Any) -> tuple[str, ...]:
    """Return the paths of a model's head: the modules outside of its backbone."""
    return tuple(
        name
        for name, child in model.named_children()
        if child is not model.base_model
        and not any(isinstance(module, nn.ModuleList) for module in child.modules())
        and any(True for _ in child.parameters())
    )


def owners(names: Iterable[str], head: Iterable[str]) -> dict[str, str]:
    """Return the path under which each parameter of a head is trained.

    Args:
        names: Of parameters.
        head: Paths of its modules.
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
    """Draw the matrices among these parameters anew; biases become 0, scales of norms 1."""
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

    Its output is then the log-odds of the first word against the second.

    Args:
        names: Of the head's parameters. base_name: For messages.

    Raises:
        BaseError: The head has more than one row, or the language head is not at hand.
    """
    rows = model.get_input_embeddings().weight
    new = {name: model.get_parameter(name) for name in sorted(names)}
    if [tuple(parameter.shape) for parameter in new.values()] != [(1, rows.shape[1])]:
        raise BaseError(
            f"A head of {base_name} cannot start from words.",
            found=f"New in it: {', '.join(new) or 'nothing, the base has a head already'}.",
            fix="Leave task.answers out, or give a decoder without a head.",
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
        found=f"No {LANGUAGE_HEAD} is in its safetensors files.",
        fix="Leave task.answers out, or give the folder of a base that has it.",
    )


def scale_rope(config: Any, scaling: RopeScaling, name: str) -> None:
    """Write the scaling of rotary positions, and the length it allows, into a model's config.

    Args:
        scaling: As transformers' `rope_parameters`; by default the base's own values.
        name: Of the base, for messages.

    Raises:
        BaseError: The model has no such positions, or transformers' validation rejects the scaling.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # not to read a recipe

    text = config.get_text_config()
    rope: Any = getattr(text, "rope_parameters", None)
    if not rope or any(isinstance(value, Mapping) for value in rope.values()):
        raise BaseError(
            f"base.rope_scaling does not go with {name}.",
            found="Its layers have rotary positions of several kinds."
            if rope
            else "Its config has no rope_parameters: its positions are no rotary ones.",
            fix="Leave it out, or give another base.",
        )
    kind = str(scaling.get("rope_type", scaling.get("type")))
    if kind not in ROPE_INIT_FUNCTIONS:
        raise BaseError(
            f"base.rope_scaling names no rope_type that transformers knows: {kind}.",
            found=did_you_mean(kind, ROPE_INIT_FUNCTIONS),
            fix=f"Known are: {', '.join(ROPE_INIT_FUNCTIONS)}.",
        )
    before = int(rope.get("original_max_position_embeddings") or text.max_position_embeddings)
    base_values = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    parameters = {
        **base_values,
        **{k: v for k, v in scaling.items() if k != "type"},
        "rope_type": kind,
    }
    if kind in STRETCHED and kind != "linear":
        parameters.setdefault("original_max_position_embeddings", before)
    if kind in STRETCHED and isinstance(factor := parameters.get("factor"), int | float):
        start = parameters.get("original_max_position_embeddings", before)
        text.max_position_embeddings = max(int(factor * start), text.max_position_embeddings)
    text.rope_parameters = parameters
    if problems := _rope_problems(text):
        raise BaseError(
            f"base.rope_scaling is not what rope_type: {kind} takes.",
            found=problems,
            fix="See rope_parameters in transformers' documentation.",
        )


def rope_notice(scaling: RopeScaling) -> str:
    """Return the notice for an adapter file that cannot hold its base's rope scaling."""
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    original = scaling.get("original_max_position_embeddings")
    others: dict[str, Any] = {"rope_parameters": dict(scaling)}
    if original and isinstance(factor, int | float):
        others["max_position_embeddings"] = int(factor * original)
    text = (
        "The adapter was trained over a base with base.rope_scaling, which has no place in this "
        f"file. For vLLM: --hf-overrides '{json.dumps(others)}'"
    )
    if kind not in ("linear", "yarn") or not isinstance(factor, int | float):
        return f"{text}."
    original_length = f" --yarn-orig-ctx {original}" if kind == "yarn" and original else ""
    return f"{text}; for llama.cpp: --rope-scaling {kind} --rope-scale {factor:g}{original_length}."


def _rope_problems(config: Any) -> str:
    """Return what transformers' validation logs or raises about a config."""
    problems: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: problems.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("transformers.modeling_rope_utils")
    level, propagates = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    log.propagate = False
    try:
        config.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        problems.append(str(error.args[0] if error.args else error))
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates
    return "\n".join(problems)
