"""Virtual tokens before the input: the base of prompt tuning and prefix tuning.

Both act on the stack, the module that embeds the tokens and runs the blocks. Everything outside it
(head, loss, generation) sees the real tokens only: virtual tokens have no logits, labels and input
ids do not change, and pooling at the last token works.

Shapes: B rows, T tokens, V virtual tokens, P tokens in the cache (V of them virtual), H hidden
size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from peftkit.errors import AdapterError, TargetError
from peftkit.forward.compat import CACHE_NAMES, arguments, cache_name
from peftkit.methods.base import ADAPTER_DTYPES, AdapterModule, Handles, Method, Modules
from peftkit.methods.peft_format import LAYERS, PROMPT, M, PeftFormat
from peftkit.model.places import embedding_of, find_places, unwrap_adapter
from peftkit.model.targets import Site

INPUT = "input"
"""The only target."""
Inputs = dict[str, Any]
Changed = tuple[tuple[Any, ...], Inputs] | None
"""The arguments that a forward pre-hook returns; None: unchanged."""


class VirtualTokens(AdapterModule):
    """The unchanged embedding of a stack, which holds its virtual tokens.

    Attributes:
        num_virtual: V.
        trained: The tensor of PEFT's files, with a row for each virtual token.
    """

    def __init__(
        self, base: nn.Module, site: Site, method: VirtualMethod, shape: tuple[int, int]
    ) -> None:
        super().__init__(base, site)
        self.num_virtual = method.num_virtual_tokens
        device = next(base.parameters()).device
        tensor = torch.zeros(shape, dtype=ADAPTER_DTYPES[method.dtype], device=device)
        # after the base's parameters: transformers takes the dtype of the first as the model's
        self.trained = nn.ParameterDict({PROMPT: nn.Parameter(tensor)})

    @property
    def prompt_embeddings(self) -> Tensor:
        return self.trained[PROMPT]

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self.base(*args, **kwargs)

    def state(self) -> dict[str, Tensor]:
        return {}  # its tensor is the adapter's: `VirtualMethod.shared`

    def load(self, state: Mapping[str, Tensor]) -> None:
        return None

    def sampled_ids(self, generator: torch.Generator) -> Tensor:
        """Return V random tokens of the vocabulary."""
        base: Any = unwrap_adapter(self.base)
        ids = torch.randint(base.num_embeddings, (self.num_virtual,), generator=generator)
        return ids.to(self.prompt_embeddings.device)


class VirtualMethod(Method):
    """A method that trains virtual tokens before the input of one stack."""

    acts_on_input: ClassVar[bool] = True
    shared_names: ClassVar[tuple[str, ...]] = (PROMPT,)
    unmergeable: ClassVar[str] = "it adds tokens to the input and changes no weight"
    fresh_changes: ClassVar[str] = "every token attends to the virtual ones, trained or not"
    in_decoder: ClassVar[bool]
    """In an encoder-decoder: True for the decoder, False for the encoder."""

    targets: tuple[str, ...] | str = INPUT
    """Always "input"."""
    num_virtual_tokens: int = Field(default=20, ge=1)
    """Number of virtual tokens before the input."""

    def sites(self, model: nn.Module) -> list[Site]:
        path, stack = self.find_stack(model)
        if set(self.target_names) not in ({INPUT}, {path}):
            raise TargetError(
                f"{self.type} has no targets to choose",
                found=f"targets: {', '.join(sorted(self.target_names)) or 'none'}",
                fix=f"Remove targets: the method acts on the {INPUT}.",
            )
        return [self.site(path, stack)]

    def site(self, path: str, stack: nn.Module) -> Site:
        """Return the site of a stack's embedding."""
        return Site(path=path, roles=())

    def candidates(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        return {self.find_stack(model)[0]: ()}

    def find_stack(self, model: nn.Module) -> tuple[str, nn.Module]:
        """Return the path of the embedding of the targeted stack, and the stack.

        Raises:
            TargetError: The model has no token embedding.
        """
        holder: Any = model
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            holder = holder.get_decoder() if self.in_decoder else holder.get_encoder()
        embedding = embedding_of(holder)
        if embedding is None or not isinstance(unwrap_adapter(embedding), nn.Embedding):
            raise TargetError(
                f"{self.type} needs a model with token embeddings",
                found=f"{type(holder).__name__} has none.",
                fix="Use a method for linear layers, such as lora.",
            )
        named = {id(module): path for path, module in model.named_modules()}
        above = path = named[id(embedding)]
        stack: Any = holder
        while above and holder is model:  # the innermost module that returns it as its embedding
            above = above.rpartition(".")[0]
            stack = model.get_submodule(above)
            if hasattr(stack, "get_input_embeddings"):
                break
        if not stack.config.is_encoder_decoder and _has_cross_attention(stack):
            raise TargetError(
                f"{self.type} cannot put tokens before the input of {type(stack).__name__}",
                found="Its blocks also attend to an image or another text, with masks for "
                "the real tokens only.",
                fix="Use a method for linear layers, such as lora.",
            )
        return path, stack

    def shared(self, modules: Modules) -> dict[str, Tensor]:
        ours = [module for module in modules.values() if isinstance(module, VirtualTokens)]
        return {PROMPT: ours[0].prompt_embeddings.detach()} if ours else {}

    def connect(self, model: nn.Module, modules: Modules) -> Handles:
        (module,) = modules.values()
        assert isinstance(module, VirtualTokens)
        return self.register_hooks(model, self.find_stack(model)[1], module)

    @abstractmethod
    def register_hooks(self, model: nn.Module, stack: object, module: VirtualTokens) -> Handles:
        """Register the hooks that add the virtual tokens to the input."""


class VirtualFormat(PeftFormat[M]):
    """The fields that prompt tuning and prefix tuning share in PEFT's files."""

    absent_fields = (
        "bias", "fan_in_fan_out", "target_modules", *LAYERS,
    )  # fmt: skip
    known_fields: ClassVar[Collection[str]] = (
        "num_virtual_tokens", "token_dim", "num_transformer_submodules", "num_attention_heads",
        "num_layers",
    )  # fmt: skip
    shared_prefix = ""


def _has_cross_attention(stack: nn.Module) -> bool:
    """Return whether the blocks also attend to an image or another text."""
    return any(
        place.side or any(role.startswith("cross_") for role in place.roles)
        for place in find_places(stack)
    )


class StackInputs:
    """Extends the inputs of a stack by the virtual tokens.

    Attributes:
        module: Holds the virtual tokens.
        cache_name: Name of the stack's argument for the key-value cache, if it has one.
    """

    def __init__(self, stack: nn.Module, module: VirtualTokens) -> None:
        self.stack, self.module = stack, module
        self._names, self.cache_name = arguments(stack), cache_name(stack)

    def named(self, args: tuple[object, ...], kwargs: Inputs) -> Inputs:
        """Return all inputs of the stack as keyword arguments; its cache has its current name."""
        inputs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        for name in CACHE_NAMES:
            if name in inputs and self.cache_name not in (None, name):
                inputs[str(self.cache_name)] = inputs.pop(name)
        return inputs

    def lengthen(self, inputs: Inputs, num_past: int) -> None:
        """Extend the attention mask and shift the positions by the virtual tokens.

        Args:
            inputs: The stack's inputs, changed in place.
            num_past: P, or 0.

        Raises:
            AdapterError: The mask has another form or another length.
        """
        num_virtual, ids = self.module.num_virtual, inputs.get("input_ids")
        num_tokens = int((ids if ids is not None else inputs["inputs_embeds"]).shape[1])
        num_real = num_tokens + max(num_past - num_virtual, 0)
        mask = inputs.get("attention_mask")
        if mask is not None:
            self._check_mask(mask, num_real)
            inputs["attention_mask"] = torch.cat(
                [mask.new_ones(len(mask), num_virtual), mask], dim=1
            )
        if inputs.get("position_ids") is not None:
            inputs["position_ids"] = inputs["position_ids"] + num_virtual
        inputs.pop("cache_position", None)  # the stack computes the positions itself

    def _check_mask(self, mask: object, num_real: int) -> None:
        problem = f"the virtual tokens cannot be added to this input of {type(self.stack).__name__}"
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise AdapterError(
                problem,
                found="Its attention mask is not (batch, tokens), as with packed documents, each "
                "of which would need the virtual tokens.",
                fix="Set data.packing: false, and use a dynamic cache.",
            )
        if mask.shape[1] != num_real:
            raise AdapterError(
                problem,
                found=f"Its mask has {mask.shape[1]} tokens; input and cache have {num_real} and "
                f"{self.module.num_virtual} virtual ones.",
                fix="Fill and use a cache with the adapter in the same state; assisted decoding "
                "is not possible with it.",
            )


def num_past(cache: Any) -> int:
    """Return the number of tokens in a cache; in an encoder-decoder, of the self-attention cache.

    Raises:
        AdapterError: The cache is static, sized for the real tokens only.
    """
    if cache is None:
        return 0
    decoder_cache = getattr(cache, "self_attention_cache", cache)
    if any(getattr(layer, "is_compileable", False) for layer in decoder_cache.layers):
        raise AdapterError(
            "virtual tokens need a dynamic cache",
            found=f"{type(decoder_cache).__name__}, whose size is fixed",
            fix="Remove cache_implementation.",
        )
    # cache.get_seq_length() reads the first layer, which may have linear attention
    return max(
        (int(x.get_seq_length()) for x in decoder_cache.layers if hasattr(x, "get_seq_length")),
        default=0,
    )
