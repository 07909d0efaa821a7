"""Each command for real, on a tiny model: check, train, generate, chat, eval, merge, inspect."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from peftkit.evaluation.evaluate import trained_length
from peftkit.figures import metric_name
from peftkit.files.disk import LOCKS
from peftkit.formats.open_adapter import open_adapter
from peftkit.inference.generate import generate
from tests.helpers.command_line import Run, start, turn, typed
from tests.helpers.folders import write_rows

ASKED = "what is the lazy?"


@pytest.fixture
def inside(trained: Path, peftkit: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in the folder of a trained project."""
    monkeypatch.chdir(trained)
    return peftkit


def test_train_prints_the_folder_and_tells_the_rest_on_stderr(trained):
    assert (trained / "out.txt").read_text() == "runs/demo\n"
    output = (trained / "err.txt").read_text()
    for line in ("Training ", "step 8/8  loss ", "eval at step 8: ", "saved adapter: runs/demo"):
        assert line in output
    assert "Warning" not in output
    assert "\x1b" not in output, "no colours in a file"
    assert "it/s" not in output, "no progress bars of libraries in a file"
    names = {path.name for path in (trained / "runs" / "demo").iterdir()}
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
        "peftkit.json",
    } <= names
    assert {"recipe.yaml", "run.json", "metrics.jsonl", "checkpoints", "report.html"} <= names


def test_train_on_a_finished_run_requires_overwrite(project, peftkit):
    steps = ("--set", "train.max_steps=1", "--out", "a: run")
    assert peftkit("train", "recipe.yaml", *steps)[:2] == (0, "a: run\n")
    before = (project / "a: run" / "adapter_model.safetensors").read_bytes()
    assert (
        "OutputError: "
        in peftkit("train", "recipe.yaml", *steps, "--set", "train.seed=1").refusal()
    )
    assert (project / "a: run" / "adapter_model.safetensors").read_bytes() == before
    again = (*steps, "--set", "train.seed=1", "--overwrite")
    peftkit("train", "recipe.yaml", *again).succeeded()
    assert (project / "a: run" / "adapter_model.safetensors").read_bytes() != before


@pytest.mark.covers("peftkit", "cli/peftkit_cli")
def test_resume_refuses_changes_that_are_not_allowed(project, peftkit):
    train = ("train", "recipe.yaml", "--set", "train.save_every=2")
    assert peftkit(*train, "--set", "train.max_steps=2").code == 0
    errors = peftkit(*train, "--set", "train.max_steps=4", "--resume").refusal()
    assert "--allow-changes train.max_steps" in errors
    assert "peftkit train --from RUN" in errors
    allowed = peftkit(
        *train, "--set", "train.max_steps=4", "--resume", "--allow-changes", "train.max_steps"
    ).succeeded()
    assert "step 4/4" in allowed.err
    assert "step 2/4" not in allowed.err


def test_a_finished_run_gives_its_recipe_to_another(inside, tmp_path):
    done = inside(
        *("train", "--from", "runs/demo", "--set", "train.max_steps=2"),
        *("--set", "train.eval_every=null", "--out", tmp_path / "other"),
    )
    assert (done.code, done.out) == (0, f"{tmp_path / 'other'}\n"), done.err
    assert "step 2/2" in done.err
    kept = (tmp_path / "other" / "recipe.yaml").read_text()
    assert "rank: 4" in kept
    assert "max_steps: 2" in kept
    for wrong in (("--from", "runs"), ("--from", "run/demo"), (), ("recipe.yaml", "--from", "x")):
        assert "ConfigError: " in inside("train", *wrong).refusal()


def test_check_shows_rows_as_the_loss_sees_them_without_writes(project, peftkit):
    before = sorted(project.rglob("*"))
    done = peftkit("check", "recipe.yaml").succeeded()
    assert (done.out + done.err).count("Ready to train") == 1
    title = next(line for line in done.out.splitlines() if line.startswith("train.jsonl:1"))
    assert title.endswith("as the loss sees it")
    learnt = [line for line in done.out.splitlines() if line.strip().startswith("learnt  ")]
    assert any(line.endswith("the quick dog<|im_end|>") for line in learnt)
    assert not any("what is" in line for line in learnt)
    assert sorted(project.rglob("*")) == before


