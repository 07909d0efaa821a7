"""Prefix tuning: V trained keys and values at the start of each layer's key-value cache
(Li & Liang, 2021, arXiv:2101.00190).

In encoder-decoders they are in the decoder's self-attention. The prefix is trained directly,
without the paper's reparameterisation network, of which PEFT only saves the output.

Shapes: B rows, V virtual tokens, L layers, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache

from peftkit.errors import AdapterError, TargetError
from peftkit.files.strict_json import Json, JsonMap
from peftkit.forward.compat import cache_in, cache_name
from peftkit.methods.base import Handles, Modules
from peftkit.methods.virtual import (
    Changed,
    Inputs,
    StackInputs,
    VirtualFormat,
    VirtualMethod,
    VirtualTokens,
    num_past,
)
from peftkit.model.modes import evaluating
from peftkit.model.targets import Site

Pair = tuple[Tensor, Tensor]
"""Keys and values of a layer, (B, K, V, D) each."""


ANOTHER_METHOD = "Use prompt_tuning, or a method for linear layers, such as lora."


class CacheKindError(TargetError):
    """A model without weights, or with a cache of its own kind, could not run to measure it."""


@dataclass(frozen=True, slots=True)
class PrefixSite(Site):
    """A site with the shape of its stack's key-value cache.

    Attributes:
        stack: The module that runs the blocks. shape: L, K and D.
    """

    stack: Any = None
    shape: tuple[int, int, int] = (0, 0, 0)


class Prefix(VirtualTokens):
    """The virtual tokens' keys and values, (V, 2 * L * K * D): keys before values, by layer.

    Attributes:
        stride: Layer l uses pair l * stride mod L. In encoder-decoders PEFT takes every second pair
            and wraps around.
    """

    def __init__(self, base: nn.Module, site: PrefixSite, method: PrefixTuning) -> None:
        layers, heads, size = self.shape = site.shape
        shape = method.num_virtual_tokens, 2 * layers * heads * size
        super().__init__(base, site, method, shape)
        self.init = method.init
        self.stack = (site.stack,)  # in a tuple: torch registers no submodule
        self.stride = 2 if site.stack.config.is_encoder_decoder else 1

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        if self.init == "random":
            self.prompt_embeddings.copy_(
                torch.randn(self.prompt_embeddings.shape, generator=generator)
            )
            return
        pairs = keys_and_values(self.stack[0], self.sampled_ids(generator)[None])
        for slots, pair in zip(self.slots(), pairs, strict=True):
            for slot, states in zip(slots, pair, strict=True):
                slot.copy_(states[0])

    def slots(self) -> list[Pair]:
        """Return views of the keys and values (K, V, D) of each layer."""
        layers, heads, size = self.shape
        parts = self.prompt_embeddings.view(self.num_virtual, 2 * layers, heads, size)
        parts = parts.permute(1, 2, 0, 3)  # (2 L, K, V, D)
        chosen = [layer * self.stride % layers for layer in range(layers)]
        return [(parts[2 * index], parts[2 * index + 1]) for index in chosen]


class PrefixTuning(VirtualMethod):
    """Trained keys and values at the start of each layer's key-value cache."""

    in_decoder: ClassVar[bool] = True

    type: Literal["prefix_tuning"] = "prefix_tuning"
    init: Literal["sampled", "random"] = "sampled"
    """sampled: keys and values of random tokens; random: normal with variance 1."""

    def site(self, path: str, stack: nn.Module) -> PrefixSite:
        return PrefixSite(path, (), stack=stack, shape=_shape(stack, self.type))

    def wrap(self, base: nn.Module, site: Site) -> Prefix:
        assert isinstance(site, PrefixSite)
        return Prefix(base, site, self)

    def register_hooks(self, model: nn.Module, stack: Any, module: VirtualTokens) -> Handles:
        assert isinstance(module, Prefix)
        hooks = _Hooks(stack, module)
        return [
            stack.register_forward_pre_hook(hooks.before, with_kwargs=True),
            stack.register_forward_hook(hooks.after, always_call=True),
        ]


