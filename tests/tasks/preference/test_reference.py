"""The reference is what the model was, for every method; asked once, kept with the run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit.base.load import load_base
from peftkit.errors import AdapterError, PeftkitError
from peftkit.evaluation.evaluate import evaluate
from peftkit.events import RunStarted, StepDone
from peftkit.files.tensors import read_tensors
from peftkit.formats.open_adapter import before_training, open_adapter
from peftkit.formats.peft.folder import START
from peftkit.methods.base import Method
from peftkit.methods.lora import LoRA
from peftkit.methods.prefix import PrefixTuning
from peftkit.tasks.pairs.preference_rows import FILE
from tests.helpers.finished import WEIGHTS, Finished, finished, merged, sections
from tests.helpers.pair_cases import (
    moved_adapter,
    settings,
    task_on,
    write,
    write_pairs,
    write_verdicts,
)

METHODS: dict[str, Method] = {
    "lora": LoRA(rank=2),
    "rows and head": LoRA(rank=2, token_rows=(5, 7), train_fully=("norm",)),
    "prefix": PrefixTuning(num_virtual_tokens=3),
}


@pytest.mark.parametrize("name", METHODS)
def test_it_is_the_bare_base_whatever_is_trained(name, llama, tokenizer, tmp_path):
    file = write_pairs(tmp_path / "a.jsonl")
    task, rows = task_on(llama, tokenizer, settings("dpo"), file)
    with torch.no_grad():
        bare = task.log_probs(llama, task.collate(rows))
    adapter = moved_adapter(llama, METHODS[name])
    task, rows = task_on(llama, tokenizer, settings("dpo"), file)
    with torch.no_grad():
        assert not torch.allclose(task.log_probs(llama, task.collate(rows)), bare, atol=1e-2)
    found = task.reference_of(llama, task.collate(rows))
    torch.testing.assert_close(found, bare, rtol=0, atol=1e-5)
    assert all(module.enabled for module in adapter.modules.values())


def spec(folder: Path, model_folder: Path) -> dict[str, Any]:
    """Return a recipe of four steps over five pairs."""
    file = write_pairs(folder / "train.jsonl")
    told = sections(folder, model_folder, file, "preference", loss="dpo", beta=0.5)
    train = {"max_steps": 4, "batch_size": 1, "gradient_accumulation": 3}
    train |= {"learning_rate": 0.05, "save_every": 1}
    method = {"rank": 2, "alpha": 4, "targets": ["q", "v"], "dropout": 0.1}
    return merged(told, {"method": method, "train": train})


@pytest.fixture
def told(tmp_path: Path, model_folder: Path) -> dict[str, Any]:
    return spec(tmp_path, model_folder)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Finished:
    return finished(spec(tmp_path_factory.mktemp("dpo"), model_folder))


ASKING = "Computing the reference"


def test_it_is_asked_once_and_kept_with_the_run(done):
    (started,) = done.of_kind(RunStarted)
    assert "one row for both, the prompt once" in started.paths
    assert len(done.stages(ASKING)) == 1
    steps = done.of_kind(StepDone)
    # the first step compares the model with itself
    assert steps[0].loss == pytest.approx(0.6931, abs=1e-4)
    assert steps[0].figures["margin"] == pytest.approx(0, abs=1e-4)
    assert steps[-1].loss < 0.6
    assert read_tensors(done.folder / FILE)["values"].shape == (5, 2)


def test_a_resumed_run_ends_bit_equal_and_asks_nothing(done, tmp_path):
    found = done.resumed(tmp_path / "half", "step-4")
    assert not found.stages(ASKING)
    assert len(found.of_kind(StepDone)) == 1
    assert (found.folder / WEIGHTS).read_bytes() == (done.folder / WEIGHTS).read_bytes()


@pytest.mark.covers("peftkit")
def test_changed_inputs_are_recomputed(done, told, tmp_path):
    kept = tmp_path / "run" / FILE
    kept.parent.mkdir()
    kept.write_bytes((done.folder / FILE).read_bytes())
    rows = (tmp_path / "train.jsonl").read_text().splitlines()
    rows[0] = rows[0].replace("sleeps", "is extra lazy")
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    short = {"max_steps": 1, "save_every": None}
    some = finished(told, train=short, overwrite=True)
    assert some.stages(ASKING)[0].endswith("1 rows")
    again = finished(told, base={"quantize": "nf4"}, train=short, overwrite=True)
    assert again.stages(ASKING)[0].endswith("5 rows")
    embeddings = {"quantize": "nf4", "quantize_embeddings": "nf4"}
    again = finished(told, base=embeddings, train=short, overwrite=True)
    assert again.stages(ASKING)[0].endswith("5 rows")
    kept.write_bytes(b"no tensors")
    assert finished(told, train=short, overwrite=True).stages(ASKING)[0].endswith("5 rows")


@pytest.mark.parametrize("loss", ["orpo", "kto"])
def test_a_run_learns_preferences(loss, told, tmp_path):
    file = tmp_path / "train.jsonl"
    (write_verdicts if loss == "kto" else write_pairs)(file)
    train = {"max_steps": 12, "save_every": None, "batch_size": 5, "gradient_accumulation": 1}
    run = finished(told, task={"loss": loss}, data={"eval": str(file)}, train=train)
    opened = open_adapter(run.folder)
    assert opened.is_causal  # it can be talked with
    before = before_training(opened.adapter, opened.file.folder)
    found = evaluate(opened.base, file, task=opened.task, style=opened.style, before=before)
    for name in ("loss", "accuracy", "margin", "cut"):
        assert found[name] == pytest.approx(run.metrics[f"eval_{name}"], abs=1e-4)
    assert found["accuracy"] > 0.8
    assert found["margin"] > 0


class TestGoingOnWithAnAdapter:
    def test_its_values_are_the_start_and_the_reference(self, done, told, tmp_path):
        told["method"] = {"start_from": str(done.folder), "dropout": 0.0}
        second = finished(told)
        assert second.of_kind(StepDone)[0].loss == pytest.approx(0.6931, abs=1e-4)
        before, start = read_tensors(done.folder / WEIGHTS), read_tensors(second.folder / START)
        assert len(start) == len(before)
        for name, tensor in start.items():
            assert torch.equal(before[f"base_model.model.{name}"], tensor)
        opened = open_adapter(second.folder)
        assert opened.file.method.start_from is None
        asked = {"task": opened.task, "style": opened.style}
        of_start = before_training(opened.adapter, opened.file.folder)
        means = [
            evaluate(opened.base, tmp_path / "train.jsonl", **asked, before=state)["margin"]
            for state in (of_start, opened.adapter.disabled)
        ]
        assert means[1] > means[0] > 0  # the first run's margin comes on top
        (second.folder / FILE).unlink()  # asked again, of what the adapter was then
        half = second.resumed(tmp_path / "half", "step-4")
        assert (half.folder / WEIGHTS).read_bytes() == (second.folder / WEIGHTS).read_bytes()
        (second.folder / START).unlink()
        with pytest.raises(AdapterError, match=r"start\.safetensors is missing"):
            before_training(opened.adapter, opened.file.folder)

    def test_another_task_continues_the_adapter(self, done, told, tmp_path):
        rows = [{"prompt": "the dog ", "completion": "and the fox"}] * 4
        told["data"] = {
            "train": write(tmp_path / "sft.jsonl", rows),
            "packing": False,
            "max_length": 64,
        }
        told |= {"method": {"start_from": str(done.folder)}, "task": {"type": "causal_lm"}}
        found = finished(told, train={"learning_rate": 1e-9, "max_steps": 1, "save_every": None})
        assert not (found.folder / START).exists()  # nothing is compared with it
        a, b = (read_tensors(folder / WEIGHTS) for folder in (done.folder, found.folder))
        for name, tensor in a.items():
            torch.testing.assert_close(b[name], tensor, rtol=0, atol=1e-6)

    @pytest.mark.parametrize(
        ("method", "error"),
        [
            ({"rank": 4}, "method.rank"),
            ({"type": "dora"}, "method.type: dora"),
            ({"start_from": "runs/none"}, "runs/none"),
        ],
    )
    def test_what_it_is_not_is_refused(self, method, error, done, told):
        told["method"] = {"start_from": str(done.folder), **method}
        with pytest.raises(PeftkitError, match=error):
            finished(told)

    def test_another_base_is_refused(self, done, told, tmp_path, tokenizer):
        base = load_base(told["base"]["model"], dtype="fp32")
        with torch.no_grad():
            base.model.lm_head.weight += 1
        base.model.save_pretrained(tmp_path / "other")
        tokenizer.save_pretrained(tmp_path / "other")
        told["method"] = {"start_from": str(done.folder)}
        with pytest.raises(AdapterError, match="another base"):
            finished(told, base={"model": str(tmp_path / "other")})
