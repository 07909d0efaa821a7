"""EVA: what A starts as, which ranks the layers get, and that nothing else is changed by it."""

import copy
from collections.abc import Sequence

import peft
import pytest
import torch
from torch import Tensor, nn

from peftkit.adapter import Adapter, attach
from peftkit.errors import AdapterError, ConfigError, DataError, TargetError
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.kernels.svd import BLOCK, Directions
from peftkit.methods.data_init import eva_starts
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from peftkit.quant.quantize import quantize_model
from tests.helpers.adapters import perturb
from tests.helpers.families import ARCHITECTURES, FAMILIES
from tests.helpers.kinds import outputs

pytestmark = pytest.mark.filterwarnings(
    # PEFT asks transformers by an old name, and gives advice
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    "ignore:lora with eva initialization used with low_cpu_mem_usage:UserWarning",
)
EVA = LoRA(rank=4, alpha=8, init="eva", targets=("q", "k", "v", "o", "down"))


def rows(number: int = 24, length: int = 50) -> list[dict[str, Tensor]]:
    """Return batches of one row each; some tokens are much more frequent than others."""
    frequencies = 1.0 / torch.arange(1, 100)
    generator = torch.Generator().manual_seed(3)
    drawn = torch.multinomial(frequencies, number * length, replacement=True, generator=generator)
    return [{"input_ids": ids[None] + 5} for ids in drawn.view(number, length)]


def with_bos(model: nn.Module, method: LoRA = EVA) -> Adapter:
    method, starts = eva_starts(model, method, rows())
    return attach(model, method, starts=starts)


def read_by(model: nn.Module, path: str, batches: Sequence[dict[str, Tensor]]) -> Tensor:
    """Return everything that a layer reads (tokens, in), less its mean."""
    seen: list[Tensor] = []
    layer = model.get_submodule(path)
    hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    hook.remove()
    return torch.cat(seen) - torch.cat(seen).mean(0)


