"""The kernel of split attention without a GPU: its machine code, and its numbers.

The interpreter computes wrong products in bfloat16; float16 takes the same path.
"""

from importlib.util import find_spec

import pytest

from tests.helpers.gpu_code import CARDS, output_of

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton: pip install peftkit[gpu-tests]"
)

COMPILED = """
import json, sys
import torch
from peftkit.kernels import triton_attention
from tests.cross_compile.machine_code import compiled, resources

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
dtype = sys.argv[2]
strides = ("k_slot", "k_head", "v_slot", "v_head", "m_slot", "m_query")
inputs = ("q", "keys", "values", "mask", "sinks", "joined")
sums = ("out", "top", "total", "joined_top", "joined_total")
types = dict.fromkeys(("heads", "queries", "length", "parts", "num_sinks", *strides), "i32")
types |= dict.fromkeys(("scale", "softcap"), "fp32") | dict.fromkeys(inputs, "*" + dtype)
types |= dict.fromkeys(sums, "*fp32")
asked = []
for queries, size, value_size in ((4, 64, 64), (1, 96, 96), (32, 128, 128), (16, 192, 128),
                                  (2, 256, 256), (32, 256, 256)):
    sizes = triton_attention.sizes_of(queries, size, value_size, DTYPES[dtype])
    asked.append((triton_attention.parts_kernel, {**sizes, "MASKED": True, "CAPPED": True}))
    fixed = {"PARTS": 64, "VALUES": value_size, "PADDED_VALUES": sizes["PADDED_VALUES"]}
    for whole in (True, False):
        asked.append((triton_attention.join_kernel, {**fixed, "WHOLE": whole, "SINKS": whole}))
found = []
for kernel, fixed in asked:
    # a launch sees that arrays, heads and lengths of slots begin at multiples of 16
    even = [n for n in kernel.arg_names if n not in fixed and (n in strides or "*" in types[n])]
    made = compiled(kernel, types, fixed, int(sys.argv[1]), aligned=even, num_stages=2)
    found.append({**resources(made), "shared": made.metadata.shared})
print(json.dumps(found))
"""

INTERPRETED = """
import json
from itertools import product
import torch
from peftkit.inference.partial_attention import PartialAttention, Scores, partial_attention
from peftkit.kernels.triton_attention import split_attention

# rows, heads of keys, queries of each, sizes, length: GQA groups, a prefix of many rows, odd sizes
CASES = ((1, 2, 1, 64, 64, 224), (3, 2, 4, 16, 24, 160), (1, 1, 36, 24, 24, 72),
         (2, 1, 3, 8, 8, 33))
worst = {}
for (rows, heads, group, size, value_size, length), dtype, parts, capped, window in product(
    CASES, (torch.float32, torch.float16), (1, 3), (False, True), (40, None)
):
    torch.manual_seed(length)
    q = torch.randn(rows, heads, group, size, dtype=dtype)
    keys, values = (
        torch.randn(rows, heads, length + 32, n, dtype=dtype)[:, :, :length]
        for n in (size, value_size)
    )
    key, last = torch.arange(length), torch.linspace(1, length, rows + 1).long()[1:, None]
    mask = None
    if window is not None:
        seen = (key < last) & (key >= last - window)
        mask = torch.zeros(seen.shape, dtype=dtype)
        mask = mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None, None]
        # what no query sees is not read
        unseen = ~seen[:, None, :, None].expand_as(keys[..., :1])
        keys, values = (torch.where(unseen, torch.nan, x) for x in (keys, values))
    sinks = torch.randn(heads * group, dtype=dtype) if capped else None
    scores = Scores(0.2, 3.0 if capped else None, sinks)
    numbers = (scores.scale, scores.softcap)
    exact = [x.nan_to_num().float() for x in (q, keys, values)]
    right = partial_attention(*exact, None if mask is None else mask.float(), scores)
    given = (q, keys, values, mask, *numbers)
    part = PartialAttention(*split_attention(*given, None, parts, False, ""))
    whole = split_attention(*given, sinks, parts, True, "")
    results = [(whole, right.normalised(sinks))]
    for found, expected in ((part.top, right.top), (part.total, right.total)):
        scale = expected.abs().clamp(min=1)
        results.append((found / scale, expected / scale))
    results.append((part.out / part.total, right.out / right.total))
    error = max(float((a.float() - b).abs().max()) for a, b in results)
    name = str(dtype)
    worst[name] = max(worst.get(name, 0.0), error if error == error else 1e9)
print(json.dumps(worst))
"""

