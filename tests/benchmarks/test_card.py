"""The first hour with a card runs through on the simulated one, and writes its page."""

import json
import sys
import tarfile
import time
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import shapes
from benchmarks.all import tables_in
from benchmarks.card import __main__ as card
from benchmarks.card import answers, carry, decode, disk, operators, peers, runs
from benchmarks.card.job import Job, capped
from benchmarks.workers import checkpoint, ours
from peftkit.execution.environment import free_now, this_machine
from peftkit.inference.cached_engine import CachedEngine
from peftkit.kernels import varlen
from tests.helpers.varlen_reference import reference_varlen_attn
from tests.simulated_gpu.simulation import simulated
from tests.simulated_gpu.tensors import Card

SMALL = [
    *("--model", "tiny", "--layers", "2", "--length", "16"),
    *("--large", "tiny", "--large-layers", "3", "--large-lengths", "64"),
    *("--contexts", "12", "90", "--answers", "1", "3", "--new-tokens", "40", "--probe", "64"),
    *("--product", "256"),
    *("--batch-size", "2", "--steps", "3", "--repeats", "2", "--caps", "4"),
]
FAST = ("environment", "attention")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", shapes._llama(32, 64, 2, 4, 2, 512))
    monkeypatch.setitem(shapes.LARGE, "tiny", shapes.SHAPES["tiny"])


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Have workers run in this process, so that they find the simulated card."""

    def work(worker: str, job: dict[str, Any], folder: Path, **_: Any) -> dict[str, Any]:
        if worker == "checkpoint":
            checkpoint.write(job)
            return {}
        if worker == "peft_answers":
            return {"speeds": [7.0 for _ in job["prompts"]]}
        assert worker == "ours"
        file, output = folder / "job.json", folder / f"output-{time.monotonic_ns()}"
        file.write_text(json.dumps({**job, "output": str(output), "started": time.time()}))
        monkeypatch.setattr(sys, "argv", ["ours", str(file)])
        before = capsys.readouterr().out
        ours.main()
        facts = capsys.readouterr().out.strip().splitlines()[-1]
        print(before, end="")
        return json.loads(facts)

    monkeypatch.setattr(disk, "work", work)
    monkeypatch.setattr(peers, "work", work)
    monkeypatch.setattr(answers, "work", work)
    monkeypatch.setattr(answers, "missing", lambda *_: "")


def run_here(part: str, page: Path, *options: str) -> tuple[int, str]:
    """Run a part in this process; return its exit code and its page."""
    code = card.main(["--part", part, "--here", "--out", str(page), *SMALL, *options])
    return code, page.read_text(encoding="utf-8")


@pytest.mark.covers("benchmarks/card")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch itself
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "part",
    [
        *FAST,
        *(pytest.param(part, marks=pytest.mark.slow) for part in card.PARTS if part not in FAST),
    ],
)
def test_every_part_passes_and_is_written_to_the_page(part, tmp_path, monkeypatch):
    page = tmp_path / "card.md"
    if part == "training":  # the CPU's own, without a simulation around it
        job = Job(torch.device("cpu"), "tiny", 2, 16)
        asked = [(kind, torch.float32) for kind in ("none", "nf4", "int8")]
        asked += [(kind, torch.bfloat16) for kind in ("none", "nf4")]
        known = {each: runs.losses_on_cpu(job, *each) for each in asked}
        monkeypatch.setattr(runs, "losses_on_cpu", lambda _, *each: known[each])
    if part == "operators":
        monkeypatch.setattr(varlen, "kernel", lambda: reference_varlen_attn)
    monkeypatch.setattr(runs, "SUITE", ("tests/simulated_gpu/test_devices.py",))
    # the compiler asks torch for a card; what it makes for one is seen in tests/cross_compile
    compiles = part in ("compiled", "packed", "peers")
    eagerly = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
    with simulated(), eagerly:
        code, text = run_here(part, page)
    assert f"## {part}" in text
    assert code == 0, text
    assert text.count("\n|") >= 3


def test_a_kernel_that_is_wrong_is_seen(monkeypatch):
    job = Job(torch.device("cpu"), "tiny", 2, 16)
    (case,) = (case for case in operators.cases() if case.name == "gated silu")
    assert operators.difference(case, job.device, torch.float32) < 1e-5
    wrong = case._replace(kernel=lambda gate, up: 1.1 * case.kernel(gate, up))
    assert operators.difference(wrong, job.device, torch.float32) > 0.05


def test_a_failed_part_keeps_the_lines_before_its_error(tmp_path, monkeypatch):
    def broken(job: Job) -> Any:
        """It breaks."""
        yield "a", "well"
        yield "x", "yes"
        raise ZeroDivisionError("in a part")

    monkeypatch.setitem(card.PARTS, "training", broken)
    with simulated():
        code, text = run_here("training", tmp_path / "card.md")
    assert code == 1
    assert "| x |" in text
    assert "ZeroDivisionError: in a part" in text


LEAVES = """
import os, pathlib, signal, sys, time
part, page = sys.argv[1], pathlib.Path(sys.argv[2])
page.write_text(f"## {part}\\n\\nfirst line")
print("what went wrong", file=sys.stderr, flush=True)
if part == "training":
    os.kill(os.getpid(), signal.SIGKILL)
