"""A recipe from its file to an adapter that others load: the whole run, at a tiny size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from peftkit import recipe
from peftkit.config.schema import Config, from_dict
from peftkit.errors import ConfigError
from peftkit.events import EvalDone, Event, Notice, RunStarted, Saved, StepDone
from peftkit.formats.open_adapter import open_adapter
from peftkit.run.config import Recipe, load

ROWS = [
    {"instruction": f"Say {word} {n}.", "output": f"{word} {n}"}
    for n in range(4)
    for word in ("yes", "no", "perhaps")
]


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def settings(tmp_path: Path, model_folder: Path) -> dict[str, Any]:
    return {
        "base": {"model": str(model_folder), "dtype": "fp32"},
        "method": {"type": "lora", "rank": 4, "alpha": 8},
        "data": {
            "train": str(write_rows(tmp_path / "train.jsonl", ROWS)),
            "eval": str(write_rows(tmp_path / "eval.jsonl", ROWS[:3])),
            "max_length": 128,
        },
        "train": {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 6,
            "batch_size": 2,
            "learning_rate": 5e-3,
            "eval_every": 3,
            "save_every": 3,
        },
    }


def parse(settings: dict[str, Any], **sections: dict[str, Any]) -> Recipe:
    merged = {name: {**section, **sections.get(name, {})} for name, section in settings.items()}
    return from_dict(Recipe, merged, "test")


@pytest.mark.parametrize(("quantize", "packing"), [("none", True), ("nf4", False), ("int8", True)])
def test_a_run_learns_and_its_folder_is_an_adapter(
    settings: dict[str, Any], quantize: str, packing: bool, tmp_path: Path
) -> None:
    events: list[Event] = []
    asked = parse(settings, base={"quantize": quantize}, data={"packing": packing})
    recipe.run(asked, on_event=events.append)
    losses = [event.loss for event in events if isinstance(event, StepDone)]
    assert losses[-1] < losses[0]
    assert any(isinstance(event, EvalDone) and event.best for event in events)
    started = next(event for event in events if isinstance(event, RunStarted))
    assert started.num_trainable < started.num_parameters / 4
    folder = tmp_path / "run"
    assert Saved("adapter", folder) in events
    found = {path.name for path in folder.iterdir()}
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "peftkit.json",
        "README.md",
        "recipe.yaml",
        "metrics.jsonl",
        "report.html",
        "run.json",
        "checkpoints",
        ".locks",
    } == found
    assert load(folder / "recipe.yaml") == asked
    opened = open_adapter(folder)
    assert opened.base.audit.quantized_as == quantize
    assert opened.style.kind == "chat"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_loads_the_run_and_gives_its_logits(
    settings: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    recipe.run(parse(settings))
    ours = open_adapter(tmp_path / "run", dtype="fp32").base.model
    base = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "run").eval()
    ids = torch.arange(20)[None] + 3
    with torch.no_grad():
        torch.testing.assert_close(
            ours(input_ids=ids).logits, theirs(input_ids=ids).logits, atol=1e-5, rtol=0
        )


def test_a_checkpoint_is_an_adapter_folder_too(settings: dict[str, Any], tmp_path: Path) -> None:
    recipe.run(parse(settings))
    opened = open_adapter(tmp_path / "run" / "checkpoints" / "step-3")
    final = open_adapter(tmp_path / "run")
    assert opened.adapter.state().keys() == final.adapter.state().keys()


def test_a_resumed_run_ends_where_the_whole_run_does(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    recipe.run(parse(settings, train={"output_dir": str(whole)}))

    class Stopped(Exception):
        pass

    def stop(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 4:
            raise Stopped

    asked = parse(settings, train={"output_dir": str(part)})
    with pytest.raises(Stopped):
        recipe.run(asked, on_event=stop)
    recipe.run(asked, resume=True)
    name = "adapter_model.safetensors"
    assert (whole / name).read_bytes() == (part / name).read_bytes()


class _Reads:
    """Which fields of which config classes are read by their names."""

    def __init__(self) -> None:
        self.seen: set[tuple[type, str]] = set()

    def __call__(self, config: Config, name: str) -> Any:
        if not name.startswith("_"):
            self.seen |= {(cls, name) for cls in type(config).__mro__}
        return object.__getattribute__(config, name)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> _Reads:
    recorder = _Reads()
    monkeypatch.setattr(Config, "__getattribute__", lambda self, name: recorder(self, name))
    return recorder


def test_every_field_of_a_recipe_is_read_by_something(
    settings: dict[str, Any], reads: _Reads
) -> None:
    asked = parse(settings)
    recipe.run(asked)
    sections = [
        Recipe,
        *(type(getattr(asked, name)) for name in ("base", "method", "data", "train")),
    ]
    unread = {
        f"{section.__name__}.{name}"
        for section in sections
        for name in section.model_fields
        if (section, name) not in reads.seen
    }
    assert not unread


def test_new_tokens_are_trained_saved_and_there_again_when_it_is_opened(
    settings: dict[str, Any],
) -> None:
    tokens = ["<think>", "<done>"]
    asked = parse(settings, base={"new_tokens": tokens})
    recipe.run(asked)
    folder = asked.train.output_dir
    assert (folder / "tokenizer.json").is_file()
    for place in (folder, folder / "checkpoints" / "step-6"):
        opened = open_adapter(place)
        ids = opened.base.tokenizer.convert_tokens_to_ids(tokens)
        assert len(set(ids)) == 2
        assert opened.base.tokenizer.unk_token_id not in ids
        state = opened.adapter.state()
        trained = [name for name in state if name.endswith("trainable_tokens_delta")]
        assert trained
        assert all(len(state[name]) == 2 for name in trained)


def test_virtual_tokens_and_packed_rows_are_refused_before_anything_is_loaded(
    settings: dict[str, Any],
) -> None:
    settings["method"] = {"type": "prompt_tuning"}
    with pytest.raises(ConfigError, match=r"data\.packing does not go with .*prompt_tuning"):
        parse(settings, data={"packing": True})


def test_packing_that_was_not_asked_for_gives_way(settings: dict[str, Any]) -> None:
    settings["method"] = {"type": "prompt_tuning", "num_virtual_tokens": 3}
    events: list[Event] = []
    asked = parse(settings)
    recipe.run(asked, on_event=events.append)
    assert [e for e in events if isinstance(e, Notice) and "not packed" in e.text]
    kept = load(asked.train.output_dir / "recipe.yaml")  # and can be trained again
    assert not kept.data.packing
    recipe.run(kept, overwrite=True)
