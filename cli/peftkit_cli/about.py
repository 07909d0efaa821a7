"""`peftkit recipes`, `quickstart`, `base`, `env` and `schema`."""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import shlex
from pathlib import Path
from typing import Annotated

import typer

from peftkit.data.readers import READERS
from peftkit.errors import ConfigError, OutputError, neighbours
from peftkit_cli.arguments import Json, note, with_help
from peftkit_cli.start.recipes import recipe_file, recipes_folder

recipes = typer.Typer(help="List, show or copy ready-made recipes.", no_args_is_help=False)
base = typer.Typer(help="List, remove or add quantised bases in the cache.", no_args_is_help=True)
MAX_BYTES = 1_000_000
LIBRARIES = (
    "torch", "transformers", "bitsandbytes", "accelerate", "datasets", "safetensors", "tokenizers",
    "pydantic", "PyYAML", "typer", "rich", "peft", "gguf", "triton", "flash-attn",
)  # fmt: skip
RecipeName = Annotated[str, typer.Argument(metavar="NAME")]


def check_recipe_exists(path: Path) -> None:
    """Check that a path is an existing recipe; suggest a ready-made recipe with its name.

    Raises:
        ConfigError: There is no such file, or it is not a recipe.
    """
    if path.exists():
        _check_is_recipe(path)
        return
    fix = "To list ready-made recipes: peftkit recipes ls"
    name = path.name.removesuffix(".yaml")
    if (recipes_folder() / f"{name}.yaml").is_file():
        fix = f"To copy the ready-made recipe of this name: peftkit recipes cp {name} {name}.yaml"
    raise ConfigError(
        f"there is no recipe file '{path}'.", found=neighbours(path, "*.yaml"), fix=fix
    )


OTHERS = {
    "base_model": "axolotl",
    "model_name_or_path": "LLaMA-Factory",
    "fine_tune_type": "mlx-lm",
    "lora_parameters": "mlx-lm",
    "adapter_path": "mlx-lm",
}
"""Keys in the YAML of other programs, and the program."""


def _check_is_recipe(path: Path) -> None:
    """Refuse rows, the folder of a run and YAML of other programs, with the command for each."""
    problem, quoted = f"'{path}' is not a recipe.", shlex.quote(str(path))
    write = f"To write a recipe for it: peftkit init --data {quoted}"
    if path.suffix.lower() in READERS:
        raise ConfigError(problem, found="It is a data file.", fix=write)
    if path.is_dir() and (path / "recipe.yaml").is_file():
        raise ConfigError(
            problem,
            found="It is the folder of a run.",
            fix=f"Its recipe is {path / 'recipe.yaml'}; to start a new run from it: "
            f"peftkit train --from {quoted} --out DIR",
        )
    if path.is_dir() and any(file.suffix.lower() in READERS for file in path.iterdir()):
        raise ConfigError(problem, found="It is a folder with data files.", fix=write)
    if path.is_dir():
        raise ConfigError(
            problem,
            found="It is a folder.",
            fix="Give the file of a recipe. To list ready-made ones: peftkit recipes ls",
        )
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        return
    text = path.read_bytes().decode("utf-8", "replace")
    for key, program in OTHERS.items():
        if re.search(rf"(?m)^{key}\s*:", text):
            raise ConfigError(
                problem,
                found=f"It has the key {key}, like the YAML of {program}.",
                fix=f"To convert it: peftkit import-recipe {quoted} --out recipe.yaml",
            )


def headline(file: Path) -> str:
    """Return the first comment line of a recipe, which is its purpose."""
    with file.open(encoding="utf-8") as lines:
        return next(lines).lstrip("# ").strip()


@recipes.command("ls")
def list_recipes() -> None:
    """List the ready-made recipes with their purpose."""
    files = sorted(recipes_folder().glob("*.yaml"))
    width = max(len(file.stem) for file in files)
    for file in files:
        typer.echo(f"{file.stem:{width}}  {headline(file)}")
    note("Next: peftkit recipes cp NAME DEST; edit DEST; peftkit train DEST")


