"""The cache of encoded rows: a file is encoded once, stored as Arrow, and memory-mapped.

    records (records.py) -> examples (format.py) -> rows (encode.py) -> Arrow columns
        -> StoredRows -> View, PackedRows, batches (pack.py)

`encoded` returns the rows of a file. They are stored in the cache of Hugging Face datasets, in a
folder named by a hash of all their dependencies: the bytes of the file, the tokenizer, the
template, the settings, and the encoding code. A second start therefore encodes nothing. A complete
folder gets its final name by a rename. If several processes need the same rows, one encodes and the
others wait. The number of rows is not limited: each needs 8 to 24 bytes of memory
(docs/performance.md).

Arrow is used directly. `datasets.map` with the same encoder is not faster (20,000 conversations:
7.3 s against 7.1 s in one process, 4.4 s against 3.5 s in two) and takes five times the disk (76 MB
against 16 MB), because records must first be copied into a data set. Its fingerprint of an encoder
ignores the code of imported modules, and changes when the encoder caches something. It takes no
lock. It would replace the process pool and the file, but not the columns, counts and errors.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

from peftkit.data.readers import local_path
from peftkit.data.records import is_read_by_lines
from peftkit.data.rows.columns import DAMAGED, FACTS, ROWS, StoredRows, columns_of, feed
from peftkit.data.rows.encoder import RowEncoder
from peftkit.data.rows.workers import Block, blocks
from peftkit.errors import DataError, RunError
from peftkit.events import Listener, Notice, Progress, ignore
from peftkit.files.disk import alone

REREAD_BYTES = 256 << 20
"""Larger files with invalid rows are not read again to count all of them."""
ENCODING_PACKAGES = ("transformers", "tokenizers")


def encoded(
    where: str, encoder: RowEncoder, *, on_event: Listener = ignore, processes: int | None = None
) -> StoredRows:
    """Return the rows of a file or data set, from the cache if it has them.

    Args:
        processes: Number of encoding processes; by default one per core for a large file, else 1.

    Raises:
        DataError: Rows cannot be read or used; names them.
        RunError: The disk is full, or a process was killed.
    """
    name, num_lines = _cache_name(where, encoder)
    try:
        if name is None:  # unknown content: a file that is deleted with the process
            return _encode(where, None, num_lines, encoder, on_event, processes)
        folder = cache_folder() / name
        if (rows := _cached(where, folder, encoder)) is not None:
            return rows
        folder.parent.mkdir(parents=True, exist_ok=True)
        waiting = Notice(f"Another process encodes {where}; waiting for it.")
        with alone(folder, lambda: on_event(waiting)):
            if (rows := _cached(where, folder, encoder)) is not None:
                return rows  # the other process has encoded them
            return _encode(where, folder, num_lines, encoder, on_event, processes)
    except OSError as problem:
        raise RunError(
            f"cannot store the encoded rows of {where}",
            found=f"{problem}; they go to {cache_folder()}.",
            fix="Make room there, or set HF_HOME to a folder on a larger disk.",
        ) from problem


def cache_folder() -> Path:
    """Return the folder of encoded rows, within the cache of Hugging Face data sets."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets") / "peftkit"


def _cache_name(where: str, encoder: RowEncoder) -> tuple[str | None, int]:
    """Return a hash of everything that encoded rows depend on, or None, and the number of lines.

    Raises:
        DataError: The file cannot be read.
    """
    digest, num_lines = hashlib.sha256(), 0
    path = local_path(where)
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
    code = _code_hash(type(encoder).__module__)
    kind = (type(encoder).__qualname__, encoder.drops_invalid)
    settings = (path.suffix.lower(), *kind, code, encoder.key(where))
    digest.update(repr(settings).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:40], num_lines if is_read_by_lines(path) else 0


@cache
def _code_hash(module: str) -> str:
    """Return a hash of the encoding code: the package data/, and the encoder's package."""
    digest = hashlib.sha256()
    data, encoder = Path(__file__).parents[1], Path(str(sys.modules[module].__file__))
    tasks = data.parent / "tasks"
    for folder in sorted({data, tasks if tasks in encoder.parents else encoder.parent}):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest() + "".join(version(name) for name in ENCODING_PACKAGES)


