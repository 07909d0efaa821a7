"""The front door: names and flags, exit codes, what goes where, and how fast help comes."""

import json
import subprocess
import sys

import pytest

from peftkit.errors import AdapterError, DataError, RunError
from peftkit.formats.find_adapter import adapter_folder
from peftkit.train.start import locked
from peftkit_cli import about
from tests.helpers.command_line import commands, environment

COMMANDS: dict[str, list[str]] = {
    "quickstart": [],
    "import-recipe": ["FILE", "--out"],
    "init": ["--data", "--task", "--model", "--memory", "--fields", "--out"],
    "train": [
        "RECIPE.yaml", "--set", "--out", "--from", "--resume", "--overwrite", "--allow-changes",
        "--metric", "--quiet",
    ],
    "check": ["RECIPE.yaml", "--set", "--quiet"],
    "sweep": [
        "RECIPE.yaml", "--over", "--pick", "--set", "--out", "--resume", "--json", "--quiet",
    ],
    "distill": [
        "PROMPT.md", "--base", "--data", "--out", "--questions", "--set", "--resume", "--overwrite",
    ],
    "plan": ["RECIPE|MODEL", "--memory", "--link", "--set", "--json"],
    "generate": [
        "ADAPTER", "--prompt", "--image", "--audio", "--video", "--system", "--base",
        "--max-new-tokens", "--temperature", "--seed", "--force",
    ],
    "chat": [
        "[ADAPTER]", "--adapter", "--base", "--max-new-tokens", "--temperature", "--seed",
        "--system", "--tool", "--run-tools", "--force",
    ],
    "predict": ["ADAPTER", "--text", "--data", "--out", "--base", "--force", "--json"],
    "eval": [
        "ADAPTER", "--data", "--tasks", "--include", "--limit", "--fewshot", "--chat-template",
        "--compare", "--run-rewards", "--row-style", "--drift", "--base", "--force", "--json",
    ],
    "studio": [
        "[DIR]", "--host", "--port", "--api-key", "--models", "--run-code", "--urls", "--open",
    ],
    "serve": [
        "[NAME=]RUN...", "--host", "--port", "--api-key", "--base", "--max-batch", "--max-waiting",
        "--max-new-tokens", "--temperature", "--limit", "--force", "--train", "--quantize", "--as",
        "--run-graders",
    ],
    "merge": [
        "ADAPTER", "--out", "--base", "--dtype", "--force", "--from-quantized", "--overwrite",
        "--quantize", "--calibrate",
    ],
    "combine": [
        "ADAPTER[=WEIGHT]...", "--out", "--method", "--rank", "--density", "--seed", "--force",
    ],
    "export": [
        "ADAPTER", "--to", "--out", "--profile", "--base", "--dtype", "--merged", "--name",
        "--quantize", "--calibrate", "--llama-cpp", "--force",
    ],
    "import": ["PATH", "--out", "--base", "--force"],
    "prove": [
        "TARGET", "--proof", "--model", "--base", "--write", "--prompt", "--api-key", "--timeout",
        "--json",
    ],
    "push": ["ADAPTER", "USER/NAME", "--private"],
    "pull": ["ID[@REVISION]", "--out", "--force"],
    "inspect": ["ADAPTER|MODEL", "--json"],
    "data": [
        "FILE", "--hard-negatives", "--out", "--candidates", "--negatives", "--margin", "--for",
        "--json",
    ],
    "report": ["RUN...", "--out"],
    "runs": ["DIR", "--json"],
    "base ls": ["--json"],
    "base rm": ["NAME"],
    "base pack": ["MODEL", "--quantize", "--dtype", "--revision"],
    "recipes ls": [],
    "recipes show": ["NAME"],
    "recipes cp": ["NAME", "DEST"],
    "env": ["--json"],
    "schema": [],
}  # fmt: skip


def test_commands_and_flags_are_frozen():
    names = {
        name: [
            parameter.opts[0] if parameter.opts[0].startswith("--") else parameter.metavar
            for parameter in command.params
        ]
        for name, command in commands().items()
    }
    assert names == COMMANDS


