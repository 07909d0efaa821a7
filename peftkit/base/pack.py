"""A base packed into the cache, from where `load_base` opens it."""

from __future__ import annotations

from pathlib import Path

from peftkit.base import pretrained
from peftkit.base.build import build, convert
from peftkit.base.form import Form
from peftkit.base.load import DTYPES, BaseConfig, default_device, fast_dtype
from peftkit.base.locate import locate
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.store import Wanted, folder_of, keep, storable
from peftkit.config.schema import from_dict
from peftkit.errors import BaseError
from peftkit.events import Listener, Stage, ignore


def pack_base(
    model: str,
    *,
    quantize: str = "nf4",
    dtype: str = "auto",
    revision: str | None = None,
    on_event: Listener = ignore,
) -> Path:
    """Pack a base of any size into the cache, from where `load_base` opens it.

    Raises:
        BaseError: It cannot be packed.
        OutputError, RunError: The cache cannot be written, or the disk is full.
    """
    from_dict(
        BaseConfig, {"model": model, "quantize": quantize, "dtype": dtype}, "peftkit base pack"
    )
    place = default_device()
    form = Form(quantize, True, DTYPES.get(dtype) or fast_dtype(place), place, False)
    location = convert(locate(model, revision), on_event)
    location, revision = pretrained.reachable(location, revision)
    config = pretrained.check_config(location, revision, CAUSAL_LM)
    source = storable(location, revision, CAUSAL_LM, config, form)
    if source is None:
        raise BaseError(
            f"{location.name} cannot be kept packed.",
            found="It is a GGUF file, quantised already, or quantize is none.",
            fix="Give a model in 16 or 32 bits, and --quantize nf4, fp4 or int8.",
        )
    on_event(Stage(f"Packing the base {location.name}"))
    built = build(location, revision, CAUSAL_LM, config, form, on_event=on_event)
    folder = folder_of(source, form, CAUSAL_LM)
    wanted = Wanted(location.name, source, CAUSAL_LM, config, form)
    keep(folder, built, wanted)
    return folder