if part == "large":
    time.sleep(60)
sys.exit({"operators": 1, "memory": 3}.get(part, 0))
"""


@pytest.mark.covers("benchmarks")
def test_a_part_that_hangs_or_is_killed_costs_only_itself(tmp_path, monkeypatch):
    page = tmp_path / "card.md"
    parts = ("large", "training", "memory", "operators", "environment")
    monkeypatch.setattr(
        card, "command", lambda words, name, file: [sys.executable, "-c", LEAVES, name, str(file)]
    )
    began = time.monotonic()
    with simulated():
        code = card.main(["--part", ",".join(parts), "--out", str(page), "--seconds", "2"])
    assert time.monotonic() - began < 40
    assert code == 1
    text = page.read_text(encoding="utf-8")
    found = {name: text.partition(f"## {name}")[2].partition("\n## ")[0] for name in parts}
    assert all("first line" in section for section in found.values())
    assert "It was stopped after 2 s." in found["large"]
    assert "It was killed by SIGKILL." in found["training"]
    assert "It ended with exit code 3." in found["memory"]
    assert "what went wrong" in found["memory"]
    assert "ended" not in found["operators"] + found["environment"]
    assert (tmp_path / "card" / "training.md").exists()


@pytest.mark.slow
def test_a_part_runs_as_a_process_of_its_own(tmp_path):
    """On the CPU: a simulated card ends with its process."""
    page = tmp_path / "card.md"
    options = ["--device", "cpu", "--model", "smollm2-135m", "--layers", "1", "--probe", "64"]
    assert card.main(["--part", "environment", "--out", str(page), *options]) == 0
    assert "## environment" in page.read_text(encoding="utf-8")
    assert "host time per block" in page.read_text(encoding="utf-8")


@pytest.mark.covers("benchmarks/card")
def test_the_environment_page_names_what_a_card_lacks(tmp_path, monkeypatch):
    """WSL without expandable segments is well; a capability without machine code is not."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    with simulated(Card(is_wsl=True)):
        code, text = run_here("environment", tmp_path / "wsl.md")
    assert code == 0
    assert "microsoft" in text
    old = Card(name="Tesla V100", capability=(7, 0), has_segments=False)
    with simulated(old):
        code, text = run_here("environment", tmp_path / "old.md")
    assert code == 1
    assert "too old for this build" in text
    assert "operation not supported" in text


def test_a_capped_card_is_planned_as_a_smaller_one():
    with simulated(Card(memory=24 * 10**9)):
        device = torch.device("cuda", 0)
        weights = torch.zeros(1000, device=device)
        before = free_now(device).usable
        with capped(device, 8e9):
            inside = free_now(device).usable
            assert this_machine().memory == 8 * 10**9
        assert inside == pytest.approx(0.95 * 8e9 - weights.nbytes, abs=1e6)
        assert free_now(device).usable == before > 2 * inside


@pytest.mark.slow
def test_an_engine_that_leaves_its_cache_is_seen(tmp_path, monkeypatch):
    leaked: list[Any] = []
    take_back = CachedEngine._take_back

    def keep(engine: CachedEngine) -> Any:
        leaked.extend(engine._arenas.values())
        return take_back(engine)

    monkeypatch.setattr(CachedEngine, "_take_back", keep)
    monkeypatch.setattr(decode, "LEFT_BYTES", 1 << 10)
    with simulated():
        code, text = run_here("engines", tmp_path / "card.md")
    assert code == 1
    assert text.count("NO |") == decode.NUM_ENGINES


def test_peers_are_compared_only_if_their_losses_agree(tmp_path, monkeypatch):
    """Sides that run are given facts; a side without its packages is skipped."""
    speeds = {"ours": 2.0, "trl": 1.0, "unsloth": 1.0}

    def work(worker: str, job: dict[str, Any], folder: Path, **_: Any) -> dict[str, Any]:
        seconds = [9.0, *[100 / speeds[worker]] * 2]
        losses = [5.0, 4.0, 3.0] if worker != "unsloth" else [5.0, 5.0, 5.0]
        if job.get("liger"):
            raise peers.WorkerFailed("trl failed (1):\nno kernel image")
        memory = {"peak_bytes": 3e9, "peak_reserved_bytes": 4e9}
        return {"step_seconds": seconds, "losses": losses, "num_trainable": 7, **memory}

    def missing(python: str, packages: Any) -> str:
        return "not installed" if "flash_attn" in packages else ""

    monkeypatch.setattr(peers, "work", work)
    monkeypatch.setattr(peers, "missing", missing)
    monkeypatch.setattr(peers, "checkpoint_of", lambda job: tmp_path)
    with simulated():
        job = card.job_of(card.arguments(SMALL), torch.device("cuda", 0))
        lines = list(peers.peers(job))
    assert all(len(line) == len(lines[0]) for line in lines)
    summaries = {line[0]: line for line in lines if line[1] in ("all", "skipped")}
    assert summaries.keys() == peers.SIDES.keys()
    assert "ours is 2.00 x" in summaries["trl"]
    assert summaries["trl"][3:5] == ("3.00", "4.00")
    assert summaries["unsloth"][-2:] == ("", "NO")
    assert "no kernel image" in summaries["trl-liger"][5]
    assert summaries["trl-flash-liger"][1:6] == ("skipped", "", "", "", "not installed")
    assert [line[1] for line in lines if line[0] == "trl"] == ["1", "2", "all"]
    assert len([line for line in lines if line[0] == "trl-liger"]) == 2, "not tried again"


