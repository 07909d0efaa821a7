"""The laws of combining, and each method against a reference on whole matrices."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from peftkit.data.style import Style
from peftkit.errors import AdapterError, OutputError
from peftkit.events import Event, Notice, Saved
from peftkit.formats.peft.low_rank import LowRank, read_low_rank, save_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.merging.combine import (
    EXACT,
    PRUNING,
    RULES,
    Combined,
    Settings,
    blend,
    combine,
    drop,
    trim,
)
from tests.helpers.folders import change_json

ROUNDING = 2e-6
"""Of sums of products of order one in float32, stored as factors of order one."""
SHAPES = {"layers.0.q": (12, 9), "layers.0.v": (5, 9), "layers.1.q": (12, 9)}
BASE = Provenance(
    base="tiny", fingerprint="sha256:" + "0" * 64, loading={"quantize": "nf4"},
    prompt_style=Style("chat"),
)  # fmt: skip
EASY = settings(
    max_examples=15, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


def random_update(
    seed: int, rank: int, shape: tuple[int, int] = (12, 9), scaling: float = 0.75
) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, shape[1], generator=generator)
    return LowRank(a, torch.randn(shape[0], rank, generator=generator), scaling)


def adapter(
    seed: int, *, ranks: tuple[int, ...] = (3, 2, 4), scaling: float = 0.75
) -> dict[str, LowRank]:
    sites = zip(SHAPES.items(), ranks, strict=True)
    return {
        path: random_update(seed + i, rank, shape, scaling)
        for i, ((path, shape), rank) in enumerate(sites)
    }


def delta(layers: list[tuple[LowRank, float]]) -> Tensor:
    return sum((weight * update.delta().double() for update, weight in layers), torch.tensor(0.0))


updates = st.builds(
    random_update, st.integers(0, 10_000), st.integers(1, 6), scaling=st.sampled_from([0.5, 1, 2])
)
weights = st.floats(-2, 2, width=32).filter(lambda w: w == 0 or abs(w) > 1e-3)
layers_of = st.lists(st.tuples(updates, weights), min_size=1, max_size=4)


@EASY
@given(layers=layers_of, rule=st.sampled_from(EXACT))
def test_linear_and_cat_are_weighted_sums(layers, rule):
    update = blend("x", layers, Settings(rule)).update
    expected = delta(layers)
    largest = max(u.delta().abs().max().item() for u, _ in layers)
    torch.testing.assert_close(
        update.delta().double(), expected, rtol=0, atol=8 * ROUNDING * largest
    )
    assert update.rank <= min(sum(u.rank for u, _ in layers), 9)


@EASY
@given(update=updates, rule=st.sampled_from(RULES))
def test_one_adapter_at_weight_one_is_itself_to_the_bit(update, rule):
    assert blend("x", [(update, 1.0)], Settings(rule)).update is update


@EASY
@given(update=updates, rule=st.sampled_from(RULES), density=st.sampled_from([0.3, 1.0]))
def test_an_adapter_and_its_opposite_give_zero(update, rule, density):
    layers = [(update, 1.0), (update, -1.0)]
    blended = blend("x", layers, Settings(rule, density=density if rule in PRUNING else 1.0))
    assert blended.update.delta().abs().max() <= ROUNDING * update.delta().abs().max()
    if rule != "cat":
        assert not blended.update.delta().any()


@EASY
@given(layers=layers_of, rank=st.integers(1, 9))
def test_svd_is_the_best_matrix_of_its_rank(layers, rank):
    blended = blend("x", layers, Settings("svd", rank=rank))
    dense = delta(layers)
    if dense.ndim == 0 or not dense.any():
        return
    values = torch.linalg.svdvals(dense)
    best = values[rank:].square().sum().sqrt()
    error = (blended.update.delta().double() - dense).norm()
    assert blended.update.rank <= rank
    assert error <= best + 1e-5 * values[0]
    if len([w for _, w in layers if w]) > 1:
        assert blended.lost == pytest.approx(float(best**2), abs=1e-6 * float(values[0]) ** 2)
        assert blended.total == pytest.approx(float(values.square().sum()))


def naive_trim(matrix: Tensor, density: float) -> Tensor:
    keep = sorted(matrix.flatten().tolist(), key=abs, reverse=True)
    smallest = abs(keep[round(density * matrix.numel()) - 1])
    return torch.where(matrix.abs() >= smallest, matrix, 0.0)


def naive_ties(deltas: list[Tensor]) -> Tensor:
    out = torch.zeros_like(deltas[0])
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            values = [float(d[i, j]) for d in deltas]
            agreeing = [v for v in values if v * sum(values) > 0]
            out[i, j] = sum(agreeing) / len(agreeing) if agreeing else 0.0
    return out


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_ties_is_trim_elect_and_disjoint_mean(density):
    layers = [(random_update(s, 3), w) for s, w in ((1, 1.0), (2, 0.5), (3, -2.0))]
    blended = blend("x", layers, Settings("ties", rank=9, density=density)).update.delta()
    expected = naive_ties([w * naive_trim(u.delta(), density) for u, w in layers])
    torch.testing.assert_close(blended, expected, rtol=0, atol=1e-4)


def test_magnitude_prune_adds_what_trimming_leaves():
    layers = [(random_update(1, 2), 0.5), (random_update(2, 3), 2.0)]
    blended = blend("x", layers, Settings("magnitude_prune", rank=9, density=0.3)).update.delta()
    expected = sum((w * naive_trim(u.delta(), 0.3) for u, w in layers), torch.zeros(()))
    torch.testing.assert_close(blended, expected, rtol=0, atol=1e-4)


def test_dropping_keeps_a_share_rescaled_and_is_seeded():
    matrix = torch.randn(200, 300)
    dropped = drop(matrix, 0.25, seed=5)
    kept = dropped != 0
    assert 0.24 < kept.float().mean() < 0.26
    torch.testing.assert_close(dropped[kept], 4 * matrix[kept])
    assert torch.equal(dropped, drop(matrix, 0.25, seed=5))
    assert not torch.equal(dropped, drop(matrix, 0.25, seed=6))
    assert (trim(matrix, 0.25) != 0).sum() == 15_000


@pytest.mark.parametrize("rule", ["dare_linear", "dare_ties"])
def test_dare_depends_on_seed_layer_and_adapter_alone(rule):
    one, two = random_update(1, 3), random_update(2, 3)
    chosen = Settings(rule, rank=9, density=0.5, seed=1)
    blended = blend("x", [(one, 1.0), (two, 0.5)], chosen).update.delta()
    swapped = blend("x", [(two, 0.5), (one, 1.0)], chosen).update.delta()
    torch.testing.assert_close(blended, swapped, rtol=0, atol=1e-4)
    for path, other in (("y", chosen), ("x", replace(chosen, seed=2))):
        elsewhere = blend(path, [(one, 1.0), (two, 0.5)], other).update.delta()
        assert (elsewhere - blended).abs().max() > 0.1


class Folders:
    """Adapter folders, written and combined."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[Event] = []

    def save(self, name: str, content: dict[str, LowRank], origin: Provenance = BASE) -> Path:
        return save_low_rank(content, self.root / name, origin)

    def combine(self, weights: dict[str, float], method: str, **how: Any) -> Combined:
        pairs = [(self.root / name, weight) for name, weight in weights.items()]
        out = how.pop("out", self.root / "out")
        return combine(pairs, method, out, on_event=self.events.append, **how)

    def notices(self) -> str:
        return "\n".join(event.text for event in self.events if isinstance(event, Notice))


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    made = Folders(tmp_path)
    made.save("a", adapter(1))
    made.save("b", adapter(20, ranks=(1, 5, 2), scaling=3.0))
    return made


