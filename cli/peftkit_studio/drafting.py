"""Surveys, recipes, plans and previews, computed in a second process.

The server's process imports no torch and answers while a plan is computed. A file that crashes a
parser ends only the second process, which is started when it is needed and ends when idle.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from glob import iglob
from pathlib import Path
from typing import Any

from peftkit.config.strict_yaml import plain_value
from peftkit.errors import ConfigError, PeftkitError, RunError
from peftkit.execution.children import spawn_context
from peftkit_studio.edits import edit_of
from peftkit_studio.folder import is_name

IDLE_SECONDS = 600.0
NUM_ROWS = 4
"""Rows in a preview."""
MAX_SECONDS = 300
"""Time limit of a call; the first one of a process imports torch, which a busy machine delays."""
MAX_PATH = 4096
"""Length of a path that Linux cannot open any more."""
SOURCE = "recipe.yaml"
"""Name of the edited recipe in errors."""
FORM = ("train.epochs", "train.learning_rate", "method.rank", "data.max_length", "train.batch_size")
"""Settings that the page shows as a form; train.max_steps replaces epochs if it is set."""
Function = Callable[..., dict[str, Any]]


class Drafting:
    """Runs the functions below in another process, one at a time.

    Args:
        folder: The studio's folder, which is the working folder of the process.
        models: Further folders whose files recipes may name.
        runs_code: Whether recipes may name Python functions.
        opens_urls: Whether recipes may name URLs.
    """

    def __init__(
        self,
        folder: Path,
        models: tuple[Path, ...] = (),
        runs_code: bool = False,
        opens_urls: bool = False,
    ):
        self._arguments = (folder, models, runs_code, opens_urls)
        self._pool: ProcessPoolExecutor | None = None
        self._last_use, self._num_calls = 0.0, 0

    async def run(self, function: Function, *arguments: Any) -> dict[str, Any]:
        """Return the result of a function.

        Raises:
            PeftkitError: As the function; RunError if its process ended.
        """
        if self._pool is None:
            context = spawn_context()
            self._pool = ProcessPoolExecutor(1, context, _set_up, self._arguments)
        self._num_calls += 1
        try:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(
                self._pool, _call_in_time, MAX_SECONDS, function, arguments
            )
        except BrokenProcessPool:
            self.close()
            raise RunError(
                "the process that reads rows and computes plans ended.",
                found=f"It ends without enough memory, and after {MAX_SECONDS} seconds.",
                fix="Try again, with fewer rows or a smaller model.",
            ) from None
        finally:
            self._num_calls -= 1
            self._last_use = time.monotonic()
        if "problem" in result:
            raise PeftkitError(result["problem"], found=result["found"], fix=result["fix"])
        return result

    def close_if_idle(self) -> None:
        """End the process if it was not used for IDLE_SECONDS."""
        if not self._num_calls and time.monotonic() - self._last_use > IDLE_SECONDS:
            self.close()

    def close(self) -> None:
        """End the process."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def end_with_parent() -> None:
    """End this process when its parent ends, even if the parent is killed."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


# ------------------------------------------------------------------- in the second process

_roots: tuple[Path, ...] = ()
_runs_code = _opens_urls = False


def _set_up(folder: Path, models: tuple[Path, ...], runs_code: bool, opens_urls: bool) -> None:
    global _roots, _runs_code, _opens_urls
    _roots = (folder.resolve(), *(path.resolve() for path in models))
    _runs_code, _opens_urls = runs_code, opens_urls
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    os.chdir(folder)
    warnings.simplefilter("ignore")
    os.nice(5)  # training runs first


def _call_in_time(seconds: int, function: Function, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Call a function; SIGALRM ends this process after so many seconds, also in native code."""
    signal.alarm(seconds)
    try:
        return _call(function, arguments)
    finally:
        signal.alarm(0)


def _call(function: Function, arguments: tuple[Any, ...]) -> dict[str, Any]:
    try:
        return function(*arguments)
    except PeftkitError as error:
        return {"problem": error.problem, "found": error.found, "fix": error.fix}
    except Exception as error:  # unexpected input: the page shows it, and the process continues
        found = f"{type(error).__name__}: {error}"
        return {"problem": "the computation failed.", "found": found, "fix": ""}


