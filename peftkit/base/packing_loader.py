"""Weights that are packed as they come out of their files, one at a time, on their device.

transformers loads a model parameter by parameter, stacking and splitting tensors on the way; a
quantizer registered with it sees each parameter when it is whole. Ours takes the sample that the
fingerprint wants, rounds the parameter to its dtype or packs it, and says how far loading has come.
Modules stay as they are until all is loaded, so that transformers finds missing, misshapen and tied
weights as it always does; then `install_packed` gives them their packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from peftkit.base.class_head import head_of_classes
from peftkit.base.fingerprint import sample
from peftkit.events import Listener, Progress
from peftkit.kernels.host_memory import trim_malloc
from peftkit.kernels.packing import Packing
from peftkit.model.places import is_conv1d
from peftkit.quant.layers import pack
from peftkit.quant.quantize import (
    Job,
    has_plain_forward,
    install_packed,
    not_quantizable,
    quantizable,
    tower_paths,
)

METHOD = "peftkit"
TRIM_BYTES = 1 << 26
"""After so much was loaded, the holes that it left between packed weights are given back."""


class PackingLoader:
    """What happens to each parameter of one model as it is loaded.

    Args:
        kind: "none", "nf4", "fp4" or "int8".
        dtype: In which the parameters are computed with.
        has_head: Whether the model's head of classes is trained: it is left in the files' dtype.
        towers: Whether what stands beside a language model is packed too.
        put: Moves what is kept to where it is to be.

    Attributes:
        taken: id(parameter) to its sample for the fingerprint.
    """

    def __init__(
        self,
        kind: str,
        dtype: torch.dtype,
        device: torch.device,
        *,
        double_quant: bool = True,
        has_head: bool = False,
        towers: bool = False,
        put: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        on_event: Listener,
    ) -> None:
        self.kind, self.dtype, self.device = kind, dtype, device
        self.double_quant, self.has_head, self.on_event = double_quant, has_head, on_event
        self._towers, self._put = towers, put
        self.taken: dict[int, bytes] = {}
        self._jobs: list[Job] = []
        self._by_name: dict[str, Job] = {}
        self._packings: dict[int, Packing] = {}
        self._kept: list[Tensor] = []  # an id is only known while its tensor lives
        self._shapes: dict[str, torch.Size] = {}
        self._misshapen: set[str] = set()
        self._problems: dict[str, str] = {}
        self._head: tuple[str, ...] = ()
        self._in_float32: Callable[[str], bool] = lambda name: False
        self._done = self._total = 0

    def begin(self, model: Any) -> None:
        """Look at the model while it has no weights."""
        named = model.named_parameters(remove_duplicate=False)
        self._shapes = {name: p.shape for name, p in named if p.is_floating_point()}
        self._total = sum(p.numel() * p.element_size() for p in model.parameters())
        self._in_float32 = kept_in_float32(model, self.dtype)
        self._head = head_of_classes(model) if self.has_head else ()
        if self.kind != "none":
            with _as_tied(model):
                kept = () if self._towers else tower_paths(model)
                jobs = quantizable(model, keep=(*self._head, *kept))
            # of a Conv1D with a forward of its own it is seen later whether it is turned
            self._jobs = [j for j in jobs if has_plain_forward(j[1]) or not is_conv1d(j[1])]
        self._by_name = {f"{job[0]}.{job[2]}": job for job in self._jobs}

    def bytes_per_value(self, name: str) -> float | None:
        """Return what a value of a parameter that is packed takes, scales included."""
        return None if name not in self._by_name else 1.01 if self.kind == "int8" else 0.57

    def wants(self, name: str) -> bool:
        """Tell whether a parameter passes through here."""
        return name in self._shapes and name not in self._misshapen

    def take(self, name: str, value: Tensor) -> Tensor:
        """Return what a parameter is to be, given all of it."""
        self._advance(value)
        if value.shape != self._shapes[name]:
            self._misshapen.add(name)  # transformers is to notice it
            return value
        known = sample(value)
        if not (name.startswith(self._head) and self._head) and not self._in_float32(name):
            value = value.to(self.dtype)
        parameter = self._packed(name, value)
        self.taken[id(parameter)] = known
        self._kept.append(parameter)
        return parameter

    def _packed(self, name: str, value: Tensor) -> Tensor:
        if name not in self._by_name:
            return nn.Parameter(self._put(value), requires_grad=False)
        _, module, leaf = self._by_name[name]
        if leaf == "weight" and is_conv1d(module):
            value = value.t()
        try:
            packed, packing = pack(value.to(self.device), self.kind, double_quant=self.double_quant)
        except ValueError as error:
            self._problems[name] = f"{name} of {type(module).__name__}: {error}"
            return nn.Parameter(value, requires_grad=False)
        parameter = nn.Parameter(self._put(packed), requires_grad=False)
        for scale in packing.parameters():
            scale.data = self._put(scale.data)
        self._packings[id(parameter)] = packing
        return parameter

    def install(self, model: nn.Module) -> None:
        """Let the loaded model compute with its packed weights.

        Raises:
            BaseError: Weights could not be packed; lists them.
        """
        if self._problems:
            raise not_quantizable(model, self.kind, list(self._problems.values()))
        install_packed(model, self._jobs, self._packings, self.device)
        self._kept.clear()
        self.taken.clear()

    def _advance(self, value: Tensor) -> None:
        before = self._done
        self._done = min(before + value.nbytes, self._total)
        if before // TRIM_BYTES != self._done // TRIM_BYTES:
            trim_malloc()
        self.on_event(Progress("Loading the base", self._done, self._total, "B"))


@register_quantization_config(METHOD)
class StreamConfig(QuantizationConfigMixin):
    """Carries a `PackingLoader` through transformers' loader.

    Args:
        conversions: What is made of the files' tensors, if not what the model's class says.
        inner: What dequantises them before the stream takes them, if they are quantised.
    """

    def __init__(
        self,
        stream: PackingLoader,
        conversions: list[Any] | None = None,
        inner: HfQuantizer | None = None,
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # others may register their own
        self.stream, self.conversions, self.inner = stream, conversions, inner

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamConfig:
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return what a saved config would say of it."""
        return {"quant_method": METHOD}


