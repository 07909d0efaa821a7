"""A base packed into the cache, from where `load_base` opens it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from peftkit.base import pretrained
from peftkit.base.build import build, convert
from peftkit.base.load import DTYPES, BaseConfig, fast_dtype
from peftkit.base.locate import locate
from peftkit.base.mapped import packed_skeleton
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.storage_format import StorageFormat
from peftkit.base.store import (
    StoreKey,
    being_packed,
    folder_of,
    keep,
    num_bytes,
    room_for,
    storable,
)
from peftkit.config.schema import from_dict
from peftkit.errors import BaseError, RunError
from peftkit.events import Listener, Notice, Stage, ignore
from peftkit.execution.environment import default_device


def pack_base(
    model: str,
    *,
    quantize: str = "nf4",
    dtype: str = "auto",
    revision: str | None = None,
    agree: Callable[[str], bool] = lambda sizes: False,
    on_event: Listener = ignore,
) -> Path:
    """Pack a base of any size into the cache, from where `load_base` opens it.

    Args:
        agree: Asked before anything is downloaded or packed, if little of the disk would be left.

    Raises:
        BaseError: It cannot be packed, or does not fit into memory.
        OutputError, RunError: The cache cannot be written, the disk has too little room, or so
            little that somebody has to agree.
    """
    from_dict(
        BaseConfig, {"model": model, "quantize": quantize, "dtype": dtype}, "peftkit base pack"
    )
    place = default_device()
    form = StorageFormat(quantize, True, DTYPES.get(dtype) or fast_dtype(place), place, False)
    location = convert(locate(model, revision), on_event)
    location, revision = pretrained.reachable(location, revision)
    config = pretrained.check_config(location, revision, CAUSAL_LM)
    source = storable(location, revision, CAUSAL_LM, config, form)
    if source is None:
        raise BaseError(
            f"{location.name} cannot be kept packed.",
            found="It is packed by bitsandbytes already, or quantize is none.",
            fix="Give a model that is not, and --quantize nf4, fp4 or int8.",
        )
    sizes, is_tight = room_for(num_bytes(packed_skeleton(config, CAUSAL_LM, form)))
    if is_tight and not agree(sizes):
        raise RunError(
            f"the packed base {location.name} would leave little of the disk.",
            found=sizes,
            fix="Agree with --yes, make room (peftkit base ls, peftkit base rm), or set "
            "PEFTKIT_CACHE to a folder on another disk.",
        )
    on_event(Notice(sizes))
    on_event(Stage(f"Packing the base {location.name}"))
    folder = folder_of(source, form, CAUSAL_LM)
    wanted = StoreKey(location.name, source, CAUSAL_LM, config, form)
    with being_packed(folder, on_event) as is_there:
        if not is_there:
            with pretrained.oom_as_error(location.name):
                built = build(location, revision, CAUSAL_LM, config, form, on_event=on_event)
            keep(folder, built, wanted)
    return folder
