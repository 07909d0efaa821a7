"""Adapters side by side: each row computes what its adapter computes alone, and nothing is copied.

The reference is always the adapter attached alone, as everywhere else in peftkit.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftkit.base.load import load_base
from peftkit.data.style import Style
from peftkit.errors import AdapterError
from peftkit.events import Notice
from peftkit.formats.peft.load import load_adapter
from peftkit.inference.bank import AdapterBank, open_bank
from peftkit.inference.bank_layer import BankLinear
from peftkit.inference.engine import Limits, Request
from peftkit.inference.generate import generate, generate_ids
from peftkit.inference.sampling import Sampling
from peftkit.kernels import by_row
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from tests.helpers.bank import tiny_base, write_adapter
from tests.helpers.families import FAMILIES
from tests.helpers.generation import MODELS

TOLERANCE = 2e-5
"""float32 sums in another order; logits are of order one."""

METHODS: dict[str, LoRA] = {
    "plain": LoRA(rank=4, alpha=8),
    "twin": LoRA(rank=4, alpha=8),
    "rslora": LoRA(rank=3, alpha=5, rslora=True, targets=("q", "v")),
    "patterns": LoRA(rank=2, alpha=3, rank_pattern={"o": 5}, alpha_pattern={"down": 7}),
    "ffn": LoRA(rank=1, alpha=2, targets=("down",)),
    "pissa": LoRA(rank=2, alpha=2, init="pissa", targets=("o",)),
    "dora": DoRA(rank=3, alpha=6, targets=("q", "o", "down")),
}
FLATTENING: dict[str, tuple[str, ...]] = {
    "opt": ("up", "down"),
    "qwen2_moe": ("q", "shared_router"),
}
"""Families whose feed-forward layers read (B * T, D), and the layers to adapt."""
BATCHES: dict[str, list[str | None]] = {
    "each its own": ["plain", "twin"],
    "one for all": ["rslora", "rslora", "rslora"],
    "none": [None, None],
    "mixed with bare rows": ["plain", None, "rslora", "plain", None, "ffn"],
    "all": [*METHODS, None, *METHODS],
}


def write_all(model: nn.Module, folder: Path) -> dict[str, Path]:
    """Write one adapter of each method."""
    return {
        name: write_adapter(model, method, folder / name, seed)
        for seed, (name, method) in enumerate(METHODS.items())
    }


def some_ids(num_rows: int, length: int = 7) -> Tensor:
    return torch.randint(5, 300, (num_rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits


def alone(model: nn.Module, path: Path | None, ids: Tensor) -> Tensor:
    """Return the logits with one adapter attached, or with none."""
    adapter = None if path is None else load_adapter(model, path)
    outputs = logits(model, ids)
    if adapter is not None:
        adapter.detach()
    return outputs


def rows_alone(
    model: nn.Module, paths: dict[str, Path], rows: list[str | None], ids: Tensor
) -> Tensor:
    """Return the logits of each row with its own adapter attached alone."""
    of = {name: alone(model, paths[name] if name else None, ids) for name in set(rows)}
    return torch.stack([of[name][row] for row, name in enumerate(rows)])


@pytest.fixture
def model(llama: nn.Module) -> nn.Module:
    return llama


@pytest.fixture
def paths(model: nn.Module, tmp_path: Path) -> dict[str, Path]:
    return write_all(model, tmp_path)


@pytest.fixture
def bank(model: nn.Module, tokenizer: Any, paths: dict[str, Path]) -> AdapterBank:
    return AdapterBank(tiny_base(model, tokenizer), paths)


@pytest.fixture(params=["masked", "batched"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of the product, whatever their costs."""
    masked = request.param == "masked"
    monkeypatch.setattr(by_row.RowRanks, "masked_is_cheaper", lambda *_: masked)
    return str(request.param)


# ------------------------------------------------------------------- equality


