"""Prompt tuning: V trained embeddings before the input's
(Lester et al., 2021, arXiv:2104.08691).

They are inserted directly after the embedding layer, in encoder-decoders before the encoder's
input.

Shapes: B rows, T tokens, V virtual tokens, H hidden size.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from peftkit.errors import TargetError
from peftkit.files.strict_json import Json, JsonMap
from peftkit.forward.compat import arguments, cache_in, cache_name
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
from peftkit.model.targets import Site

_INITS = {"sampled": "SAMPLE_VOCAB", "random": "RANDOM"}
"""peftkit's names -> PEFT's."""


class Prompt(VirtualTokens):
    """The virtual tokens' embeddings, (V, H)."""

    def __init__(self, base: nn.Module, site: Site, method: PromptTuning) -> None:
        assert isinstance(base, nn.Embedding)
        num_rows = method.num_transformer_submodules * method.num_virtual_tokens
        super().__init__(base, site, method, (num_rows, base.embedding_dim))
        self.init = method.init

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        used = self.prompt_embeddings[: self.num_virtual]
        if self.init == "sampled":
            used.copy_(self.base(self.sampled_ids(generator)))
        else:
            used.copy_(torch.randn(used.shape, generator=generator))


class PromptTuning(VirtualMethod):
    """Trained embeddings before the input's."""

    in_decoder: ClassVar[bool] = False

    type: Literal["prompt_tuning"] = "prompt_tuning"
    init: Literal["sampled", "random"] = "sampled"
    """sampled: embeddings of random tokens; random: normal with variance 1."""
    num_transformer_submodules: Literal[1, 2] = 1
    """Copies of the rows: 2 for encoder-decoders, where PEFT saves an unused second half."""

    def find_stack(self, model: nn.Module) -> tuple[str, nn.Module]:
        path, stack = super().find_stack(model)
        if "inputs_embeds" not in arguments(stack):
            raise TargetError(
                f"{self.type} cannot put embeddings before the input of {type(stack).__name__}",
                found="It accepts token ids only.",
                fix="Use a method for linear layers, such as lora.",
            )
        return path, stack

    def wrap(self, base: nn.Module, site: Site) -> Prompt:
        return Prompt(base, site, self)

    def register_hooks(self, model: nn.Module, stack: Any, module: VirtualTokens) -> Handles:
        in_encoder = bool(stack.config.is_encoder_decoder)
        hooks = _Hooks(stack, module, cut=not in_encoder and not _pools_the_first(model))
        handles = [
            stack.register_forward_pre_hook(hooks.before, with_kwargs=True),
            stack.register_forward_hook(hooks.after),
        ]
        if in_encoder:
            decoder: Any = model.get_decoder()  # type: ignore[operator]
            handles.append(decoder.register_forward_pre_hook(hooks.across, with_kwargs=True))
        return handles


class PromptTuningFormat(VirtualFormat[PromptTuning]):
    """Prompt tuning in PEFT's files."""

    peft_type = "PROMPT_TUNING"
    known_fields = (
        *VirtualFormat.known_fields, "prompt_tuning_init", "prompt_tuning_init_text",
        "tokenizer_name_or_path", "tokenizer_kwargs",
    )  # fmt: skip

    def method(self, fields: JsonMap) -> PromptTuning:
        copies: Any = fields.get("num_transformer_submodules")
        if copies is None:
            copies = 2 if fields.get("task_type") == "SEQ_2_SEQ_LM" else 1
        return PromptTuning(
            num_virtual_tokens=fields.get("num_virtual_tokens", 0),
            num_transformer_submodules=copies,
            init="random" if fields.get("prompt_tuning_init") == "RANDOM" else "sampled",
        )

    def fields(self, method: PromptTuning, model: nn.Module, modules: Modules) -> Json:
        module = next(iter(modules.values()))
        assert isinstance(module, Prompt)
        return {
            "num_virtual_tokens": method.num_virtual_tokens,
            "token_dim": module.prompt_embeddings.shape[1],
            "num_transformer_submodules": method.num_transformer_submodules,
            "prompt_tuning_init": _INITS[method.init],
        }


class _Hooks(StackInputs):
    """Prepend the prompt to a stack's input; remove its positions from the output.

    Attributes:
        cut: Whether to remove them, because the head expects the real tokens only.
        prepended: Number of virtual tokens added in the current call.
    """

    def __init__(self, stack: nn.Module, module: VirtualTokens, *, cut: bool) -> None:
        super().__init__(stack, module)
        self.cut, self.prepended = cut, 0

    def before(self, stack: nn.Module, args: tuple[object, ...], kwargs: Inputs) -> Changed:
        self.prepended = 0
        if not self.module.enabled:
            return None
        inputs = self.named(args, kwargs)
        past = num_past(cache_in(inputs))
        self.lengthen(inputs, past)
        if not past:  # otherwise they are in the cache
            self._prepend(inputs)
        return (), inputs

    def _prepend(self, inputs: Inputs) -> None:
        num_virtual = self.prepended = self.module.num_virtual
        embeds = inputs.get("inputs_embeds")
        if embeds is None:
            embeds = self.module(inputs.pop("input_ids"))  # (B, T, H)
        prompt = self.module.prompt_embeddings[:num_virtual].to(embeds.dtype)
        prompt = prompt.expand(len(embeds), -1, -1)
        inputs["inputs_embeds"] = torch.cat([prompt, embeds], dim=1)
        if (positions := inputs.get("position_ids")) is not None:  # (..., B, T)
            first = torch.arange(num_virtual, device=positions.device, dtype=positions.dtype)
            first = first.expand(*positions.shape[:-1], -1)
            inputs["position_ids"] = torch.cat([first, positions], dim=-1)
        if (types := inputs.get("token_type_ids")) is not None:
            zeros = types.new_zeros(len(types), num_virtual)
            inputs["token_type_ids"] = torch.cat([zeros, types], dim=1)

    def after(self, stack: nn.Module, args: tuple[object, ...], output: Any) -> Any:
        if not self.prepended or not self.cut:
            return None
        if isinstance(output, tuple):
            return tuple(self._without(part) for part in output)
        for name in ("last_hidden_state", "hidden_states"):
            if output.get(name) is not None:
                output[name] = self._without(output[name])
        return output

    def _without(self, part: object) -> Any:
        """Return hidden states of one layer, or of all, without the virtual tokens."""
        if isinstance(part, tuple):
            return tuple(self._without(each) for each in part)
        if isinstance(part, Tensor) and part.ndim == 3:
            return part[:, self.prepended :]
        return part

    def across(self, decoder: nn.Module, args: tuple[object, ...], kwargs: Inputs) -> Changed:
        """Extend the decoder's mask over the encoder's output by the virtual tokens."""
        mask = kwargs.get("encoder_attention_mask")
        if not self.module.enabled or mask is None or mask.ndim != 2:
            return None
        ones = mask.new_ones(len(mask), self.module.num_virtual)
        return args, {**kwargs, "encoder_attention_mask": torch.cat([ones, mask], dim=1)}


def _pools_the_first(model: nn.Module) -> bool:
    """Return whether the model pools its first position, which is a virtual token here.

    BERT's pooler does this inside the stack; PEFT does it for all classifiers of this kind.
    """
    name, config = type(model).__name__, model.config
    return (
        name.endswith("ForSequenceClassification")
        and cache_name(model) is None
        and getattr(config, "classifier_pooling", "cls") == "cls"
    )