def warm_up() -> dict[str, Any]:
    """Import torch before it is needed, which takes seconds."""
    import peftkit_cli.start.survey  # noqa: F401

    validate("")
    return {}


def survey_file(file: str) -> dict[str, Any]:
    """Return the survey of a file, and the tasks that accept its rows."""
    from peftkit_cli.start.draft import suited_tasks
    from peftkit_cli.start.recipes import GOALS
    from peftkit_cli.start.survey import survey

    summary, no_task = survey(_allowed(file)), ""
    try:
        names = suited_tasks(summary)
    except ConfigError as error:
        names, no_task = [], str(error)
    tasks = [{"name": name, "purpose": GOALS[name].does} for name in names]
    return {**asdict(summary), "tasks": tasks, "no_task": no_task}


def draft_recipe(file: str, task: str, model: str, memory: str) -> dict[str, Any]:
    """Return the recipe that `peftkit init` writes.

    Args:
        memory: GPU memory such as "24GB", or "cpu"; "" for this machine.
    """
    from peftkit.execution.environment import this_machine
    from peftkit_cli.start import draft as drafts
    from peftkit_cli.start.survey import survey

    if why := _why_forbidden(model):
        raise ConfigError("the base is not allowed.", found=why)
    summary = survey(_allowed(file))
    task = drafts.checked_task(task, drafts.suited_tasks(summary), summary)
    if memory:
        num_bytes = drafts.memory_bytes(memory)
    else:
        environment = this_machine()
        num_bytes = (environment.memory or 0) if environment.on_gpu else 0
    for on_gpu in (bool(num_bytes), True):
        model = model or drafts.usual_model(task, on_gpu=on_gpu)
    named = drafts.usual_fields(task, summary)
    if named is None:
        named = drafts.longest_fields(summary)
    return {"recipe": drafts.draft(summary, task, model, num_bytes, named=named)[0]}


def read_recipe(text: str) -> Any:
    """Return a recipe.

    Raises:
        ConfigError: The recipe is not valid, or names files or code that the page may not use;
            with the line of each error.
    """
    from peftkit.config.schema import load_text
    from peftkit.recipe import Recipe

    recipe = load_text(Recipe, text, SOURCE)
    problems = [*_forbidden_code(recipe), *_forbidden_files(recipe)]
    if problems:
        lines = tuple((_line_of(text, value), message) for value, message in problems)
        error = ConfigError(f"{SOURCE} is not allowed.", found="\n".join(m for _, m in lines))
        error.lines = lines
        raise error
    return recipe


def _forbidden_code(recipe: Any) -> Iterator[tuple[str, str]]:
    """Yield Python functions that the recipe names, and why they are refused."""
    for setting, uses in recipe.task.code.items() if not _runs_code else ():
        for use in uses:
            yield (
                use,
                f"task.{setting}: the recipe names Python code, which this page does not run. "
                "Start it with peftkit train, or restart the page with --run-code.",
            )


def _forbidden_files(recipe: Any) -> Iterator[tuple[str, str]]:
    """Yield URLs and paths outside of the allowed folders, and why they are refused.

    Hub ids and short names are relative paths as well, and a folder of that name comes first.
    """
    from peftkit.config.schema import locations

    output = recipe.train.output_dir
    is_named = output.parent == Path("runs") and is_name(output.name)
    if not is_named or not _is_inside(output, _roots[:1]):
        text = str(output)
        form = "runs/NAME, with at most 80 letters, digits, '.', '_' and '-'"
        yield text, f"train.output_dir: '{text[:100]}' is not of the form {form}."
    for key, text in locations(recipe):
        if key != "train.output_dir" and (why := _why_forbidden(text)):
            yield text, f"{key}: {why}"


def _why_forbidden(text: str) -> str:
    """Return why the page may not open a file, pattern, URL or hub id; "" if it may."""
    if re.search(r"[\w+.-]+:/", text):  # a Path has one slash
        return "" if _opens_urls else f"'{text[:100]}' is a URL (restart the page with --urls)."
    if all(_is_inside(path, _roots) for path in _paths(text)):
        return ""
    allowed = ", ".join(map(str, _roots))
    return f"'{text[:100]}' is outside of {allowed} (further folders: --models)."


