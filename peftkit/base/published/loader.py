"""The loader of pre-quantised checkpoints: keeps their codes, or dequantises and packs them.

transformers passes all tensors of a parameter together. `CodesLoader` reads them into codes;
weights that cannot stay in codes are dequantised and loaded like any other weight (base/pack.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer

from peftkit.base.pack import (
    LoaderArguments,
    LoadingAborted,
    PackingConfig,
    PackingLoader,
    PackingQuantizer,
    sample_positions,
    shown,
)
from peftkit.base.pretrained import published
from peftkit.base.published.checkpoint import PublishedCheckpoint, UnreadableError, scheme_of
from peftkit.base.published.codes import (
    LEAVES,
    STACKS,
    Codes,
    read_codes,
    some_values,
    stacked_codes,
    unpacked,
)
from peftkit.errors import BaseError, first_few
from peftkit.events import Notice
from peftkit.quant.layers import Packing
from peftkit.quant.quantize import stores_transposed

METHOD = "peftkit_codes"


class CodesLoader(PackingLoader):
    """Builds each parameter from its tensors in a quantised checkpoint.

    Attributes:
        checkpoint: The quantisation of the files.
        dequantised: Names of parameters whose codes could not be kept.
    """

    checkpoint: PublishedCheckpoint
    dequantised: list[str]

    def arguments(self) -> LoaderArguments:
        """Return the arguments with which transformers loads the model through this loader."""
        cls, source, kwargs = super().arguments()
        return cls, source, kwargs | {"quantization_config": CodesConfig(self)}

    def begin(self, model: nn.Module) -> None:
        """Inspect the model before it has weights."""
        super().begin(model)
        checkpoint = published(self.request.config)
        assert checkpoint is not None
        self.checkpoint, self.dequantised = checkpoint, []
        if not self._packs:
            self._find_jobs(model)

    def shape_of(self, name: str) -> torch.Size:
        return self._shapes[name]

    def take_codes(self, name: str, codes: Codes) -> Tensor:
        """Return the model's parameter for the codes of its weight.

        The codes are kept, unless the request packs them in another kind or the model uses the
        parameter for more than a matrix product.
        """
        job = self._jobs[name][0] if name in self._jobs else None
        transposes = job is not None and stores_transposed(job[1], job[2])
        expected = self._shapes[name]
        shape = expected[::-1] if transposes else expected
        if job is None or self._packs or codes.form.shape != shape:
            if not self._packs:
                self.dequantised.append(name)
            value = unpacked(codes, torch.float32)
            is_transposed = value.dim() == 2 and value.shape != expected
            return self.take(name, value.t() if is_transposed else value)
        positions = sample_positions(expected, codes.packed.device)
        if transposes:
            positions = positions % expected[1] * expected[0] + positions // expected[1]
        sampled = shown(expected, some_values(codes, positions))
        self._advance(codes.packed)
        device, dtype = self.request.device, self.request.dtype
        scales = tuple(self._put(scale.to(device)) for scale in codes.scales)
        packing = Packing(codes.form, dtype, scales)
        return self._keep(self._put(codes.packed.to(device)), sampled, packing)

    def install(self, model: nn.Module) -> None:
        """Let the loaded model compute with packed weights; emit a notice about dequantised ones.

        Raises:
            BaseError: As `PackingLoader.install`.
        """
        super().install(model)
        if self.dequantised:
            names = dict.fromkeys(re.sub(r"\d+", "*", name) for name in self.dequantised)
            self.on_event(
                Notice(
                    f"{len(self.dequantised)} quantised weights are kept dequantised, in 16 or 32 "
                    "bits: the model stores their transpose, or they have no whole blocks "
                    f"({first_few(names, 5, ', ')})."
                )
            )

    def read_codes(self, name: str, tensors: Mapping[str, Tensor]) -> Codes:
        """Read a layer's tensors.

        Raises:
            BaseError: The tensors do not match the checkpoint's config.
        """
        path = name.removesuffix(".weight")
        try:
            return read_codes(tensors, scheme_of(self.checkpoint.settings, path))
        except UnreadableError as problem:
            raise BaseError(
                f"cannot read the quantised weight {path}.",
                found=f"{problem}; its tensors are {', '.join(sorted(tensors))}.",
                fix="Download it again, or use the same model in 16 bits.",
            ) from None


class StoredConfig(PackingConfig):
    """Tells transformers that the loaded model is no longer quantised in the files' format."""

    dequantize = True