def test_every_command_has_help_that_loads_no_torch_and_comes_soon():
    code = (
        "import os, sys; from peftkit_cli.app import run\n"
        f"codes = [run([*command.split(), '--help']) for command in {list(COMMANDS)!r}]\n"
        "codes += [run(['chat', './run/demo']), run(['merge', './run/demo', '--out', 'x'])]\n"
        "slow = [name for name in ('torch', 'transformers', 'yaml') if name in sys.modules]\n"
        "print(set(codes), slow, sum(os.times()[:2]) < 4)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert all(f"Usage: peftkit {command}" in done.stdout for command in COMMANDS)
    assert done.stdout.splitlines()[-1] == "{0, 2} [] True"
    assert done.stderr.startswith("AdapterError: there is no adapter folder './run/demo'.")


@pytest.mark.parametrize(
    "args", ["train NAME", "runs NAME", "chat NAME", "export NAME --to ollama", "plan NAME"]
)
def test_a_name_that_is_too_long_is_a_usage_error(args, peftkit):
    errors = peftkit(*args.replace("NAME", "x" * 300).split()).refusal()
    assert "is too long for this file system" in errors
    assert "traceback" not in errors


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian", "x.yaml"], "No such command 'trian'. Did you mean 'train'?"),
        (["check"], "Missing argument 'RECIPE.yaml'"),
        (["train", "x.yaml", "--sett", "a=1"], "--set"),
        (["generate", "x", "--prompt", "hi", "--max-new-tokens", "0"], "'--max-new-tokens'"),
        (["generate", "x", "--prompt", "hi", "--temperature", "hot"], "'--temperature'"),
        (["merge", "x", "--out", "y", "--dtype", "bf17"], "'bf16', 'fp16', 'fp32'"),
        (["recipes"], "Missing command"),
    ],
)
def test_a_wrong_command_line_is_one_message(args, message, peftkit):
    errors = peftkit(*args).refusal()
    assert errors.startswith("UsageError: ")
    assert message in errors
    assert errors.splitlines()[-1].startswith("  See: peftkit")


