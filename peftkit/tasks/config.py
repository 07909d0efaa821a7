"""The section of a recipe that every task has: `task`, as `{type: ...}` or as the type alone.

It says which model the task needs (`purpose`, after `resolve` has read the labels from the data)
and makes the task itself, `on` that model.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
    """What every task's config has: a recipe's `task`, as `{type: ...}` or as the type alone."""

    task_type: ClassVar[str | None]
    """PEFT's task type; None where PEFT has none."""
    auto_class: ClassVar[str]
    """transformers' auto class of the model."""
    processor: ClassVar[Processor] = "tokenizer"
    """What turns raw inputs into tensors; passed to `on`."""
    command: ClassVar[str] = "peftkit eval {folder} --data FILE"
    """The command that uses an adapter of the task."""
    generates: ClassVar[bool] = False
    """Whether its adapters generate text from a prompt."""
    writes_text: ClassVar[bool] = False
    """Whether text can be sampled during training (train.sample_every)."""
    data_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields of DataConfig that this task reads besides train and eval; others are refused."""
    evaluates_answers: ClassVar[bool] = False
    """Whether `peftkit eval` compares greedy completions with the rows' own answers."""
    predicts: ClassVar[frozenset[Predicts]] = frozenset()
    """What its adapters predict for: texts, rows of a file, or audio files."""
    scores_documents: ClassVar[bool] = False
    """Whether the loss needs the log-probabilities of whole documents, not their cross-entropy."""
    measures_before: ClassVar[bool] = False
    """Whether the base model is evaluated before training, too."""
    num_texts: ClassVar[int] = 1
    """Least number of texts in a row, each of up to data.max_length tokens."""

    task: ClassVar[Callable[..., Task]]
    """Makes the task; takes the arguments of `on`."""

    type: str

    def resolve(self, data: DataConfig) -> TaskConfig:
        """Return the config with what `purpose` needs, read from the training data.

        Raises:
            DataError: The data cannot be read, or is ambiguous.
        """
        return self

    @property
    def texts_per_row(self) -> int:
        """Texts of one row that go through the model in a step, to plan its memory."""
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
        """The kind of media that prompts hold besides text, such as "image"; "": none."""
        return ""

    def without_tools(self) -> TaskConfig:
        """Return the config without the Python functions that the model calls."""
        return self

    @property
    def makes_answers(self) -> str:
        """The setting by which rows get their answers only after the adapter is attached."""
        return ""

    def saved(self) -> dict[str, Any]:
        """Return the config that is saved with the adapter, for its use and evaluation."""
        return self.model_dump(mode="json")

    @property
    def plain_purpose(self) -> Purpose:
        """What the base is loaded for, before `resolve` has read its head's labels."""
        return Purpose(self.type, self.auto_class, self.processor)

    @property
    def head(self) -> ClassHead | None:
        """The head that the base gets, after `resolve`; None: the one it has."""
        return None

    @property
    def purpose(self) -> Purpose:
        """What the base is loaded for, with its head."""
        return replace(self.plain_purpose, head=self.head)

    def write_beside(self, folder: Path, config: Any, base: Path | None) -> None:
        """Write what a merged model needs beside its weights to be used for the task.

        Args:
            folder: The merged model's. config: Its config. base: The base's folder, if it has one.
        """
        return None

    def on(
        self,
        model: nn.Module,
        processor: Any,
        data: DataConfig,
        *,
        style: Style | None = None,
        on_event: Listener = ignore,
    ) -> Task:
        """Make the task for a model that was loaded for `purpose`, adapter and all.

        Args:
            processor: The base's tokenizer or image processor.
            style: The prompt style that the adapter was trained with; None: that of the rows.

        Raises:
            PeftkitError: The model or the settings do not suit the task.
        """
        return self.task(model, processor, self, data, style=style, on_event=on_event)
