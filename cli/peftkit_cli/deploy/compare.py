"""Six prompts through peftkit and through an exported file: tokens of the prompt, then answers.

The tokens show what most exports get wrong: the chat template, a second BOS token, the system
prompt. Answers of a quantised file may differ although everything is right.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from peftkit.config.strict_yaml import SourceLocation, parse
from peftkit.data.chat_template import shortened
from peftkit.data.generation import prompt_ids, stop_ids
from peftkit.data.prompts import read_prompts
from peftkit.data.records import iterate_records
from peftkit.data.style import ALPACA, Style
from peftkit.errors import PeftkitError, RunError
from peftkit.events import Listener, Notice, Table
from peftkit.formats.folders import RECIPE
from peftkit.formats.open_adapter import Opened
from peftkit.inference.generate import decoded, generate_ids
from peftkit_cli.deploy.programs import environment

NUM_PROMPTS, NUM_TOKENS = 6, 64
START_SECONDS, ANSWER_SECONDS = 600, 600
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "What is 2+2?",
    "Write one sentence about the sea.",
    "Translate 'good morning' into Spanish.",
    "Is water wet?",
)
"""Prompts if the rows of training are not on this machine."""

Prompt = str | Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt with its tokens and its greedy answer.

    Attributes:
        ids: Tokens of the prompt; None if the program does not report them.
        num_ids: Their number; None if unknown.
        error: The program's reason not to answer, such as a template that it cannot render.
    """

    ids: list[int] | None
    num_ids: int | None
    text: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a program's prompts and answers compare with peftkit's; one entry for each prompt."""

    program: str
    same_prompts: tuple[bool, ...]
    same_answers: tuple[bool, ...]
    differences: tuple[str, ...]


def prompts_of(folder: Path, style: Style) -> list[Prompt]:
    """Return the first prompts of a run's eval or training rows, or general questions."""
    for where in _rows_of(folder):
        try:
            records = list(islice(iterate_records(where), NUM_PROMPTS))
            examples, _ = read_prompts(records, where=where)
        except (PeftkitError, OSError):
            continue  # moved, or rows without prompts
        prompts: list[Prompt] = []
        for example in examples:
            if style.kind == "chat" and not example.tools:
                prompts.append([dict(turn) for turn in example.messages])
            elif isinstance(example.prompt, str):
                prompts.append(example.prompt)
        if prompts:
            return prompts
    if style.kind == "chat":
        return [[{"role": "user", "content": question}] for question in QUESTIONS]
    return list(QUESTIONS)


def _rows_of(folder: Path) -> list[str]:
    for file in (folder / RECIPE, folder.parent.parent / RECIPE):
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8")
        recipe = parse(text, lambda line: SourceLocation(str(file), line)).data  # noqa: B023
        data = recipe.get("data") if isinstance(recipe, dict) else None
        if isinstance(data, dict):
            paths = (data.get(name) for name in ("eval", "train"))
            return [path for path in paths if isinstance(path, str) and Path(path).is_file()]
    return []


def answered_here(opened: Opened, prompts: Sequence[Prompt]) -> list[Answered]:
    """Return the prompts' tokens and greedy answers of base and adapter."""
    tokenizer, style = opened.base.tokenizer, opened.style
    ids = [prompt_ids(tokenizer, prompt, style) for prompt in prompts]
    stops = stop_ids(tokenizer, style)
    answers = generate_ids(
        opened.base.model, tokenizer, ids, stops=stops, max_new_tokens=NUM_TOKENS
    )
    texts = [decoded(tokenizer, answer) for answer in answers]
    return [Answered(one, len(one), text) for one, text in zip(ids, texts, strict=True)]


def answered_by_llama_cpp(
    command: Sequence[str], file: Path, prompts: Sequence[Prompt], style: Style, context: int
) -> list[Answered]:
    """Return the prompts' tokens and answers of a server of llama.cpp on a GGUF file.

    Raises:
        RunError: The server does not start, or fails.
    """
    with _llama_server(command, file, context) as address:
        return [_by_llama_cpp(address, prompt, style) for prompt in prompts]


def _by_llama_cpp(address: str, prompt: Prompt, style: Style) -> Answered:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "cache_prompt": False}
    try:
        if isinstance(prompt, str):
            text = framed(prompt, style)
            answer = _post(f"{address}/v1/completions", settings | {"prompt": text})
            content = answer["choices"][0]["text"]
        else:
            text = _post(f"{address}/apply-template", {"messages": prompt})["prompt"]
            settings |= {"messages": prompt, "reasoning_format": "none"}
            answer = _post(f"{address}/v1/chat/completions", settings)
            content = answer["choices"][0]["message"]["content"] or ""
    except _RefusedError as refused:
        return Answered(None, None, "", str(refused))
    # as the server tokenizes a rendered prompt: BOS if the file's flag requires it
    wanted = {"content": text, "add_special": True, "parse_special": True}
    ids = _post(f"{address}/tokenize", wanted)["tokens"]
    return Answered(ids, len(ids), content)