@pytest.mark.parametrize(
    ("family", "batch"),
    [("llama", batch) for batch in ("mixed with bare rows", "all")]
    + [("gpt2", "all"), pytest.param("gemma2", "all", marks=pytest.mark.slow)],
)
def test_a_mixed_batch_equals_each_alone(family, batch, way, tmp_path):
    model = FAMILIES[family]().eval()
    fused = family in ("gpt2", "phi3", "gpt_neox")  # PiSSA cannot start from a part of these
    rows = [name for name in BATCHES[batch] if not (fused and name == "pissa")]
    methods = {n: m for n, m in METHODS.items() if n in rows}
    paths = {
        name: write_adapter(model, method, tmp_path / name, seed)
        for seed, (name, method) in enumerate(methods.items())
    }
    ids = some_ids(len(rows))
    expected = rows_alone(model, paths, rows, ids)
    bank = AdapterBank(tiny_base(model), paths)
    with bank.use(rows):
        outputs = logits(model, ids)
    torch.testing.assert_close(outputs, expected, atol=TOLERANCE, rtol=0)
    if any(rows):
        assert not torch.allclose(outputs, logits(model, ids), atol=1e-3), "adapters take part"


@pytest.mark.parametrize("name", ["patterns", "pissa", "dora"])
def test_one_adapter_for_the_batch_is_that_adapter_alone(name, bank, model, paths):
    ids = some_ids(3)
    with bank.use(name):
        outputs = logits(model, ids)
    for one in bank.names:
        bank.drop(one)
    torch.testing.assert_close(outputs, alone(model, paths[name], ids), atol=TOLERANCE, rtol=0)


def test_no_name_is_the_base_exactly(bank, model, tmp_path):
    ids = some_ids(3)
    outside = logits(model, ids)
    with bank.use("plain"), bank.use(None):
        inside = logits(model, ids)
    with bank.use([None, None, None]):
        by_row_ = logits(model, ids)
    for name in bank.names:
        bank.drop(name)
    bare = logits(model, ids)
    for outputs in (outside, inside, by_row_):
        assert torch.equal(outputs, bare)


@pytest.mark.parametrize(("kind", "placement"), [("int8", "device"), ("nf4", "stream")])
def test_adapters_share_a_quantised_base(kind, placement, model_folder, way, tmp_path):
    base = load_base(str(model_folder), quantize=kind, dtype="fp32", placement=placement)
    paths = write_all(base.model, tmp_path)
    ids = some_ids(len(BATCHES["all"]))
    expected = rows_alone(base.model, paths, BATCHES["all"], ids)
    bank = AdapterBank(base, paths)
    with bank.use(BATCHES["all"]):
        torch.testing.assert_close(logits(base.model, ids), expected, atol=TOLERANCE, rtol=0)


# ------------------------------------------------------------------- generation

PROMPTS = [[9, 41, 77, 20, 33], [50], [80, 81, 82], [9, 41, 77, 20, 33], [60, 61], [7, 8, 9, 10]]
NAMES: list[str | None] = ["plain", "rslora", None, "ffn", "plain", "twin"]


def test_each_prompt_is_completed_by_its_own_adapter(bank, model, tokenizer, paths):
    with bank.engine(Limits(rows=4)) as engine:
        groups = engine.answers(PROMPTS, Sampling(max_new_tokens=6), adapters=NAMES)
    completions = [answer.ids for (answer,) in groups]
    for name in bank.names:
        bank.drop(name)
    for prompt, name, ids in zip(PROMPTS, NAMES, completions, strict=True):
        adapter = load_adapter(model, paths[name]) if name else None
        assert generate_ids(model, tokenizer, [prompt], max_new_tokens=6) == [ids], name
        if adapter:
            adapter.detach()
    assert len({tuple(ids) for ids in completions}) > 2, "adapters take part"


def test_each_adapter_has_its_own_style(model, tokenizer, tmp_path):
    styles = {"chat": Style("chat"), "plain": Style("plain")}
    paths = {
        name: write_adapter(model, METHODS["plain"], tmp_path / name, 4, prompt_style=style)
        for name, style in styles.items()
    }
    bank = AdapterBank(tiny_base(model, tokenizer), paths)
    prompts, names = ["what is the lazy?", "the quick", "the brown fox"], ["chat", "plain", None]
    texts = bank.generate(prompts, names, max_new_tokens=5)
    for prompt, name, text in zip(prompts, names, texts, strict=True):
        with bank.use(name):
            style = styles[name] if name else None
            expected = generate(model, tokenizer, prompt, style=style, max_new_tokens=5)
        assert expected == [text]


# ------------------------------------------------------------------- a lookup, and memory