class StoredQuantizer(PackingQuantizer):
    """Passes tensors in the dtype of the files; transformers would otherwise cast them."""

    def __init__(self, quantization_config: Any, **kwargs: object) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = True

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> None:
        """Pass tensors to the loader without a cast.

        For quantised files transformers calls this instead of `param_needs_quantization`.
        """
        converter.quantization_operation = self.get_quantize_ops()


@register_quantization_config(METHOD)
class CodesConfig(StoredConfig):
    """Carries a `CodesLoader` through transformers' loader."""

    method = METHOD


@register_quantizer(METHOD)
class CodesQuantizer(StoredQuantizer):
    """Passes all tensors of a parameter to the `CodesLoader`."""

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        loader: CodesLoader = quantization_config.loader
        checkpoint = published(loader.request.config)
        self._method = checkpoint.settings.get("quant_method") if checkpoint else None
        self.serialized_names = STACKS if self._method == "mxfp4" else {"weight": [*LEAVES]}

    def update_weight_conversions(self, weight_conversions: object, model: nn.Module) -> Any:
        """Read the tensors of a parameter together, before the model's own conversions."""
        converters = HfQuantizer.update_weight_conversions(self, weight_conversions, model)
        for converter in converters:
            operations = getattr(converter, "operations", None) or [None]
            if isinstance(operations[0], _Read):  # _Read runs the other operations
                operations[0].rest, converter.operations = operations[1:], operations[:1]
        return [*self._other_names(model), *converters]

    def _other_names(self, model: nn.Module) -> list[WeightRenaming]:
        """Return renamings of FP8 scales in DeepSeek-V4 and Mistral Large 4."""
        if self._method != "fp8":
            return []
        renamings = [WeightRenaming(r"\.qscale_weight", ".weight_scale_inv")]
        if not any(name.endswith(".scale") for name, _ in model.named_parameters()):
            renamings.append(WeightRenaming(r"^(.+)\.scale", r"\1.weight_scale_inv"))
        return renamings

    def get_new_dtype(self, converter: object, param: object, dtype: torch.dtype | None) -> None:
        """Pass tensors to the loader, unless `_Read` reads them together."""
        operations = getattr(converter, "operations", None) or [None]
        if not isinstance(operations[0], _Read):
            super().get_new_dtype(converter, param, dtype)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: object) -> Any:
        model._weight_conversions = None  # save it like any model of its class
        return model

    def get_load_operations(self) -> dict[str, object]:
        return {"dequantize": _Read}


class _Read(ConversionOps):
    """Builds a parameter from a layer's serialized tensors, or a stack from its experts'."""

    def __init__(self, quantizer: CodesQuantizer) -> None:
        self._config: Any = quantizer.quantization_config  # not copied with the converter
        self.rest: list[ConversionOps] = []
        """The remaining operations of the model's own converter, which stack experts and join gate
        and up. `CodesQuantizer.update_weight_conversions` moves them here."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the parameter, in codes if possible."""
        loader: CodesLoader = self._config.loader
        name = full_layer_name.replace("*.", "0.")
        patterns = (source_patterns, target_patterns)
        try:
            if self.rest:
                more = {**kwargs, "full_layer_name": full_layer_name}
                return self._stacked(loader, name, input_dict, patterns, more)
            tensors = {leaf: v[0] if isinstance(v, list) else v for leaf, v in input_dict.items()}
            if set(tensors) == {"weight"}:  # norms, embeddings, unquantised layers
                value = tensors["weight"]
                return {name: loader.take(name, value) if loader.takes(name) else value}
            return {name: loader.take_codes(name, loader.read_codes(name, tensors))}
        except Exception as error:
            raise LoadingAborted(error) from None

    def _stacked(
        self,
        loader: CodesLoader,
        name: str,
        tensors: dict[str, Any],
        patterns: tuple[list[str], list[str]],
        kwargs: dict[str, Any],
    ) -> dict[str, object]:
        """Read every expert, then stack and join codes, scales and zeros separately.

        This requires rows of whole blocks in the order of the model's parameter; other experts are
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