def test_version_is_the_installed_one(peftkit):
    done = peftkit("--version").succeeded()
    assert done.out.startswith("peftkit 0.")


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `peftkit recipes ls` raise."""

    def broken() -> None:
        raise error

    monkeypatch.setattr(about, "recipes_folder", broken)


@pytest.mark.parametrize(
    ("error", "code"), [(DataError("no rows.", fix="Add some."), 2), (RunError("NaN."), 1)]
)
def test_an_error_of_ours_has_its_exit_code_and_no_traceback(error, code, peftkit, monkeypatch):
    fails_with(monkeypatch, error)
    done = peftkit("recipes", "ls")
    assert done == (code, "", f"{type(error).__name__}: {error}\n")


def test_an_unknown_error_is_one_message_and_a_logged_traceback(peftkit, monkeypatch, tmp_path):
    monkeypatch.delenv("PEFTKIT_DEBUG", raising=False)
    fails_with(monkeypatch, KeyError("loss"))
    done = peftkit("recipes", "ls")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("KeyError: 'loss'\n")
    assert "Traceback" not in done.err
    (file,) = tmp_path.glob("peftkit-*.txt")
    assert str(file) in done.err
    assert "in broken" in file.read_text(encoding="utf-8")


def test_ctrl_c_is_130(peftkit, monkeypatch):
    fails_with(monkeypatch, KeyboardInterrupt())
    done = peftkit("recipes", "ls")
    assert done == (130, "", "Interrupted: the command was stopped.\n")


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m peftkit_cli recipes show dora | true"
    done = subprocess.run(command, shell=True, env=environment(), capture_output=True, text=True)
    assert done.stderr == ""


def test_recipes_are_listed_shown_and_copied(peftkit, tmp_path):
    listed = peftkit("recipes", "ls")
    names = [line.split()[0] for line in listed.out.splitlines()]
    assert names == sorted(file.stem for file in about.recipes_folder().glob("*.yaml"))
    shown = peftkit("recipes", "show", "dora")
    copied = peftkit("recipes", "cp", "dora", "mine.yaml")
    assert copied[:2] == (0, "mine.yaml\n")
    head = "# yaml-language-server: $schema=recipe.schema.json\n"
    assert (tmp_path / "mine.yaml").read_text(encoding="utf-8") == head + shown.out
    assert peftkit("recipes", "cp", "dora", tmp_path).out == f"{tmp_path / 'dora.yaml'}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show", "dor"], "Did you mean 'dora'?"),
        (["show", "../pyproject"], "there is no recipe named '../pyproject'."),
        (["cp", "dora", "taken.yaml"], "'taken.yaml' cannot be written."),
        (["cp", "dora", "nowhere/x.yaml"], "No such file or directory"),
    ],
)
def test_recipes_refuse_errors(args, message, peftkit, tmp_path):
    (tmp_path / "taken.yaml").write_text("mine")
    assert message in peftkit("recipes", *args).refusal()
    assert (tmp_path / "taken.yaml").read_text() == "mine"


def test_a_recipe_that_is_not_there_but_shipped_is_offered(peftkit):
    done = peftkit("train", "dora.yaml")
    assert done.code == 2
    assert "peftkit recipes cp dora dora.yaml" in done.err


def test_an_adapter_near_to_a_misspelt_one_is_offered(peftkit, tmp_path):
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert "Did you mean 'demo'?" in peftkit("generate", "runs/dmo", "--prompt", "hi").err
    assert "contains: demo." in peftkit("inspect", "runs/zebra").err
    (tmp_path / "runs" / "demo" / "checkpoints").mkdir()
    message = peftkit("generate", "runs/demo", "--prompt", "hi").err
    assert "holds no adapter_config.json" in message
    assert "--resume" in message
    (tmp_path / "runs" / "demo" / "adapter_config.json").touch()
    message = peftkit("generate", "runs", "--prompt", "hi").err
    assert "Use one of the adapters in it: runs/demo" in message


@pytest.mark.parametrize(
    "command", ["prove runs/a", "export runs/a --to gguf --out b", "merge runs/a --out b"]
)
def test_an_adapter_that_is_not_there_is_refused_as_such(command, peftkit):
    refusal = peftkit(*command.split()).refusal()
    assert "there is no" in refusal
    assert "runs" in refusal
    assert "proof" not in refusal


def test_a_run_that_still_trains_is_not_called_ended(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    with locked(folder):
        with pytest.raises(AdapterError, match="still training and has saved no step"):
            adapter_folder(folder)
        step = folder / "checkpoints" / "step-40"
        step.mkdir()
        (step / "adapter_config.json").touch()
        with pytest.raises(AdapterError, match=f"still training.*{step}"):
            adapter_folder(folder)
    with pytest.raises(AdapterError, match="has not finished: resume it"):
        adapter_folder(folder)


def test_env_tells_versions_and_devices_on_one_screen(peftkit):
    done = peftkit("env")
    assert (done.code, done.err) == (0, "")
    assert len(done.out.splitlines()) <= 24
    facts = json.loads(peftkit("env", "--json").out)
    assert facts["libraries"]["torch"].startswith("2.")
    assert facts["cores"] >= 1
    assert set(facts) == {line.split(":")[0] for line in done.out.splitlines()}


def test_schema_is_a_json_schema_of_the_recipe(peftkit):
    done = peftkit("schema")
    assert (done.code, done.err) == (0, "")
    assert {"base", "method", "data", "train", "task"} == set(json.loads(done.out)["properties"])


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        ("chat.jsonl", '{"text": "a"}\n', "peftkit init --data chat.jsonl"),
        ("own.csv", "a,b\n", "peftkit init --data own.csv"),
        ("axolotl.yaml", "base_model: x\n", "peftkit import-recipe axolotl.yaml --out recipe.yaml"),
        ("factory.yaml", "model_name_or_path: x\n", "the YAML of LLaMA-Factory"),
        ("runs/small/recipe.yaml", "base: {}\n", "peftkit train --from runs/small --out DIR"),
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_a_file_that_is_no_recipe_is_named_with_its_command(
    command, name, text, fix, peftkit, tmp_path
):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    done = peftkit(command, name.removesuffix("/recipe.yaml"))
    assert done.code == 2
    assert "is not a recipe" in done.err
    assert fix in done.err


def test_a_group_without_a_command_shows_its_help_and_no_error(peftkit):
    done = peftkit("base")
    assert done.code == 2
    assert done.err.startswith("Usage: peftkit base")


def test_a_name_that_shares_only_its_ending_is_not_suggested(peftkit, tmp_path):
    (tmp_path / "numeric.jsonl").write_text('{"text": "a"}\n')
    assert "Did you mean" not in peftkit("data", "none.jsonl").err
    assert "Did you mean 'numeric.jsonl'?" in peftkit("data", "numerc.jsonl").err
