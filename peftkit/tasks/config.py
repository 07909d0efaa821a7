"""The base class of a recipe's `task` section.

`resolve` reads labels from the data, `purpose` then describes the model to load, and `on` creates
the task for that model.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import nn

from peftkit.base.purpose import Processor, Purpose
from peftkit.config.schema import Config
from peftkit.data.style import Style
from peftkit.events import Listener, ignore
from peftkit.settings import DataConfig

if TYPE_CHECKING:
    from peftkit.base.heads import ClassHead
    from peftkit.tasks.base import Task


Predicts = Literal["texts", "rows", "audio"]


class TaskConfig(Config, ABC):
    """A recipe's `task`: `{type: ...}` with settings, or the type alone."""

    task_type: ClassVar[str | None]
    """PEFT's task type; None where PEFT has none."""
    auto_class: ClassVar[str]
    """transformers' auto class of the model."""
    processor: ClassVar[Processor] = "tokenizer"
    """Kind of processor that `on` receives."""
    command: ClassVar[str] = "peftkit eval {folder} --data FILE"
    """The command that uses an adapter of the task."""
    generates: ClassVar[bool] = False
    """Whether its adapters generate text from a prompt."""
    writes_text: ClassVar[bool] = False
    """Whether text can be sampled during training (train.sample_every)."""
    data_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields of DataConfig that the task reads in addition to EVERY_TASK; others are errors."""
    evaluates_answers: ClassVar[bool] = False
    """Whether `peftkit eval` compares greedy completions with the answers of the rows."""
    predicts: ClassVar[frozenset[Predicts]] = frozenset()
    """Inputs of `peftkit predict`: texts, rows of a file, or audio files."""
    scores_documents: ClassVar[bool] = False
    """Whether the loss needs the log-probabilities of whole documents, not their cross-entropy."""
    measures_before: ClassVar[bool] = False
    """Whether a run also evaluates the base before training."""
    num_texts: ClassVar[int] = 1
    """Minimum number of texts in a row, each of up to data.max_length tokens."""

    task: ClassVar[Callable[..., Task]]
    """Creates the task from the arguments of `on`."""

    type: str

    def resolve(self, data: DataConfig) -> TaskConfig:
        """Return the config with the labels that `purpose` needs, read from the training data.

        Raises:
            DataError: The data cannot be read, or is ambiguous.
        """
        return self

    @property
    def texts_per_row(self) -> int:
        """Number of texts of one row in a step, for planning memory."""
        return self.num_texts

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with its state before training."""
        return False

    @property
    def code(self) -> Mapping[str, Sequence[str]]:
        """Python functions and classes that the task runs, by the setting that names them."""
        return {}

    @property
    def prompt_media(self) -> str:
        """The kind of media in prompts, such as "image"; "": text alone."""
        return ""

    def without_tools(self) -> TaskConfig:
        """Return the config without the Python functions that the model calls."""
        return self

    @property
    def makes_answers(self) -> str:
        """The setting that has answers generated after the adapter is attached; "": none."""
        return ""

    def saved(self) -> dict[str, object]:
        """Return the config that is saved with the adapter."""
        return self.model_dump(mode="json")

    @property
    def plain_purpose(self) -> Purpose:
        """The purpose of the base, without the head, whose labels `resolve` reads."""
        return Purpose(self.type, self.auto_class, self.processor)

    @property
    def head(self) -> ClassHead | None:
        """The head to add to the base, after `resolve`; None: the base's own head."""
        return None

    @property
    def purpose(self) -> Purpose:
        """The purpose of the base, with its head."""
        return replace(self.plain_purpose, head=self.head)

    def write_beside(self, folder: Path, config: object, base: Path | None) -> None:
        """Write the task's further files into a merged model's folder; `base`: its base's."""
        return None

    def on(
        self,
        model: nn.Module,
        processor: object,
        data: DataConfig,
        *,
        style: Style | None = None,
        on_event: Listener = ignore,
    ) -> Task:
        """Create the task for a model that was loaded for `purpose` and has its adapter.

        The arguments are those of `Task`.

        Raises:
            PeftkitError: The model or the settings do not suit the task.
        """
        return self.task(model, processor, self, data, style=style, on_event=on_event)
