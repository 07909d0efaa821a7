"""Weights that are packed as they come out of their files, one at a time, on their device.

transformers loads a model parameter by parameter, stacking and splitting tensors on the way. A
quantizer that is registered with it gets each parameter when it is whole or, of a quantised
checkpoint, all tensors that a parameter is made of. It hands them to a `PackingLoader`, which takes
the sample for the fingerprint and rounds the parameter to its dtype, packs it, or keeps its codes.

Modules stay unchanged until all is loaded, so that transformers finds missing, misshapen and tied
weights as it always does; then `PackingLoader.install` gives them their packed weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from peftkit.base.codes import (
    LEAVES,
    STACKS,
    Codes,
    read_codes,
    some_values,
    stacked_codes,
    unpacked,
)
from peftkit.base.fingerprint import sample, sample_positions, shown
from peftkit.base.published import UnreadableError, published, scheme_of
from peftkit.base.purpose import head_modules
from peftkit.base.request import BaseRequest, weights_to_pack
from peftkit.errors import BaseError, first_few
from peftkit.events import Listener, Notice, Progress
from peftkit.kernels.device import trim_malloc
from peftkit.quant.layers import Packing, pack
from peftkit.quant.quantize import Job, install_packed, not_quantizable, stores_transposed

TRIM_BYTES = 1 << 26
"""After so much was loaded, the holes that it left between packed weights are given back."""
METHOD = "peftkit"


class _Loaded(NamedTuple):
    """A parameter of the model: what the fingerprint takes of it, and how it is packed, if so."""

    parameter: nn.Parameter
    sample: bytes
    packing: Packing | None


class PackingLoader:
    """Makes each parameter of one model what the request says, as it is loaded.

    Args:
        put: Moves what is kept to where it stays; by default it stays where it is.

    Attributes:
        codes_config: The checkpoint's `quantization_config`, if its codes are read by codes.py.
        dequantised: Names of parameters whose codes could not be kept.
    """

    def __init__(
        self,
        request: BaseRequest,
        *,
        put: Callable[[Tensor], Tensor] | None = None,
        on_event: Listener,
    ) -> None:
        self.request, self.on_event = request, on_event
        self.codes_config = published(request.config)
        self.dequantised: list[str] = []
        self._packs = request.settings.quantize != "none"
        self._put = put or (lambda tensor: tensor)
        self._shapes: dict[str, torch.Size] = {}
        self._jobs: dict[str, tuple[Job, str]] = {}
        self._head: tuple[str, ...] = ()
        self._in_float32: Callable[[str], bool] = lambda name: False
        self._loaded: dict[int, _Loaded] = {}  # by id, which is unique while the parameter lives
        self._problems: list[str] = []
        self._done = self._total = 0

    def begin(self, model: Any) -> None:
        """Look at the model while it has no weights."""
        named = model.named_parameters(remove_duplicate=False)
        self._shapes = {name: p.shape for name, p in named if p.is_floating_point()}
        self._total = sum(p.numel() * p.element_size() for p in model.parameters())
        self._in_float32 = kept_in_float32(model, self.request.dtype)
        self._head = head_modules(model) if self.request.purpose.head is not None else ()
        if self._packs or self.codes_config is not None:
            with _as_tied(model):
                jobs = weights_to_pack(self.request.settings, model, self._head)
            self._jobs = {f"{job[0]}.{job[2]}": (job, kind) for job, kind in jobs.items()}

    def bytes_per_value(self, name: str) -> float | None:
        """Return the bytes of a value of a parameter that is packed, scales included."""
        if not self._packs or name not in self._jobs:
            return None
        return 1.01 if self._jobs[name][1] == "int8" else 0.57

    def takes(self, name: str) -> bool:
        """Tell whether a parameter passes through here."""
        return name in self._shapes

    def shape_of(self, name: str) -> torch.Size:
        return self._shapes[name]

    def samples(self) -> dict[int, bytes]:
        """Return what the fingerprint takes of each parameter, by its id."""
        return {key: loaded.sample for key, loaded in self._loaded.items()}

    def take(self, name: str, value: Tensor) -> Tensor:
        """Return the parameter that the model keeps, given its whole value."""
        self._advance(value)
        if value.shape != self._shapes[name]:
            del self._shapes[name]  # it passes through, for transformers to notice
            return value
        identity = sample(value)
        if not (name.startswith(self._head) and self._head) and not self._in_float32(name):
            value = value.to(self.request.dtype)
        if self._packs and name in self._jobs:
            return self._pack(name, value, identity)
        return self._keep(self._put(value), identity)

    def take_codes(self, name: str, codes: Codes) -> Tensor:
        """Return the parameter that the model keeps, given the codes of its weight.

        The codes are kept, unless they are to be packed in another kind or the model does not
        multiply with this parameter alone.
        """
        job = self._jobs[name][0] if name in self._jobs else None
        turns = job is not None and stores_transposed(job[1], job[2])
        expected = self._shapes[name]
        shape = expected[::-1] if turns else expected
        if job is None or self._packs or codes.form.shape != shape:
            if not self._packs:
                self.dequantised.append(name)
            value = unpacked(codes, torch.float32)
            is_transposed = value.dim() == 2 and value.shape != expected
            return self.take(name, value.t() if is_transposed else value)
        positions = sample_positions(expected, codes.packed.device)
        if turns:
            positions = positions % expected[1] * expected[0] + positions // expected[1]
        identity = shown(expected, some_values(codes, positions))
        self._advance(codes.packed)
        device, dtype = self.request.device, self.request.dtype
        scales = tuple(self._put(scale.to(device)) for scale in codes.scales)
        packing = Packing(codes.form, dtype, scales)
        return self._keep(self._put(codes.packed.to(device)), identity, packing)

    def _pack(self, name: str, value: Tensor, identity: bytes) -> nn.Parameter:
        (_, module, leaf), kind = self._jobs[name]
        if stores_transposed(module, leaf):
            value = value.t()
        try:
            packed, packing = pack(
                value.to(self.request.device),
                kind,
                double_quant=self.request.settings.double_quant,
            )
        except ValueError as error:
            self._problems.append(f"{name} of {type(module).__name__}: {error}")
            return self._keep(value, identity)
        packed = self._put(packed)
        for scale in packing.parameters():
            scale.data = self._put(scale.data)
        return self._keep(packed, identity, packing)

    def _keep(self, value: Tensor, identity: bytes, packing: Packing | None = None) -> nn.Parameter:
        parameter = nn.Parameter(value, requires_grad=False)
        self._loaded[id(parameter)] = _Loaded(parameter, identity, packing)
        return parameter

    def install(self, model: nn.Module) -> None:
        """Let the loaded model compute with its packed weights.

        Raises:
            BaseError: Weights could not be packed; lists them.
        """
        if self._problems:
            raise not_quantizable(model, self.request.settings.quantize, self._problems)
        packings = {key: each.packing for key, each in self._loaded.items() if each.packing}
        jobs = [job for job, _ in self._jobs.values()]
        install_packed(model, jobs, packings, self.request.device)
        if self.dequantised:
            names = dict.fromkeys(re.sub(r"\d+", "*", name) for name in self.dequantised)
            self.on_event(
                Notice(
                    f"{len(self.dequantised)} quantised weights are kept dequantised, in 16 or 32 "
                    f"bits: the model keeps their transpose, or their parts are no whole blocks "
                    f"({first_few(names, 5, ', ')})."
                )
            )
        self._loaded.clear()

    def read_codes(self, name: str, tensors: Mapping[str, Tensor]) -> Codes:
        """Read a layer's tensors.

        Raises:
            BaseError: They are not what the checkpoint's config says.
        """
        assert self.codes_config is not None
        path = name.removesuffix(".weight")
        try:
            return read_codes(tensors, scheme_of(self.codes_config, path))
        except UnreadableError as problem:
            raise BaseError(
                f"cannot read the quantised weight {path}.",
                found=f"{problem}; its tensors are {', '.join(sorted(tensors))}.",
                fix="Download it again, or give the same model in 16 bits.",
            ) from None

    def _advance(self, value: Tensor) -> None:
        before = self._done
        self._done = min(before + value.nbytes, self._total)
        if before // TRIM_BYTES != self._done // TRIM_BYTES:
            trim_malloc()
        self.on_event(Progress("Loading the base", self._done, self._total, "B"))


def kept_in_float32(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a test of whether a model keeps the parameter of a name in float32."""
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


