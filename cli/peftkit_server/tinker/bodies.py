"""JSON bodies of Tinker's API, validated field by field.

Unknown fields of newer clients are an error that names them, unless they are empty. Names of
weights cannot contain path separators.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from peftkit_server.limits import Limits
from peftkit_server.refusals import RequestError
from peftkit_server.requests import MAX_TOKENS, StopText
from peftkit_server.validation import NullIsUnset


def _is_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_](\.?[A-Za-z0-9_-]){0,127}", text):
        raise ValueError("use letters, digits, '_', '-' and single dots, at most 128 of them")
    return text


Name = Annotated[str, AfterValidator(_is_name)]
"""Name of weights."""
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_:-]{1,128}$")]
"""Id that the server generated."""
Number = Annotated[int, Field(ge=0, lt=1 << 31)]
Seconds = Annotated[int, Field(ge=1, le=10 * 366 * 24 * 3600)]
Metadata = Annotated[dict[str, Any], Field(max_length=64)]
PATH = re.compile(
    r"tinker://([A-Za-z0-9_:-]{1,128})/(weights|sampler_weights)/([A-Za-z0-9_.-]{1,128})"
)
MAX_RANK, MAX_SAMPLES, MAX_TOP, MAX_STOPS = 1024, 1024, 64, 64
EMPTY: tuple[Any, ...] = (False, 0, "", [], {})


class Body(NullIsUnset):
    """A request body; `type` is ignored."""

    type: str | None = None

    @classmethod
    def is_used(cls, name: str, value: object) -> bool:
        is_empty = name not in cls.model_fields and value in EMPTY  # a field of newer clients
        return not is_empty and super().is_used(name, value)


class NewSession(Body):
    """create_session."""

    tags: list[str] = Field(default_factory=list, max_length=256)
    user_metadata: Metadata = Field(default_factory=dict)
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(Body):
    """session_heartbeat."""

    session_id: Id


class Lora(Body):
    """LoRA settings of a model."""

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)] = 32
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class Optimizer(Body):
    """The optimizer; only AdamW is supported."""

    type: Literal["adamw"] = "adamw"


class NewModel(OfSession):
    """create_model."""

    model_seq_id: Number
    base_model: str
    lora_config: Lora = Lora()
    user_metadata: Metadata = Field(default_factory=dict)
    optimizer_config: Optimizer = Optimizer()


class OfModel(Body):
    """get_info, unload_model."""

    model_id: Id


class OperationBody(OfModel):
    """An operation of a model, with its number."""

    seq_id: Number


class Adam(Body):
    """AdamW settings of a step."""

    learning_rate: Annotated[float, Field(ge=0, le=1e6)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0, le=1e6)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class Step(OperationBody):
    """optim_step."""

    adam_params: Adam


class Save(OperationBody):
    """save_weights."""

    path: Name | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: Metadata = Field(default_factory=dict)


class SaveForSampler(OperationBody):
    """save_weights_for_sampler: under a name, or for a new sampler."""

    path: Name | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Seconds | None = None
    user_metadata: Metadata = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_one(self) -> SaveForSampler:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("set path or sampling_session_seq_id")
        return self


class Load(Body):
    """load_weights, into a new model or into one without operations so far."""

    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: Metadata = Field(default_factory=dict)
    path: str
    optimizer: bool
    optimizer_config: Optimizer = Optimizer()

    @model_validator(mode="after")
    def _is_one(self) -> Load:
        of_model, of_session = (self.model_id, self.seq_id), (self.session_id, self.model_seq_id)
        pairs = [pair for pair in (of_model, of_session) if pair != (None, None)]
        if len(pairs) != 1 or None in pairs[0]:
            raise ValueError("set model_id and seq_id, or session_id and model_seq_id")
        return self


class NewSampler(OfSession):
    """create_sampling_session."""

    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body):
    """A chunk of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: Annotated[list[int], Field(max_length=MAX_TOKENS, fail_fast=True)]


class Prompt(Body):
    """A prompt."""

    chunks: Annotated[list[Chunk], Field(min_length=1, max_length=4096, fail_fast=True)]

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class Sampling(Body):
    """Sampling settings; `stop`: None: the model's end tokens; []: no stop."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 62), le=1 << 62)] | None = None
    stop: (
        StopText
        | Annotated[list[int], Field(max_length=MAX_STOPS)]
        | Annotated[list[StopText], Field(max_length=MAX_STOPS)]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


Top = Annotated[int, Field(ge=0, le=MAX_TOP)]


class Targets(Body):
    """Tokens to score at each prompt position but the first; -1: none. Dense, or sparse (CSR)."""

    dtype: Literal["int64"]
    shape: Annotated[list[Number], Field(min_length=2, max_length=2)]
    data: list[int] = Field(default_factory=list, max_length=MAX_TOKENS, fail_fast=True)
    sparse_crow_indices: Annotated[list[int], Field(max_length=MAX_TOKENS + 1)] | None = None
    sparse_col_indices: Annotated[list[int], Field(max_length=MAX_TOKENS)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Targets:
        (rows, columns), size = self.shape, len(self.data)
        starts, places = self.sparse_crow_indices, self.sparse_col_indices
        if starts is None or places is None:
            is_whole = starts is places is None and size == rows * columns
        else:
            is_whole = len(starts) == rows + 1 and (starts[0], starts[-1]) == (0, size)
            is_whole = is_whole and all(a <= b for a, b in itertools.pairwise(starts))
            is_whole = is_whole and len(places) == size and all(0 <= n < columns for n in places)
        if not is_whole:
            raise ValueError("data, shape and sparse indices do not match")
        return self

    @property
    def rows(self) -> list[int]:
        """The row of each value in `data`."""
        if (starts := self.sparse_crow_indices) is None:
            return [n // self.shape[1] for n in range(len(self.data))]
        sizes = (stop - start for start, stop in itertools.pairwise(starts))
        return [row for row, size in enumerate(sizes) for _ in range(size)]


class Sample(Body):
    """asample."""

    sampling_session_id: Id
    seq_id: Annotated[int, Field(ge=0, lt=1 << 63)]
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    prompt: Prompt
    sampling_params: Sampling
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Top = 0
    topk_sample_logprobs: Top = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    target_prompt_logprobs: Targets | None = None
    record_stability_info: bool = False

    @field_validator("record_stability_info")
    @classmethod
    def _has_a_formula(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "the server does not support the loss stable_reinforce, which has no public "
                "formula; use loss_fn=importance_sampling"
            )
        return value


class OfFuture(Body):
    """retrieve_future, cancel_future."""

    request_id: Id
    allow_metadata_only: bool = False


class OfPath(Body):
    """weights_info."""

    tinker_path: str


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Context of a request, in addition to its validated body.

    Attributes:
        digest: Hash of the body, which identifies retries.
        size: Bytes of the body.
        fields: Fields of a JSON body.
        key: X-Idempotency-Key.
    """

    owner: str
    digest: str
    size: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""


def check_metadata(metadata: Mapping[str, object], limits: Limits) -> None:
    """Raise if a client's metadata is too long.

    Raises:
        RequestError: It has more characters in JSON than `metadata_bytes`.
    """
    if (size := len(json.dumps(metadata))) > limits.metadata_bytes:
        raise RequestError(
            f"the metadata has {size:,} characters.",
            found=f"The limit is {limits.metadata_bytes:,}.",
            fix="Send less metadata.",
        )


def digest_of(fields: Mapping[str, object] | bytes) -> str:
    """Return a hash of a body."""
    data = fields if isinstance(fields, bytes) else json.dumps(fields, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()