@register_quantizer(METHOD)
class StreamQuantizer(HfQuantizer):
    """Hands every parameter that was loaded to the stream."""

    requires_calibration = False
    quantization_config: StreamConfig

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = quantization_config.inner is not None

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self.quantization_config.stream.begin(model)

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        """Return what is made of the files' tensors before the stream takes them."""
        own, inner = self.quantization_config.conversions, self.quantization_config.inner
        if inner is not None:
            return inner.update_weight_conversions(weight_conversions, model)
        return weight_conversions if own is None else own

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> Any:
        """Return the dtype that a tensor is read in, and have the stream take what is made of it.

        transformers asks this, and not `param_needs_quantization`, of files that are quantised.
        """
        converter.quantization_operation = self.get_quantize_ops()
        inner: Any = self.quantization_config.inner
        return inner.get_new_dtype(converter, param, dtype)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config = self.quantization_config
        if config.conversions is not None or config.inner is not None:
            model._weight_conversions = None  # it is saved as any model of its class
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Tell whether a parameter passes through the stream."""
        return self.quantization_config.stream.wants(param_name)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Return the bytes that transformers sets aside for each value on a GPU."""
        stream = self.quantization_config.stream
        return stream.bytes_per_value(param_name) or param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        """Return what is done to a parameter when it is whole."""
        return _Take(self.quantization_config.stream)

    def is_serializable(self, *args: Any) -> bool:
        """Tell that transformers cannot write this."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether transformers' own trainer would train it."""
        return True


class Broken(BaseException):
    """Ends transformers' loading, which goes on after any Exception.

    Attributes:
        error: What went wrong.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Take(ConversionOps):
    def __init__(self, stream: PackingLoader) -> None:
        self.stream = stream

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the parameters as the stream makes them."""
        taken: dict[str, Any] = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            value = value.pop() if isinstance(value, list) else value
            try:
                taken[name] = self.stream.take(name, value) if self.stream.wants(name) else value
            except Exception as error:
                raise Broken(error) from None
        return taken


def kept_in_float32(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return what tells of a parameter's name whether its model keeps it in float32."""
    plan = [model._keep_in_fp32_modules_strict or ()]
    if dtype == torch.float16:
        plan.append(model._keep_in_fp32_modules or ())
    keep = {f".{name}." for names in plan for name in names}
    return lambda name: any(k in f".{name}." for k in keep)


@contextmanager
def _as_tied(model: Any) -> Iterator[None]:
    """Tie a model's weights for as long as the context holds: its loader ties them at the end."""
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
