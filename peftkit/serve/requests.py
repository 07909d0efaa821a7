"""Requests as OpenAI's clients send them, checked field by field.

What this server cannot do is refused by name; a field is left unread only if it changes no answer.
Source: the API reference of OpenAI, /v1/completions and /v1/chat/completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from peftkit.errors import PeftkitError, did_you_mean, first_few
from peftkit.files.strict_json import parse_json

MAX_TOKENS = 1 << 20
_UNREAD = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
}
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Fields of what is not done, for one kind of request or both, with the values that ask for
nothing, as null does."""


class RequestError(PeftkitError):
    """A request cannot be answered.

    Args:
        status: HTTP's code.
        code: OpenAI's word for it.
        param: The field in question.
    """

    def __init__(
        self,
        asked: str,
        *,
        found: str = "",
        fix: str = "",
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(asked, found=found, fix=fix)
        self.status, self.code, self.param = status, code, param


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Part(_Strict):
    type: Annotated[str, Field(pattern="^text$")]
    text: str


class _Message(_Strict):
    role: Annotated[str, Field(pattern="^(system|developer|user|assistant)$")]
    content: str | list[_Part]
    name: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        """Clients send an answer back with all its fields, most of them null."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    def plain(self) -> dict[str, str]:
        """Return what a chat template takes."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        more = {"name": self.name, "reasoning_content": self.reasoning_content}
        told = {key: value for key, value in more.items() if value is not None}
        return {"role": self.role, "content": text, **told}


class _StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Body(_Strict):
    """Fields that both kinds of requests have; None where the client leaves the choice."""

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 62), le=1 << 62)] | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_top(self) -> int | None:
        """How many of the likeliest tokens are told with each; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """A JSON schema that the answer has to follow."""
        raise NotImplementedError

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum length of an answer, if the client gave one."""
        return self.max_tokens


class _JsonSchema(_Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class _ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> _ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is for the type json_schema")
        return self


class ChatBody(Body):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: _ResponseFormat | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Variables of the chat template, in place of those that the adapter learnt with."""

    @model_validator(mode="after")
    def _asks_for_log_probs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def num_top(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        if self.response_format is None or self.response_format.type == "text":
            return None
        asked = self.response_format.json_schema
        return {"type": "object"} if asked is None else asked.schema_

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum length of an answer; `max_tokens` is the older name."""
        return self.max_completion_tokens or self.max_tokens

    def conversation(self) -> list[dict[str, str]]:
        """Return the messages as a chat template takes them."""
        return [message.plain() for message in self.messages]


class TextBody(Body):
    """A request to /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        return None

    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts: texts, or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return prompt  # type: ignore[return-value]


def read_body(data: bytes, kind: type[Body]) -> Body:
    """Return a request's fields.

    Raises:
        RequestError: It is no JSON object, or a field is missing, wrong, unknown or asks for
            something that is not done here.
    """
    fields = parse_json(data, "the request's body cannot be read.", error=RequestError)
    kept = {}
    for name, value in fields.items():
        if name in _WITHOUT_EFFECT and name not in kind.model_fields:
            _refuse_effect(name, value)
        elif name not in _UNREAD:
            kept[name] = value
    try:
        return kind.model_validate(kept)
    except ValidationError as problem:
        raise _told(problem, kind) from None


def _refuse_effect(name: str, value: object) -> None:
    nothing = _WITHOUT_EFFECT[name]
    if value is None or any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in nothing
    ):
        return
    raise RequestError(
        f"this server does not do '{name}'.",
        fix="Leave the field out.",
        param=name,
        code="unsupported_parameter",
    )


def _told(problem: ValidationError, kind: type[Body]) -> RequestError:
    lines: dict[str, None] = {}
    names = []
    for error in problem.errors(include_url=False, include_input=False):
        # of a union's branches pydantic names the types too; the field and place are enough
        place = [str(part) for part in error["loc"] if str(part).isidentifier() or _is_index(part)]
        name = ".".join(place)
        names.append(str(error["loc"][0]) if error["loc"] else "")
        hint = did_you_mean(name, kind.model_fields) if error["type"] == "extra_forbidden" else ""
        said = "unknown field." if error["type"] == "extra_forbidden" else error["msg"]
        lines[f"{name}: {said} {hint}".rstrip()] = None
    return RequestError(
        "the request has fields that cannot be used.",
        found=first_few(lines, 5),
        param=names[0] if names else None,
    )


def _is_index(part: object) -> bool:
    return isinstance(part, int)
