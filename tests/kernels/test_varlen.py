"""Documents of one row, each attended to by itself: where they are, and what becomes of them."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from peftkit.kernels import varlen
from peftkit.kernels.varlen import Spans, spans_attention, spans_of
from tests.helpers.varlen_reference import reference_varlen_attn

APART = [[0, 1, 2, 3, 4], [5, 6, 7], [8]]
SHARED = [[0, 1, 2, 3, 4], [0, 1, 5, 6], [0, 1, 5, 7], [0, 1], [8, 9]]
"""Two that branch off within others, one that is how others begin, one of its own."""


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute what the GPU's kernel does, and refuse what it refuses."""

    def checked(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Tensor:
        assert {x.stride(-1) for x in (query, key, value)} == {1}
        assert [x.dtype for x in rest[:2]] == [torch.int32] * 2
        assert all(type(size) is int for size in rest[2:])
        assert int(rest[0][-1]) == len(query)
        assert int(rest[1][-1]) == len(key) == len(value)
        return reference_varlen_attn(query, key, value, *rest, **more)

    monkeypatch.setattr(varlen, "kernel", lambda: checked)


def alone(inputs: list[Tensor], document: list[int], *, causal: bool, window: int | None) -> Tensor:
    """Return (H, T, D) of a document by itself."""
    query, key, value = (x[0][:, document] for x in inputs)
    keys, values = (x.repeat_interleave(len(query) // len(x), 0) for x in (key, value))
    place = torch.arange(len(document))
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < (window or len(document))) if causal else None
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, seen, scale=0.3)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (True, 1), (False, None)])
@pytest.mark.parametrize("documents", [APART, SHARED], ids=["apart", "shared"])
@pytest.mark.parametrize("rounds", [False, True])
def test_each_document_attends_only_to_itself(rounds, documents, causal, window):
    if not causal and documents is SHARED:
        return  # what begins alike ends otherwise, and is seen
    total = 16
    inputs = [torch.randn(1, h, total, 8, requires_grad=True) for h in (4, 2, 2)]
    spans = spans_of(documents, total, rounds=rounds)
    actual = spans_attention(*inputs, spans, is_causal=causal, scale=0.3, window=window)
    assert actual.shape == (1, total, 4, 8)
    weights = torch.randn(total, 4, 8)
    weights[max(map(max, documents)) + 1 :] = 0
    expected_sum, heard = actual.new_zeros(()), set()
    for document in sorted(documents, key=max):
        expected = alone(inputs, document, causal=causal, window=window)
        for place, token in enumerate(document):
            torch.testing.assert_close(actual[0, token], expected[:, place])
            if token not in heard:  # one place of each token speaks
                expected_sum = expected_sum + (expected[:, place] * weights[token]).sum()
                heard.add(token)
    grads = torch.autograd.grad((actual[0] * weights).sum(), inputs)
    for a, b in zip(grads, torch.autograd.grad(expected_sum, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_a_row_is_cut_where_documents_begin_and_padded_by_one_of_its_own():
    spans = spans_of(APART, 16)
    assert spans.queries.tolist() == spans.keys.tolist() == [0, 5, 8, 9, 16]
    assert len(spans.tokens) == 0  # nothing is gathered where nothing is shared
    assert spans.longest.shape == (7, 7, 16, 0)


def test_of_documents_that_begin_alike_only_what_is_new_asks():
    spans = spans_of(SHARED, 12)
    assert spans.queries.tolist() == [0, 5, 7, 8, 10, 12]  # [0, 1] has nothing of its own
    assert spans.keys.tolist() == [0, 5, 9, 13, 15, 17]
    assert spans.tokens.tolist() == [*range(5), 0, 1, 5, 6, 0, 1, 5, 7, 8, 9, 10, 11]
    assert spans.longest.shape == (5, 5, 12, 0)
    assert spans.owners.tolist() == [0, 1, 0, 1, 5]


@pytest.mark.parametrize("num_shared", [0, 1, 30])
def test_rounded_sizes_are_few_and_large_enough(num_shared):
    draw, shapes = torch.Generator().manual_seed(num_shared), set()
    for _ in range(200):
        count = int(torch.randint(1, 17, (), generator=draw))
        lengths = torch.randint(1, 200, (count,), generator=draw).tolist()
        used, documents = num_shared, list[list[int]]()
        for length in sorted(lengths, reverse=True):
            documents.append([*range(num_shared), *range(used, used + length)])
            used += length
        spans = spans_of(documents, 3300, rounds=True)
        queries, keys = spans.queries.diff(), spans.keys.diff()
        assert queries[: len(lengths)].count_nonzero() == len(lengths)
        assert (int(queries.sum()), int(keys.sum())) == (3300, len(spans.tokens) or 3300)
        assert queries.max() <= spans.longest.shape[0] < 2 * max(64, int(queries.max()))
        assert keys.max() <= spans.longest.shape[1]
        assert len(keys) < 2 * max(4, len(lengths) + 1)
        assert len(spans.tokens) <= 17 / 16 * max(3300, 3300 + num_shared * (len(lengths) - 1))
        shapes.add(tuple(tensor.shape for tensor in spans))
    assert len(shapes) <= 20


def test_sizes_travel_with_the_batch():
    moved = Spans(*(x.to("meta") for x in spans_of(SHARED, 12)))
    assert moved.longest.shape[:2] == (5, 5)


def test_what_is_shared_by_many_is_summed_in_float32():
    documents = [[0, n] for n in range(1, 301)]
    spans = spans_of(documents, 304)
    x = torch.ones(304, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    gathered = varlen.gathered(x, spans)
    (grad,) = torch.autograd.grad(gathered.sum(), x)
    assert grad[0].unique().tolist() == [300.0]  # bfloat16 alone stands still at 256


@pytest.mark.parametrize(
    ("sizes", "dtype", "takes"),
    [
        ((64, 64), torch.bfloat16, True),
        ((256, 256), torch.float16, True),
        ((64, 64), torch.float32, False),
        ((288, 288), torch.bfloat16, False),
        ((20, 20), torch.bfloat16, False),
        ((192, 128), torch.bfloat16, False),
    ],
)
def test_the_kernel_takes_what_flash_attention_takes(sizes, dtype, takes, monkeypatch):
    query, value = (torch.zeros(1, 2, 4, size, dtype=dtype) for size in sizes)
    assert not varlen.serves(query, query, value)  # not on a CPU
    monkeypatch.setattr(varlen, "is_available", lambda device: True)
    assert varlen.serves(query, query, value) == takes


@pytest.mark.parametrize(
    ("capability", "sizes"),
    [
        ((8, 0), [192, 200, 224, 256]),
        ((8, 6), [192, 256]),
        ((8, 9), [192, 256]),
        ((9, 0), [192, 200, 224, 256]),
        ((10, 0), [192, 200, 224, 256]),
        ((12, 0), [192, 256]),
    ],
)
def test_the_kernel_takes_heads_whose_backward_pass_the_card_has(capability, sizes, monkeypatch):
    monkeypatch.setattr(varlen, "is_available", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    varlen._has_large_memory.cache_clear()
    heads = {size: torch.zeros(1, 2, 4, size).bfloat16() for size in (192, 200, 224, 256)}
    assert [size for size, x in heads.items() if varlen.serves(x, x, x)] == sizes
    varlen._has_large_memory.cache_clear()


def test_torch_has_the_arguments_that_are_given(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    varlen.is_available.cache_clear()
    assert varlen.is_available(torch.device("cuda", 0))
    given = inspect.signature(reference_varlen_attn).parameters
    kernel: Any = varlen.kernel()
    assert given.keys() <= inspect.signature(kernel).parameters.keys()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    varlen.is_available.cache_clear()
    assert not varlen.is_available(torch.device("cuda", 0))
    varlen.is_available.cache_clear()


def of_2_11(query: Tensor, *rest: Any, scale: float, window_size: Any) -> Any:
    return "grouped without the argument"


def of_2_12(
    query: Tensor, *rest: Any, scale: float, window_size: Any, enable_gqa: bool = False
) -> Any:
    return enable_gqa


@pytest.mark.parametrize(
    ("theirs", "answer"), [(of_2_11, "grouped without the argument"), (of_2_12, True)]
)
def test_grouped_heads_are_requested_where_torch_has_the_argument(theirs, answer, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", theirs)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for cached in (varlen.kernel, varlen.is_available):
        cached.cache_clear()
    assert varlen.is_available(torch.device("cuda", 0))
    run: Any = varlen.kernel()
    assert run(torch.zeros(16, 4, 8), scale=1.0, window_size=(-1, 0)) == answer
    for cached in (varlen.kernel, varlen.is_available):
        cached.cache_clear()
