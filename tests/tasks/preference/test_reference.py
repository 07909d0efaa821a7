"""The reference is what the model was, for every method; asked once, kept with the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from peftkit.base.load import load_base
from peftkit.config import schema
from peftkit.errors import AdapterError, PeftkitError
from peftkit.events import Event, RunStarted, Stage, StepDone
from peftkit.files.disk import read_tensors
from peftkit.formats.continued import START, before_training
from peftkit.formats.open_adapter import open_adapter
from peftkit.inference.evaluate import evaluate
from peftkit.methods.lora import DoRA, LoRA
from peftkit.methods.prefix import PrefixTuning
from peftkit.methods.prompt import PromptTuning
from peftkit.methods.protocol import Method
from peftkit.recipe import run
from peftkit.run.config import Recipe
from peftkit.tasks.preference.reference import FILE
from tests.tasks.preference.cases import (
    moved_adapter,
    settings,
    task_on,
    write_pairs,
    write_verdicts,
)

METHODS: dict[str, Method] = {
    "lora": LoRA(rank=2),
    "pissa": LoRA(rank=2, init="pissa"),
    "dora": DoRA(rank=2),
    "rows and head": LoRA(rank=2, token_rows=(5, 7), train_fully=("norm",)),
    "prompt": PromptTuning(num_virtual_tokens=3),
    "prefix": PrefixTuning(num_virtual_tokens=3),
}


@pytest.mark.parametrize("name", METHODS)
def test_it_is_the_bare_base_whatever_is_trained(
    name: str, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
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


@pytest.fixture
def told(tmp_path: Path, model_folder: Path) -> dict[str, Any]:
    """A recipe of four steps over five pairs."""
    write_pairs(tmp_path / "train.jsonl")
    return {
        "task": {"type": "preference", "loss": "dpo", "beta": 0.5},
        "base": {"model": str(model_folder), "dtype": "fp32"},
        "method": {"type": "lora", "rank": 2, "alpha": 4, "targets": ["q", "v"], "dropout": 0.1},
        "data": {"train": str(tmp_path / "train.jsonl"), "max_length": 64},
        "train": {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 4,
            "batch_size": 1,
            "gradient_accumulation": 3,
            "learning_rate": 0.05,
            "save_every": 1,
        },
    }


def recipe(told: dict[str, Any], **changes: dict[str, Any]) -> Recipe:
    spec = {name: {**section, **changes.get(name, {})} for name, section in told.items()}
    return schema.from_dict(Recipe, spec, "the test")


def asked(events: list[Event]) -> int:
    texts = [event.text for event in events if isinstance(event, Stage)]
    return sum(text.startswith("Asking the reference") for text in texts)


def steps(events: list[Event]) -> list[StepDone]:
    return [event for event in events if isinstance(event, StepDone)]


def test_it_is_asked_once_and_kept_with_the_run(told: dict[str, Any], tmp_path: Path) -> None:
    events: list[Event] = []
    run(recipe(told), on_event=events.append)
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert "one row for both, the prompt once" in started.paths
    assert asked(events) == 1
    # the first step compares the model with itself
    assert steps(events)[0].loss == pytest.approx(0.6931, abs=1e-4)
    assert steps(events)[0].figures["margin"] == pytest.approx(0, abs=1e-4)
    assert steps(events)[-1].loss < 0.6
    assert read_tensors(tmp_path / "run" / FILE)["values"].shape == (5, 2)


def test_a_resumed_run_ends_bit_equal_and_asks_nothing(
    told: dict[str, Any], tmp_path: Path
) -> None:
    run(recipe(told, train={"output_dir": str(tmp_path / "whole")}))
    broken = recipe(told)

    class Stop(Exception):
        pass

    def stop(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            raise Stop

    with pytest.raises(Stop):
        run(broken, on_event=stop)
    events: list[Event] = []
    run(broken, resume=True, on_event=events.append)
    assert asked(events) == 0
    name = "adapter_model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_other_rows_or_another_base_are_asked_about_again(
    told: dict[str, Any], tmp_path: Path
) -> None:
    run(recipe(told))
    rows = (tmp_path / "train.jsonl").read_text().splitlines()
    rows[0] = rows[0].replace("sleeps", "is extra lazy")
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    events: list[Event] = []
    run(recipe(told), overwrite=True, on_event=events.append)
    assert [event.text for event in events if isinstance(event, Stage)][-1].endswith("1 rows")
    events.clear()
    run(recipe(told, base={"quantize": "nf4"}), overwrite=True, on_event=events.append)
    assert [event.text for event in events if isinstance(event, Stage)][-1].endswith("5 rows")


def test_a_damaged_file_is_computed_again(told: dict[str, Any], tmp_path: Path) -> None:
    run(recipe(told))
    (tmp_path / "run" / FILE).write_bytes(b"no tensors")
    events: list[Event] = []
    run(recipe(told), overwrite=True, on_event=events.append)
    assert asked(events) == 1


@pytest.mark.parametrize("loss", ["dpo", "orpo", "kto"])
def test_a_run_learns_to_prefer_and_eval_says_so(
    loss: str, told: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "train.jsonl"
    (write_verdicts if loss == "kto" else write_pairs)(file)
    asked_for = recipe(
        told,
        task={"loss": loss},
        data={"eval": str(file)},
        train={"max_steps": 12, "save_every": None, "batch_size": 5, "gradient_accumulation": 1},
    )
    result = run(asked_for)
    opened = open_adapter(tmp_path / "run")
    assert opened.is_causal  # it can be talked with
    before = before_training(opened.adapter, opened.file.folder)
    found = evaluate(opened.base, file, task=opened.task, style=opened.style, before=before)
    for name in ("loss", "accuracy", "margin", "cut"):
        assert found[name] == pytest.approx(result.metrics[f"eval_{name}"], abs=1e-4)
    assert found["accuracy"] > 0.8
    assert found["margin"] > 0


class TestGoingOnWithAnAdapter:
    @pytest.fixture
    def first(self, told: dict[str, Any], tmp_path: Path) -> Path:
        folder = tmp_path / "first"
        run(recipe(told, train={"output_dir": str(folder), "save_every": None}))
        return folder

    def test_its_values_are_the_start_and_the_reference(
        self, first: Path, told: dict[str, Any], tmp_path: Path
    ) -> None:
        told["method"] = {"start_from": str(first), "dropout": 0.0}
        events: list[Event] = []
        run(recipe(told), on_event=events.append)
        assert steps(events)[0].loss == pytest.approx(0.6931, abs=1e-4)
        before = read_tensors(first / "adapter_model.safetensors")
        start = read_tensors(tmp_path / "run" / START)
        assert len(start) == len(before)
        for name, tensor in start.items():
            assert torch.equal(before[f"base_model.model.{name}"], tensor)
        opened = open_adapter(tmp_path / "run")
        assert opened.file.method.start_from is None
        file = str(tmp_path / "train.jsonl")
        means = {}
        for where, state in (
            ("start", before_training(opened.adapter, opened.file.folder)),
            ("base", opened.adapter.disabled),
        ):
            means[where] = evaluate(
                opened.base, file, task=opened.task, style=opened.style, before=state
            )["margin"]
        assert means["base"] > means["start"] > 0  # the first run's margin comes on top

    def test_a_checkpoint_is_resumed_to_the_bit(
        self, first: Path, told: dict[str, Any], tmp_path: Path
    ) -> None:
        told["method"] = {"start_from": str(first), "dropout": 0.2}
        run(recipe(told, train={"output_dir": str(tmp_path / "whole")}))
        half = recipe(told)

        def stop(event: Event) -> None:
            if isinstance(event, StepDone) and event.step == 3:
                raise KeyError

        with pytest.raises(KeyError):
            run(half, on_event=stop)
        (tmp_path / "run" / FILE).unlink()  # asked again, of what the adapter was then
        run(half, resume=True)
        name = "adapter_model.safetensors"
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()

    def test_another_task_takes_it_up(
        self, first: Path, told: dict[str, Any], tmp_path: Path
    ) -> None:
        rows = [{"prompt": "the dog ", "completion": "and the fox"}] * 4
        (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        told["method"] = {"start_from": str(first)}
        told["task"] = {"type": "causal_lm"}
        data = {"train": str(tmp_path / "sft.jsonl"), "packing": False}
        run(recipe(told, data=data, train={"learning_rate": 1e-9, "max_steps": 1}))
        assert not (tmp_path / "run" / START).exists()  # nothing is compared with it
        a = read_tensors(first / "adapter_model.safetensors")
        b = read_tensors(tmp_path / "run" / "adapter_model.safetensors")
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
    def test_what_it_is_not_is_refused(
        self, method: dict[str, Any], error: str, first: Path, told: dict[str, Any]
    ) -> None:
        told["method"] = {"start_from": str(first), **method}
        with pytest.raises(PeftkitError, match=error):
            run(recipe(told))

    def test_another_base_is_refused(
        self, first: Path, told: dict[str, Any], tmp_path: Path, tokenizer: Any
    ) -> None:
        base = load_base(told["base"]["model"], dtype="fp32")
        with torch.no_grad():
            base.model.lm_head.weight += 1
        base.model.save_pretrained(tmp_path / "other")
        tokenizer.save_pretrained(tmp_path / "other")
        told["method"] = {"start_from": str(first)}
        with pytest.raises(AdapterError, match="another base"):
            run(recipe(told, base={"model": str(tmp_path / "other")}))
