"""Pack weights while they are loaded, one at a time, on their device.

transformers loads a model parameter by parameter, and stacks and splits tensors of the files. A
registered quantizer receives each complete parameter and passes it to a `PackingLoader`, which
samples it for the fingerprint and packs it or casts it to its dtype.

Modules stay unchanged until all weights are loaded, because transformers checks missing, misshapen
and tied weights at the end. Then `PackingLoader.install` installs the packed weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from peftkit.base.pretrained import check_weights, loader_arguments, without_quantization
from peftkit.base.request import BaseRequest
from peftkit.events import Listener, Progress
from peftkit.kernels.device import trim_malloc
from peftkit.model.places import head_modules
from peftkit.quant.layers import Job, Packing, pack
from peftkit.quant.quantize import (
    install_packed,
    not_quantizable,
    stores_transposed,
    weights_to_pack,
)

SAMPLES = 64
"""Sampled values per tensor."""
VOLATILE = {
    *("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"),
    *("quantization_config", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("id2label", "label2id", "num_labels", "problem_type"),
}
"""Config fields that do not affect the computation; names that start with _ do not either."""


def fingerprint(
    model: nn.Module, *, without: Collection[str] = (), samples: Mapping[int, bytes] | None = None
) -> str:
    """Return "sha256:..." of a model's config and of a fixed sample of each of its tensors.

    It does not depend on the precision or the device of the model (values are rounded to 8 bits of
    mantissa), but on the weights. Compute it before quantising.

    Args:
        without: Names of tensors to leave out, such as a new head's.
        samples: id(tensor) to its `sample` before it was packed or rounded.
    """
    config = getattr(model, "config", None)
    settings = _settings(config.to_diff_dict() if config is not None else {})
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if name not in without:
            digest.update(f"{name} ".encode())
            before = (samples or {}).get(id(tensor))
            digest.update(sample(tensor) if before is None else before)
    return f"sha256:{digest.hexdigest()}"


def sample(tensor: Tensor) -> bytes:
    """Return the fingerprint's sample of a tensor: its shape and some of its values."""
    positions = sample_positions(tensor.shape, tensor.device)
    return shown(tensor.shape, tensor.detach().reshape(-1)[positions])


def sample_positions(shape: torch.Size, device: torch.device) -> Tensor:
    """Return the positions of the sampled values in the flattened tensor."""
    number = min(SAMPLES, shape.numel())
    return torch.arange(number, device=device) * shape.numel() // max(number, 1)


def shown(shape: torch.Size, values: Tensor) -> bytes:
    """Return the fingerprint's sample of a tensor from the values at its positions."""
    rounded = values.to(torch.bfloat16).cpu().view(torch.int16)
    return f"{tuple(shape)}".encode() + rounded.numpy().tobytes()


