"""Functions and classes of the user, which recipes name as FILE.py:NAME.

A file is run when training begins and at no other time: opening an adapter runs nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from peftkit.errors import ConfigError
from peftkit.inference.call_formats import Call

PATTERN = r"^.+\.py:\w+$"


class UserCode:
    """Loads what recipes name. Each file is run once: its functions share what it holds."""

    def __init__(self) -> None:
        self._modules: dict[Path, Any] = {}

    def load(self, use: str, seconds: float | None = None) -> Callable[..., object]:
        """Return a function or class.

        Args:
            seconds: That running the file may take.

        Raises:
            ConfigError: A file or name is not there, or the file fails.
        """
        path, name = file_of(use), use.rpartition(":")[2]
        if path not in self._modules:
            self._modules[path] = _run(path) if seconds is None else _run_within(seconds, path)
        function: Callable[..., Any] | None = getattr(self._modules[path], name, None)
        if not callable(function):
            raise ConfigError(f"{path} has no function {name}.")
        return function


def _run(path: Path) -> Any:
    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]
    name = f"peftkit_user_{path.stem}_{digest}"  # jobs have graders of the same file name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _run_within(seconds: float, path: Path) -> Any:
    module, error = outcome(_run, seconds, path=path)
    if isinstance(error, ConfigError):
        raise error
    if error is not None:
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def file_of(use: str) -> Path:
    """Return the file of FILE.py:NAME.

    Raises:
        ConfigError: It is not there, or nothing is named in it.
    """
    file, colon, _ = use.rpartition(":")
    if not colon:
        raise ConfigError(f"{use} names no function.", fix="Write it as FILE.py:NAME.")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(
            f"there is no file {path} for {use}.",
            fix="Paths are relative to the folder that peftkit is started in.",
        )
    return path


def source_hashes(uses: Iterable[str]) -> dict[str, str]:
    """Return a hash of each function's file, which must not change when a run resumes."""
    return {use: hashlib.sha256(file_of(use).read_bytes()).hexdigest()[:16] for use in uses}


def returned(function: Callable[..., object], /, **arguments: object) -> Any:
    """Return what a function returns, also one that is async."""
    result = function(**arguments)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[object]) -> Any:
    return await result


def outcome(
    function: Callable[..., object], seconds: float, /, **arguments: object
) -> tuple[Any, BaseException | None]:
    """Return what a function returns, or what it raises: TimeoutError after so many seconds.

    It runs in a thread, which continues after a timeout.
    """
    box: list[tuple[object, BaseException | None]] = []

    def work() -> None:
        try:
            box.append((returned(function, **arguments), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return box[0] if box else (None, TimeoutError(f"It took longer than {seconds:g} seconds."))


def called(
    function: Callable[..., object] | None, call: Call, seconds: float
) -> tuple[str, BaseException | None]:
    """Return what a tool returns, as text, and why the call failed: the text says so then.

    Args:
        function: None: there is no such tool.
    """
    error: BaseException | None = ValueError(f"Tool {call.name} not found.")
    if function is not None:
        result, error = outcome(lambda: str(returned(function, **call.arguments)), seconds)
    text = str(result) if error is None else str({"error": str(error)})
    return text.encode(errors="replace").decode(), error  # halves of characters are no text


def tool_schemas(functions: Mapping[str, Callable[..., object]]) -> list[Mapping[str, Any]]:
    """Return what chat templates take of functions with types and docstrings in Google's style.

    Raises:
        ConfigError: One of them lacks a type or a line of its docstring; or there are none.
    """
    schemas: list[Mapping[str, Any]] = []
    for name, function in functions.items():
        try:
            schemas.append(get_json_schema(function))
        except Exception as problem:
            raise ConfigError(
                f"{name} cannot be a tool.",
                found=str(problem),
                fix="Give each argument a type, and a line under Args: in the docstring.",
            ) from problem
    if not schemas:
        raise ConfigError("the environment has no tools.", fix="Give it public methods.")
    return schemas


def shortly(value: object) -> str:
    """Return what a function returned, in at most 80 characters."""
    try:
        return f"{value!r:.80}"
    except Exception:  # a number of thousands of digits, or a class with a faulty __repr__
        return f"what is of the type {type(value).__name__}"