def test_what_is_written_is_what_was_computed_and_carries_its_origin(folders):
    done = folders.combine({"a": 0.7, "b": -0.3}, "cat")
    file, written = read_low_rank(folders.root / "out")
    one, two = adapter(1), adapter(20, ranks=(1, 5, 2), scaling=3.0)
    for path, update in written.items():
        expected = 0.7 * one[path].delta() - 0.3 * two[path].delta()
        torch.testing.assert_close(update.delta(), expected, rtol=0, atol=1e-5)
    assert {path: update.rank for path, update in written.items()} == {
        "layers.0.q": 4, "layers.0.v": 5, "layers.1.q": 6,
    }  # fmt: skip
    assert file.provenance == BASE
    assert (done.rank, done.error) == (6, 0.0)
    assert "a x 0.7, b x -0.3" in (folders.root / "out" / "README.md").read_text()
    assert folders.events[-1] == Saved("adapter", folders.root / "out")
    assert sorted(path.name for path in folders.root.iterdir()) == ["a", "b", "out"]


@pytest.mark.parametrize("rule", sorted(set(RULES) - set(EXACT)))
def test_a_lossy_method_keeps_to_its_rank_and_tells_its_error(rule, folders):
    done = folders.combine({"a": 1.0, "b": 1.0}, rule, rank=2)
    assert {update.rank for update in done.updates.values()} == {2}
    assert 0.05 < done.error < 1
    assert f"relative error {done.error:.2g}" in folders.notices()
    default = folders.combine({"a": 1.0, "b": 1.0}, rule, out=folders.root / "default")
    assert [update.rank for update in default.updates.values()] == [3, 5, 4]


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            BASE,
            replace(BASE, fingerprint="sha256:" + "1" * 64),
            "to different bases\n.*sha256:0000",
        ),
        (Provenance("x"), Provenance("y"), "to different bases\n.*a: x\n.*other: y"),
        (Provenance("x", revision="1"), Provenance("x", revision="2"), "to different bases"),
        (BASE, replace(BASE, task_type="SEQ_CLS"), "for different tasks\n.*CAUSAL_LM\n.*SEQ_CLS"),
    ],
)
def test_foreign_adapters_are_errors(one, other, message, folders):
    folders.save("a", adapter(1), one)
    folders.save("other", adapter(2), other)
    with pytest.raises(AdapterError, match=message):
        folders.combine({"a": 1.0, "other": 1.0}, "linear")
    assert not (folders.root / "out").exists()


