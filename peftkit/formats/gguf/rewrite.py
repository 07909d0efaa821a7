"""A GGUF file with some tensors changed; all else is copied to the byte.

A tensor may get another type. Those behind it move then, by whole steps of the file's alignment,
and nothing of the header changes but types and offsets, which are numbers of fixed size.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from peftkit.errors import AdapterError, RunError
from peftkit.files import disk
from peftkit.formats.gguf.header import GGUFHeader, GGUFTensor, read_header
from peftkit.formats.gguf.tensors import all_kinds

PIECE = 16 << 20

Layout = Mapping[str, GGUFTensor]


def laid_out(path: Path, header: GGUFHeader, types: Mapping[str, str]) -> Layout:
    """Return where each tensor will be, in the order of the file.

    Args:
        types: The new type of each tensor that changes, by its name in the gguf library.

    Raises:
        AdapterError: Tensors lie over one another.
    """
    kinds = all_kinds()
    numbers = {name: number for number, (name, _, _) in kinds.items()}
    found, shift, end = {}, 0, 0
    for name, entry in sorted(header.tensors.items(), key=lambda item: item[1].start):
        if entry.start < end:
            raise AdapterError(f"cannot change {path}", found=f"{name} lies over another tensor.")
        end = entry.start + entry.num_bytes
        kind = numbers[types[name]] if name in types else entry.kind
        _, per_block, block_bytes = kinds[kind]
        num_bytes = entry.num_values // per_block * block_bytes
        start = entry.start + shift
        found[name] = replace(entry, kind=kind, start=start, num_bytes=num_bytes)
        shift += _padded(num_bytes, header) - _padded(entry.num_bytes, header)
    return found


@contextlib.contextmanager
def rewritten(
    path: Path,
    source: BinaryIO,
    header: GGUFHeader,
    layout: Layout,
    changed: Collection[str],
    packed: Callable[[str], Tensor],
    out: Path,
    on_bytes: Callable[[int, int], None],
) -> Iterator[None]:
    """Write the changed file and read it again; it is in its place when the block ends well.

    Args:
        path, source, header: The file as it is.
        layout: See `laid_out`.
        changed: Names of the tensors that change. packed: Makes the bytes of one, uint8.
        on_bytes: Told how many bytes are written, of how many.

    Raises:
        OutputError: It cannot be written.
        RunError: The disk is full, or what was written is not what was to be written.
    """
    size = source.seek(0, 2)
    total = size + sum(
        _padded(entry.num_bytes, header) - _padded(header.tensors[name].num_bytes, header)
        for name, entry in layout.items()
    )
    disk.check_space(out.parent, total)
    with disk.replacing(out, total) as file:

        def write(data: Any) -> None:
            file.write(data)
            on_bytes(file.tell(), total)

        at, digests = 0, {}
        for name, entry in layout.items():
            if name not in changed:
                continue
            old = header.tensors[name]
            for piece in _pieces(path, source, at, old.start):
                write(piece)
            data = packed(name).numpy().data
            assert len(data) == entry.num_bytes, name
            digests[name] = hashlib.sha256(data).digest()
            write(data)
            at = old.start + old.num_bytes
            if entry.kind != old.kind:  # its padding is another one
                file.write(bytes(_padded(entry.num_bytes, header) - entry.num_bytes))
                at = min(size, old.start + _padded(old.num_bytes, header))
        for piece in _pieces(path, source, at, size):
            write(piece)
        for name, entry in layout.items():
            if entry != header.tensors[name]:
                file.seek(entry.info)
                file.write(struct.pack("<IQ", entry.kind, entry.start - header.payload))
        file.flush()
        _check(path, source, header, Path(file.name), digests, layout)
        yield


def _check(
    path: Path,
    source: BinaryIO,
    header: GGUFHeader,
    written: Path,
    digests: Mapping[str, bytes],
    layout: Layout,
) -> None:
    """Compare what was written, by its own header, with the source and with what was packed.

    Raises:
        RunError: Names what differs.
    """
    with disk.open_regular(written) as file:
        found = read_header(written, file, of="model", kinds=all_kinds())
        strange = [] if found.keys == header.keys else ["the keys"]
        strange += sorted(found.tensors.keys() ^ header.tensors.keys())
        first = min(entry.info for entry in header.tensors.values())
        if not _same(_pieces(path, source, 0, first), _pieces(written, file, 0, first)):
            strange.append("the header")
        for name in found.tensors.keys() & header.tensors.keys():
            old, new = header.tensors[name], found.tensors[name]
            pieces = _pieces(written, file, new.start, new.start + new.num_bytes)
            if name in digests:
                digest = hashlib.sha256()
                for piece in pieces:
                    digest.update(piece)
                same = digest.digest() == digests[name] and new == layout[name]
            else:
                theirs = _pieces(path, source, old.start, old.start + old.num_bytes)
                same = new.kind == old.kind and _same(pieces, theirs)
            if not same or new.shape != old.shape:
                strange.append(name)
    if strange:
        raise RunError(
            f"what was written is not {path} with the adapter in it",
            found=f"{', '.join(strange[:5])} came out otherwise",
            fix="Report this with the output of: peftkit env",
        )


def _same(ours: Iterator[bytes], theirs: Iterator[bytes]) -> bool:
    return all(a == b for a, b in zip(ours, theirs, strict=True))


def _pieces(path: Path, file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """Yield a stretch of a file, piece by piece.

    Raises:
        AdapterError: The file became shorter.
    """
    while start < end:
        file.seek(start)
        piece = file.read(min(PIECE, end - start))
        if not piece:
            raise AdapterError(f"cannot read {path}", found="It became shorter while it was read.")
        start += len(piece)
        yield piece


def _padded(num_bytes: int, header: GGUFHeader) -> int:
    return -(-num_bytes // header.alignment) * header.alignment