def test_adapters_move_but_are_not_in_the_state_dict(bank, model):
    assert not any(".updates" in name or "lora" in name for name in model.state_dict())
    ids = some_ids(2)
    with bank.use(["plain", "dora"]):
        before = logits(model, ids)
        model.to(torch.float64)
        torch.testing.assert_close(logits(model, ids).float(), before, atol=1e-4, rtol=0)
    layer = next(m for m in model.modules() if isinstance(m, BankLinear))
    assert {u.a.dtype for u in layer.updates.values()} == {torch.float64}


# ------------------------------------------------------------------- add and drop


def test_adapters_come_and_go(bank, model, paths):
    ids = some_ids(2)
    rows: list[str | None] = ["rslora", "ffn"]
    bank.drop("plain")
    with bank.use(rows):
        before = logits(model, ids)
        bank.drop("dora")
        bank.add("late", paths["plain"])
        assert torch.equal(logits(model, ids), before)
        with bank.use(["late", None]):
            late = logits(model, ids)
        assert torch.equal(logits(model, ids), before)
        with pytest.raises(AdapterError, match="'ffn' is in use"):
            bank.drop("ffn")
        with bank.use(None), pytest.raises(AdapterError, match="'rslora' is in use"):
            bank.drop("rslora")
    assert bank.names == ("twin", "rslora", "patterns", "ffn", "pissa", "late")
    for name in bank.names:
        bank.drop(name)
    expected = rows_alone(model, paths, ["plain", None], ids)
    torch.testing.assert_close(late, expected, atol=TOLERANCE, rtol=0)


# ------------------------------------------------------------------- bad input


def test_a_name_is_a_plain_word_and_taken_once(bank, paths):
    for name in ("", "a/b", "..", "a..b", "a b", "a=b", ".a", "a\\b", "-a"):
        with pytest.raises(AdapterError, match="is not allowed as the name"):
            bank.add(name, paths["plain"])
    with pytest.raises(AdapterError, match=r"'plain' already(.|\n)*Drop it first"):
        bank.add("plain", paths["twin"])


ASKS: dict[str, Callable[[AdapterBank], object]] = {
    "use": lambda bank: bank.use("plian").__enter__(),
    "rows": lambda bank: bank.use(["plain", "plian"]).__enter__(),
    "drop": lambda bank: bank.drop("plian"),
    "num_bytes": lambda bank: bank.num_bytes("plian"),
    "file": lambda bank: bank.file("plian"),
    "complete": lambda bank: bank.generate(["a"], ["plian"]),
}


def test_an_unknown_name_is_told_with_its_neighbour(bank):
    for ask in ASKS.values():
        with pytest.raises(AdapterError, match=r"'plian'(.|\n)*twin(.|\n)*Did you mean 'plain'"):
            ask(bank)


@pytest.mark.parametrize("rows", [["plain", None], []])
def test_wrong_row_counts_fail(rows, bank, model):
    with bank.use(rows), pytest.raises(AdapterError, match=f"3 rows.*given for {len(rows)}"):
        logits(model, some_ids(3))


@pytest.mark.parametrize("family", FLATTENING)
def test_rows_that_the_model_flattens_keep_their_adapters(family, tmp_path):
    model, targets = MODELS[family]().eval(), FLATTENING[family]
    methods = {
        "one": LoRA(rank=1, alpha=4, targets=targets),
        "dora": DoRA(rank=1, alpha=6, targets=targets),
    }
    paths = {n: write_adapter(model, methods[n], tmp_path / n, s) for s, n in enumerate(methods)}
    rows: list[str | None] = ["one", None, "dora", "one"]
    ids = some_ids(len(rows), 5)
    expected = rows_alone(model, paths, rows, ids)
    bank = AdapterBank(tiny_base(model), paths)
    with bank.use(rows):
        outputs = logits(model, ids)
    torch.testing.assert_close(outputs, expected, atol=TOLERANCE, rtol=1e-5)