@recipes.command("show")
def show_recipe(name: RecipeName) -> None:
    """Print a ready-made recipe."""
    typer.echo(recipe_file(name).read_text(encoding="utf-8"), nl=False)


SCHEMA = "recipe.schema.json"
"""Schema file next to a recipe, with which editors complete and check its keys."""


def write_recipe(path: Path, text: str) -> None:
    """Write a recipe that names its schema for editors, and the schema next to it.

    Raises:
        OutputError: A file exists already or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(f"# yaml-language-server: $schema={SCHEMA}\n{text}")
        (path.parent / SCHEMA).write_text(_schema_text(), encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"'{path}' cannot be written.",
            found=error.strerror or str(error),
            fix="Choose a new name in an existing, writable folder.",
        ) from None


@recipes.command("cp")
@with_help
def copy_recipe(name: RecipeName, dest: Path) -> None:
    """Copy a ready-made recipe to edit it.

    Args:
        dest (DEST): A new file, or a folder.
    """
    source = recipe_file(name)
    target = dest / source.name if dest.is_dir() else dest
    write_recipe(target, source.read_text(encoding="utf-8"))
    typer.echo(target)
    note(f"Next: peftkit check {target}")


@base.command("ls")
def list_bases(as_json: Json = False) -> None:
    """List the quantised bases in the cache, with size and problems."""
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
    total = size(sum(entry.num_bytes for entry in stored))
    number = f"{len(stored)} packed base{'' if len(stored) == 1 else 's'}"
    hint = "" if stored else " To add one: peftkit base pack MODEL"
    note(f"{number} in {store_folder()}, {total} in total.{hint}")


@base.command("rm")
@with_help
def remove_base(name: str) -> None:
    """Remove quantised bases from the cache; the models stay.

    Args:
        name (NAME): Name or model from `peftkit base ls`.
    """
    from peftkit.base.stored import remove_stored
    from peftkit.figures import size

    for entry in remove_stored(name):
        note(f"Removed {entry.folder.name} ({size(entry.num_bytes)}).")


@base.command("pack")
@with_help
def pack(
    model: str, quantize: str = "nf4", dtype: str = "auto", revision: str | None = None
) -> None:
    """Quantise a base into the cache, for runs that start in seconds.

    Args:
        model (MODEL): Hub id, folder or short name.
        quantize (KIND): nf4, fp4 or int8.
        dtype (DTYPE): bf16, fp16, fp32, auto.
        revision (NAME): Branch, tag or commit.
    """
    from peftkit_cli.render import Renderer

    with Renderer() as listener:
        from peftkit.base.stored import pack_base

        folder = pack_base(
            model, quantize=quantize, dtype=dtype, revision=revision, on_event=listener
        )
    typer.echo(str(folder))


def quickstart() -> None:
    """Train a small model in minutes, on two CPU cores.

    Prints scores before and after, and replaces the run in runs/quickstart.
    """
    script = recipes_folder() / "examples" / "quickstart.py"
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


def environment() -> dict[str, object]:
    """Return versions, processor and accelerators, for a bug report."""
    from importlib.metadata import distributions

    import torch

    from peftkit.figures import size
    from peftkit.forward.compiler import cpp_compiler
    from peftkit.inference.open_engine import fallbacks_here

    installed = {package.metadata["Name"]: package.version for package in distributions()}
    cards = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    gpus = [f"{c.name}, {size(c.total_memory)}, sm_{c.major}{c.minor}" for c in cards]
    others = [name for name in ("mps", "xpu") if getattr(torch, name).is_available()]
    return {
        "peftkit": installed.get("peftkit", "not installed"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "c++ compiler": cpp_compiler() or "none (needed to compile blocks on a CPU)",
        "accelerators": "; ".join([*gpus, *others]) or "none",
        "cuda": torch.version.cuda or "not in this build of torch",
        "fallbacks": " ".join(fallback.text for fallback in fallbacks_here()) or "none",
        "libraries": {name: installed[name] for name in LIBRARIES if name in installed},
    }