def test_check_shows_two_documents_of_packed_rows(project, peftkit):
    overrides = ("--set", "data.max_length=256", "--set", "data.packing=true")
    overrides += ("--set", "train.learning_rate=0.05")
    done = peftkit("check", "recipe.yaml", *overrides)
    assert "note: A learning rate of 0.05 also changes the answers to unrelated" in done.err
    titles = [line for line in done.out.splitlines() if line.endswith("as the loss sees it")]
    assert [title.split(",")[0] for title in titles] == ["train.jsonl:1", "train.jsonl:2"]
    assert "Packed 12 documents" in done.err
    quiet = peftkit("check", "recipe.yaml", "--quiet")
    assert quiet.out == ""
    assert all(line.startswith("note: ") for line in quiet.err.splitlines())


def test_check_says_that_a_run_is_too_short(project, peftkit):
    write_rows(project / "few.jsonl", [turn(f"what is {n}?", f"the dog {n}") for n in range(40)])
    more = ("--set", "data.train=few.jsonl", "--set", "train.max_steps=null")
    packed = ("--set", "data.packing=true", "--set", "train.batch_size=16")
    done = peftkit("check", "recipe.yaml", *more, *packed)
    assert "note: This run is too short to learn: " in done.err
    assert "(40 documents, packed)" in done.err
    assert "--set data.packing=false --set train.batch_size=4" in done.err
    assert "Ready to train" not in done.err
    cured = peftkit("check", "recipe.yaml", *more, "--set", "train.batch_size=4")
    (verdict,) = [line for line in cured.err.splitlines() if "Ready to train" in line]
    num_eval = len((project / "eval.jsonl").read_text(encoding="utf-8").splitlines())
    counts = f"40 rows, {num_eval} to evaluate on, 30 optimizer steps"
    assert verdict == f"note: Ready to train: {counts}."


def test_generate_prints_the_completion_and_nothing_else(inside, trained):
    opened = open_adapter(trained / "runs" / "demo")
    (expected,) = generate(
        opened.base.model, opened.base.tokenizer, ASKED, style=opened.style, max_new_tokens=12
    )
    done = inside("generate", "runs/demo", "--prompt", ASKED, "--max-new-tokens", 12)
    assert done[:2] == (0, expected + "\n")
    with opened.adapter.disabled():
        bare = generate(opened.base.model, opened.base.tokenizer, ASKED, max_new_tokens=12)
    assert bare != [expected], "the adapter takes part"


@pytest.mark.covers("peftkit", "cli/peftkit_cli")
def test_a_seed_repeats_a_sampled_completion(inside):
    sample = ("generate", "runs/demo", "--prompt", ASKED, "--temperature", 2, "--seed")
    first, second, other = inside(*sample, 1), inside(*sample, 1), inside(*sample, 2)
    assert first.out == second.out != other.out


def test_a_prompt_can_come_from_stdin(inside, monkeypatch):
    output = inside("generate", "runs/demo", "--prompt", ASKED).out
    typed(monkeypatch, ASKED)
    assert inside("generate", "runs/demo", "--prompt", "-").out == output
    typed(monkeypatch)
    assert inside("generate", "runs/demo", "--prompt", "-").code == 2


def test_chat_alternates_adapter_and_base(inside, monkeypatch):
    lines = [
        ASKED, "/base", ASKED, "/reset", "/adapter", ASKED, "/bas", "/help", "", "/quit",
        "never asked",
    ]  # fmt: skip
    typed(monkeypatch, *lines)
    done = inside("chat", "runs/demo", "--max-new-tokens", 5).succeeded()
    first, bare, again = done.out.splitlines()
    assert first == again != bare
    assert "Did you mean '/base'?" in done.err
    assert all(command in done.err for command in ("/adapter", "/reset", "/quit"))
    assert ">" not in done.out, "no prompts where there is no terminal"


