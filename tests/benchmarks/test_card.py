"""The first hour with a card runs through on the simulated one, and writes its page."""

import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from benchmarks import card, card_carry, card_operators, card_runs, shapes
from benchmarks.card_job import Job
from peftkit.kernels import varlen
from tests.helpers.varlen_reference import reference_varlen_attn
from tests.simulated_gpu.simulation import simulated

SMALL = [
    *("--model", "tiny", "--layers", "2", "--length", "16"),
    *("--large", "tiny", "--large-layers", "3", "--large-lengths", "64"),
]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", shapes._llama(32, 64, 2, 4, 2, 512))
    monkeypatch.setitem(shapes.LARGE, "tiny", shapes.SHAPES["tiny"])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch itself
@pytest.mark.parametrize(
    "part",
    [
        *("environment", "attention", "activations"),
        *(
            pytest.param(part, marks=pytest.mark.slow)
            for part in card.PARTS
            if part not in ("environment", "attention", "activations")
        ),
    ],
)
def test_every_part_passes_and_is_written_to_the_page(part, tmp_path, monkeypatch):
    page = tmp_path / "card.md"
    if part == "training":  # the CPU's own, without a simulation around it
        job = Job(torch.device("cpu"), "tiny", 2, 16)
        asked = [(kind, torch.float32) for kind in ("none", "nf4", "int8")]
        asked += [(kind, torch.bfloat16) for kind in ("none", "nf4")]
        known = {each: card_runs.losses_on_cpu(job, *each) for each in asked}
        monkeypatch.setattr(card_runs, "losses_on_cpu", lambda _, *each: known[each])
    if part == "operators":
        monkeypatch.setattr(varlen, "kernel", lambda: reference_varlen_attn)
    monkeypatch.setattr(card_runs, "SUITE", ("tests/simulated_gpu/test_devices.py",))
    # the compiler asks torch for a card; what it makes for one is seen in tests/cross_compile
    eagerly = torch.compiler.set_stance("force_eager") if part == "compiled" else nullcontext()
    with simulated(), eagerly:
        assert card.main(["--part", part, "--out", str(page), *SMALL]) == 0
    text = page.read_text(encoding="utf-8")
    assert f"## {part}" in text
    assert "| NO |" not in text
    assert text.count("\n|") >= 3


def test_a_kernel_that_is_wrong_is_seen(monkeypatch):
    job = Job(torch.device("cpu"), "tiny", 2, 16)
    (case,) = (case for case in card_operators.cases() if case.name == "gated silu")
    assert card_operators.difference(case, job.device, torch.float32) < 1e-5
    wrong = case._replace(kernel=lambda gate, up: 1.1 * case.kernel(gate, up))
    assert card_operators.difference(wrong, job.device, torch.float32) > 0.05


def test_a_failed_part_is_reported_alone(tmp_path, monkeypatch):
    page = tmp_path / "card.md"
    monkeypatch.setitem(card.PARTS, "operators", lambda job: iter([("a", "well"), ("x", "NO")]))

    def broken(job: Job) -> None:
        """It breaks."""
        raise ZeroDivisionError("in a part")

    monkeypatch.setitem(card.PARTS, "training", broken)
    with simulated():
        asked = ["--parts", "operators,training,environment", "--out", str(page), *SMALL]
        assert card.main(asked) == 1
    text = page.read_text(encoding="utf-8")
    assert "ZeroDivisionError: in a part" in text
    assert "free for tensors" in text


def test_without_a_card_nothing_is_measured(tmp_path):
    assert card.main(["--out", str(tmp_path / "card.md")]) == 2
    assert not (tmp_path / "card.md").exists()


def test_a_bare_machine_gets_only_one_library_of_bitsandbytes(tmp_path, monkeypatch):
    def download(packages: object, python: str, folder: Path) -> None:
        with zipfile.ZipFile(folder / "x.whl", "w") as wheel:
            for name in ("cpu", "cuda124", "cuda130"):
                wheel.writestr(f"bitsandbytes/libbitsandbytes_{name}.so", bytes(100))
            wheel.writestr("bitsandbytes/__init__.py", "")
            wheel.writestr("pydantic_core/core.so", bytes(50))

    monkeypatch.setattr(card_carry, "download", download)
    folder = tmp_path / "carried"
    assert card.main(["--carry", str(folder)]) == 0
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert names == {
        *("libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so"),
        *("__init__.py", "core.so"),
    }
    monkeypatch.setattr(card_carry, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="Name fewer packages"):
        card_carry.carry(tmp_path / "again", (), "3.12", "130")
