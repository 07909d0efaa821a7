"""Where encoded rows are kept: once for all runs whose rows are the same.

They lie in the cache of Hugging Face datasets, under a name made of all that they depend on: the
bytes of the data, the tokenizer, the template, the settings, and the code that encodes. So a second
start encodes nothing. They are written under another name and renamed when they are whole; of
several processes that need the same ones, one encodes and the others wait. Arrow is used directly,
which datasets brings: its own `map` cannot say which line is wrong, nor how far it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peftkit.data import load
from peftkit.data.columns import columns_of
from peftkit.data.encoding import Block, RowEncoder, blocks
from peftkit.data.lazy_rows import StoredRows, open_rows, write_rows
from peftkit.errors import DataError, RunError
from peftkit.events import Listener, Notice, Progress, ignore
from peftkit.files.folders import alone

REREAD_BYTES = 256 << 20
"""A larger file with wrong rows is not read again to count them all."""
CODE_OF_OTHERS = ("transformers", "tokenizers")


def encoded(
    where: str,
    encoder: RowEncoder,
    *,
    on_event: Listener = ignore,
    processes: int | None = None,
) -> StoredRows:
    """Return the rows of a file or data set, encoded now or before.

    Raises:
        DataError: Rows cannot be read or used; names them.
        RunError: The disk has no room for them.
    """
    name, num_lines = _name_of(where, encoder)
    try:
        if name is None:  # nothing tells its content: mapped, and gone with the process
            return _encode(where, None, num_lines, encoder, on_event, processes)
        folder = cache_folder() / name
        if (found := _kept(where, folder, encoder)) is not None:
            return found
        folder.parent.mkdir(parents=True, exist_ok=True)
        waiting = Notice(f"Another process encodes {where}; waiting for it.")
        with alone(folder, lambda: on_event(waiting)):
            if (found := _kept(where, folder, encoder)) is not None:
                return found  # another process was at it
            return _encode(where, folder, num_lines, encoder, on_event, processes)
    except OSError as problem:
        raise RunError(
            f"cannot keep the encoded rows of {where}",
            found=f"{problem}; they go to {cache_folder()}.",
            fix="Make room there, or set HF_HOME to a folder on a larger disk.",
        ) from problem


def cache_folder() -> Path:
    """Return where encoded rows are kept: beside the data sets of Hugging Face."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets") / "peftkit"


def _kept(where: str, folder: Path, encoder: RowEncoder) -> StoredRows | None:
    """Open the rows of a folder; None where they are not there, harmed, or of other files."""
    try:
        found = open_rows(where, folder, columns_of(encoder.kind))
    except (OSError, ValueError, KeyError):
        return None
    return found if found.is_current else None


def _encode(
    where: str,
    folder: Path | None,
    num_lines: int,
    encoder: RowEncoder,
    on_event: Listener,
    processes: int | None,
) -> StoredRows:
    """Encode into a folder of another name; rename it when it is whole."""
    parent, columns = cache_folder(), columns_of(encoder.kind)
    parent.mkdir(parents=True, exist_ok=True)
    prefix = "making-" if folder is None else f"making-{folder.name}-"
    for left in parent.glob(f"{prefix}*") if folder is not None else ():
        shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        found = _told(blocks(where, encoder, processes), where, num_lines, on_event)
        write_rows(where, temporary, columns, found)
        if folder is None:
            return open_rows(where, temporary, columns)
        shutil.rmtree(folder, ignore_errors=True)  # harmed, or of other files
        os.rename(temporary, folder)
        return open_rows(where, folder, columns)
    except DataError:
        _read_whole(where, encoder)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read_whole(where: str, encoder: RowEncoder) -> None:
    """Raise the error that counts all wrong rows of a file, not those of one block."""
    path = Path(where).expanduser()
    if not path.is_file() or path.stat().st_size <= REREAD_BYTES:
        records = [record for part in encoder.parts(where) for record in part()]
        if records:
            encoder.read(records, where)


def _told(
    found: Iterator[Block], where: str, num_lines: int, on_event: Listener
) -> Iterator[Block]:
    """Pass blocks on, and tell how far it is; what has to be the same in all of them is."""
    done, first = 0, None
    for block in found:
        first = first if first and first.agreed else block
        for name, value in block.agreed.items():
            if value != (other := first.agreed.get(name)):
                raise DataError(
                    f"Cannot use {where}.",
                    found=f"{block.first} has the {name} '{value}', the first row the {name} "
                    f"'{other}'.",
                    fix="Give rows of one kind, or set data.format.",
                )
        yield block
        done = int(block.last.rpartition(":")[2]) if num_lines else done + block.num_read
        on_event(Progress(f"Encoding {where}", done, max(done, num_lines)))


def _name_of(where: str, encoder: RowEncoder) -> tuple[str | None, int]:
    """Return a name made of all that encoded rows depend on, None if it is unknown; and lines.

    Raises:
        DataError: The file cannot be read.
    """
    digest, num_lines = hashlib.sha256(), 0
    path = Path(where).expanduser()
    if path.is_file():
        try:
            with open(path, "rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
                    num_lines += chunk.count(b"\n")
        except OSError as problem:
            raise DataError(f"Cannot read {where}.", found=str(problem)) from None
    elif (stamp := encoder.stamp(where)) is not None:
        digest.update(repr(stamp).encode())
    else:
        return None, 0
    code = _code_of(type(encoder).__module__)
    told = (path.suffix.lower(), type(encoder).__qualname__, code, encoder.key(where))
    digest.update(repr(told).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:40], num_lines if load.is_read_by_lines(path) else 0


@lru_cache
def _code_of(module: str) -> str:
    """Return a hash of the code that encodes: of this package, and of the encoder's own."""
    digest = hashlib.sha256()
    own = {Path(__file__).parent, Path(str(sys.modules[module].__file__)).parent}
    for folder in sorted(own):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest() + "".join(version(name) for name in CODE_OF_OTHERS)


def tokenizer_key(tokenizer: Any) -> tuple[object, ...]:
    """Return what the tokens of a text depend on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    for how_called in ("truncation", "padding"):  # what the last call left there
        words.pop(how_called, None) if backend is not None else None
    return (
        type(tokenizer).__name__,
        hashlib.sha256(json.dumps(words).encode()).hexdigest(),
        sorted(tokenizer.special_tokens_map.items()),
        tokenizer.chat_template,
        getattr(tokenizer, "init_kwargs", {}).get("add_bos_token"),
    )