def framed(prompt: str, style: Style) -> str:
    """Return the text of a prompt without chat template."""
    return ALPACA.format(prompt) if style.kind == "alpaca" else prompt


def answered_by_ollama(
    name: str, prompts: Sequence[Prompt], address: str = "http://127.0.0.1:11434"
) -> list[Answered]:
    """Return the answers of a model in Ollama, and the number of each prompt's tokens.

    Raises:
        RunError: Ollama's server does not answer.
    """
    answers = []
    for prompt in prompts:
        kind = "generate" if isinstance(prompt, str) else "chat"
        options = {"temperature": 0, "num_predict": NUM_TOKENS}
        given = {"model": name, "stream": False, "options": options}
        given["prompt" if kind == "generate" else "messages"] = prompt
        try:
            answer = _post(f"{address}/api/{kind}", given)
        except _RefusedError as refused:
            answers.append(Answered(None, None, "", str(refused)))
            continue
        text = answer["response"] if kind == "generate" else answer["message"]["content"]
        answers.append(Answered(None, answer.get("prompt_eval_count"), text))
    return answers


def compared(
    program: str, ours: Sequence[Answered], theirs: Sequence[Answered], tokenizer: Any
) -> Comparison:
    """Compare a program's prompts and answers with peftkit's."""
    prompts, answers, differences = [], [], []
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True), 1):
        same_prompt = not other.error and (
            mine.ids == other.ids if other.ids is not None else mine.num_ids == other.num_ids
        )
        prompts.append(same_prompt)
        answers.append(mine.text.strip() == other.text.strip() and not other.error)
        if other.error:
            differences.append(f"Prompt {number}: {program} refuses it: {other.error}")
        elif not same_prompt:
            differences.append(f"Prompt {number}: {_first_difference(mine, other, tokenizer)}")
        if not answers[-1] and not other.error:
            here, there = (shortened(each.text, 200) for each in (mine, other))
            differences.append(f"Answer {number}: peftkit {here}; {program} {there}")
    return Comparison(program, tuple(prompts), tuple(answers), tuple(differences))


def _first_difference(mine: Answered, other: Answered, tokenizer: Any) -> str:
    if mine.ids is None or other.ids is None:
        return f"{mine.num_ids} tokens in training, {other.num_ids} here"
    pairs = list(zip(mine.ids, other.ids, strict=False))
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
    here, there = (
        json.dumps(tokenizer.decode(ids[at : at + 8]), ensure_ascii=False) or "nothing"
        for ids in (mine.ids, other.ids)
    )
    return f"from token {at}, in training {here}, in the file {there}"


def report(comparison: Comparison, on_event: Listener) -> None:
    """Show a comparison: counts, then each difference."""
    number = len(comparison.same_prompts)
    rows = (
        ("prompts with equal tokens", f"{sum(comparison.same_prompts)} of {number}"),
        ("equal answers", f"{sum(comparison.same_answers)} of {number}"),
    )
    on_event(Table(f"The file in {comparison.program}, compared with peftkit", ("", ""), rows))
    for difference in comparison.differences:
        on_event(Notice(difference))
    if not all(comparison.same_prompts):
        on_event(
            Notice(
                f"{comparison.program} reads other prompts than the adapter was trained on, which "
                "costs quality. Serve the adapter with peftkit serve or vLLM, or train with "
                "data.chat_template: chatml."
            )
        )


class _RefusedError(Exception):
    """The server refused a request; its message."""


def _post(url: str, payload: Any) -> Any:
    request = urllib.request.Request(
        url, json.dumps(payload).encode(), {"Content-Type": "application/json"}
    )
    try:
        with _direct().open(request, timeout=ANSWER_SECONDS) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        text = error.read(4096).decode("utf-8", "replace")
        match = re.search(r'"(?:message|error)":\s*"((?:[^"\\]|\\.)*)"', text)
        raise _RefusedError(match[1] if match else text) from error
    except (OSError, ValueError) as problem:
        raise RunError(f"the server at {url} does not answer", found=str(problem)) from problem


def _direct() -> urllib.request.OpenerDirector:
    """Return an opener that uses no proxy."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def _llama_server(command: Sequence[str], file: Path, context: int) -> Iterator[str]:
    """Start a server on a free port of this machine, yield its address, and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    arguments = [*command, "-m", str(file), "-c", str(context), "--port", str(port), "--jinja"]
    arguments += ["-t", str(torch.get_num_threads())]  # llama.cpp counts a container's host cores
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment()
            )
        except OSError as problem:
            raise RunError(f"cannot run {command[0]}", found=str(problem)) from problem
        try:
            _wait_for(process, address, log)
            yield address
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(process: subprocess.Popen[bytes], address: str, log: Any) -> None:
    """Wait until a server is healthy.

    Raises:
        RunError: It ends, or takes too long.
    """
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with _direct().open(f"{address}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    log.seek(0)
    text = log.read().decode("utf-8", "replace").strip().splitlines()[-12:]
    raise RunError("llama.cpp does not load the exported file", found="\n".join(text))
