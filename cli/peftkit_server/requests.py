"""Request bodies of OpenAI's completion endpoints, validated field by field.

Unsupported fields are an error that names them; the server ignores only fields that do not affect
completions. Source: OpenAI's API reference, /v1/completions and /v1/chat/completions; vLLM
for min_p, top_k and repetition_penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from peftkit.files.strict_json import Json
from peftkit.inference.call_formats import CallFormat
from peftkit.inference.sampling import Penalties
from peftkit_server.refusals import RequestError
from peftkit_server.tool_fields import (
    MAX_TOOLS,
    Tool,
    ToolCall,
    ToolChoice,
    ToolUse,
    closed,
    with_calls,
)
from peftkit_server.validation import NullIsUnset, Strict, check_schema

MAX_TOKENS = 1 << 20
StopText = Annotated[str, Field(max_length=256)]
"""A stop text; its length is limited because the server searches for it at each token."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_BIASES = 1024
TokenId = Annotated[str, Field(pattern=r"^(0|[1-9]\d{0,8})$")]


class _Part(Strict):
    type: Annotated[str, Field(pattern="^text$")]
    text: str


class _Message(NullIsUnset):
    role: Annotated[str, Field(pattern="^(system|developer|user|assistant|tool)$")]
    content: str | Annotated[list[_Part], Field(fail_fast=True)] = ""
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    # fields of responses that clients send back
    IGNORED = ("parsed", "provider_specific_fields")
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    refusal: Annotated[str, Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> _Message:
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("messages of the role tool, and no others, have a tool_call_id")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of the role assistant have tool_calls")
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    def plain(self) -> dict[str, object]:
        """Return the message in the format of chat templates, without its calls."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        names = ("name", "reasoning_content", "tool_call_id")
        optional = {name: getattr(self, name) for name in names}
        non_null = {key: value for key, value in optional.items() if value is not None}
        return {"role": self.role, "content": text, **non_null}


class _StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Unsupported(NullIsUnset):
    """Unsupported fields; only their default values are accepted."""

    audio: None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    echo: Literal[False] | None = None
    function_call: Literal["none", "auto"] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    modalities: list[Literal["text"]] | None = None
    moderation: None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None


class SamplingFields(NullIsUnset):
    """Settings of the sampling of each token; None: the server's default."""

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)
        ]
        | None
    ) = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    @property
    def biases(self) -> dict[int, float]:
        """Numbers to add to the logits of tokens."""
        return {int(token): value for token, value in (self.logit_bias or {}).items() if value}

    @property
    def penalties(self) -> Penalties | None:
        """Changes to the logits; None: none."""
        penalties = Penalties(
            repetition=self.repetition_penalty or 1.0,
            frequency=self.frequency_penalty or 0.0,
            presence=self.presence_penalty or 0.0,
            bias=self.biases,
        )
        return None if penalties == Penalties() else penalties


class Body(_Unsupported, SamplingFields):
    """Fields of chat and text completions; None: the server's default."""

    IGNORED: ClassVar[Sequence[str]] = (
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "user"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store"),
    )
    UNSUPPORTED = frozenset(_Unsupported.model_fields)

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 62), le=1 << 62)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end a completion."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum length of a completion, if the client set one."""
        return self.max_tokens


class _JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: Json = Field(alias="schema")
    strict: bool | None = None


class _ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> _ResponseFormat:
        check_schema(self.type, self.json_schema, "json_schema")
        return self


class ChatBody(Body):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: _ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Variables of the chat template; by default, the adapter's from training."""
    reasoning_effort: Effort | None = None

    @model_validator(mode="after")
    def _requests_log_probs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _has_one_constraint(self) -> ChatBody:
        use = self.tool_use
        if use is not None and use.forced and self.schema_of_answer is not None:
            raise ValueError("response_format and a forced tool call exclude each other")
        return self

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools of the request; None: it has no tools."""
        return ToolUse.of(self.tools or (), self.tool_choice, self.parallel_tool_calls)

    @property
    def schema_of_answer(self) -> dict[str, object] | None:
        """The JSON schema of the completion, if any."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        form = self.response_format.json_schema
        if form is None:
            return {"type": "object"}
        schema: Json = closed(form.schema_) if form.strict else form.schema_
        return schema

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum length of a completion; `max_tokens` is the older name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def has_calls(self) -> bool:
        """Whether the conversation has tool calls."""
        return any(message.tool_calls for message in self.messages)

    def conversation(self, form: CallFormat | None = None) -> list[Json]:
        """Return the messages in the format of chat templates.

        Args:
            form: Call format of the template; None: it has none.

        Raises:
            RequestError: The template has no call format, or a tool message refers to no call.
        """
        turns = [message.plain() for message in self.messages]
        try:
            return with_calls(turns, [message.tool_calls or () for message in self.messages], form)
        except ValueError as problem:
            raise RequestError(f"{problem}.", param="messages") from None


class TextBody(Body):
    """A request to /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts, as texts or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return prompt  # type: ignore[return-value]
