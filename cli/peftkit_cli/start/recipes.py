"""The ready-made recipes of the installed package or a checkout."""

from __future__ import annotations

from pathlib import Path

from peftkit.errors import ConfigError, did_you_mean


def recipes_folder() -> Path:
    """Return the folder of the recipes in the installed package or a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def recipe_file(name: str) -> Path:
    """Return the file of a ready-made recipe.

    Raises:
        ConfigError: There is no recipe with this name.
    """
    files = {file.stem: file for file in sorted(recipes_folder().glob("*.yaml"))}
    stem = name.removesuffix(".yaml")
    if stem not in files:
        raise ConfigError(
            f"there is no recipe named '{name}'.",
            found=f"The recipes are: {', '.join(files)}. {did_you_mean(stem, files)}".rstrip(),
            fix="To list them with their purpose: peftkit recipes ls",
        )
    return files[stem]
