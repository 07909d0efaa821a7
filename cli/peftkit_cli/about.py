"""`peftkit recipes`, `quickstart`, `base`, `env` and `schema`: what is there to work with."""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from peftkit.errors import ConfigError, OutputError, did_you_mean, neighbours
from peftkit_cli.arguments import Json, note

recipes = typer.Typer(help="Ready-made recipes: list, show or copy them.", no_args_is_help=False)
base = typer.Typer(
    help="Quantised bases in the cache: list, remove or add one.", no_args_is_help=True
)
MAX_BYTES = 1_000_000
LIBRARIES = (
    "torch", "transformers", "bitsandbytes", "accelerate", "datasets", "safetensors", "tokenizers",
    "pydantic", "PyYAML", "typer", "rich", "peft", "gguf", "triton", "flash-attn",
)  # fmt: skip
RecipeName = Annotated[str, typer.Argument(metavar="NAME")]


def recipes_folder() -> Path:
    """Return the folder of the recipes, in the installed package or in a checkout."""
    here = Path(__file__).resolve()
    installed = here.parent / "recipes"
    return installed if installed.is_dir() else here.parents[2] / "recipes"


def recipe_file(name: str) -> Path:
    """Return the shipped recipe of this name.

    Raises:
        ConfigError: There is none.
    """
    files = {file.stem: file for file in sorted(recipes_folder().glob("*.yaml"))}
    stem = name.removesuffix(".yaml")
    if stem not in files:
        raise ConfigError(
            f"there is no recipe named '{name}'.",
            found=f"The recipes are: {', '.join(files)}. {did_you_mean(stem, files)}".rstrip(),
            fix="What each is for: peftkit recipes ls",
        )
    return files[stem]


def check_recipe_exists(path: Path) -> None:
    """Refuse the path of a recipe that does not exist; it may be a ready-made recipe's name.

    Raises:
        ConfigError: There is no such file.
    """
    if path.exists():
        _check_is_recipe(path)
        return
    fix = "Start from a ready-made one: peftkit recipes ls"
    name = path.name.removesuffix(".yaml")
    if (recipes_folder() / f"{name}.yaml").is_file():
        fix = f"To get the ready-made recipe of this name: peftkit recipes cp {name} {name}.yaml"
    raise ConfigError(
        f"there is no recipe file '{path}'.", found=neighbours(path, "*.yaml"), fix=fix
    )


DATA = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
OTHERS = {
    "base_model": "axolotl",
    "model_name_or_path": "LLaMA-Factory",
    "fine_tune_type": "mlx-lm",
    "lora_parameters": "mlx-lm",
    "adapter_path": "mlx-lm",
}
"""A key of other programs' YAML, and whose it is."""


def _check_is_recipe(path: Path) -> None:
    """Refuse rows, a run's folder and other programs' YAML, and name the command for each.

    Raises:
        ConfigError: It is one of these.
    """
    if path.suffix.lower() in DATA:
        raise ConfigError(
            f"'{path}' is no recipe.",
            found="It is a file of rows.",
            fix=f"Write a recipe for it: peftkit init --data {shlex.quote(str(path))}",
        )
    if path.is_dir() and (path / "recipe.yaml").is_file():
        raise ConfigError(
            f"'{path}' is no recipe.",
            found="It is the folder of a run.",
            fix=f"Its recipe is {path / 'recipe.yaml'}; a new run from it: "
            f"peftkit train --from {shlex.quote(str(path))} --out DIR",
        )
    if path.is_dir():
        has_rows = any(file.suffix.lower() in DATA for file in path.iterdir())
        raise ConfigError(
            f"'{path}' is no recipe.",
            found="It is a folder of rows." if has_rows else "It is a folder.",
            fix=f"Write a recipe for it: peftkit init --data {shlex.quote(str(path))}"
            if has_rows
            else "Give a recipe's file; peftkit recipes ls lists ready-made ones.",
        )
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        return
    text = path.read_bytes().decode("utf-8", "replace")
    for key, program in OTHERS.items():
        if re.search(rf"(?m)^{key}\s*:", text):
            raise ConfigError(
                f"'{path}' is no recipe of peftkit.",
                found=f"It has the key {key}, as {program}'s YAML.",
                fix=f"Make a recipe of it: peftkit import-recipe {shlex.quote(str(path))} "
                "--out recipe.yaml",
            )


def headline(file: Path) -> str:
    """Return a recipe's first comment line: its purpose in a sentence."""
    with file.open(encoding="utf-8") as lines:
        return next(lines).lstrip("# ").strip()


@recipes.command("ls")
def list_recipes() -> None:
    """List the recipes and what each is for."""
    files = sorted(recipes_folder().glob("*.yaml"))
    width = max(len(file.stem) for file in files)
    for file in files:
        typer.echo(f"{file.stem:{width}}  {headline(file)}")
    note("Next: peftkit recipes cp NAME DEST, then edit it, then peftkit train DEST")


