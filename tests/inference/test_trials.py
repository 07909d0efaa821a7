"""Trials of fast paths accept kernels that round elsewhere, and refuse errors, at any depth."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from peftkit.data.pack import padded_rows
from peftkit.errors import DataError
from peftkit.forward.noise import Trial
from peftkit.forward.probes import check_packing
from peftkit.inference import plain_engine
from peftkit.inference.bank_layer import rows_in_order
from peftkit.inference.cached_attention import Decode, LayerMask
from peftkit.inference.open_engine import why_plain
from peftkit.inference.plain_engine import takes_padding
from tests.helpers.families import _GROUPED, EOS, PAD, _builder

TOKENIZER: Any = type("T", (), {"eos_token_id": EOS, "pad_token_id": PAD})
# weights of this size give scores of order one, as trained models have
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
CASES = [
    pytest.param(
        family,
        depth,
        dtype,
        id=f"{family}-{depth}-{str(dtype)[6:]}",
        marks=[pytest.mark.slow] if depth > 4 else [],
    )
    for family in FAMILIES
    for depth in (4, 32)
    for dtype in (torch.float32, torch.bfloat16)
    # over 32 layers of random routers in 16 bits, rounding sends most tokens to other experts
    if (family, depth, dtype) != ("mixtral", 32, torch.bfloat16)
]
Plant = Callable[[], Any]


def model_of(family: str, depth: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    kind, config, more = FAMILIES[family]
    sizes = {**_GROUPED, **more, "num_hidden_layers": depth}
    return _builder(kind, config, **sizes)().eval().to(dtype)


@contextmanager
def kernels_by_shape() -> Iterator[None]:
    """Sum products in parts whose number depends on the rows, as GPUs may."""
    product = functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = 1 + x.shape[:-1].numel() % 3
        pairs = zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
        out = sum(product(*pair) for pair in pairs)
        assert isinstance(out, Tensor)
        return out if bias is None else out + bias

    with mock.patch.object(functional, "linear", linear):
        yield


def with_mask(hide: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    """Hide keys at some positions of queries and keys."""

    def masked(self: Any, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        visible = self._function(0, 0, queries, keys) & (keys <= queries) & ~hide(queries, keys)
        return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)

    return lambda: mock.patch.object(LayerMask, "__call__", masked)


def positions_off_by_one() -> Any:
    later = property(lambda self: (self._starts + self._lengths)[:, None] + 1)
    return mock.patch.object(Decode, "positions", later)


def rows_swapped() -> Any:
    attend = Decode.attend
    return mock.patch.object(Decode, "attend", lambda *args: attend(*args).flip(0))


ENGINE_ERRORS = {
    "a lost key": with_mask(lambda queries, keys: (keys == 2) & (queries > 2)),
    "a mask off by one": with_mask(lambda queries, keys: (keys == queries) & (queries > 0)),
    "positions off by one": positions_off_by_one,
    "rows swapped": rows_swapped,
}


@pytest.mark.parametrize(("family", "depth", "dtype"), CASES)
def test_the_engine_is_accepted_and_its_errors_are_refused(family, depth, dtype):
    model = model_of(family, depth, dtype)
    with kernels_by_shape():
        assert why_plain(model, TOKENIZER) is None
        for name, plant in ENGINE_ERRORS.items():
            wrong = model_of(family, depth, dtype)
            with plant():
                problem = why_plain(wrong, TOKENIZER)
            assert problem is not None, name
            assert "other logits" in problem, name


@pytest.mark.parametrize(("family", "depth", "dtype"), CASES)
def test_padding_packing_and_order_are_accepted_and_their_errors_are_refused(
    family, depth, dtype, monkeypatch
):
    model = model_of(family, depth, dtype)
    middle = model.model.layers[depth // 2]

    def without_mask(_: Any, args: Any, named: Any) -> Any:
        return args, {**named, "attention_mask": None}

    with kernels_by_shape():
        assert takes_padding(model, PAD)
        check_packing(model)
        assert all(rows_in_order(model).values())
        hook = middle.register_forward_pre_hook(without_mask, with_kwargs=True)
        with pytest.raises(DataError, match="changes the logits"):
            check_packing(model)
        hook.remove()
        hook = middle.register_forward_pre_hook(lambda _, args: (args[0].flip(0), *args[1:]))
        ordered = rows_in_order(model)
        hook.remove()
        assert [path for path, right in ordered.items() if not right] == [
            path for path in ordered if is_from(path, depth // 2)
        ]
        monkeypatch.setattr(plain_engine, "padded_rows", padding_that_counts)
        assert not takes_padding(model_of(family, depth, dtype), PAD)


def is_from(path: str, layer: int) -> bool:
    """Return whether a path is of a layer from this one on, or of the head."""
    names = path.split(".")
    return "layers" not in names or int(names[names.index("layers") + 1]) >= layer


def padding_that_counts(rows: Any, pad: int, *, left: bool) -> Any:
    ids, mask = padded_rows(rows, pad, left=left)
    return ids, torch.ones_like(mask)


def test_nothing_but_equal_numbers_is_accepted_of_a_model_without_noise():
    values = [torch.tensor([1.0, 2.0])]
    trial = Trial(torch.nn.Identity(), lambda: values)
    assert trial.noise == (0.0, 0.0)
    assert trial.accepts([values[0].clone()])
    assert not trial.accepts([values[0] + 1e-6])
    assert not trial.accepts([values[0] * float("nan")])
