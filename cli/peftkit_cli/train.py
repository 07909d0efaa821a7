"""`peftkit train` and `peftkit check`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from peftkit.errors import ConfigError, neighbours
from peftkit_cli.arguments import Overrides, Overwrite, Quiet, ResumeOrAuto, note

if TYPE_CHECKING:
    from peftkit.recipe import Recipe

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="The recipe.")]


def train(
    recipe: Annotated[Path | None, typer.Argument()] = None,
    overrides: Overrides = None,
    out: Path | None = None,
    run_folder: Annotated[Path | None, typer.Option("--from")] = None,
    resume: ResumeOrAuto = "no",
    overwrite: Overwrite = False,
    allow_changes: list[str] | None = None,
    metrics: Annotated[list[str] | None, typer.Option("--metric")] = None,
    quiet: Quiet = False,
) -> None:
    """Train an adapter from a recipe. Prints the adapter's folder.

    Args:
        recipe (RECIPE.yaml): The recipe; or use --from.
        out (DIR): Output folder. Default: train.output_dir of the recipe.
        run_folder (RUN): Start a new run with the recipe of a finished run.
        allow_changes (KEY): Resume even if this key of the recipe, or rows, has changed.
            Repeatable.
        metrics (MODULE:FUNCTION): Metric of completion and reference, averaged over the answers of
            train.eval_generate. Repeatable.
    """
    from peftkit_cli.render import Renderer

    file = recipe if recipe and not run_folder else _recipe_of(recipe, run_folder)
    overrides = list(overrides or ())
    if out is not None:  # quoted, because YAML would read a name such as 2024 or "a: b" differently
        overrides.append(f"train.output_dir={json.dumps(str(out), ensure_ascii=False)}")
    with Renderer(brief=True, quiet=quiet) as screen:
        settings = _load(file, overrides)
        from peftkit.events import to_all
        from peftkit.report.page import LiveReport
        from peftkit.run import run

        report = LiveReport(settings.train.output_dir, screen)
        result = run(
            settings,
            resume=resume if resume == "auto" else resume == "yes",
            overwrite=overwrite,
            allow_changes=allow_changes or (),
            metrics={name: _function(name) for name in metrics or ()},
            on_event=to_all(screen, report.on_event),
        )
    if result.is_main:  # under `accelerate launch`, all processes get here
        typer.echo(settings.train.output_dir)
        if settings.task.generates and not result.metrics.get("num_tokens", 1):
            note("The adapter has not changed. Next: change the task, then train with --overwrite")
            return
        note(f"Next: {settings.task.command.format(folder=settings.train.output_dir)}")


def check(recipe: RecipeFile, overrides: Overrides = None, quiet: Quiet = False) -> None:
    """Check a recipe, its data and its base; show the first rows.

    Nothing is trained.
    """
    from rich.console import Console

    from peftkit_cli.render import Renderer

    with Renderer(tables=Console(highlight=False), quiet=quiet) as on_event:
        settings = _load(recipe, overrides or ())
        from peftkit.run import check as check_recipe

        check_recipe(settings, on_event=on_event)


def _recipe_of(recipe: Path | None, run_folder: Path | None) -> Path:
    """Return the path of a run's recipe."""
    if recipe is not None or run_folder is None:
        raise ConfigError(
            "peftkit train needs either a recipe or --from RUN.",
            found="Both are given." if recipe else "Neither is given.",
            fix="Use peftkit train RECIPE.yaml, or peftkit train --from RUN --out DIR.",
        )
    file = run_folder / "recipe.yaml"
    if not file.is_file():
        raise ConfigError(
            f"there is no recipe.yaml in '{run_folder}'.",
            found=neighbours(run_folder) if not run_folder.exists() else "",
            fix="A run writes it at its end. Finish that run, or give its recipe.",
        )
    return file


def _load(path: Path, overrides: list[str] | tuple[str, ...]) -> Recipe:
    from peftkit_cli.about import check_recipe_exists

    if path.suffix not in {".yaml", ".yml"} or not path.is_file():
        check_recipe_exists(path)  # before the imports below, which take seconds
    from peftkit.recipe import load

    try:
        return load(path, overrides)
    except ConfigError:
        check_recipe_exists(path)  # names the program that the YAML is for
        raise


def _function(name: str) -> Callable[[str, str], float]:
    """Import "module:function", also from the current folder.

    Only the command line may name a function, since recipes are shared and must not run code.

    Raises:
        ConfigError: There is no such module or function.
    """
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")  # the later imports of this process must not search there
    try:
        function = getattr(import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"cannot use --metric {name}.",
            found=f"{error}. Searched in {Path.cwd()} and the installed packages.",
            fix="Give module:function, with def function(completion: str, reference: str) -> float",
        ) from None
    finally:
        sys.path.remove("")
    if not callable(function):
        raise ConfigError(f"{name} is not a function.", found=f"It is {function!r:.80}.")
    return cast("Callable[[str, str], float]", function)