@pytest.mark.covers("peftkit", "cli/peftkit_cli")
def test_eval_measures_and_speaks_json(inside):
    done = inside("eval", "runs/demo", "--data", "eval.jsonl").succeeded()
    names = [line.split("  ")[0] for line in done.out.splitlines()]
    assert names == ["loss", "perplexity", "exact match", "target tokens", "rows"]
    facts = json.loads(inside("eval", "runs/demo", "--data", "eval.jsonl", "--json").out)
    assert facts["num_rows"] == 3
    assert [metric_name(name) for name in facts] == names
    both = json.loads(
        inside("eval", "runs/demo", "--data", "eval.jsonl", "--compare", "--json").out
    )
    assert both["adapter"] == facts
    assert both["base"]["loss"] > 1.5 * facts["loss"]
    shown = inside("eval", "runs/demo", "--data", "eval.jsonl", "--compare")
    header, *lines = (line.split() for line in shown.out.splitlines() if line.strip()[:1].isalpha())
    assert header == ["metric", "base", "adapter", "change"]
    loss = lines[0]
    assert loss[0] == "loss"
    assert float(loss[3]) == pytest.approx(
        float(loss[2]) - float(loss[1]), abs=0.01
    )  # of rounded figures


def test_a_chat_adapter_is_evaluated_on_texts(inside, trained, tmp_path):
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": "The sea is wide. " * 40}])
    refused = inside("eval", "runs/demo", "--data", texts)
    assert refused.code == 2
    assert "--row-style" in refused.err
    done = inside("eval", "runs/demo", "--data", texts, "--row-style", "--json").succeeded()
    assert json.loads(done.out)["num_targets"] < 64  # the run's data.max_length
    assert trained_length(trained / "runs" / "demo") == 64
    assert trained_length(next((trained / "runs" / "demo" / "checkpoints").iterdir())) == 64


def test_transformers_loads_a_merged_model(inside, trained, tmp_path):
    done = inside("merge", "runs/demo", "--out", tmp_path / "merged", "--dtype", "fp32")
    assert done[:2] == (0, f"{tmp_path / 'merged'}\n"), done.err
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    opened = open_adapter(trained / "runs" / "demo", dtype="fp32")
    ids = torch.tensor([[9, 41, 77]])
    with torch.no_grad():
        difference = merged(ids).logits - opened.base.model(ids).logits
    assert difference.abs().max() < 1e-4  # fp32, weights of order 0.2: rounding of the sums
    assert "OutputError: " in inside("merge", "runs/demo", "--out", tmp_path / "merged").refusal()


def test_inspect_tells_what_an_adapter_is(inside, model_folder):
    facts = json.loads(inside("inspect", "runs/demo", "--json").out)
    assert (facts["kind"], facts["type"], facts["rank"], facts["alpha"]) == (
        "adapter",
        "lora",
        4,
        8,
    )
    assert facts["base"] == str(model_folder)
    assert facts["prompt_style"] == "chat"
    q, v = (4 * 32 + 32 * 4, 4 * 32 + 16 * 4)
    assert facts["num_parameters"] == 2 * (q + v)
    paths = {group["modules"] for group in facts["modules"]}
    assert paths == {"model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.v_proj"}
    output = inside("inspect", "runs/demo/adapter_config.json").succeeded()
    assert "model.layers.*.self_attn.q_proj" in output.out


def test_inspect_tells_the_roles_of_a_model(inside, model_folder):
    facts = json.loads(inside("inspect", model_folder, "--json").out)
    assert (facts["kind"], facts["num_blocks"]) == ("model", 2)
    groups = {group["role"]: group for group in facts["modules"]}
    assert groups["q"]["modules"] == "model.layers.*.self_attn.q_proj"
    assert groups["k"] | {"modules": ""} == {
        "role": "k", "modules": "", "count": 2, "shape": "32 -> 16", "parameters": 2 * 32 * 16,
    }  # fmt: skip
    assert groups["embed"]["shape"] == "384 -> 32"
    assert groups["down"]["shape"] == "64 -> 32"
    output = inside("inspect", model_folder).succeeded()
    assert "self_attn.q_proj" in output.out


@pytest.mark.slow  # tests/reliability has one that is quicker
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_run_and_exits(number, code, project):
    endless = ("--set", "train.max_steps=100000", "--set", "train.eval_every=null")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what it starts by &
    process = start("train", "recipe.yaml", *endless, cwd=project)
    signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert "Traceback" not in err
    assert number.name in err
    assert list((project / "runs" / "demo" / "checkpoints").glob("step-*/MANIFEST.json"))