def angles(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosines of the principal angles between two spans of orthonormal rows."""
    return torch.linalg.svdvals(one @ other.t())


@pytest.mark.parametrize("width", [9, 41, 341])
def test_block_by_block_the_directions_are_those_of_the_whole(width):
    scales = 0.8 ** torch.arange(width)  # a spectrum that falls, as that of real activations
    x = torch.randn(4 * BLOCK + 100, width) * scales + torch.randn(width)
    x[: 2 * BLOCK] += 1.0  # the mean moves
    pca = Directions(4, 6)
    for piece in x.split(700):
        pca.take(piece)
    pca.flush()
    x = x - x.mean(0)
    _, s, vh = torch.linalg.svd(x, full_matrices=False)
    # what was left out of each block is the tail of the spectrum
    assert angles(pca.basis(4), vh[:4]).min() > 0.999
    assert pca.variance == pytest.approx(float(x.square().sum()), rel=1e-4)
    shares = s.square() / s.square().sum()
    torch.testing.assert_close(torch.tensor(pca.shares()), shares[:6], atol=1e-3, rtol=1e-3)
    assert pca.converged


def test_a_starts_as_what_the_layer_reads_most():
    model, batches = FAMILIES["llama"]().eval(), rows()
    _, starts = eva_starts(model, EVA, batches)
    for path, (a, b) in starts.items():
        rank = len(a)
        assert b is None
        torch.testing.assert_close(a @ a.t(), torch.eye(rank), atol=1e-5, rtol=0)
        x = read_by(model, path, batches)
        best = torch.linalg.svdvals(x)[:rank].square().sum()
        # it explains as much as any span of this rank can, but for what stopping early leaves
        assert (x @ a.t()).square().sum() > 0.98 * best
    q, v = (starts[f"model.layers.1.self_attn.{name}_proj"][0] for name in "qv")
    both = min(len(q), len(v))
    torch.testing.assert_close(q[:both], v[:both], atol=1e-5, rtol=0)  # they read the same


def test_ranks_move_to_where_they_explain_most_and_scaling_stays():
    model = FAMILIES["llama"]().eval()
    method_before = EVA.model_copy(update={"rslora": True, "rank_pattern": {"o": 6}})
    method, starts = eva_starts(model, method_before, rows())
    sites = method.sites(model)
    before = {site.path: method_before.scale_of(site) for site in sites}
    after = {site.path: method.scale_of(site) for site in sites}
    ranks = {path: rank for path, (rank, _) in after.items()}
    assert ranks == {path: len(a) for path, (a, _) in starts.items()}
    assert ranks != {path: rank for path, (rank, _) in before.items()}
    assert sum(ranks.values()) == sum(rank for rank, _ in before.values())
    assert all(1 <= ranks[path] <= 2 * rank for path, (rank, _) in before.items())
    for path, (_, scaling) in after.items():
        assert scaling == pytest.approx(before[path][1])
    # whoever explains more with its last direction has more of them
    explained = {path: read_by(model, path, rows()) for path in ranks}
    shares = {p: torch.linalg.svdvals(x).square() / x.square().sum() for p, x in explained.items()}
    last = min(float(shares[path][rank - 1]) for path, rank in ranks.items() if rank > 1)
    free = [p for p, rank in ranks.items() if rank < 2 * before[p][0]]
    assert max(float(shares[path][ranks[path]]) for path in free) < 1.1 * last  # stopped early


@pytest.mark.parametrize(
    ("family", "method", "kind"),
    [
        ("llama", DoRA(rank=4, alpha=8, init="eva"), "nf4"),
        ("gpt2", EVA.model_copy(update={"targets": ("q", "v", "down")}), "none"),
        ("phi3", EVA.model_copy(update={"targets": "all-linear"}), "nf4"),
    ],
)
def test_a_fresh_adapter_leaves_the_base_unchanged(family, method, kind, tmp_path):
    model = FAMILIES[family]().eval()
    if kind != "none":
        quantize_model(model, kind, compute_dtype=torch.float32)
    before = outputs(model)
    adapter = with_bos(model, method)
    assert not adapter.method.fresh_changes
    assert torch.equal(outputs(model), before)
    perturb(adapter.parameters())
    trained = outputs(model)
    assert not torch.allclose(trained, before)
    save_adapter(adapter, tmp_path)
    adapter.detach()
    assert torch.equal(outputs(model), before)
    load_adapter(model, tmp_path)  # without data
    assert torch.equal(outputs(model), trained)


def test_without_its_start_it_is_refused_by_the_name_of_what_makes_it():
    model = FAMILIES["llama"]()
    with pytest.raises(AdapterError, match=r"Compute them with eva_starts\(\.\.\.\)"):
        attach(model, EVA)
    method, starts = eva_starts(model, EVA, rows())
    starts.pop("model.layers.1.mlp.down_proj")
    with pytest.raises(AdapterError, match=r"Missing: model\.layers\.1\.mlp\.down_proj"):
        attach(model, method, starts=starts)
    with pytest.raises(AdapterError, match="accepts none"):
        attach(model, LoRA(), starts=starts)
    attach(model, LoRA())  # nothing of these is left on the model


def test_padding_is_refused_since_it_would_count():
    ids, mask = torch.full((2, 6), 7), torch.ones(2, 6)
    mask[1, 4:] = 0
    with pytest.raises(DataError, match="padded batches"):
        eva_starts(FAMILIES["llama"](), EVA, [{"input_ids": ids, "attention_mask": mask}])


@pytest.mark.parametrize("number", [0, 1])
def test_too_few_tokens_for_the_rank_are_refused(number):
    with pytest.raises(DataError, match=f"{number * 5} tokens; at least 8 are needed"):
        eva_starts(FAMILIES["llama"](), EVA, rows(2, 5)[:number])


def test_what_has_no_such_start_is_refused():
    with pytest.raises(TargetError, match=r"stacked experts .* supports neither"):
        eva_starts(ARCHITECTURES["mixtral"](), LoRA(rank=2, init="eva"), rows(1))
    with pytest.raises(TargetError, match="rank 64 is larger than the matrix"):
        eva_starts(FAMILIES["llama"](), LoRA(rank=64, init="eva"), rows(1))
    with pytest.raises(ConfigError, match=r"eva_rho: 1\.5 requires init 'eva'"):
        LoRA(eva_rho=1.5)


@pytest.mark.slow
def test_peft_finds_the_same_directions():
    model, batches = FAMILIES["llama"]().eval(), rows(8, 400)
    config = peft.LoraConfig(
        r=3,
        target_modules=["q_proj", "o_proj", "down_proj"],
        init_lora_weights="eva",
        eva_config=peft.EvaConfig(rho=1.0, tau=0.999),
    )
    theirs = peft.get_peft_model(copy.deepcopy(model), config)
    peft.initialize_lora_eva_weights(theirs, batches, show_progress_bar=False)
    method_before = LoRA(rank=3, init="eva", eva_rho=1.0, targets=("q", "o", "down"))
    _, starts = eva_starts(model, method_before, batches)
    state = {n: p for n, p in theirs.named_parameters() if "lora_A" in n}
    for path, (a, _) in starts.items():
        other = state[f"base_model.model.{path}.lora_A.default.weight"].detach()
        # PEFT cuts to rank 3 after every batch, by a random sketch, where the third direction
        # explains little more than the fourth; a random span would be at 0.05
        assert angles(a, other).min() > 0.85, path
        x = read_by(model, path, batches)
        explained, theirs_explain = ((x @ span.t()).square().sum() for span in (a, other))
        assert explained > 0.999 * theirs_explain, path
