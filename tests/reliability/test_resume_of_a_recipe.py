"""A resumed run is the run that was stopped, or an error that lists what differs."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from peftkit.config.schema import from_dict
from peftkit.errors import AdapterError, BaseError, CheckpointError, DataError
from peftkit.events import Event, Notice, Stage, StepDone
from peftkit.formats.folders import set_aside
from peftkit.formats.open_adapter import open_adapter
from peftkit.recipe import Recipe
from peftkit.run import run as run_recipe

TENSORS = "adapter_model.safetensors"


class Stopped(Exception):
    """Stands for whatever ends a process."""


def stop_after(step: int) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == step + 1:
            raise Stopped

    return listen


def stop_while_trying(event: Event) -> None:
    if isinstance(event, Stage) and event.text.startswith("Trying kernels"):
        raise Stopped


@pytest.fixture
def with_bos(asked: Recipe) -> Recipe:
    """A recipe whose run broke off after its third checkpoint."""
    with pytest.raises(Stopped):
        run_recipe(asked, on_event=stop_after(3))
    return asked


def refusal(asked: Recipe, **kwargs: object) -> list[str]:
    """Return the differences with which a resume is refused."""
    with pytest.raises(CheckpointError, match="cannot resume") as caught:
        run_recipe(asked, resume=True, **kwargs)  # type: ignore[arg-type]
    return caught.value.found.splitlines()


def changed(asked: Recipe, **sections: dict[str, object]) -> Recipe:
    update = {name: {**asked.model_dump()[name], **new} for name, new in sections.items()}
    return from_dict(Recipe, {**asked.model_dump(mode="json"), **update}, "test")


def test_changed_base_is_refused(with_bos, tmp_path, model_folder):
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += 0.01
    model.save_pretrained(other)
    elsewhere = changed(with_bos, base={"model": str(other)})
    (path,) = refusal(elsewhere)
    assert path.startswith("base.model: ")
    (fingerprint,) = refusal(elsewhere, allow_changes=["base.model"])
    assert fingerprint.startswith('base.fingerprint: "sha256:')


def test_the_same_base_in_another_precision_is_refused(with_bos):
    lines = refusal(changed(with_bos, base={"quantize": "nf4"}))
    assert lines == ['base.quantize: "none" -> "nf4"']


@pytest.mark.covers("peftkit")
def test_another_auto_dtype_is_refused(asked, monkeypatch):
    auto = changed(asked, base={"dtype": "auto"})
    monkeypatch.setattr("peftkit.base.request.has_bf16_units", lambda: False)
    with pytest.raises(Stopped):
        run_recipe(auto, on_event=stop_after(3))
    monkeypatch.setattr("peftkit.base.request.has_bf16_units", lambda: True)
    assert refusal(auto) == ['base.computes_in: "float32" -> "bfloat16"']
    run_recipe(auto, resume=True, allow_changes=["base.computes_in"])


def test_other_rows_are_refused_and_can_be_allowed(with_bos):
    path = Path(with_bos.data.train)
    lines = path.read_text().splitlines()
    lines[0], lines[1] = lines[1], lines[0]
    path.write_text("\n".join(lines) + "\n")
    (line,) = refusal(with_bos)
    assert line.startswith('rows.train: "sha256:')
    events: list[Event] = []
    run_recipe(with_bos, resume=True, allow_changes=["rows"], on_event=events.append)
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert any("Resumed with these changes" in text and "rows.train" in text for text in notices)


def test_every_changed_setting_is_listed_at_once(with_bos, monkeypatch):
    def loads(*_: object, **__: object) -> None:
        pytest.fail("the base is loaded")

    monkeypatch.setattr("peftkit.run.prepare", loads)
    other = changed(
        with_bos,
        method={"rank": 4, "targets": ["q"]},
        data={"max_length": 63},
        train={"batch_size": 2, "gradient_accumulation": 1, "learning_rate": 0.1, "seed": 7},
    )
    lines = refusal(other)
    keys = [line.partition(":")[0] for line in lines]
    assert keys == [
        "data.max_length",
        "method.rank",
        "method.targets",
        "train.batch_size",
        "train.gradient_accumulation",
        "train.learning_rate",
        "train.seed",
    ]
    assert "method.rank: 2 -> 4" in lines


def test_a_run_that_fails_before_its_first_step_leaves_no_folder(asked):
    absent = changed(asked, base={"model": "./absent"})
    with pytest.raises(BaseError):
        run_recipe(absent)
    assert not absent.train.output_dir.exists()


def test_a_refused_resume_changes_nothing(with_bos, tmp_path):
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    refusal(changed(with_bos, train={"seed": 7}))
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    log = tmp_path / "run" / "metrics.jsonl"
    assert after.pop(log).startswith(before.pop(log))
    assert after == before


def test_the_cli_names_skipped_checkpoints(with_bos, recipe_file, tmp_path, peftkit):
    whole = tmp_path / "whole"
    assert peftkit("train", recipe_file, "--out", whole).code == 0
    tensors = tmp_path / "run" / "checkpoints" / "step-3" / TENSORS
    bits = bytearray(tensors.read_bytes())
    bits[-1] ^= 1
    tensors.write_bytes(bits)
    done = peftkit("train", recipe_file, "--resume")
    assert done.code == 0, done.err
    assert f"Skipped checkpoint step-3: {TENSORS} has changed" in done.err
    assert "step 3/6" in done.err
    assert (tmp_path / "run" / TENSORS).read_bytes() == (whole / TENSORS).read_bytes()


def test_resuming_needs_the_whole_state(with_bos, recipe_file, tmp_path, peftkit):
    """The scheduler is a function of the step, which is in state.json."""
    name = "state.json"
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        (checkpoint / name).unlink()
    done = peftkit("train", recipe_file, "--resume")
    assert (done.code, done.out) == (2, "")
    assert f"step-3: {name} is missing" in done.err


def test_a_refusal_s_advice_works(with_bos, recipe_file, peftkit):
    train = ("train", recipe_file, "--resume", "--set", "train.learning_rate=0.1")
    train = (*train, "--set", "train.seed=3")
    refused = peftkit(*train)
    (line,) = [line for line in refused.err.splitlines() if "--allow-changes" in line]
    advice = line[line.index("--allow-changes") :].split()
    assert advice[::2] == ["--allow-changes"] * 2
    assert peftkit(*train, *advice).code == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"resume": True, "allow_changes": ["train.learning_rat"]}, "mean 'train.learning_rate'"),
        ({"allow_changes": ["train"]}, "Add --resume"),
        ({"resume": True, "overwrite": True}, "not both"),
    ],
)
def test_unusable_keys_refused(kwargs, message, with_bos):
    with pytest.raises(CheckpointError, match=message):
        run_recipe(with_bos, **kwargs)  # type: ignore[arg-type]


def test_overwrite_deletes_nothing_before_a_valid_start(with_bos, tmp_path):
    with pytest.raises(DataError):
        run_recipe(changed(with_bos, data={"train": "nowhere.jsonl"}), overwrite=True)
    assert (tmp_path / "run" / "checkpoints" / "step-3" / "MANIFEST.json").exists()
    run_recipe(with_bos, resume=True)


@pytest.mark.covers("peftkit")
def test_a_run_that_dies_after_overwriting_leaves_no_adapter_of_another(asked):
    run_recipe(asked)
    folder, aside = asked.train.output_dir, asked.train.output_dir / "overwritten"
    trained = (folder / TENSORS).read_bytes()
    (folder / "tasks.json").write_text("[]")
    (folder / "samples.jsonl").write_text("{}\n")
    with pytest.raises(Stopped):
        run_recipe(asked, overwrite=True, on_event=stop_after(2))
    assert not (folder / "tasks.json").exists()
    assert not (folder / "samples.jsonl").exists()
    with pytest.raises(AdapterError, match="holds no adapter_config") as refused:
        open_adapter(folder)
    assert "--resume" in refused.value.fix
    assert f"{folder}/checkpoints/step-2" in refused.value.fix
    with pytest.raises(Stopped):  # again: the adapter that was finished stays
        run_recipe(asked, overwrite=True, on_event=stop_after(0))
    assert (aside / TENSORS).read_bytes() == trained
    assert (aside / "tasks.json").exists()
    open_adapter(aside)
    with pytest.raises(AdapterError) as refused:
        open_adapter(folder)
    assert "--resume" not in refused.value.fix
    for _ in range(2):  # before the run has written a file
        with pytest.raises(Stopped):
            run_recipe(asked, overwrite=True, on_event=stop_while_trying)
    assert (aside / TENSORS).read_bytes() == trained
    run_recipe(asked, overwrite=True)
    assert (folder / TENSORS).read_bytes() == trained
    assert not aside.exists()


def test_a_backup_survives_any_kill(saved, monkeypatch):
    contents = {path.name: path.read_bytes() for path in saved.iterdir()}
    replace = os.replace
    for number in range(len(contents)):
        moves = iter(range(number))

        def move_or_die(source: Path, target: Path, moves: Iterator[int] = moves) -> None:
            if source.exists() and next(moves, None) is None:
                raise Stopped
            replace(source, target)

        monkeypatch.setattr(os, "replace", move_or_die)
        with pytest.raises(Stopped):
            set_aside(saved)
        monkeypatch.setattr(os, "replace", replace)
        aside = set_aside(saved)
        assert aside is not None
        assert {path.name: path.read_bytes() for path in aside.iterdir()} == contents
        assert not [path for path in saved.iterdir() if path.is_file()]
        for path in aside.iterdir():
            path.rename(saved / path.name)


def test_the_manifest_proves_recipe_data_base_and_place(with_bos, tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "step-3"
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert manifest["step"] == 3
    assert manifest["epoch"] == 1
    assert manifest["sampler"] == {"seed": with_bos.train.seed, "epoch": 1, "position": 0}
    assert manifest["num_processes"] == 1
    identity = manifest["identity"]
    assert identity["base"]["fingerprint"].startswith("sha256:")
    assert identity["rows"]["train"].startswith("sha256:")
    assert identity["method"]["rank"] == 2
    assert {"peftkit", "python", "torch", "transformers"} <= manifest["versions"].keys()
    present = {path.name for path in folder.iterdir()} - {"MANIFEST.json"}
    assert manifest["files"].keys() == present
    for file in manifest["files"].values():
        assert file.keys() == {"bytes", "sha256"}