@recipes.command("show")
def show_recipe(name: RecipeName) -> None:
    """Print a recipe."""
    typer.echo(recipe_file(name).read_text(encoding="utf-8"), nl=False)


SCHEMA = "recipe.schema.json"
"""File beside a recipe, by which editors complete and check its keys."""


def write_recipe(path: Path, text: str) -> None:
    """Write a recipe, with the line by which an editor finds the schema, and that beside it.

    Raises:
        OutputError: They cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(f"# yaml-language-server: $schema={SCHEMA}\n{text}")
        (path.parent / SCHEMA).write_text(_schema_text(), encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"'{path}' cannot be written.",
            found=error.strerror or str(error),
            fix="Choose a new name in a folder that exists and is writable.",
        ) from None


@recipes.command("cp")
def copy_recipe(
    name: RecipeName,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="A new file, or a folder.")],
) -> None:
    """Copy a recipe, to edit it."""
    source = recipe_file(name)
    target = dest / source.name if dest.is_dir() else dest
    write_recipe(target, source.read_text(encoding="utf-8"))
    typer.echo(target)
    note(f"Next: peftkit check {target}")


@base.command("ls")
def list_bases(as_json: Json = False) -> None:
    """List the packed bases: their sizes, and any problem with them."""
    from peftkit.base.store import store_folder
    from peftkit.base.stored import stored_bases
    from peftkit.figures import size
    from peftkit_cli.render import print_table

    stored = stored_bases()
    if as_json:
        names = ("model", "quantize", "dtype", "num_bytes", "problem")
        facts = [{"name": e.folder.name, **{n: getattr(e, n) for n in names}} for e in stored]
        typer.echo(json.dumps(facts, indent=2))
        return
    rows = tuple(
        (e.folder.name, e.model, e.quantize, e.dtype, size(e.num_bytes), e.problem) for e in stored
    )
    if rows:
        columns = ("name", "model", "quantize", "dtype", "size", "problem")
        print_table("", columns, rows)
    total = size(sum(each.num_bytes for each in stored))
    number = f"{len(stored)} packed base{'' if len(stored) == 1 else 's'}"
    how = "" if stored else " Pack one with: peftkit base pack MODEL"
    note(f"{number} in {store_folder()}, {total} in all.{how}")


@base.command("rm")
def remove_base(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name or model, as `base ls` shows it.")
    ],
) -> None:
    """Remove packed bases. The original models stay."""
    from peftkit.base.stored import remove_stored
    from peftkit.figures import size

    for each in remove_stored(name):
        note(f"Removed {each.folder.name} ({size(each.num_bytes)}).")


@base.command("pack")
def pack(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Hub id, folder or short name."),
    ],
    quantize: Annotated[str, typer.Option(metavar="KIND", help="nf4, fp4 or int8.")] = "nf4",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="bf16, fp16, fp32, auto.")] = "auto",
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit.")
    ] = None,
) -> None:
    """Quantise a base into the cache, so that runs on it start in seconds."""
    from peftkit.base.stored import pack_base
    from peftkit_cli.render import Renderer

    with Renderer() as listener:
        folder = pack_base(
            model, quantize=quantize, dtype=dtype, revision=revision, on_event=listener
        )
    typer.echo(str(folder))


def quickstart() -> None:
    """Teach a small model a task in minutes, with scores before and after.

    Two CPU cores are enough. Writes into runs/quickstart, replacing an earlier quickstart.
    """
    script = recipes_folder() / "quickstart.py"
    runpy.run_path(str(script))["main"]()


def schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    typer.echo(_schema_text(), nl=False)


def _schema_text() -> str:
    from peftkit.config.schema import json_schema
    from peftkit.recipe import Recipe

    return json.dumps(json_schema(Recipe), indent=2) + "\n"


def env(as_json: Json = False) -> None:
    """Show versions and devices, for a bug report."""
    facts = environment()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    width = max(len(name) for name in facts) + 2
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {text}" for key, text in value.items())
        typer.echo(f"{name + ':':{width}}{value}")


def environment() -> dict[str, Any]:
    """Return the versions, the processor and the accelerators, for a bug report."""
    from importlib.metadata import distributions

    import torch

    from peftkit.figures import size
    from peftkit.forward.blocks import cpp_compiler
    from peftkit.inference.fallbacks import fallbacks_here

    installed = {each.metadata["Name"]: each.version for each in distributions()}
    cards = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    shown = [f"{c.name}, {size(c.total_memory)}, sm_{c.major}{c.minor}" for c in cards]
    others = [name for name in ("mps", "xpu") if getattr(torch, name).is_available()]
    return {
        "peftkit": installed.get("peftkit", "not installed"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "c++ compiler": cpp_compiler() or "none",
        "accelerators": "; ".join([*shown, *others]) or "none",
        "cuda": torch.version.cuda or "not in this torch",
        "fallbacks": " ".join(fallback.text for fallback in fallbacks_here()) or "none",
        "libraries": {name: installed[name] for name in LIBRARIES if name in installed},
    }
