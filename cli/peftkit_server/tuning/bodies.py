"""Request bodies of fine-tuning jobs. Source: OpenAI's API reference, fine-tuning."""

from __future__ import annotations

import re
import time
from typing import Annotated, Literal

from pydantic import Field, model_validator

from peftkit.files.strict_json import Json
from peftkit_server.validation import Strict

Count = Annotated[int, Field(ge=1)]
Auto = Literal["auto"]
Text = Annotated[str, Field(min_length=1, max_length=512)]
_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class Hyperparameters(Strict):
    """Hyperparameters of supervised jobs; "auto" and null: defaults by number of rows."""

    n_epochs: Auto | Annotated[int, Field(ge=1, le=50)] | None = None
    batch_size: Auto | Annotated[int, Field(ge=1, le=256)] | None = None
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0, le=1e4)] | None = None

    def set(self) -> dict[str, object]:
        """Return the hyperparameters that the client set."""
        return {name: value for name, value in self if value not in (None, "auto")}


class _OfDpo(Hyperparameters):
    beta: Auto | Annotated[float, Field(gt=0, le=2)] | None = None


class _OfReinforcement(Hyperparameters):
    compute_multiplier: Auto | Annotated[float, Field(ge=0.25, le=10)] | None = None
    eval_interval: Auto | Count | None = None
    eval_samples: Auto | Annotated[int, Field(ge=1, le=1)] | None = None
    """An evaluation generates one greedy completion for each row."""
    reasoning_effort: Literal["default"] | None = None


class _Supervised(Strict):
    hyperparameters: Hyperparameters | None = None


class _Dpo(Strict):
    hyperparameters: _OfDpo | None = None


class _Reinforcement(Strict):
    grader: Json
    hyperparameters: _OfReinforcement | None = None


Kind = Literal["supervised", "dpo", "reinforcement"]


class _Method(Strict):
    type: Kind
    supervised: _Supervised | None = None
    dpo: _Dpo | None = None
    reinforcement: _Reinforcement | None = None

    @model_validator(mode="after")
    def _has_only_its_section(self) -> _Method:
        names = self.model_fields_set - {"type", self.type}
        if others := sorted(name for name in names if getattr(self, name)):
            raise ValueError(f"the type is {self.type}, but the section {others[0]} is set")
        if self.type == "reinforcement" and self.reinforcement is None:
            raise ValueError("reinforcement requires a grader")
        return self


class _Wandb(Strict):
    project: Literal["peftkit"]
    """The wandb project of the server's runs."""


class _Integration(Strict):
    type: Literal["wandb"]
    wandb: _Wandb


class JobBody(Strict):
    """The body that creates a job."""

    model: Text
    training_file: Text
    validation_file: Text | None = None
    method: _Method | None = None
    hyperparameters: Hyperparameters | None = None
    """Deprecated by OpenAI in favor of `method`."""
    suffix: Annotated[str, Field(max_length=64)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None
    integrations: Annotated[list[_Integration], Field(max_length=4)] | None = None

    @model_validator(mode="after")
    def _has_one_set_of_hyperparameters(self) -> JobBody:
        if self.hyperparameters and self.method:
            raise ValueError("hyperparameters belong to the method if there is one")
        return self

    @property
    def kind(self) -> Kind:
        """The method's name."""
        return self.method.type if self.method else "supervised"

    @property
    def all_hyperparameters(self) -> Hyperparameters:
        """The hyperparameters, from the method or the deprecated field."""
        section = getattr(self.method, self.kind) if self.method else None
        return (section and section.hyperparameters) or self.hyperparameters or Hyperparameters()

    @property
    def grader(self) -> dict[str, object] | None:
        """The client's grader; None: the method has none."""
        section = self.method.reinforcement if self.method else None
        return section.grader if section else None

    def model_name(self, id: str) -> str:
        """Return the public name of the model that the job with an id trains."""
        base = self.model.split(":")[1] if self.model.startswith("ft:") else self.model
        base = base.rstrip("/").rpartition("/")[2] or "base"
        base, suffix = (re.sub(r"[^\w.-]", "-", text) for text in (base, self.suffix or ""))
        return f"ft:{base}:local:{suffix}:{id[-8:]}"

    def as_job(self, id: str, seed: int) -> dict[str, object]:
        """Return the new job as clients receive it.

        Args:
            seed: Used if the client set none.
        """
        values = self.all_hyperparameters.model_dump(exclude={"reasoning_effort"})
        hyperparameters = {name: "auto" if v is None else v for name, v in values.items()}
        section: Json = {"hyperparameters": hyperparameters}
        if self.grader:
            section["grader"] = self.grader
        return {
            "object": "fine_tuning.job",
            "id": id,
            "model": self.model,
            "created_at": int(time.time()),
            "finished_at": None,
            "fine_tuned_model": None,
            "organization_id": "org-local",
            "result_files": [],
            "status": "validating_files",
            "validation_file": self.validation_file,
            "training_file": self.training_file,
            "hyperparameters": hyperparameters,
            "trained_tokens": None,
            "error": None,
            "seed": seed if self.seed is None else self.seed,
            "estimated_finish": None,
            "integrations": [each.model_dump() for each in self.integrations or ()],
            "metadata": self.metadata,
            "method": {"type": self.kind, self.kind: section},
        }


class GraderBody(Strict):
    """Request body for validating a grader."""

    grader: Json


class GraderRun(GraderBody):
    """Request body for running a grader on one answer."""

    model_sample: str
    item: Json = Field(default_factory=dict)