class PrefixTuningFormat(VirtualFormat[PrefixTuning]):
    """Prefix tuning in PEFT's files."""

    peft_type = "PREFIX_TUNING"
    known_fields = (
        *VirtualFormat.known_fields, "init_weights", "encoder_hidden_size", "prefix_projection",
    )  # fmt: skip

    def method(self, fields: JsonMap) -> PrefixTuning:
        return PrefixTuning(num_virtual_tokens=fields.get("num_virtual_tokens", 0))

    def fields(self, method: PrefixTuning, model: nn.Module, modules: Modules) -> Json:
        module = next(iter(modules.values()))
        assert isinstance(module, Prefix)
        layers, heads, size = module.shape
        return {
            "num_virtual_tokens": method.num_virtual_tokens,
            "num_layers": layers,
            "num_attention_heads": heads,
            "token_dim": heads * size,
            "num_transformer_submodules": module.stride,
        }


def _one_token(stack: Any) -> Tensor:
    device = next(stack.get_input_embeddings().parameters()).device
    return torch.zeros(1, 1, dtype=torch.long, device=device)


def _shape(stack: Any, method_type: str) -> tuple[int, int, int]:
    """Return the number of layers, and of key-value heads and their size in each.

    Raises:
        TargetError: The layers have no key-value cache, or caches of different shapes.
        CacheKindError: The model does not run with such a cache.
    """
    pairs: list[Pair] = []
    reason = "It takes no past keys and values."
    if cache_name(stack) is not None:
        try:
            pairs = keys_and_values(stack, _one_token(stack))
        except Exception as error:  # models raise different errors for an unsupported cache
            raise CacheKindError(
                f"{method_type} needs layers with a key-value cache of one size",
                found=f"{type(stack).__name__}: Its cache is of another kind: {error}",
                fix=ANOTHER_METHOD,
            ) from None
    shapes = {tuple(states.shape) for pair in pairs for states in pair}
    num_layers = stack.config.get_text_config(decoder=True).num_hidden_layers
    if len(shapes) == 1 and len(pairs) == num_layers:
        _, heads, _, size = shapes.pop()
        return len(pairs), heads, size
    if pairs:
        reason = f"{len(pairs)} of its {num_layers} layers keep keys and values, "
        reason += "of the sizes " + ", ".join(sorted(str(shape[1::2]) for shape in shapes)) + "."
    raise TargetError(
        f"{method_type} needs layers with a key-value cache of one size",
        found=f"{type(stack).__name__}: {reason}",
        fix=ANOTHER_METHOD,
    )


class _Hooks(StackInputs):
    """Pass the stack a cache that begins with the prefix.

    Attributes:
        recomputed: Whether the blocks of the current call use gradient checkpointing.
        only_used: Whether the stack passes its blocks a cache only if use_cache is True.
    """

    module: Prefix
    recomputed = False

    def __init__(self, stack: nn.Module, module: VirtualTokens) -> None:
        super().__init__(stack, module)
        self.only_used = not keys_and_values(stack, _one_token(stack), use_cache=False)

    def before(self, stack: Any, args: tuple[object, ...], kwargs: Inputs) -> Changed:
        if not self.module.enabled:
            return None
        inputs = self.named(args, kwargs)
        cache = cache_in(inputs)
        past = num_past(cache)
        self.lengthen(inputs, past)
        if not past:
            modules = stack.modules() if stack.training else ()
            self.recomputed = any(getattr(m, "gradient_checkpointing", False) for m in modules)
            if self.recomputed:
                _pass_cache_to_blocks(stack, True)
            ids = inputs.get("input_ids")
            num_rows = len(ids if ids is not None else inputs["inputs_embeds"])
            inputs |= self._cache_with_prefix(stack, cache, inputs.get("use_cache"), num_rows)
        return (), inputs

    def _cache_with_prefix(
        self, stack: Any, cache: Any, use_cache: bool | None, num_rows: int
    ) -> Inputs:
        """Return a cache that begins with the prefix, and `use_cache` for the stack."""
        name = str(self.cache_name)

        def repeated(states: Tensor) -> Tensor:
            return states.to(stack.dtype).expand(num_rows, -1, -1, -1)

        pairs = [(repeated(keys), repeated(values)) for keys, values in self.module.slots()]
        if use_cache is None:
            use_cache = bool(getattr(stack.config, "use_cache", False))
        if self.recomputed or not (use_cache or cache is not None):
            return {name: read_cache(stack, pairs)[1], "use_cache": self.only_used}
        if cache is None:
            cache = DynamicCache(config=stack.config)
            if stack.config.is_encoder_decoder:
                cache = EncoderDecoderCache(cache, DynamicCache(config=stack.config))
        layers_cache = getattr(cache, "self_attention_cache", cache)
        for layer, (keys, values) in enumerate(pairs):
            layers_cache.update(keys, values, layer)
        return {name: cache, "use_cache": use_cache or self.only_used}

    def after(self, stack: nn.Module, args: tuple[object, ...], output: Any) -> Any:
        if self.recomputed:
            _pass_cache_to_blocks(stack, False)
            self.recomputed = False
        cache = cache_in(output)
        if not isinstance(getattr(cache, "self_attention_cache", cache), ReadCache):
            return None
        return type(output)(**{k: v for k, v in output.items() if v is not cache})