def test_what_is_known_of_a_base_is_kept_and_what_differs_is_left_open(folders):
    folders.save("silent", adapter(2), Provenance())
    folders.save("hub", adapter(2), Provenance("org/tiny", hub_id="org/tiny"))
    folders.save(
        "differs", adapter(2), replace(BASE, prompt_style=Style("plain"), loading={"dtype": "bf16"})
    )
    folders.save("named", adapter(3), Provenance("tiny", hub_id="org/tiny"))
    folders.combine({"silent": 1.0, "a": 1.0}, "cat")
    assert read_low_rank(folders.root / "out")[0].provenance == BASE
    folders.combine({"hub": 1.0, "named": 1.0}, "cat", force=True)
    folders.combine({"a": 1.0, "differs": 1.0}, "cat", force=True)
    origin = read_low_rank(folders.root / "out")[0].provenance
    assert origin == replace(BASE, prompt_style=None, loading={})
    assert "prompt styles; the new one records none" in folders.notices()


def test_zero_is_an_adapter_that_changes_nothing_and_is_told(folders):
    done = combine(
        [(folders.root / "a", 1.0), (folders.root / "a", -1.0)],
        "linear",
        folders.root / "zero",
        on_event=folders.events.append,
    )
    assert done.rank == 1
    assert not any(update.b.any() for update in done.updates.values())
    assert "is zero: this adapter leaves its base unchanged" in folders.notices()
    with pytest.raises(AdapterError, match="nothing to combine"):
        combine([], "cat", folders.root / "nothing")


def test_layers_of_other_shapes_are_listed(folders):
    folders.save("other", {path: random_update(1, 2, (7, 9)) for path in SHAPES})
    with pytest.raises(AdapterError, match=r"layers\.0\.q: \(12, 9\) in .*a, \(7, 9\) in .*other"):
        folders.combine({"a": 1.0, "other": 1.0}, "svd")


def test_a_missing_layer_is_zero_but_has_no_vote(folders):
    folders.save("q", {path: u for path, u in adapter(7).items() if path.endswith("q")})
    done = folders.combine({"a": 1.0, "q": 1.0}, "linear")
    torch.testing.assert_close(done.updates["layers.0.v"].delta(), adapter(1)["layers.0.v"].delta())
    done = folders.combine({"a": 1.0, "q": 1.0}, "ties", density=1.0, force=True)
    torch.testing.assert_close(done.updates["layers.0.v"].delta(), adapter(1)["layers.0.v"].delta())


def test_endings_never_reach_layers_that_no_adapter_had(folders):
    targets = ["layers.0.q", "v", "layers.1.q"]
    change_json(folders.root / "a" / "adapter_config.json", target_modules=targets)
    folders.combine({"a": 1.0}, "cat")
    written = json.loads((folders.root / "out" / "adapter_config.json").read_text())
    assert written["target_modules"] == ["layers.0.q", "layers.1.q", "v"]


def test_dora_is_refused(folders):
    content = {p: replace(u, magnitude=torch.rand(u.b.shape[0])) for p, u in adapter(1).items()}
    folders.save("dora", content)
    with pytest.raises(AdapterError, match=r"cannot combine .*dora\n.*magnitudes"):
        folders.combine({"dora": 0.5, "a": 1.0}, "linear")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"method": "tise"}, "no combination method 'tise'\n.*Did you mean 'ties'"),
        ({"method": "cat", "rank": 4}, "cat takes no rank\n(.*\n)*.*--method svd --rank 4"),
        ({"method": "svd", "density": 0.5}, "svd takes no density"),
        ({"method": "ties", "density": 0.0}, "the density is 0"),
        ({"method": "cat", "weight": float("inf")}, "the weight of .*a is inf"),
    ],
)
def test_unused_settings_are_refused(how, message, folders):
    weight = how.pop("weight", 1.0)
    with pytest.raises(AdapterError, match=message):
        folders.combine({"a": weight, "b": 1.0}, **how)


def test_a_taken_place_is_left_alone_unless_forced(folders):
    out = folders.root / "out"
    folders.combine({"a": 1.0}, "cat")
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(OutputError, match=r"It holds an adapter\.\n.*--force"):
        folders.combine({"b": 1.0}, "cat")
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    folders.combine({"b": 1.0}, "cat", force=True)
    assert {path: path.read_bytes() for path in out.iterdir()} != before
    (out / "recipe.yaml").touch()
    with pytest.raises(OutputError, match=r"It holds a training run's recipe\.yaml"):
        folders.combine({"b": 1.0}, "cat", force=True)
    with pytest.raises(OutputError, match="one of the source folders"):
        folders.combine({"b": 1.0}, "cat", out=folders.root / "b", force=True)
    (folders.root / "notes").mkdir()
    (folders.root / "notes" / "mine.txt").touch()
    with pytest.raises(OutputError, match=r"It holds mine\.txt"):
        folders.combine({"b": 1.0}, "cat", out=folders.root / "notes", force=True)
