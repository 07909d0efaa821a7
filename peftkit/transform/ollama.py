"""An adapter as a folder from which `ollama create` makes a model."""

from __future__ import annotations

from pathlib import Path

from peftkit.base.locate import locate
from peftkit.base.pretrained import load_tokenizer
from peftkit.data.encode import default_style
from peftkit.errors import AdapterError, OutputError, first_few
from peftkit.events import Listener, Notice
from peftkit.files import disk
from peftkit.formats.gguf.convert import export_gguf
from peftkit.formats.ollama import modelfile
from peftkit.formats.peft.folder import read_adapter

ADAPTER, MODELFILE = "adapter.gguf", "Modelfile"


def check_ollama_folder(out: Path, *, force: bool) -> None:
    """Refuse a folder that is taken.

    Raises:
        OutputError: `out` is a file, holds something else, or an export and not `force`.
    """
    if not out.exists():
        return
    asked = f"cannot write an Ollama model to {out}"
    if not out.is_dir():
        raise OutputError(asked, found="It is not a folder.", fix="Choose another folder.")
    names = sorted(path.name for path in out.iterdir())
    if others := [name for name in names if name not in (ADAPTER, MODELFILE)]:
        held = first_few(others, 5, ", ")
        raise OutputError(asked, found=f"It holds {held}.", fix="Choose another folder.")
    if names and not force:
        raise OutputError(
            asked, found="It holds one already.", fix="Choose another folder, or add --force."
        )


def write_ollama(
    source: Path, out: Path, *, base: str | None, dtype: str, on_event: Listener
) -> None:
    """Write the GGUF adapter, and after it the Modelfile.

    Args:
        source: Folder of the adapter.
        base: Where its base is; by default the one recorded.
        dtype: As of `export_gguf`.

    Raises:
        AdapterError: As `export_gguf`.
        BaseError: The base, or its tokenizer, is not found.
        OutputError: It cannot be written.
    """
    known = read_adapter(source).provenance
    name = base or known.base
    if not name:
        raise AdapterError(
            f"{source} does not say which base it belongs to",
            fix="Name the base it was trained on with --base MODEL.",
        )
    location = locate(name)
    tokenizer = load_tokenizer(location, None if base else known.revision, on_event)
    start = "./BASE.gguf"
    if location.gguf or location.is_local:
        start = str((Path(location.source).expanduser() / (location.gguf or "")).resolve())
    text, notes = modelfile(
        start, f"./{ADAPTER}", tokenizer, known.prompt_style or default_style(tokenizer)
    )
    if start == "./BASE.gguf":
        notes.append(f"Put {name} as a GGUF file beside the Modelfile, as BASE.gguf.")
    disk.writable_folder(out)
    (out / MODELFILE).unlink(missing_ok=True)
    notes += export_gguf(source, out / ADAPTER, base=base, dtype=dtype, force=True)
    disk.write_text(text, out / MODELFILE)
    for note in notes:
        on_event(Notice(note))
