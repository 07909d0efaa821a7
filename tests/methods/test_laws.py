"""The laws that every method obeys on every architecture: one grid. laws.py has them.

`make test` takes every method and every architecture, each several times, in cells spread over the
grid; the whole product is marked slow (`make test-all`, `python -m benchmarks.coverage`).
"""

from itertools import product
from typing import Any

import pytest
import torch

from peftkit.adapter import attach
from peftkit.errors import AdapterError, TargetError
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.methods.base import Method
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from peftkit.methods.own_parameters import BitFit
from peftkit.methods.table import METHODS
from peftkit.methods.vera import VeRA
from tests.helpers import cell, grid, laws
from tests.helpers.families import ARCHITECTURES, FAMILIES
from tests.helpers.kinds import inputs, outputs
from tests.helpers.spread import spread

QUANTIZE = ("none", "nf4")
CELLS = spread(product(grid.COLUMNS, ARCHITECTURES, QUANTIZE), 29)
CHEAP = (*laws.CHEAP, laws.recomputing_changes_nothing)
THREE, MIXTURES = "llama gpt2 qwen2", "mixtral qwen3_moe deepseek_v3 gpt_oss"
TOKENS = (40, 12, 33)
BOTH = {"lm_head": (12, 33, 60), "model.embed_tokens": (40, 12)}
SETTINGS: dict[str, tuple[str, Method]] = {
    "patterns": (THREE, LoRA(**grid.LOW_RANK, rank_pattern={"o": 2}, alpha_pattern={"o": 5})),
    "gaussian": (THREE, LoRA(**grid.LOW_RANK, init="gaussian")),
    "bf16": (THREE, LoRA(**grid.LOW_RANK, dtype="bf16")),
    "dora-rslora": (THREE, DoRA(**grid.LOW_RANK, rslora=True)),
    "vera-seed-only": (THREE, VeRA(rank=16, d_initial=1.0, save_projection=False)),
    "experts-up": (MIXTURES, LoRA(**grid.LOW_RANK, targets=("expert_up", "q"))),
    "experts-patterns": (
        MIXTURES,
        LoRA(**grid.LOW_RANK, rank_pattern={"expert_down": 2, "down_proj": 2}),
    ),
    "bitfit-ffn": ("gpt2", BitFit(targets=("ffn",))),
    "bitfit-norms": ("gpt2", BitFit(targets=("norms",))),
    "bitfit-roles": ("bert", BitFit(targets=("q", "v"))),
    "fully-head": ("llama gpt2", LoRA(rank=2, train_fully=("lm_head",))),
    "fully-embeddings": ("llama", LoRA(rank=2, train_fully=("embed_tokens",))),
    "fully-classes": ("bert_cls", LoRA(rank=2, train_fully=("classifier",))),
    "fully-pooler": ("bert_cls", LoRA(rank=2, train_fully=("classifier", "pooler"))),
    "fully-block": ("llama", LoRA(rank=2, train_fully=("layers.1",))),
    "rows": ("llama gpt2 gemma t5 bart", LoRA(rank=2, token_rows=TOKENS)),
    "rows-both": ("llama", LoRA(rank=2, token_rows=BOTH)),
    "rows-head": ("llama", LoRA(rank=2, token_rows={"lm_head": TOKENS})),
    "rows-and-head": ("llama", LoRA(rank=2, token_rows=TOKENS, train_fully=("lm_head",))),
    "rows-bitfit": ("qwen2", BitFit(token_rows=TOKENS)),
}
"""Name -> architectures and a method with settings that are not the grid's."""
IN_16_BITS = ("fully-block", "fully-pooler")
"""What has linear layers inside that would be quantised, and then not trained in full."""
SETTING_CELLS: list[Any] = []
for number, (setting, (families, _)) in enumerate(SETTINGS.items()):
    kinds = QUANTIZE if setting not in IN_16_BITS else QUANTIZE[:1]
    keys = [(setting, *key) for key in product(families.split(), kinds)]
    first = keys.pop(number % len(keys))
    SETTING_CELLS += [first, *(pytest.param(*key, marks=pytest.mark.slow) for key in keys)]
COMPILED = [("lora", "gpt2")]
COMPILED_TOO = [("parallel", "bert")]
COMPILED_TOO += [("lora", f) for f in ("llama", "mixtral", "vit", "mllama", "t5")]
COMPILED_TOO += [("houlsby", "mixtral")]
COMPILED_TOO += [("bitfit", "gpt2")]
COMPILED_TOO += [(c, "llama") for c in ("pissa", "dora", "ia3", "vera", "ln_tuning", "token_rows")]
COMPILED_TOO += [(c, "llama") for c in ("prompt_tuning", "prefix_tuning")]
"""Compiling takes a second and more: the benchmark does it everywhere."""
COMPILED_CELLS = [*COMPILED, *(pytest.param(*c, marks=pytest.mark.slow) for c in COMPILED_TOO)]


def demand_no_failure(outcome: laws.Outcome) -> None:
    assert not outcome.failures, "\n".join(outcome.failures)


