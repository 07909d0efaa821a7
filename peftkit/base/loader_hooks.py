"""How weights go from transformers' loader into a `PackingLoader`.

transformers loads a model parameter by parameter, stacking and splitting tensors on the way. A
quantizer that is registered with it is shown each parameter when it is whole, or, of a checkpoint
that is quantised, all tensors that a parameter is made of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from peftkit.base.codes import LEAVES, STACKS, stacked_codes, unpacked
from peftkit.base.packing_loader import PackingLoader

METHOD = "peftkit"


@register_quantization_config(METHOD)
class StreamConfig(QuantizationConfigMixin):
    """Carries a `PackingLoader` through transformers' loader.

    Args:
        conversions: What is made of the files' tensors, if not what the model's class says.

    Attributes:
        dequantize: To transformers: nothing of the files' quantisation is left in the model.
    """

    def __init__(self, stream: PackingLoader, conversions: list[Any] | None = None) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # others may register their own
        self.stream, self.conversions = stream, conversions
        self.dequantize = stream.settings is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamConfig:
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD}


@register_quantizer(METHOD)
class StreamQuantizer(HfQuantizer):
    """Hands every parameter that was loaded to the stream."""

    requires_calibration = False
    quantization_config: StreamConfig

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        settings = quantization_config.stream.settings
        self.pre_quantized = settings is not None
        if settings is not None:
            is_gpt_oss = settings.get("quant_method") == "mxfp4"
            self.serialized_names = STACKS if is_gpt_oss else {"weight": [*LEAVES]}

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self.quantization_config.stream.begin(model)

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        """Return what is made of the files' tensors before the stream takes them."""
        own = self.quantization_config.conversions
        if self.pre_quantized:
            found = super().update_weight_conversions(weight_conversions, model)
            for each in found:
                operations = getattr(each, "operations", None) or [None]
                if isinstance(operations[0], _Read):  # it runs the others itself
                    operations[0].rest, each.operations = operations[1:], operations[:1]
            return [*self._other_names(model), *found]
        return weight_conversions if own is None else own

    def _other_names(self, model: Any) -> list[WeightRenaming]:
        """Return other names of FP8 scales: of DeepSeek-V4, and of Mistral Large 4."""
        settings = self.quantization_config.stream.settings or {}
        if settings.get("quant_method") != "fp8":
            return []
        found = [WeightRenaming(r"\.qscale_weight", ".weight_scale_inv")]
        if not any(name.endswith(".scale") for name, _ in model.named_parameters()):
            found.append(WeightRenaming(r"^(.+)\.scale", r"\1.weight_scale_inv"))
        return found

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> None:
        """Say that a tensor is read in its own dtype, and have the stream take what is made of it.

        transformers asks this, and not `param_needs_quantization`, of files that are quantised.
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
        return self.quantization_config.stream.wants(param_name)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Return the bytes that transformers sets aside for each value on a GPU."""
        stream = self.quantization_config.stream
        return stream.bytes_per_value(param_name) or param.element_size()

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _Read}

    def get_quantize_ops(self) -> ConversionOps:
        return _Take(self.quantization_config.stream)

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


class _Read(ConversionOps):
    """Makes a parameter of a layer's serialized tensors, or a stack of those of its experts."""

    def __init__(self, quantizer: StreamQuantizer) -> None:
        self._config = quantizer.quantization_config  # which is not copied with the converter
        self.rest: list[ConversionOps] = []
        """What the model's own converter does then: it stacks experts, and joins gate and up."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the parameter, kept in its codes where it can be."""
        stream, name = self._config.stream, full_layer_name.replace("*.", "0.")
        how = (source_patterns, target_patterns)
        try:
            if self.rest:
                more = {**kwargs, "full_layer_name": full_layer_name}
                return self._stacked(stream, name, input_dict, how, more)
            own = {leaf: v[0] if isinstance(v, list) else v for leaf, v in input_dict.items()}
            if set(own) == {"weight"}:  # norms, embeddings, layers that stayed dense
                value = own["weight"]
                return {name: stream.take(name, value) if stream.wants(name) else value}
            return {name: stream.take_codes(name, stream.as_codes(name, own))}
        except Exception as error:
            raise Broken(error) from None

    def _stacked(
        self,
        stream: PackingLoader,
        name: str,
        tensors: dict[str, Any],
        how: tuple[list[str], list[str]],
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        """Read every expert, then stack and join codes, scales and zeros, each by themselves.

        That needs codes whose rows are the rows of the model's parameter, and parts of whole
        blocks; others are stacked dequantised.
        """
        parts: dict[str, dict[str, list[Tensor]]] = {}
        for key, value in tensors.items():
            path, _, leaf = key.rpartition(".")
            parts.setdefault(path, {})[leaf] = value

        def combined(found: dict[str, Any]) -> Tensor:
            for operation in self.rest:
                found = operation.convert(found, *how, **kwargs)
            (made,) = found.values()
            return made[0] if isinstance(made, list) else made

        if all(set(own) == {"weight"} for own in parts.values()):
            dense = {f"{path}.weight": own["weight"] for path, own in parts.items()}
            return {name: stream.take(name, combined(dense))}
        experts = {
            path: [
                stream.as_codes(f"{path}.{number}", dict(zip(own, each, strict=True)))
                for number, each in enumerate(zip(*own.values(), strict=True))
            ]
            for path, own in parts.items()
        }
        codes = stacked_codes(experts, combined, stream.shape_of(name))
        if codes is not None:
            return {name: stream.take_codes(name, codes)}
        if stream.kind == "none":
            stream.unpacked.append(name)
        values = {
            f"{path}.weight": [unpacked(each, stream.dtype) for each in every]
            for path, every in experts.items()
        }
        return {name: stream.take(name, combined(values))}
