"""Tools and environments that a model uses in its answers, by the contract of TRL.

A tool is a Python function, sync or async, with types and a docstring in Google's style. An
environment is a class: `reset(**row)` begins an answer, and what it returns is appended to the last
user message; its other public methods are tools, and `get_reward()`, if it is there, returns the
answer's reward. What fails, hangs, or is no tool is told to the model and counted.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from peftkit.data.generation import prompt_ids
from peftkit.data.style import Style
from peftkit.data.turns import Turns
from peftkit.errors import ConfigError, RunError
from peftkit.inference.cache import num_common
from peftkit.inference.call_formats import Call
from peftkit.inference.call_style import CallStyle
from peftkit.inference.calls import whole
from peftkit.inference.dialogues import Wait, dialogues
from peftkit.inference.generate import ModelSampler, SampledAnswer
from peftkit.tasks.documents import drawn_seeds
from peftkit.tasks.user_code import UserCode, called, outcome, tool_schemas

Message = dict[str, Any]
NOT_TOOLS = ("reset", "get_reward")
RESETS = 16
"""Environments that are reset at once."""


class ToolConfig(Protocol):
    """What a task's config says of tools; see `GRPOConfig`."""

    @property
    def tools(self) -> tuple[str, ...]: ...
    @property
    def environment(self) -> str | None: ...
    @property
    def max_turns(self) -> int: ...
    @property
    def tool_timeout(self) -> float: ...
    @property
    def max_new_tokens(self) -> int: ...


class AskedPrompt(Protocol):
    """A prompt: text or messages, as JSON, and the fields of its record."""

    @property
    def asked(self) -> str: ...
    @property
    def fields(self) -> dict[str, Any]: ...
    @property
    def input_ids(self) -> tuple[int, ...]: ...
    @property
    def source(self) -> str: ...


class Sampled(NamedTuple):
    """The answers to a prompt.

    Attributes:
        prompt: The tokens that all of them begin with.
        answers: Tokens after those; where `reset` said other things, the rest of it is not learnt.
    """

    prompt: tuple[int, ...]
    answers: list[SampledAnswer]
    dialogues: list[Dialogue]


class Tools:
    """The tools of a run, and how its model calls them.

    Args:
        style: Of prompts.
        max_prompt: Most tokens of a prompt.

    Attributes:
        schemas: As the chat template takes them.
        stops: Tokens that end a turn.

    Raises:
        ConfigError: A function cannot be a tool, or the chat template writes no calls.
        DataError: The chat template rewrites what came before a reply.
    """

    def __init__(
        self, tokenizer: Any, style: Style, config: ToolConfig, code: UserCode, max_prompt: int
    ) -> None:
        self.tokenizer, self.config, self._style = tokenizer, config, style
        self._max_prompt = max_prompt
        self._functions = [code.load(use) for use in config.tools]
        self._factory = code.load(config.environment) if config.environment else None
        self._pool: list[Any] = []
        self._retired: list[Any] = []
        self.schemas = tool_schemas(self.functions(self._environments(1)[0]))
        self.calls = CallStyle(tokenizer, style)
        self.turns = Turns(tokenizer, style.chat_template)
        self.turns.check(self.schemas)
        name = self.schemas[0]["function"]["name"]
        said = {"role": "tool", "name": name, "tool_call_id": "call00000", "content": ""}
        end, _ = self.turns.after([said], [(name, "call00000")], self.schemas)
        self.stops = sorted({*self.calls.stops, end})
        self.widest = max(map(len, tokenizer.get_vocab()))
        """Most characters of a token."""

    @property
    def has_reward(self) -> bool:
        """Whether the environment rewards answers."""
        return self._factory is not None and hasattr(self._factory, "get_reward")

    def functions(self, environment: Any) -> dict[str, Callable[..., Any]]:
        """Return the tools of an answer by their names."""
        methods = [
            getattr(environment, name)
            for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
            if self._factory is not None and name not in NOT_TOOLS and not name.startswith("_")
        ]
        functions = (*self._functions, *methods)
        named = {function.__name__: function for function in functions}
        if len(named) < len(functions):
            names = ", ".join(sorted(function.__name__ for function in functions))
            raise ConfigError("two tools have one name.", found=names, fix="Rename one of them.")
        return named

    def sample(
        self,
        prompts: Sequence[AskedPrompt],
        seeds: Sequence[int] | None,
        sampler: ModelSampler,
        number: int,
    ) -> list[Sampled]:
        """Return `number` answers to each prompt, of several turns; greedy ones without seeds.

        Raises:
            RunError: An environment's `reset` failed, or left no room for an answer.
        """
        begun = self._begun([prompt for prompt in prompts for _ in range(number)])
        groups = [begun[start : start + number] for start in range(0, len(begun), number)]
        found = dialogues(
            sampler,
            [[one.prompt for one in group] for group in groups],
            drawn_seeds(seeds, number),
            max_new_tokens=self.config.max_new_tokens,
            stops=self.stops,
            reply=lambda index, number, turn: groups[index][number].reply(turn),
        )
        return [_together(*pair) for pair in zip(groups, found, strict=True)]

    def _begun(self, prompts: Sequence[AskedPrompt]) -> list[Dialogue]:
        """Return an answer to each prompt, of which nothing is said yet."""
        environments = self._environments(len(prompts))
        asked = [_messages(prompt) for prompt in prompts]
        if self._factory is None:
            return [
                Dialogue(self, [*prompt.input_ids], turns, None)
                for prompt, turns in zip(prompts, asked, strict=True)
            ]
        with ThreadPoolExecutor(RESETS) as pool:
            said = [*pool.map(self._reset, environments, prompts)]
        begun = []
        for environment, prompt, turns, text in zip(
            environments, prompts, asked, said, strict=True
        ):
            ids = [*prompt.input_ids]
            if text is not None:
                turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}{text}"}
                ids = prompt_ids(self.tokenizer, turns, self._style, self.schemas)
            if len(ids) > self._max_prompt:
                raise RunError(
                    f"what reset() said leaves no room for an answer to {prompt.source}",
                    found=f"The prompt has {len(ids):,} tokens, of {self._max_prompt:,}.",
                    fix="Raise data.max_length.",
                )
            begun.append(Dialogue(self, ids, turns, environment))
        return begun

    def _environments(self, number: int) -> list[Any]:
        """Return so many environments; they are used again, after another `reset`."""
        if self._factory is None:
            return [None] * number
        pool = [one for one in self._pool if not any(one is each for each in self._retired)]
        self._pool = pool + [self._factory() for _ in range(number - len(pool))]
        return self._pool[:number]

    def retire(self, environment: Any) -> None:
        """Use an environment for no other answer: a call that hangs may still change it."""
        self._retired.append(environment)

    def _reset(self, environment: Any, prompt: AskedPrompt) -> Any:
        said, error = outcome(environment.reset, self.config.tool_timeout, **prompt.fields)
        if error is not None:
            raise RunError(
                f"reset() of {self.config.environment} failed: {type(error).__name__}: {error}",
                found=f"It was called for {prompt.source}.",
                fix="Fix it; then start again, with --resume if a step was saved.",
            ) from error
        return said