WRONG_RECIPES: dict[str, tuple[list[str], list[str]]] = {
    "unknown key": (["train.learning_rat=1"], ["learning_rat", "Did you mean", "learning_rate"]),
    "wrong type": (["train.epochs=many"], ["train.epochs", "'many'"]),
    "misspelt target": (["method.targets=[q_porj]"], ["TargetError", "'q_porj'", "Roles found"]),
    "rank": (["method.rank=4096"], ["TargetError", "larger than the matrix"]),
    "role": (["method.targets=[cross_q]"], ["no linear layer matches", "peftkit inspect"]),
    "method": (["method.type=ia4"], ["method.type", "Did you mean 'ia3'?"]),
    "no bias": (["method={type: bitfit}"], ["there is no bias to train in LlamaForCausalLM"]),
    "missing file": (["data.train=trian.jsonl"], ["trian.jsonl", "train.jsonl"]),
    "broken JSON line": (["data.train=broken.jsonl"], ["broken.jsonl:2"]),
    "no assistant turn": (["data.train=unanswered.jsonl"], ["unanswered.jsonl:2", "assistant"]),
    "all masked": (["data.train=silent.jsonl"], ["silent.jsonl", "no row has a target token"]),
    "unknown base": (["base.model=nowhere/such-model"], ["nowhere/such-model"]),
}


@pytest.mark.parametrize("wrong", WRONG_RECIPES)
def test_wrong_input_is_told_with_exit_code_2(wrong, project, peftkit):
    command = "train" if len(wrong) % 2 else "check"
    write_rows(
        project / "unanswered.jsonl", [turn("a", "b"), {"messages": turn("a", "b")["messages"][:1]}]
    )
    write_rows(project / "silent.jsonl", [turn("a", ""), turn("b", " ")])
    (project / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n{"text": "b"}\n')
    changes, parts = WRONG_RECIPES[wrong]
    done = peftkit(command, "recipe.yaml", *(part for c in changes for part in ("--set", c)))
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    for part in parts:
        assert part in done.err
    left = [path for path in (project / "runs").rglob("*") if path.is_file()]
    assert not [path for path in left if path.parent.name != LOCKS]


@pytest.mark.parametrize(("command", "out"), [("train", "eval.jsonl/run"), ("check", "eval.jsonl")])
def test_an_invalid_output_folder_is_reported_before_loading(out, command, project, peftkit):
    before = (project / "eval.jsonl").read_bytes()
    errors = peftkit(command, "recipe.yaml", "--set", f"train.output_dir={out}").refusal()
    assert errors.startswith("OutputError: ")
    assert out in errors
    assert (project / "eval.jsonl").read_bytes() == before


def test_every_error_of_a_recipe_comes_at_once_with_its_line(project, peftkit):
    text = (project / "recipe.yaml").read_text().replace("rank: 4", "rnk: 4")
    (project / "recipe.yaml").write_text(text.replace("max_steps: 8", "max_steps: eight"))
    done = peftkit("train", "recipe.yaml", "--set", "train.seed=-1")
    assert done.code == 2
    for part in ("recipe.yaml:2", "method.rnk", "recipe.yaml:4", "train.max_steps", "train.seed"):
        assert part in done.err


@pytest.mark.covers("peftkit", "cli/peftkit_cli")
def test_another_base_requires_force(inside, tmp_path, model_folder):
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(other)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(other)
    args = ("--prompt", ASKED, "--base", other)
    errors = inside("generate", "runs/demo", *args).refusal()
    assert "AdapterError: " in errors
    assert "--force" in errors
    assert inside("generate", "runs/demo", *args, "--force").code == 0


def test_missing_tensors_or_pickles_refused(inside, trained, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("adapter_config.json", "peftkit.json"):
        shutil.copy(trained / "runs" / "demo" / name, folder)
    for command in (("generate", folder, "--prompt", "a"), ("inspect", folder)):
        assert "adapter_model.safetensors" in inside(*command).refusal()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    assert "safetensors" in inside("generate", folder, "--prompt", "a").err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_at_stdout_is_an_error(peftkit, monkeypatch):
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails as writing does
    monkeypatch.setattr("sys.stdout", full)
    done = peftkit("recipes", "show", "dora")
    assert done.code == 1
    assert "No space left on device" in done.err
    with pytest.raises(OSError, match="No space"):
        full.close()
