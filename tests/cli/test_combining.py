"""combine, and the half of inspect that reads tensors, as commands."""

import json
import re
from pathlib import Path

import pytest
import torch

from peftkit.formats.peft.low_rank import LowRank, read_low_rank, save_low_rank
from peftkit.formats.peft.notes import Provenance

PATH = "model.layers.0.self_attn.q_proj"


def save(folder: Path, seed: int, origin: Provenance | None = None) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(shape, generator=generator) for shape in ((2, 32), (32, 2))]
    update = LowRank(draw[0], draw[1], 0.5)
    save_low_rank({PATH: update}, folder, origin or Provenance("tiny"))
    return update


@pytest.fixture
def adapters(tmp_path: Path) -> list[LowRank]:
    """Two adapters in the folders a and lr=1, and one on another base in other."""
    save(tmp_path / "other", 3, Provenance("huge"))
    return [save(tmp_path / "a", 1), save(tmp_path / "lr=1", 2)]


def test_combine_writes_an_adapter_and_prints_its_folder(adapters, peftkit, tmp_path):
    done = peftkit("combine", "a=0.7", "lr=1=-3e-1", "--method", "cat", "--out", "c")
    assert (done.code, done.out) == (0, "c\n")
    assert "peftkit chat 'c'" in done.err
    one, two = adapters
    expected = 0.7 * one.delta() - 0.3 * two.delta()
    torch.testing.assert_close(read_low_rank(tmp_path / "c")[1][PATH].delta(), expected)
    assert peftkit("combine", "a", "lr=1", "--out", "even").code == 0
    even = read_low_rank(tmp_path / "even")[1][PATH].delta()
    torch.testing.assert_close(even, (one.delta() + two.delta()) / 2)
    done = peftkit("combine", "a=1", "lr=1=1", "--method", "svd", "--rank", 1, "--out", "d")
    assert re.search(r"Rank 1 keeps \d+\.\d\d% of the combined update", done.err)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["a", "a=1", "--out", "c"],
            "AdapterError: 'a' has no weight, but others have one.\n .*: a=1",
        ),
        (["a=half", "--out", "c"], "AdapterError: the weight 'half' of a is not a number."),
        (["a=nan", "--out", "c"], "AdapterError: the weight of a is nan"),
        (["b=1", "--out", "c"], "AdapterError: there is no adapter folder 'b'."),
        (["a=1", "other=1", "--out", "c"], "different bases\n  a: tiny\n  other: huge"),
        (["a=1", "--method", "tie", "--out", "c"], "'--method': .*'tie' is not one of 'linear'"),
        (["a=1", "--rank", "4", "--out", "c"], "linear takes no rank"),
        (["a=1", "--out", "a"], "OutputError: .*\n  It is one of the source folders"),
        (["a=1", "--out", "other"], "OutputError: .*\n  It holds an adapter.\n  .*--force"),
        (["a=1", "--out", "a/adapter_config.json"], "OutputError: .*\n  It is not a folder"),
    ],
)
def test_combine_refuses_what_is_wrong(args, message, adapters, peftkit, tmp_path):
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    errors = peftkit("combine", *args).refusal()
    assert re.search(message, errors), errors
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_inspect_shows_update_norms(adapters, peftkit, tmp_path):
    facts = json.loads(peftkit("inspect", "a", "--json").out)
    (update,) = facts["updates"]
    assert (update["role"], update["num_layers"], update["rank"]) == ("q", 1, 2)
    assert update["norm"] == pytest.approx(float(adapters[0].delta().norm()))
    assert "effective rank" in peftkit("inspect", "a").out


def test_inspect_reports_why_an_update_cannot_be_measured(adapters, peftkit, tmp_path):
    (tmp_path / "a" / "peftkit.json").unlink()
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(
        config.read_text().replace('"init_lora_weights": true', '"init_lora_weights": "pissa"')
    )
    done = peftkit("inspect", "a").succeeded()
    assert "No norms of the updates: " in done.err
    assert "init_lora_weights: pissa" in done.err