@dataclass(eq=False)
class Dialogue:
    """An answer of several turns.

    Attributes:
        prompt: Tokens.
        asked: The prompt's messages.
        messages: Those since, which reward functions get.
    """

    tools: Tools
    prompt: list[int]
    asked: list[Message]
    environment: Any
    messages: list[Message] = field(default_factory=list)
    num_turns: int = 0
    num_calls: int = 0
    num_failed: int = 0

    def __post_init__(self) -> None:
        self._before = self.prompt  # what the turn was said after

    def reply(self, turn: SampledAnswer) -> Wait | None:
        """Read a turn; call the tools that it calls, in a thread."""
        tools, ids = self.tools, turn.ids if turn.is_cut else turn.ids[:-1]
        said = whole(tools.calls.reader(self._before, tools.schemas), tools.calls.decoded(ids))
        keys = [one.id or f"call{self.num_turns:03}{n:02}" for n, one in enumerate(said.calls)]
        calls = list(zip(keys, said.calls, strict=True))
        text = tools.calls.special.sub("", said.text)
        message: Message = {"role": "assistant", "content": text}
        if calls:
            message = tools.calls.form.message(text, calls)
        if said.thought:
            message["reasoning_content"] = said.thought
        self.messages.append(message)
        self.num_turns += 1
        if not calls or turn.is_cut or self.num_turns >= tools.config.max_turns:
            return None
        return self._waiting(calls, tools.calls.decoded(turn.ids[-1:]))

    def _waiting(self, calls: Sequence[tuple[str, Call]], ended_by: str) -> Wait:
        results: list[Message] = []
        functions = self.tools.functions(self.environment)

        def work() -> None:
            for key, call in calls:
                content = self._called(functions.get(call.name), call)
                named = {"name": call.name, "tool_call_id": key}
                results.append({"role": "tool", **named, "content": content})

        thread = threading.Thread(target=work, daemon=True)
        thread.start()

        def wait(room: int) -> Sequence[int] | None:
            thread.join()
            # what is far too long is not even tokenised
            if sum(len(each["content"]) for each in results) > room * self.tools.widest:
                return None
            names = [(call.name, key) for key, call in calls]
            schemas, turns = self.tools.schemas, self.tools.turns
            _, tokens = turns.after(results, names, schemas, ended_by=ended_by)
            if len(tokens) >= room:
                return None
            self.messages += results
            self._before = tokens
            return tokens

        return wait

    def _called(self, function: Callable[..., Any] | None, call: Call) -> str:
        """Return what a tool returns, as text."""
        found, error = called(function, call, self.tools.config.tool_timeout)
        self.num_calls += 1
        self.num_failed += error is not None
        if isinstance(error, TimeoutError):
            self.tools.retire(self.environment)
        return found


def figures(dialogues: Sequence[Dialogue]) -> dict[str, float]:
    """Return the means of calls, failed calls and turns of an answer."""
    number = max(len(dialogues), 1)
    return {
        "calls": sum(one.num_calls for one in dialogues) / number,
        "failed_calls": sum(one.num_failed for one in dialogues) / number,
        "turns": sum(one.num_turns for one in dialogues) / number,
    }


def _together(group: list[Dialogue], answers: Sequence[SampledAnswer]) -> Sampled:
    first = group[0].prompt
    size = min(num_common(first, one.prompt) for one in group)
    own = []
    for one, answer in zip(group, answers, strict=True):
        rest = tuple(one.prompt[size:])
        learnt = (*[False] * len(rest), *(answer.is_target or ()))
        own.append(replace(answer, ids=rest + answer.ids, is_target=learnt))
    return Sampled(tuple(first[:size]), own, group)


def _messages(prompt: AskedPrompt) -> list[Message]:
    asked = json.loads(prompt.asked)
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