def _pass_cache_to_blocks(stack: Any, allowed: bool) -> None:
    """Pass the cache to recomputed blocks, or stop passing it.

    transformers withholds a cache from them, because they would write it twice; this one is
    read-only.

    Raises:
        AdapterError: The blocks do not support this.
    """
    blocks: list[Any] = [m for m in stack.modules() if hasattr(m, "_can_checkpoint_with_cache")]
    if not blocks:
        raise AdapterError(
            "prefix tuning is not possible with gradient checkpointing here",
            found=f"The blocks of {type(stack).__name__} would ignore the prefix.",
            fix="Set train.gradient_checkpointing: false.",
        )
    for block in blocks:
        block._can_checkpoint_with_cache = allowed
    stack.gradient_checkpointing = not allowed  # some stacks withhold the cache themselves


def keys_and_values(stack: Any, ids: Tensor, *, use_cache: bool = True) -> list[Pair]:
    """Return each layer's keys and values for some tokens (B, V): (B, K, V, D) each.

    Args:
        use_cache: Passed to the stack; if False, some stacks pass no cache to their blocks.
    """
    recorded, cache = read_cache(stack, [])
    with evaluating(stack):
        stack(input_ids=ids, use_cache=use_cache, **{str(cache_name(stack)): cache})
    return [recorded.last_pairs[layer] for layer in sorted(recorded.last_pairs)]


class ReadCache(DynamicCache):
    """A read-only cache: returns the prefix with the new keys and values, and stores nothing.

    Blocks can therefore be recomputed in the backward pass, and no memory is held after a step.

    Attributes:
        last_pairs: Keys and values of the last call, by layer.
    """

    def __init__(self, config: Any, pairs: Sequence[Pair]) -> None:
        super().__init__(config=config)
        self.last_pairs: dict[int, Pair] = {}
        for index, (keys, values) in enumerate(pairs):
            super().update(keys, values, index)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> Pair:
        self.last_pairs[layer_idx] = key_states, value_states
        stored: Any = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if stored is None or not stored.is_initialized:
            return key_states, value_states
        return (
            torch.cat([stored.keys, key_states], dim=-2),
            torch.cat([stored.values, value_states], dim=-2),
        )


class _NeverUpdated(dict[int, bool]):
    """The `is_updated` of a read-only EncoderDecoderCache, which is never set."""

    def __setitem__(self, key: int, value: bool) -> None:
        return None


def read_cache(stack: Any, pairs: Sequence[Pair]) -> tuple[ReadCache, object]:
    """Return a cache of the pairs, and the cache object to pass to the stack."""
    decoder_cache = ReadCache(stack.config, pairs)
    if not stack.config.is_encoder_decoder:
        return decoder_cache, decoder_cache
    both = EncoderDecoderCache(decoder_cache, ReadCache(stack.config, []))
    both.is_updated = _NeverUpdated()
    return decoder_cache, both
