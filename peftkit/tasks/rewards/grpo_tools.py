"""Tools and environments for rollouts, with TRL's interface.

A tool is a Python function, sync or async, with types and a docstring in Google's style. An
environment is a class: `reset(**row)` starts an answer, and its result is appended to the last user
message. The other public methods are tools, and an optional `get_reward()` returns the reward.
If a call fails, hangs or names no tool, the model receives the error, and a metric counts it.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from peftkit.data.generation import prompt_ids
from peftkit.data.style import Style
from peftkit.data.tokens import num_common
from peftkit.data.turns import Turns
from peftkit.errors import ConfigError, RunError
from peftkit.inference.call_formats import Call
from peftkit.inference.calls import CallStyle, whole
from peftkit.inference.dialogues import Wait, dialogues
from peftkit.inference.generate import ModelSampler, SampledAnswer
from peftkit.tasks.documents import drawn_seeds
from peftkit.tasks.rewards.grpo_rows import Prompt
from peftkit.tasks.user_code import UserCode, called, outcome, tool_schemas

Message = dict[str, Any]
NOT_TOOLS = ("reset", "get_reward")
RESETS = 16
"""Maximum number of concurrent resets."""


class Sampled(NamedTuple):
    """The answers to a prompt.

    Attributes:
        prompt: The longest prefix of tokens that all dialogues share.
        answers: Tokens after the prefix. If the results of `reset` differ, the rest of each result
            is not a target.
    """

    prompt: tuple[int, ...]
    answers: list[SampledAnswer]
    dialogues: list[Dialogue]


class Tools:
    """The tools of a run, and the format of calls.

    Args:
        style: Prompt style.
        config: A `GRPOConfig`.
        max_prompt: Maximum tokens of a prompt.

    Attributes:
        schemas: JSON schemas for the chat template.
        stops: Tokens that end a turn.
        max_token_chars: Length of the longest token in characters.

    Raises:
        ConfigError: A function cannot be a tool, or the chat template writes no calls.
        DataError: The chat template rewrites the turns before a reply.
    """

    def __init__(
        self, tokenizer: Any, style: Style, config: Any, code: UserCode, max_prompt: int
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
        reply = {"role": "tool", "name": name, "tool_call_id": "call00000", "content": ""}
        end, _ = self.turns.after([reply], [(name, "call00000")], self.schemas)
        self.stops = sorted({*self.calls.stops, end})
        self.max_token_chars = max(map(len, tokenizer.get_vocab()))

    @property
    def has_reward(self) -> bool:
        """Whether the environment rewards answers."""
        return self._factory is not None and hasattr(self._factory, "get_reward")

    def functions(self, environment: object) -> dict[str, Callable[..., object]]:
        """Return a dictionary of the tools of an answer."""
        methods = [
            getattr(environment, name)
            for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
            if self._factory is not None and name not in NOT_TOOLS and not name.startswith("_")
        ]
        functions = (*self._functions, *methods)
        named = {function.__name__: function for function in functions}
        if len(named) < len(functions):
            names = ", ".join(sorted(function.__name__ for function in functions))
            raise ConfigError("Two tools have the same name.", found=names, fix="Rename one.")
        return named

    def sample(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int] | None,
        sampler: ModelSampler,
        number: int,
    ) -> list[Sampled]:
        """Return `number` answers of several turns to each prompt; greedy ones without seeds.

        Raises:
            RunError: An environment's `reset` failed, or left no room for an answer.
        """
        started = self._started([prompt for prompt in prompts for _ in range(number)])
        groups = [started[start : start + number] for start in range(0, len(started), number)]
        answers = dialogues(
            sampler,
            [[dialogue.prompt for dialogue in group] for group in groups],
            drawn_seeds(seeds, number),
            max_new_tokens=self.config.max_new_tokens,
            stops=self.stops,
            reply=lambda index, number, turn: groups[index][number].reply(turn),
        )
        return [_with_common_prompt(*pair) for pair in zip(groups, answers, strict=True)]

    def _started(self, prompts: Sequence[Prompt]) -> list[Dialogue]:
        """Return a dialogue for each prompt, without an answer."""
        environments = self._environments(len(prompts))
        messages = [_messages(prompt) for prompt in prompts]
        if self._factory is None:
            return [
                Dialogue(self, [*prompt.input_ids], turns, None)
                for prompt, turns in zip(prompts, messages, strict=True)
            ]
        with ThreadPoolExecutor(RESETS) as pool:
            texts = [*pool.map(self._reset, environments, prompts)]
        started = []
        for environment, prompt, turns, text in zip(
            environments, prompts, messages, texts, strict=True
        ):
            ids = [*prompt.input_ids]
            if text is not None:
                turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}{text}"}
                ids = prompt_ids(self.tokenizer, turns, self._style, self.schemas)
            if len(ids) > self._max_prompt:
                raise RunError(
                    f"the result of reset() leaves no room for an answer to {prompt.source}",
                    found=f"The prompt has {len(ids):,} tokens, of {self._max_prompt:,}.",
                    fix="Raise data.max_length.",
                )
            started.append(Dialogue(self, ids, turns, environment))
        return started

    def _environments(self, number: int) -> list[Any]:
        """Return environments from the pool; each is reset before its next answer."""
        if self._factory is None:
            return [None] * number
        retired = {id(environment) for environment in self._retired}
        pool = [environment for environment in self._pool if id(environment) not in retired]
        self._pool = pool + [self._factory() for _ in range(number - len(pool))]
        return self._pool[:number]

    def retire(self, environment: object) -> None:
        """Remove an environment from the pool: a call that hangs may still change it."""
        self._retired.append(environment)

    def _reset(self, environment: Any, prompt: Prompt) -> Any:
        text, error = outcome(environment.reset, self.config.tool_timeout, **prompt.fields)
        if error is not None:
            raise RunError(
                f"reset() of {self.config.environment} failed: {type(error).__name__}: {error}",
                found=f"It was called for {prompt.source}.",
                fix="Fix it; then start again, with --resume if a step was saved.",
            ) from error
        return text


@dataclass(eq=False)
class Dialogue:
    """An answer of several turns.

    Attributes:
        prompt: Tokens of the prompt.
        prompt_messages: Messages of the prompt.
        messages: Messages after the prompt, for reward functions.
    """

    tools: Tools
    prompt: list[int]
    prompt_messages: list[Message]
    environment: object
    messages: list[Message] = field(default_factory=list)
    num_turns: int = 0
    num_calls: int = 0
    num_failed: int = 0

    def __post_init__(self) -> None:
        self._before = self.prompt  # tokens before the turn

    def reply(self, turn: SampledAnswer) -> Wait | None:
        """Parse a turn, and run its calls in a thread; None: the answer ends."""
        tools, ids = self.tools, turn.ids if turn.is_cut else turn.ids[:-1]
        parsed = whole(tools.calls.reader(self._before, tools.schemas), tools.calls.decoded(ids))
        keys = [call.id or f"call{self.num_turns:03}{n:02}" for n, call in enumerate(parsed.calls)]
        calls = list(zip(keys, parsed.calls, strict=True))
        text = tools.calls.special.sub("", parsed.text)
        message: Message = {"role": "assistant", "content": text}
        if calls:
            message = tools.calls.form.message(text, calls)
        if parsed.thought:
            message["reasoning_content"] = parsed.thought
        self.messages.append(message)
        self.num_turns += 1
        if not calls or turn.is_cut or self.num_turns >= tools.config.max_turns:
            return None
        return self._waiting(calls, tools.calls.decoded(turn.ids[-1:]))

    def _waiting(self, calls: Sequence[tuple[str, Call]], ended_by: str) -> Wait:
        results: list[Message] = []
        tools, functions = self.tools, self.tools.functions(self.environment)

        def work() -> None:
            for key, call in calls:
                content = self._run(functions.get(call.name), call)
                names = {"name": call.name, "tool_call_id": key}
                results.append({"role": "tool", **names, "content": content})

        thread = threading.Thread(target=work, daemon=True)
        thread.start()

        def wait(room: int) -> Sequence[int] | None:
            thread.join()
            # a cheap bound: tokenising very long results takes minutes
            if sum(len(result["content"]) for result in results) > room * tools.max_token_chars:
                return None
            names = [(call.name, key) for key, call in calls]
            _, tokens = tools.turns.after(results, names, tools.schemas, ended_by=ended_by)
            if len(tokens) >= room:
                return None
            self.messages += results
            self._before = tokens
            return tokens

        return wait

    def _run(self, function: Callable[..., object] | None, call: Call) -> str:
        """Return the result of a tool, as text."""
        text, error = called(function, call, self.tools.config.tool_timeout)
        self.num_calls += 1
        self.num_failed += error is not None
        if isinstance(error, TimeoutError):
            self.tools.retire(self.environment)
        return text


def figures(dialogues: Sequence[Dialogue]) -> dict[str, float]:
    """Return the mean numbers of calls, failed calls and turns of an answer."""
    number = max(len(dialogues), 1)
    return {
        "calls": sum(dialogue.num_calls for dialogue in dialogues) / number,
        "failed_calls": sum(dialogue.num_failed for dialogue in dialogues) / number,
        "turns": sum(dialogue.num_turns for dialogue in dialogues) / number,
    }


def _with_common_prompt(group: list[Dialogue], answers: Sequence[SampledAnswer]) -> Sampled:
    first = group[0].prompt
    size = min(num_common(first, dialogue.prompt) for dialogue in group)
    after_prompt = []
    for dialogue, answer in zip(group, answers, strict=True):
        rest = tuple(dialogue.prompt[size:])
        mask = (*[False] * len(rest), *(answer.is_target or ()))
        after_prompt.append(replace(answer, ids=rest + answer.ids, is_target=mask))
    return Sampled(tuple(first[:size]), after_prompt, group)


def _messages(prompt: Prompt) -> list[Message]:
    content = json.loads(prompt.content)
    return [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