def _settings(value: object) -> Any:
    """Return the JSON-serialisable fields of a config that affect the computation."""
    if isinstance(value, Mapping):
        return {
            str(key): _settings(item)
            for key, item in value.items()
            if key not in VOLATILE and not str(key).startswith("_")
        }
    if isinstance(value, list | tuple):
        return [_settings(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


TRIM_BYTES = 1 << 26
"""Loaded bytes after which freed memory is returned to the system."""
METHOD = "peftkit"

LoaderArguments = tuple[Any, str | None, dict[str, Any]]
"""A class of transformers; source and keyword arguments of its `from_pretrained`."""


def folder_arguments(request: BaseRequest) -> LoaderArguments:
    """Return the arguments for loading a folder or files of the hub with transformers.

    Raises:
        BaseError: The folder holds no weights that can be read without running code.
    """
    location = request.location
    check_weights(location)
    kwargs = loader_arguments(location) | {"config": request.config, "use_safetensors": True}
    kwargs["dtype"] = "auto" if request.dtype == torch.float16 else request.dtype
    return getattr(transformers, request.purpose.auto_class), location.source, kwargs


class _Loaded(NamedTuple):
    """A parameter of the model, with its sample for the fingerprint and its packing, if any."""

    parameter: nn.Parameter
    sample: bytes
    packing: Packing | None


class PackingLoader:
    """Packs, casts or keeps each parameter of one model while it is loaded.

    Args:
        put: Moves each finished tensor to its final storage; by default it is not moved.
    """

    reads_tables: ClassVar[bool] = False
    """Whether the files may hold the token embedding and the output layer packed."""

    def __init__(
        self,
        request: BaseRequest,
        *,
        put: Callable[[Tensor], Tensor] | None = None,
        on_event: Listener,
    ) -> None:
        self.request, self.on_event = request, on_event
        self._packs = request.settings.quantize != "none"
        self._put = put or (lambda tensor: tensor)
        self._shapes: dict[str, torch.Size] = {}
        self._jobs: dict[str, tuple[Job, str]] = {}
        self._head: tuple[str, ...] = ()
        self._in_float32: Callable[[str], bool] = lambda name: False
        self._loaded: dict[int, _Loaded] = {}  # by id, which is unique while the parameter lives
        self._problems: list[str] = []
        self._done = self._total = 0

    @classmethod
    def reads(cls, request: BaseRequest) -> bool:
        """Return whether a loader of another package reads this base's files."""
        return False

    def arguments(self) -> LoaderArguments:
        """Return the arguments for loading the model through this loader."""
        cls, source, kwargs = folder_arguments(self.request)
        kwargs["config"] = without_quantization(self.request.config)
        return cls, source, kwargs | {"quantization_config": PackingConfig(self)}

    def begin(self, model: nn.Module) -> None:
        """Collect names, shapes and weights to pack from the model without weights."""
        named = model.named_parameters(remove_duplicate=False)
        self._shapes = {name: p.shape for name, p in named if p.is_floating_point()}
        with _as_tied(model):
            self._total = sum(p.numel() * p.element_size() for p in model.parameters())
        self._in_float32 = kept_in_float32(model, self.request.dtype)
        self._head = head_modules(model) if self.request.purpose.head is not None else ()
        if self._packs:
            self._find_jobs(model)

    def _find_jobs(self, model: nn.Module) -> None:
        """Set the weights to pack, or to keep as codes."""
        settings = self.request.settings
        with _as_tied(model):
            jobs = weights_to_pack(settings, model, self._head, tables=self.reads_tables)
        self._jobs = {f"{job[0]}.{job[2]}": (job, kind) for job, kind in jobs.items()}

    def bytes_per_value(self, name: str) -> float | None:
        """Return the bytes per value of a packed parameter, scales included; None if unpacked."""
        if not self._packs or name not in self._jobs:
            return None
        return 1.01 if self._jobs[name][1] == "int8" else 0.57

    def takes(self, name: str) -> bool:
        """Return whether `take` handles a parameter."""
        return name in self._shapes

    def samples(self) -> dict[int, bytes]:
        """Return the fingerprint's sample of each parameter, by the parameter's id."""
        return {key: loaded.sample for key, loaded in self._loaded.items()}

    def take(self, name: str, value: Tensor) -> Tensor:
        """Return the model's parameter for a value of the files."""
        self._advance(value)
        if value.shape != self._shapes[name]:
            del self._shapes[name]  # transformers reports the mismatch
            return value
        sampled = sample(value)
        if not (name.startswith(self._head) and self._head) and not self._in_float32(name):
            value = value.to(self.request.dtype)
        if self._packs and name in self._jobs:
            return self._pack(name, value, sampled)
        return self._keep(self._put(value), sampled)

    def _pack(self, name: str, value: Tensor, sampled: bytes) -> nn.Parameter:
        (_, module, leaf), kind = self._jobs[name]
        if stores_transposed(module, leaf):
            value = value.t()
        try:
            packed, packing = pack(
                value.to(self.request.packs_on or self.request.device),
                kind,
                double_quant=self.request.settings.double_quant,
            )
        except ValueError as error:
            self._problems.append(f"{name} of {type(module).__name__}: {error}")
            return self._keep(value, sampled)
        packed = self._put(packed)
        for scale in packing.parameters():
            scale.data = self._put(scale.data)
        return self._keep(packed, sampled, packing)

    def _keep(self, value: Tensor, sampled: bytes, packing: Packing | None = None) -> nn.Parameter:
        parameter = nn.Parameter(value, requires_grad=False)
        self._loaded[id(parameter)] = _Loaded(parameter, sampled, packing)
        return parameter

    def install(self, model: nn.Module) -> None:
        """Replace layers by layers with packed weights; raises BaseError for failed weights."""
        if self._problems:
            raise not_quantizable(model, self.request.settings.quantize, self._problems)
        packings = {key: item.packing for key, item in self._loaded.items() if item.packing}
        jobs = [job for job, _ in self._jobs.values()]
        install_packed(model, jobs, packings, self.request.device)
        self._loaded.clear()

    def _advance(self, value: Tensor) -> None:
        before = self._done
        self._done = min(before + value.nbytes, self._total)
        if before // TRIM_BYTES != self._done // TRIM_BYTES:
            trim_malloc()
        self.on_event(Progress("Loading the base", self._done, self._total, "B"))


def kept_in_float32(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a function that tells whether a model keeps a parameter in float32."""
    plan = [model._keep_in_fp32_modules_strict or ()]
    if dtype == torch.float16:
        plan.append(model._keep_in_fp32_modules or ())
    keep = {f".{name}." for names in plan for name in names}
    return lambda name: any(k in f".{name}." for k in keep)


@contextmanager
def _as_tied(model: nn.Module) -> Iterator[None]:
    """Tie a model's weights within the context; transformers ties them only after loading."""
    before = []
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        path, _, name = target.rpartition(".")
        owner = model.get_submodule(path)
        if name in owner._parameters:
            before.append((owner, name, owner._parameters[name]))
            owner._parameters[name] = model.get_parameter(source)
    try:
        yield
    finally:
        for owner, name, parameter in reversed(before):
            owner._parameters[name] = parameter


@register_quantization_config(METHOD)
class PackingConfig(QuantizationConfigMixin):
    """Carries a `PackingLoader` through transformers' loader.

    Args:
        conversions: Conversions of the files' tensors; by default those of the model's class.
    """

    method = METHOD

    def __init__(self, loader: PackingLoader, conversions: list[object] | None = None) -> None:
        self.quant_method = self.method  # type: ignore[assignment]  # any registered name
        self.loader, self.conversions = loader, conversions

    def __deepcopy__(self, memo: dict[int, object]) -> PackingConfig:
        return self

    def to_dict(self) -> dict[str, object]:
        return {"quant_method": self.method}


@register_quantizer(METHOD)
class PackingQuantizer(HfQuantizer):
    """Passes every loaded parameter to the `PackingLoader`."""

    requires_calibration = False
    quantization_config: PackingConfig

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = False

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: object) -> None:
        self.quantization_config.loader.begin(model)

    def update_weight_conversions(self, weight_conversions: object, model: nn.Module) -> Any:
        """Return the conversions of the files' tensors, which run before the loader."""
        conversions = self.quantization_config.conversions
        return weight_conversions if conversions is None else conversions

    def _process_model_after_weight_loading(self, model: Any, **kwargs: object) -> Any:
        if self.quantization_config.conversions is not None:
            model._weight_conversions = None  # save it like any model of its class
        return model

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: object) -> bool:
        return self.quantization_config.loader.takes(param_name)

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        """Return the bytes that transformers reserves for each value on a GPU."""
        loader = self.quantization_config.loader
        return loader.bytes_per_value(param_name) or param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        return _Take(self.quantization_config.loader)

    def is_serializable(self, *args: object) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class LoadingAborted(BaseException):
    """Aborts transformers' loading, which would continue after an Exception."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Take(ConversionOps):
    def __init__(self, loader: PackingLoader) -> None:
        self.loader = loader

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the loader's parameters."""
        parameters: dict[str, Any] = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            value = value.pop() if isinstance(value, list) else value
            try:
                takes = self.loader.takes(name)
                parameters[name] = self.loader.take(name, value) if takes else value
            except Exception as error:
                raise LoadingAborted(error) from None
        return parameters
