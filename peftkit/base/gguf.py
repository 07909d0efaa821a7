"""GGUF files: their tensors, each dequantised when it is read, and their copies in the cache.

transformers dequantises the complete file in float32 before it fills a model. Here its loader gets
a mapping of names to tensors that are dequantised one by one as it reads them. Its own code
converts names and layouts, so the values are the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

from peftkit.base.build import forget_quantization, load_model
from peftkit.base.locate import Location
from peftkit.base.pack import LoaderArguments, PackingConfig, PackingLoader
from peftkit.base.pretrained import load_tokenizer, quiet
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.request import request_of
from peftkit.base.skeleton import on_meta
from peftkit.errors import OutputError
from peftkit.events import Listener, Notice, Progress, Stage, ignore
from peftkit.files.disk import alone, new_folder
from peftkit.settings import BaseConfig

CHUNK = 1 << 22
"""Values that are dequantised at a time: their scratch takes several times their own memory."""


class GGUFLoader(PackingLoader):
    """Packs, casts or keeps each parameter of a GGUF file."""

    def arguments(self) -> LoaderArguments:
        """Return the arguments with which transformers loads the file's tensors."""
        request = self.request
        bare = on_meta(request.config, request.purpose, torch.float32)
        with parsed_once(request.location):
            tensors, conversions = open_gguf(request.location.gguf_path, bare)
        kwargs = {"state_dict": tensors, "config": request.config, "dtype": torch.float32}
        return type(bare), None, kwargs | {"quantization_config": PackingConfig(self, conversions)}


class LazyTensor:
    """A tensor that is computed when it is indexed, `tensor[...]`, as transformers' loader does."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make

    def __getitem__(self, index: Any) -> Tensor:
        return self._make()[index]


def open_gguf(path: Path, model: nn.Module) -> tuple[dict[str, LazyTensor], list[Any] | None]:
    """Return the tensors of a GGUF file, in float32, none of them read yet.

    Args:
        model: What they are for, without data.

    Returns:
        The tensors by name, and their conversions; None where names are the model's own and
        transformers applies its usual conversions.

    Raises:
        ValueError, KeyError, NotImplementedError: The file is damaged, or of an architecture or a
            kind of numbers that transformers or the package gguf do not know.
    """
    import gguf

    reader: Any = gguf.GGUFReader(path)
    field = reader.get_field("general.architecture")
    architecture = str(field.contents())
    config: Any = model.config
    if (conversions := _conversions(architecture, config)) is not None:
        return {t.name: LazyTensor(partial(_dequantised, t)) for t in reader.tensors}, conversions
    kind = transformers_gguf.TENSOR_PROCESSORS.get(architecture, transformers_gguf.TensorProcessor)
    processor = kind(config=config.to_dict())
    names = transformers_gguf.get_gguf_hf_weights_map(model, processor)
    parts: dict[str, list[Any]] = {}  # halves of stacked experts are tensors of their own
    for tensor in reader.tensors:
        name = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))
        if name is not None:
            parts.setdefault(name, []).append(tensor)
    return {
        name: LazyTensor(partial(_processed, name, tensors, processor, names))
        for name, tensors in parts.items()
    }, None


@contextmanager
def parsed_once(location: Location) -> Iterator[None]:
    """Parse a base's GGUF file once for all its readers in this context.

    It takes seconds, and transformers parses the file for the config and again for the tokenizer.
    """
    if importlib.util.find_spec("gguf") is None:
        yield
        return
    import gguf

    module: Any = gguf
    plain, parsed = module.GGUFReader, {}

    def reader(path: Any, *more: Any) -> Any:
        if str(path) not in parsed:
            parsed[str(path)] = plain(path, *more)
        return parsed[str(path)]

    module.GGUFReader = reader
    try:
        yield
    finally:
        module.GGUFReader = plain


def convert(location: Location, on_event: Listener) -> Location:
    """Convert a package's GGUF file into a folder in the cache; return where that is.

    Raises:
        BaseError: The file cannot be read.
        OutputError: The cache cannot be written.
    """
    target = location.convert_to
    assert target is not None
    waiting = Notice(f"Another process is writing {target}; this one waits for it.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with alone(target, lambda: on_event(waiting)):
            if not target.exists():
                _convert_into(target, location, on_event)
    except OSError as error:
        raise OutputError(
            f"cannot write {target}.", found=str(error), fix="Set PEFTKIT_CACHE to another folder."
        ) from error
    return replace(location, source=str(target), gguf=None, convert_to=None)


def _convert_into(target: Path, location: Location, on_event: Listener) -> None:
    on_event(Stage(f"Converting {location.gguf} into {target} (once)"))
    doing = f"Converting {location.gguf}"
    settings = BaseConfig(model=location.name, dtype="fp32")
    with parsed_once(location):
        tokenizer = load_tokenizer(location, on_event)
        on_event(Progress(doing, 2, 4))
        request = request_of(settings, CAUSAL_LM, location, torch.device("cpu"))
        model, _ = load_model(request, GGUFLoader(request, on_event=ignore), on_event)
    on_event(Progress(doing, 3, 4))
    forget_quantization(model)
    with new_folder(target) as folder:
        with quiet():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        mode = (folder / "config.json").stat().st_mode  # safetensors writes for its owner alone
        for path in folder.iterdir():
            path.chmod(mode)
    on_event(Progress(doing, 4, 4))


def _conversions(architecture: str, config: Any) -> list[Any] | None:
    """Return the conversions of an architecture that transformers loads tensor by tensor itself."""
    if importlib.util.find_spec("transformers.integrations.gguf") is None:  # before 5.2
        return None
    from transformers.integrations.gguf.utils import (
        get_gguf_conversion_mapping,
        is_gguf_arch_supported,
    )

    if not is_gguf_arch_supported(architecture):
        return None
    return list(get_gguf_conversion_mapping(architecture, config))


def _dequantised(tensor: Any) -> Tensor:
    """Return a reader's tensor in float32, in new memory."""
    from gguf.quants import dequantize

    shape = tuple(int(number) for number in reversed(tensor.shape))
    values = torch.empty(shape, dtype=torch.float32)
    rows, out = tensor.data.reshape(-1, tensor.data.shape[-1]), values.view(-1, shape[-1]).numpy()
    step = max(CHUNK // shape[-1], 1)
    for start in range(0, len(rows), step):
        out[start : start + step] = dequantize(rows[start : start + step], tensor.tensor_type)
    return values


def _processed(name: str, tensors: list[Any], processor: Any, names: dict[str, str]) -> Tensor:
    """Return the parameter that transformers' processor makes of a file's tensors."""
    parameters: dict[str, Tensor] = {}
    for tensor in tensors:
        result = processor.process(
            weights=_dequantised(tensor).numpy(),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": parameters},
        )
        if result.name in names:  # else it has put it there itself
            parameters[names[result.name]] = torch.from_numpy(result.weights).contiguous()
    return parameters[name]
