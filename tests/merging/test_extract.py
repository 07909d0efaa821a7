"""A full fine-tune as an adapter: exact where it is of low rank, the best there is elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from peftkit.base.load import load_base
from peftkit.errors import BaseError, OutputError, TargetError
from peftkit.events import Event, Notice, Table
from peftkit.formats.peft.folder import load_adapter
from peftkit.formats.peft.low_rank import read_low_rank
from peftkit.kernels import svd
from peftkit.merging.extract import Extracted, extract
from tests.families import FAMILIES

IDS = torch.arange(3, 23).view(1, 20)


class Models:
    """A base and a fine-tune of it, as folders."""

    def __init__(self, root: Path) -> None:
        self.root, self.out = root, root / "out"
        self.events: list[Event] = []
        self.base: PreTrainedModel
        self.tuned: PreTrainedModel

    def build(self, family: str = "llama", dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.base = FAMILIES[family]().eval().to(dtype)
        self.tuned = FAMILIES[family]().eval().to(dtype)
        self.tuned.load_state_dict(self.base.state_dict())

    def tune(self, ending: str, rank: int, size: float = 0.1) -> None:
        """Move the weights whose names end so, by a matrix of that rank (0: a full one)."""
        generator = torch.Generator().manual_seed(3)
        found = [p for n, p in self.tuned.named_parameters() if n.endswith(ending)]
        assert found
        with torch.no_grad():
            for weight in found:
                out, *rest = weight.shape
                delta = torch.randn(out, rank or 1, generator=generator)
                if rank:
                    delta = delta @ torch.randn(rank, *rest, generator=generator)
                else:
                    delta = torch.randn(weight.shape, generator=generator)
                weight += size * delta

    def extract(self, rank: int, **how: Any) -> Extracted:
        for name, model in (("base", self.base), ("tuned", self.tuned)):
            if not (self.root / name).exists():
                model.save_pretrained(self.root / name, **how.pop(f"save_{name}", {}))
        paths = [str(self.root / name) for name in ("base", "tuned")]
        return extract(*paths, rank, self.out, on_event=self.events.append, **how)

    @torch.no_grad()
    def error(self) -> float:
        """Return the largest difference of a logit, of base and adapter from the fine-tune."""
        expected = self.tuned(input_ids=IDS).logits
        assert (self.base(input_ids=IDS).logits - expected).abs().max() > 0.1
        found = load_adapter(self.base, self.out).model(input_ids=IDS).logits
        return float((found - expected).abs().max())


@pytest.fixture
def models(tmp_path: Path) -> Models:
    found = Models(tmp_path)
    found.build()
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "qwen2"])
def test_a_difference_of_low_rank_is_recovered_whole(family: str, models: Models) -> None:
    models.build(family)
    for ending in ("o_proj.weight", "down_proj.weight") if family != "gpt2" else ("c_fc.weight",):
        models.tune(ending, rank=3)
    done = models.extract(3)
    assert done.adapted.share == pytest.approx(1, abs=1e-6)
    assert not done.left
    assert {update.rank for update in done.updates.values()} == {3}
    assert models.error() < 1e-3


@torch.no_grad()
def test_what_is_kept_is_the_best_of_its_rank_and_told(models: Models) -> None:
    models.tune("q_proj.weight", rank=0)
    done = models.extract(5)
    share = {}
    for path, update in read_low_rank(models.out)[1].items():
        delta = models.tuned.get_parameter(f"{path}.weight") - models.base.get_parameter(
            f"{path}.weight"
        )
        values = torch.linalg.svdvals(delta)
        residual = (delta - update.delta()).norm()
        torch.testing.assert_close(residual, values[5:].norm(), rtol=1e-4, atol=0)
        share[path] = (values[:5].square().sum(), values.square().sum())
    kept, total = map(sum, zip(*share.values(), strict=True))
    assert done.roles.keys() == {"q"}
    assert done.adapted.share == pytest.approx(float(kept / total), rel=1e-4)
    table = next(event for event in models.events if isinstance(event, Table))
    assert table.rows == (("q", "2", f"{done.adapted.norm:.4g}", f"{done.adapted.share:.2%}"),)


def test_what_no_adapter_holds_is_told_as_not_kept(models: Models) -> None:
    models.tune("v_proj.weight", rank=2)
    models.tune("model.norm.weight", rank=0)
    models.tune("embed_tokens.weight", rank=0)
    models.tune("up_proj.weight", rank=2)
    done = models.extract(2, targets=["v"])
    assert {name: part.count for name, part in done.left.items()} == {
        "model.embed_tokens.weight": 1,
        "model.layers.*.mlp.up_proj.weight": 2,
        "model.norm.weight": 1,
    }
    assert done.adapted.share > 0.999
    assert done.whole.share == pytest.approx(done.adapted.squared / done.whole.squared, rel=1e-3)
    table = next(event for event in models.events if isinstance(event, Table))
    assert [row[0] for row in table.rows if row[3] == "0%"] == [
        f"not kept: {name}" for name in done.left
    ]
    notices = [event.text for event in models.events if isinstance(event, Notice)]
    assert f"{done.whole.share:.2%} of all that differs" in notices[-1]


def test_a_role_of_a_fused_layer_is_its_rows_only(models: Models) -> None:
    models.build("phi3")
    models.tune("qkv_proj.weight", rank=0)
    done = models.extract(64, targets=["v"])
    for path, update in done.updates.items():
        name = f"{path}.weight"
        delta = models.tuned.get_parameter(name) - models.base.get_parameter(name)
        num_kv = models.base.config.num_key_value_heads * 8
        torch.testing.assert_close(update.delta()[-num_kv:], delta[-num_kv:], atol=1e-5, rtol=0)
        assert not update.delta()[:-num_kv].abs().gt(1e-6).any()
    assert list(done.left) == ["model.layers.*.self_attn.qkv_proj.weight, rows of other roles"]


def test_shards_heads_and_dtypes_may_differ(models: Models) -> None:
    """Many files against one; a body saved without its head; bf16 against float32."""
    models.build("gpt2")
    models.tune("c_fc.weight", rank=2, size=0.5)
    models.base.transformer.save_pretrained(models.root / "base", max_shard_size="30KB")
    models.tuned.to(torch.bfloat16).save_pretrained(models.root / "tuned")
    assert len(list((models.root / "base").glob("*.safetensors"))) > 2
    models.tuned.float()
    done = models.extract(2)
    assert done.roles["up"].share > 0.98  # rounding to bf16 is part of the difference
    assert "transformer.wte.weight" in done.left


def test_the_base_is_recorded_with_the_fingerprint_that_loading_it_gives(
    model_folder: Path, models: Models
) -> None:
    models.tuned.load_state_dict(load_base(str(model_folder), dtype="fp32").model.state_dict())
    models.tune("o_proj.weight", rank=2)
    models.tuned.save_pretrained(models.root / "tuned")
    extract(str(model_folder), str(models.root / "tuned"), 2, models.out)
    origin = read_low_rank(models.out)[0].provenance
    for dtype in ("fp32", "bf16"):
        assert origin.fingerprint == load_base(str(model_folder), dtype=dtype).fingerprint
    assert origin.base == str(model_folder)


def test_tied_weights_count_once_and_are_no_target(models: Models) -> None:
    models.build("gpt2")
    models.tune("wte.weight", rank=0)
    models.tune("c_fc.weight", rank=2)
    done = models.extract(2)
    assert list(done.left) == ["transformer.wte.weight"]
    with pytest.raises(TargetError, match=r"lm_head\.weight has no weight of its own"):
        models.extract(2, targets=["head"], force=True)


def test_stacked_experts_are_not_kept_and_told(models: Models) -> None:
    models.build("mixtral")
    models.tune("o_proj.weight", rank=2)
    models.tune("experts.down_proj", rank=0)
    done = models.extract(2)
    assert set(done.roles) == {"o"}
    assert len(done.left) == 1
    assert "experts" in next(iter(done.left))


def test_models_that_are_not_alike_are_refused_with_what_differs(models: Models) -> None:
    models.build("qwen2")
    models.tuned.resize_token_embeddings(400)
    with pytest.raises(
        BaseError, match=r"is not a fine-tune of .*\n.*\(384, 32\) in the base, \(400"
    ):
        models.extract(2)
    assert not models.out.exists()
    torch.manual_seed(0)
    FAMILIES["llama"]().save_pretrained(models.root / "llama")
    with pytest.raises(BaseError, match=r"q_proj\.bias is not in .*llama"):
        extract(str(models.root / "base"), str(models.root / "llama"), 2, models.out)


def test_nothing_to_extract_is_told(models: Models) -> None:
    with pytest.raises(BaseError, match=r"nothing to extract .*\n.*to the bit"):
        models.extract(2)


def test_nothing_in_the_layers_asked_for_is_told(models: Models) -> None:
    models.tune("up_proj.weight", rank=2)
    with pytest.raises(BaseError, match=r"layers asked for\n.*mlp\.up_proj\.weight"):
        models.extract(2, targets=["q"])


def test_a_broken_model_is_named(models: Models) -> None:
    with torch.no_grad():
        models.tuned.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] = torch.nan
    with pytest.raises(BaseError, match=r"layers\.1\.mlp\.up_proj\.weight of .*tuned\n.*NaN"):
        models.extract(2)
    assert not models.out.exists()


def test_other_input_that_is_wrong_is_refused(models: Models) -> None:
    models.tune("up_proj.weight", rank=2)
    with pytest.raises(TargetError, match="the rank is 0"):
        models.extract(0)
    with pytest.raises(TargetError, match="'upp'"):
        models.extract(2, targets=["upp"])
    models.extract(2)
    with pytest.raises(OutputError, match="--force"):
        models.extract(2)


def test_a_large_matrix_is_cut_nearly_as_well_at_random() -> None:
    left, right = (torch.linalg.qr(torch.randn(n, 300))[0] for n in (320, 400))
    values = 1 / torch.arange(1, 301).float()
    matrix = left * values @ right.t()
    found = svd.of_matrix(matrix, 16)
    assert min(matrix.shape) > svd.EXACT_SIDE
    residual = (matrix - found.b @ found.a).norm()
    best = values[16:].norm()
    assert best * 0.999 < residual < best * 1.002
    assert found.lost == pytest.approx(float(residual**2), rel=1e-2)
    assert torch.equal(found.a, svd.of_matrix(matrix, 16).a)