def _allowed(file: str) -> str:
    """Return a file of rows; raises ConfigError if it is a link to a place outside."""
    if why := _why_forbidden(file):
        raise ConfigError("the file is not allowed.", found=why)
    return file


def _paths(text: str) -> Iterator[Path]:
    """Yield the paths that a text may name: itself, without :FUNCTION or @REVISION, its matches.

    A pattern outside of the folders is refused before its matches are searched.
    """
    for name in dict.fromkeys((text, re.split("[:@]", text)[0])):
        path = os.path.expanduser(name)
        yield Path(path)
        if any(character in path for character in "*?["):
            yield from map(Path, iglob(path, recursive=True))


def _is_inside(path: Path, folders: tuple[Path, ...]) -> bool:
    """Return whether a path is in one of the folders, after its links are resolved."""
    try:
        is_long = len(str(path)) >= MAX_PATH
        return not is_long and any(path.resolve().is_relative_to(folder) for folder in folders)
    except (OSError, ValueError, RuntimeError):  # a NUL, or links in a circle
        return False


def _line_of(text: str, value: str) -> int:
    """Return the line of a value in a recipe; 1 if it is not written out."""
    lines = enumerate(text.splitlines(), start=1)
    return next((number for number, line in lines if value in line), 1)


def validate(text: str) -> dict[str, Any]:
    """Return the errors of a recipe with their lines; of a valid one, its name.

    A message without a line of its own is shown at line 1. `form` is how to set each of FORM.
    """
    try:
        recipe = read_recipe(text)
    except ConfigError as error:
        lines = error.lines or ((1, str(error)),)
        problems = [{"line": max(line, 1), "text": text} for line, text in lines]
        return {"problems": problems, "form": _form(text, None)}
    name = recipe.train.output_dir.name
    return {"problems": [], "name": name, "form": _form(text, recipe)}


def _form(text: str, recipe: Any) -> list[dict[str, Any]]:
    """Return how to set each field of FORM in a recipe, and its value if the text has none.

    Fields that a recipe's sections do not have, such as the rank of IA3, are left out.
    """
    fields = []
    for key in FORM:
        section, name = key.split(".")
        steps = edit_of(text, "train", "max_steps") if name == "epochs" else None
        if steps is not None and plain_value(steps.value) is not None:
            name = "max_steps"
        edit = edit_of(text, section, name)
        values = getattr(recipe, section, None)
        if edit is not None and (values is None or hasattr(values, name)):
            default = getattr(values, name, "")
            fields.append({"key": f"{section}.{name}", "default": default, **edit._asdict()})
    return fields


def add_rows(text: str, file: str, output: str) -> dict[str, Any]:
    """Return a recipe that also trains on a file, with another output folder."""
    train = read_recipe(text).data.train
    sources = [{"path": train}] if isinstance(train, str) else [s.model_dump() for s in train]
    if file not in [source["path"] for source in sources]:
        sources.append({"path": file})
    items = (", ".join(f"{k}: {json.dumps(v)}" for k, v in each.items()) for each in sources)
    values = {"data": ("train", f"[{', '.join(f'{{{item}}}' for item in items)}]")}
    for section, (name, value) in (values | {"train": ("output_dir", output)}).items():
        if (edit := edit_of(text, section, name)) is None:
            raise ConfigError("the recipe is not written as a block of sections.")
        text = edit.applied(text, value)
    return {"recipe": text}


def estimate(text: str, memory: str) -> dict[str, Any]:
    """Return the estimate of `peftkit plan`."""
    from peftkit.planning.plan import plan_run

    memory = "" if memory == "cpu" else memory
    plan = plan_run(read_recipe(text), memory=memory or None)
    return {**plan.as_json(), "facts": plan.facts(), "verdict": plan.verdict()}


def preview(text: str) -> dict[str, Any]:
    """Return the first rows, token by token."""
    from peftkit_cli.start.preview import first_rows

    rows, notices = first_rows(read_recipe(text), NUM_ROWS)
    return {"rows": [asdict(row) for row in rows], "notices": notices}