@register_quantization_config(METHOD)
class PackingConfig(QuantizationConfigMixin):
    """Carries a `PackingLoader` through transformers' loader.

    Args:
        conversions: What is made of the files' tensors, if not what the model's class says.

    Attributes:
        dequantize: To transformers: nothing of the files' quantisation is left in the model.
    """

    def __init__(self, loader: PackingLoader, conversions: list[Any] | None = None) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # others may register their own
        self.loader, self.conversions = loader, conversions
        self.dequantize = loader.codes_config is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> PackingConfig:
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD}


@register_quantizer(METHOD)
class PackingQuantizer(HfQuantizer):
    """Hands every parameter that was loaded to the `PackingLoader`."""

    requires_calibration = False
    quantization_config: PackingConfig

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        codes_config = quantization_config.loader.codes_config
        self.pre_quantized = codes_config is not None
        if codes_config is not None:
            is_gpt_oss = codes_config.get("quant_method") == "mxfp4"
            self.serialized_names = STACKS if is_gpt_oss else {"weight": [*LEAVES]}

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self.quantization_config.loader.begin(model)

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        """Return what is made of the files' tensors before the loader takes them."""
        if not self.pre_quantized:
            conversions = self.quantization_config.conversions
            return weight_conversions if conversions is None else conversions
        converters = super().update_weight_conversions(weight_conversions, model)
        for converter in converters:
            operations = getattr(converter, "operations", None) or [None]
            if isinstance(operations[0], _Read):  # it runs the others itself
                operations[0].rest, converter.operations = operations[1:], operations[:1]
        return [*self._other_names(model), *converters]

    def _other_names(self, model: Any) -> list[WeightRenaming]:
        """Return other names of FP8 scales: of DeepSeek-V4, and of Mistral Large 4."""
        codes_config = self.quantization_config.loader.codes_config or {}
        if codes_config.get("quant_method") != "fp8":
            return []
        renamings = [WeightRenaming(r"\.qscale_weight", ".weight_scale_inv")]
        if not any(name.endswith(".scale") for name, _ in model.named_parameters()):
            renamings.append(WeightRenaming(r"^(.+)\.scale", r"\1.weight_scale_inv"))
        return renamings

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> None:
        """Have a tensor read in its own dtype, and the parameter made of it taken by the loader.

        transformers calls this, and not `param_needs_quantization`, for files that are quantised.
        """
        operations = getattr(converter, "operations", None) or [None]
        if not isinstance(operations[0], _Read):
            converter.quantization_operation = self.get_quantize_ops()
        return None

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config = self.quantization_config
        if config.conversions is not None or self.pre_quantized:
            model._weight_conversions = None  # it is saved as any model of its class
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self.quantization_config.loader.takes(param_name)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Return the bytes that transformers sets aside for each value on a GPU."""
        loader = self.quantization_config.loader
        return loader.bytes_per_value(param_name) or param.element_size()

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _Read}

    def get_quantize_ops(self) -> ConversionOps:
        return _Take(self.quantization_config.loader)

    def is_serializable(self, *args: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class Broken(BaseException):
    """Ends transformers' loading, which goes on after any Exception.

    Attributes:
        error: What went wrong.
    """

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
        """Return the parameters that the loader makes."""
        parameters: dict[str, Any] = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            value = value.pop() if isinstance(value, list) else value
            try:
                takes = self.loader.takes(name)
                parameters[name] = self.loader.take(name, value) if takes else value
            except Exception as error:
                raise Broken(error) from None
        return parameters


class _Read(ConversionOps):
    """Makes a parameter of a layer's serialized tensors, or a stack of those of its experts."""

    def __init__(self, quantizer: PackingQuantizer) -> None:
        self._config = quantizer.quantization_config  # which is not copied with the converter
        self.rest: list[ConversionOps] = []
        """The operations of the model's own converter that follow: they stack experts, and join
        gate and up. `PackingQuantizer.update_weight_conversions` moves them here."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the parameter, kept in its codes where it can be."""
        loader, name = self._config.loader, full_layer_name.replace("*.", "0.")
        patterns = (source_patterns, target_patterns)
        try:
            if self.rest:
                more = {**kwargs, "full_layer_name": full_layer_name}
                return self._stacked(loader, name, input_dict, patterns, more)
            tensors = {leaf: v[0] if isinstance(v, list) else v for leaf, v in input_dict.items()}
            if set(tensors) == {"weight"}:  # norms, embeddings, layers that stayed dense
                value = tensors["weight"]
                return {name: loader.take(name, value) if loader.takes(name) else value}
            return {name: loader.take_codes(name, loader.read_codes(name, tensors))}
        except Exception as error:
            raise Broken(error) from None

    def _stacked(
        self,
        loader: PackingLoader,
        name: str,
        tensors: dict[str, Any],
        patterns: tuple[list[str], list[str]],
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        """Read every expert, then stack and join codes, scales and zeros, each by themselves.

        Their rows have to be the rows of the model's parameter, in whole blocks; other experts are
        dequantised and stacked.
        """
        parts: dict[str, dict[str, list[Tensor]]] = {}
        for key, value in tensors.items():
            path, _, leaf = key.rpartition(".")
            parts.setdefault(path, {})[leaf] = value

        def combined(by_name: dict[str, Any]) -> Tensor:
            for operation in self.rest:
                by_name = operation.convert(by_name, *patterns, **kwargs)
            (stack,) = by_name.values()
            return stack[0] if isinstance(stack, list) else stack

        if all(set(leaves) == {"weight"} for leaves in parts.values()):
            dense = {f"{path}.weight": leaves["weight"] for path, leaves in parts.items()}
            return {name: loader.take(name, combined(dense))}
        experts = {
            path: [
                loader.read_codes(f"{path}.{number}", dict(zip(leaves, each, strict=True)))
                for number, each in enumerate(zip(*leaves.values(), strict=True))
            ]
            for path, leaves in parts.items()
        }
        codes = stacked_codes(experts, combined, loader.shape_of(name))
        if codes is not None:
            return {name: loader.take_codes(name, codes)}
        if loader.request.settings.quantize == "none":
            loader.dequantised.append(name)
        values = {
            f"{path}.weight": [unpacked(each, loader.request.dtype) for each in every]
            for path, every in experts.items()
        }
        return {name: loader.take(name, combined(values))}