@pytest.mark.parametrize(("column", "architecture", "quantize"), CELLS)
def test_the_laws_hold(column, architecture, quantize):
    demand_no_failure(laws.check(column, architecture, quantize, (*CHEAP, laws.merged_is_the_same)))


@pytest.mark.filterwarnings(
    "ignore:Unsupported layer type .*Norm'>' encountered:UserWarning",  # PEFT of sizes of norms
    "ignore:Model (has|with) `tie_word_embeddings=True`:UserWarning",
)
@pytest.mark.parametrize(("setting", "family", "quantize"), SETTING_CELLS)
def test_the_laws_hold_with_settings(setting, family, quantize):
    chosen_laws = (*CHEAP, laws.peft_agrees, laws.merged_is_the_same)
    demand_no_failure(laws.check_method(SETTINGS[setting][1], family, quantize, chosen_laws))


@pytest.mark.parametrize(("column", "architecture"), COMPILED_CELLS)
def test_a_compiled_block_computes_the_same(column, architecture):
    demand_no_failure(laws.check(column, architecture, laws=[laws.compiling_changes_nothing]))


@pytest.mark.slow
def test_a_block_in_machine_code_computes_the_same():
    def in_machine_code(one: cell.Cell) -> None:
        laws.compiling_changes_nothing(one, backend="inductor")

    demand_no_failure(laws.check("lora", "llama", laws=[in_machine_code]))


def test_every_method_and_every_architecture_has_a_fast_cell():
    fast = [cell for cell in CELLS if not hasattr(cell, "marks")]
    assert {(column, kind) for column, _, kind in fast} == {*product(grid.COLUMNS, QUANTIZE)}
    assert {architecture for _, architecture, _ in fast} == ARCHITECTURES.keys()


def test_every_method_and_every_refusal_is_in_the_grid():
    assert {type(method) for method in grid.COLUMNS.values()} == set(METHODS.values())
    for column, refusals in grid.REFUSALS.items():
        named = " ".join(refusals.values()).split()
        assert column in grid.COLUMNS
        assert set(named) <= ARCHITECTURES.keys()
        assert refusals.keys() <= grid.REASONS.keys()
        assert len(named) == len(set(named))


# ------------------------------------------------------------------- what is no cell


@pytest.mark.parametrize("column", grid.COLUMNS)
def test_an_adapter_without_our_notes_loads_the_same(column, tmp_path):
    quantize = "nf4" if column in ("loftq", "dora", "vera", "houlsby") else "none"
    model = cell.bare_model("gpt2", quantize)
    adapter = laws.start(grid.fitted(grid.COLUMNS[column], model), model, "gpt2")
    cell.losses(adapter, inputs(model))
    trained = outputs(model)
    save_adapter(adapter, tmp_path)
    (tmp_path / "peftkit.json").unlink()
    adapter.detach()
    load_adapter(model, tmp_path)
    # PiSSA's and OLoRA's start is subtracted within one product of twice the rank: other rounding
    torch.testing.assert_close(outputs(model), trained, atol=1e-5, rtol=0)


@pytest.mark.parametrize("column", ["lora", "houlsby", "prefix_tuning"])
def test_a_second_adapter_on_one_model_is_refused(column):
    model = cell.bare_model("gpt2", "nf4")
    method = grid.fitted(grid.COLUMNS[column], model)
    laws.start(method, model, "gpt2")
    with pytest.raises(AdapterError, match="already has an adapter"):
        attach(model, LoRA())


@pytest.mark.parametrize(
    "method", [LoRA(rank=4, alpha=8), DoRA(rank=4, alpha=8)], ids=["lora", "dora"]
)
def test_a_role_of_a_fused_layer_adapts_only_its_rows(method, tmp_path):
    torch.manual_seed(0)
    model = FAMILIES["gpt2"]().eval()
    before = outputs(model)
    adapter = attach(model, method.model_copy(update={"targets": ("q", "v")}))
    assert torch.equal(outputs(model), before)
    losses = cell.losses(adapter, inputs(model))
    assert losses[-1] < losses[0]
    trained = outputs(model)
    module = next(iter(adapter.modules.values()))
    third = module.out_features // 3
    weight = torch.randn(module.out_features, module.in_features)
    if isinstance(method, DoRA):
        weight = module.base.weight.t().detach().clone()
    difference = (module.merged_weight(weight) - weight).abs().amax(1)
    assert (difference[third : 2 * third] < 1e-6).all()  # k; m / ||w|| rounds once for DoRA
    assert (difference[:third] > 0).all()
    save_adapter(adapter, tmp_path)
    adapter.detach()
    load_adapter(model, tmp_path)
    assert torch.equal(outputs(model), trained)


def test_a_rank_larger_than_the_matrix_is_refused_by_name():
    with pytest.raises(TargetError, match=r"rank 4096 is larger than the matrix of .*q_proj"):
        attach(FAMILIES["llama"](), LoRA(rank=4096, targets=("q",)))