ENGINE = """
import json
from unittest import mock
import torch
from peftkit.inference import cached_attention, cached_engine, partial_attention
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Limits, Request
from peftkit.inference.sampling import Sampling
from peftkit.kernels import triton_attention
from tests.helpers.generation import MODELS, TOKENIZER

class Interpreted:
    calls = 0
    def launch(self, name, *args, expected):
        Interpreted.calls += 1
        return getattr(triton_attention, name)(*args)

def answers(model):
    with CachedEngine(model, TOKENIZER, Limits(prefix_tokens=0)) as engine:
        engine.ends = frozenset()
        prompts = ([*range(20, 160), 7 + n] for n in range(3))
        running = [engine.submit(Request(ids, Sampling(4, 0.0), 0)) for ids in prompts]
        engine.run()
        return [one.ids for one in running]

found = {}
for name in ("llama", "gemma2", "gpt_oss"):
    for read in (1, 1 << 30):
        cached_engine.MIN_READ, Interpreted.calls = read, 0
        model = MODELS[name]().eval()
        expected = answers(model)
        with (
            mock.patch.object(cached_attention, "num_parts", lambda *_: 2),
            mock.patch.object(partial_attention.fused, "TRITON", Interpreted()),
        ):
            found[f"{name} {read}"] = [answers(model) == expected, Interpreted.calls]
print(json.dumps(found))
"""

GRIDS = """
import json
from unittest import mock
import torch
from peftkit.inference.partial_attention import num_parts
from peftkit.kernels import triton_attention
from tests.simulated_gpu.simulation import simulated

grids = []

class Noted:
    def __getitem__(self, grid):
        grids.append(grid[0])
        return lambda *args, **more: None

triton_attention.parts_kernel = triton_attention.join_kernel = Noted()
with simulated():
    parts = num_parts(torch.device("cuda", 0), 8, 8192)
q, keys = (torch.empty(1, 8, n, 128, device="meta") for n in (4, 8192))
triton_attention.split_attention(q, keys, keys, None, 1.0, None, None, parts, True, "")
print(json.dumps(grids))
"""


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("card", [card for card in CARDS if card >= 80])
def test_machine_code_keeps_all_in_registers(card, dtype, tmp_path):
    """Before Ampere, Triton multiplies without tensor cores; `num_parts` does not use it there."""
    found = output_of(COMPILED, str(card), dtype, TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == 18
    for used in found:
        assert used["LOCAL"] == 0
        assert used["STACK"] <= 64  # most have none; sm80 and fp32 keep some addresses there
        assert used["REG"] <= 255
        assert used["shared"] <= 48 << 10 or dtype == "fp32"
        assert used["shared"] <= 99 << 10


def test_one_row_of_an_8b_model_has_256_programs():
    """SDPA has 8 thread blocks, for one row and 8 heads of keys, on 132 multiprocessors."""
    assert output_of(GRIDS) == [256, 32]


def test_numbers_are_those_of_torch():
    worst = output_of(INTERPRETED, TRITON_INTERPRET="1")
    assert worst["torch.float32"] < 1e-5
    assert worst["torch.float16"] < 3e-3


def test_an_engine_has_the_tokens_of_torch():
    found = output_of(ENGINE, TRITON_INTERPRET="1")
    assert len(found) == 6
    for is_equal, calls in found.values():
        assert is_equal
        assert calls >= 8, "two layers and four tokens"