class Routed(nn.Module):
    """A feed-forward layer that reads the tokens of a batch in another order."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.flatten(0, 1).flip(0)).flip(0).view(x.shape)


def test_rows_that_the_model_reorders_are_answered_adapter_by_adapter(model, tokenizer, tmp_path):
    model.model.layers[1].mlp = Routed(model.model.layers[1].mlp)
    paths = {n: write_adapter(model, LoRA(rank=2, alpha=8), tmp_path / n, ord(n)) for n in "ab"}
    bank = AdapterBank(tiny_base(model, tokenizer), paths)
    (fallback,) = bank.fallbacks
    assert fallback.path == "A forward pass uses one adapter"
    assert "reorders tokens before model.layers.1.mlp.mlp." in fallback.cause
    with bank.use(["a", "b"]), pytest.raises(AdapterError, match="cannot separate the rows"):
        logits(model, some_ids(2))
    prompts, names = [[7, 8, 9], [9, 41, 77, 130], [55, 6]] * 2, ["a", "b", None, "b", "a", "b"]
    sampling = Sampling(max_new_tokens=5)
    with bank.engine() as engine:
        found = [one.ids for (one,) in engine.answers(prompts, sampling, adapters=names)]
        alone = [
            engine.answers([prompt], sampling, adapters=[name])[0][0].ids
            for prompt, name in zip(prompts, names, strict=True)
        ]
    assert found == alone
    assert len(set(map(tuple, found))) > 4


def test_rows_that_no_probe_has_seen_are_refused(bank, model):
    layer = model.model.layers[0].mlp.down_proj
    with bank.use(["plain", "ffn"]), pytest.raises(AdapterError, match="cannot separate the rows"):
        layer(torch.zeros(3, 64))


def test_an_adapter_of_other_weights_needs_force(model, tmp_path):
    base = tiny_base(model)
    path = write_adapter(
        model, METHODS["plain"], tmp_path, 0, base="other", fingerprint="sha256:" + "0" * 64
    )
    with pytest.raises(AdapterError, match=r"another base(.|\n)*trained on other"):
        AdapterBank(base, {"a": path})
    assert AdapterBank(base, {"a": path}, force=True).names == ("a",)


def test_misfits_are_listed(model, paths, tmp_path):
    other = FAMILIES["gpt2"]()
    foreign = write_adapter(other, METHODS["plain"], tmp_path / "foreign", 0)
    modules = list(model.modules())
    with pytest.raises(AdapterError) as caught:
        AdapterBank(tiny_base(model), {"a": paths["plain"], "b": foreign})
    message = str(caught.value)
    assert "no such layer: transformer.h.0.attn.c_attn" in message
    assert "no such layer: transformer.h.1.mlp.c_proj" in message
    assert list(model.modules()) == modules


def test_a_reused_name_serves_its_new_adapter(llama, tokenizer, tmp_path):
    paths = [write_adapter(llama, LoRA(rank=4, alpha=64), tmp_path / f"a{n}", n) for n in (1, 2)]
    prompt = [5 + n % 30 for n in range(140)]  # long enough to be kept for later
    bank = AdapterBank(tiny_base(llama, tokenizer), {"one": paths[1]})
    with bank.engine() as engine:
        ((right,),) = engine.answers([prompt], Sampling(6), adapters=["one"])
    bank.drop("one")
    bank.add("one", paths[0])
    with bank.engine(Limits(prefix_tokens=1000)) as engine:
        before = engine.answers([prompt] * 2, Sampling(6), adapters=["one"] * 2)
        engine.submit(Request(prompt, Sampling(6), adapter="one"))
        with pytest.raises(AdapterError, match="'one' is in use"):
            bank.drop("one")
        engine.run()
        bank.drop("one")
        bank.add("one", paths[1])
        after = engine.answers([prompt] * 2, Sampling(6), adapters=["one"] * 2)
    assert [one.ids for (one,) in after] == [right.ids] * 2
    assert before[0][0].ids != right.ids


def test_training_over_other_bits_is_reported(llama, tokenizer, tmp_path, monkeypatch):
    paths = {}
    for name, quantize in (("a", "none"), ("b", "nf4")):
        loading = {"quantize": quantize, "dtype": "fp32"}
        paths[name] = write_adapter(llama, LoRA(rank=4), tmp_path / name, 1, loading=loading)
    base = tiny_base(llama, tokenizer)
    monkeypatch.setattr("peftkit.inference.bank.base_of", lambda *_, **__: base)
    events: list[Any] = []
    open_bank(paths, force=True, on_event=events.append)
    (notice,) = [event.text for event in events if isinstance(event, Notice)]
    assert notice.startswith("'b' was trained over a base with quantize: nf4, here none")