def _cached(where: str, folder: Path, encoder: RowEncoder) -> StoredRows | None:
    """Open the rows of a folder; None if they are missing or damaged, or media files changed."""
    try:
        rows = StoredRows(where, folder, encoder.kind)
    except DAMAGED:
        return None
    return rows if rows.is_current else None


def _encode(
    where: str,
    folder: Path | None,
    num_lines: int,
    encoder: RowEncoder,
    on_event: Listener,
    processes: int | None,
) -> StoredRows:
    """Encode into a temporary folder; rename it once it is complete."""
    parent = cache_folder()
    parent.mkdir(parents=True, exist_ok=True)
    prefix = "making-" if folder is None else f"making-{folder.name}-"
    for stale in parent.glob(f"{prefix}*") if folder is not None else ():
        shutil.rmtree(stale, ignore_errors=True)  # left by a killed process
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        _write(temporary, where, encoder, num_lines, on_event, processes)
        if folder is None:
            return StoredRows(where, temporary, encoder.kind)
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or of changed media files
        temporary.rename(folder)
        return StoredRows(where, folder, encoder.kind)
    except DataError:
        _check_whole_file(where, encoder)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_whole_file(where: str, encoder: RowEncoder) -> None:
    """Raise the error that counts the invalid rows of the whole file, not of one block."""
    path = local_path(where)
    if not path.is_file() or path.stat().st_size <= REREAD_BYTES:
        records = [record for part in encoder.parts(where) for record in part()]
        if records:
            encoder.read(records, where)


def _write(
    folder: Path,
    where: str,
    encoder: RowEncoder,
    num_lines: int,
    on_event: Listener,
    processes: int | None,
) -> None:
    """Encode rows into a folder, with the facts that are summed over them.

    Raises:
        DataError: There are no rows, or they differ in a value that all rows must share.
    """
    import pyarrow as pa

    agreed: dict[str, str] = {}
    shared: dict[str, str] | None = None
    counts: Counter[str] = Counter()
    is_used: dict[str, bool] = {}
    num_read = num_rows = highest = 0
    digest = hashlib.sha256()
    with (
        pa.OSFile(str(folder / ROWS), "wb") as file,
        pa.ipc.new_stream(file, columns_of(encoder.kind).schema) as writer,
    ):
        for block in blocks(where, encoder, processes):
            agreed = agreed or block.agreed
            _check_agreed(agreed, block, where)
            shared = dict(
                block.shared.items() & (block.shared if shared is None else shared).items()
            )
            counts.update(block.counts)
            for name, used in block.fields.items():
                is_used[name] = used or is_used.get(name, False)
            num_read += block.num_read
            num_rows += len(block.batch)
            writer.write_batch(block.batch)
            highest = max(highest, columns_of(encoder.kind).highest_token(block.batch))
            feed(digest, block.batch)
            done = int(block.last.rpartition(":")[2]) if num_lines else num_read
            on_event(Progress(f"Encoding {where}", done, max(done, num_lines)))
    if not num_read:
        raise DataError(f"Cannot use {where}.", found="It holds no rows.")
    facts = {
        "agreed": agreed,
        "shared": shared,
        "counts": dict(counts),
        "drops": [*encoder.reasons],
        "unused": [name for name, used in is_used.items() if not used],
        "num_read": num_read,
        "num_rows": num_rows,
        "highest_token": highest,
        "num_bytes": (folder / ROWS).stat().st_size,
        "sha256": digest.hexdigest(),
    }
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _check_agreed(agreed: Mapping[str, str], block: Block, where: str) -> None:
    for name, value in block.agreed.items():
        if value != (first := agreed.get(name)):
            raise DataError(
                f"Cannot use {where}.",
                found=f"{block.first} has the {name} '{value}', the first row the {name} "
                f"'{first}'.",
                fix="Give rows of one kind, or set data.format.",
            )
