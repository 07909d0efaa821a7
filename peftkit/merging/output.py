"""Model folders that are written completely or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from peftkit.errors import OutputError, first_few
from peftkit.files.folders import new_folder


@contextmanager
def new_model_folder(out: Path, overwrite: bool, sources: Sequence[Path]) -> Iterator[Path]:
    """Yield an empty folder whose files become those of `out` when the block ends well.

    Raises:
        OutputError: `out` is not empty, is what is read from, or cannot be written.
    """
    asked = f"cannot write the merged model to {out}"
    if any(out.resolve() == source.resolve() for source in sources if str(source) not in ("", ".")):
        raise OutputError(
            asked, found="it is one of the source folders", fix="Choose another folder."
        )
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        names = first_few(sorted(path.name for path in out.iterdir()), 5, ", ")
        raise OutputError(asked, found=f"it holds {names}", fix="Choose a new or an empty folder.")
    with new_folder(out, last="config.json", replaced=_is_weight) as folder:
        yield folder


def _is_weight(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json", ".bin"))