def test_an_environment_without_a_peer_is_named():
    assert peers.missing(sys.executable, ("torch", "no_such_peer")) == (
        f"not installed in {sys.executable}: no_such_peer"
    )
    assert "does not run" in peers.missing("/no/python", ("torch",))
    assert "no Python" in peers.missing("", ("unsloth",))


def test_without_a_card_nothing_is_measured(tmp_path):
    assert card.main(["--out", str(tmp_path / "card.md")]) == 2
    assert not (tmp_path / "card.md").exists()


@pytest.mark.covers("benchmarks/card")
def test_a_bare_machine_gets_only_one_library_of_bitsandbytes(tmp_path, monkeypatch):
    def download(packages: object, python: str, folder: Path) -> None:
        with zipfile.ZipFile(folder / "x.whl", "w") as wheel:
            for name in ("cpu", "cuda124", "cuda130"):
                wheel.writestr(f"bitsandbytes/libbitsandbytes_{name}.so", bytes(100))
            wheel.writestr("bitsandbytes/__init__.py", "")
            wheel.writestr("pydantic_core/core.so", bytes(50))

    monkeypatch.setattr(carry, "download", download)
    folder = tmp_path / "carried"
    assert card.main(["--carry", str(folder), *SMALL]) == 0
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert names == {
        *("libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so"),
        *("__init__.py", "core.so", "wheels.txt", "rows.jsonl", "project.tar.gz"),
    }
    assert (folder / "wheels.txt").read_text().startswith("x.whl\n")
    with tarfile.open(folder / "project.tar.gz") as code:
        assert "benchmarks/card/__main__.py" in code.getnames()
    monkeypatch.setattr(carry, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="Name fewer packages"):
        carry.carry(tmp_path / "again", (), "3.12", "130")


@pytest.mark.usefixtures("in_process")
def test_the_carried_checkpoint_and_rows_are_those_of_the_card(tmp_path):
    job = card.job_of(card.arguments(SMALL), torch.device("cpu"))
    options = carry.carry_run(tmp_path / "carried", job, with_weights=True)
    assert options == ["--rows", "carried/rows.jsonl", "--checkpoint", "carried/checkpoint"]
    files = [str(tmp_path / name) if "/" in name else name for name in options]
    there = card.job_of(card.arguments([*SMALL, *files]), torch.device("cpu"))
    assert disk.rows_of_chat(there) == disk.rows_of_chat(job)
    assert len(disk.rows_of_chat(job)) == 6
    before = (tmp_path / "carried/checkpoint/model.safetensors").stat().st_mtime_ns
    assert disk.checkpoint_of(there) == tmp_path / "carried/checkpoint"
    assert (tmp_path / "carried/checkpoint/model.safetensors").stat().st_mtime_ns == before


def test_the_first_ten_minutes_are_one_table(tmp_path, monkeypatch, capsys):
    """Options of the command line precede those of `first`; each part has its own process."""
    asked: list[list[str]] = []

    def run_apart(words: list[str], name: str, page: Path, seconds: float) -> tuple[str, bool]:
        asked.append(words)
        lines = (
            "| side | tokens/s | note | well |\n| --- | --: | --- | --- |\n| ours | 7 |  | yes |"
        )
        return f"## {name}\n\n{lines}\n\n1 s", name != "grpo"

    monkeypatch.setattr(card, "run_apart", run_apart)
    with simulated():
        options = ["--part", "first", "--batch-size", "2", "--out", str(tmp_path / "card.md")]
        assert card.main(options) == 1
    rows = tables_in(capsys.readouterr().out)
    assert len(rows) == 1
    assert rows[0][1:] == [[name, "ours", "tokens/s 7", "yes"] for name in card.FIRST]
    given = card.arguments(asked[0][3:])
    assert (given.part, given.batch_size, given.new_tokens) == ([card.FIRST[0]], 2, 128)
    assert given.fixed
    job = card.job_of(given, torch.device("cpu"))
    assert {len(row) for row in disk.rows_of_chat(job)} == {2048}


def test_lost_gradients_of_compiled_blocks_are_seen():
    kept = [torch.tensor([3.0, 4.0]), torch.zeros(2)]
    assert runs.gradients_apart(kept, kept) == 0
    assert runs.gradients_apart([torch.zeros(2), torch.zeros(2)], kept) == 1
