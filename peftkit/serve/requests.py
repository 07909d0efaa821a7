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


class _NotDone(_Strict):
    """Fields of what is not done here, with the values that ask for nothing."""

    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    echo: Literal[False] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    modalities: list[Literal["text"]] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None


class _Unread(_Strict):
    """Fields that change no answer."""

    metadata: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None


class Body(_NotDone, _Unread):
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
        return None

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
    try:
        return kind.model_validate(fields)
    except ValidationError as problem:
        raise _told(problem, kind) from None


def _told(problem: ValidationError, kind: type[Body]) -> RequestError:
    lines: dict[str, None] = {}
    errors = problem.errors(include_url=False, include_input=False)
    fields = [str(error["loc"][0]) if error["loc"] else "" for error in errors]
    for field, error in zip(fields, errors, strict=True):
        # of a union's branches pydantic names the types too; the field and place are enough
        place = [part for part in error["loc"] if isinstance(part, int) or part.isidentifier()]
        said = error["msg"]
        if field in _NotDone.model_fields:
            said = "this server does not do it; leave the field out."
        elif error["type"] == "extra_forbidden":
            said = f"unknown field. {did_you_mean(field, kind.model_fields)}"
        lines[f"{'.'.join(map(str, place))}: {said}".rstrip()] = None
    return RequestError(
        "the request has fields that cannot be used.",
        found=first_few(lines, 5),
        param=fields[0],
        code="unsupported_parameter" if fields[0] in _NotDone.model_fields else None,
    )
