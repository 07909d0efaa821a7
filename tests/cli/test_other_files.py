"""Output folders: no command deletes or replaces a file that peftkit did not write there."""

import inspect
import shutil
from pathlib import Path

import pytest
from transformers import BertModel

import peftkit as package
from peftkit.formats.exchange import EXPORTERS
from peftkit.recipe import Recipe
from peftkit.run import run as run_recipe
from peftkit_cli.deploy.export import TARGETS
from tests.helpers.classifiers import framing_tokenizer, save_base, write_texts
from tests.helpers.command_line import commands
from tests.helpers.families import ARCHITECTURES
from tests.helpers.folders import write_rows
from tests.helpers.hub_server import joined_hub

CONVERTER = """
import sys
arguments = sys.argv
open(arguments[arguments.index("--outfile") + 1], "wb").write(b"GGUF" + bytes(64))
"""
AXOLOTL = "{base_model: org/model, adapter: lora, datasets: [{path: rows.jsonl, type: alpaca}]}"
FEW = "--set train.max_steps=1 --set train.eval_every=null"
MODEL = "--quantize f32 --llama-cpp llama --force"
CASES = {
    "import-recipe": "axolotl.yaml --out out/x.yaml",
    "init": "--data train.jsonl --task causal_lm --model BASE --memory cpu --out out/x.yaml",
    "train": f"recipe.yaml --out out --overwrite {FEW}",
    "sweep": f"recipe.yaml --over method.rank=1,2 --out out {FEW}",
    "distill": f"rules.md --base BASE --data asked.jsonl --out out --overwrite {FEW} "
    "--set task.max_new_tokens=2 --set train.eval_generate=null --set data.max_length=64",
    "predict": "classifier --data texts.jsonl --out out/x.jsonl",
    "merge": "runs/demo --out out --force --overwrite",
    "merge 4 bits": "runs/demo --out out --force --overwrite --quantize int4_32",
    "combine": "a b --out out --force",
    "export peft": "runs/demo --to peft --out out --force",
    "export serving": "runs/demo --to peft --profile serving --out out --force",
    "export mlx": "runs/demo --to mlx --out out --force",
    "export gguf": "runs/demo --to gguf --out out/x.gguf --force",
    "export merged": f"runs/demo --to gguf --merged --out out/x.gguf {MODEL}",
    "export ollama": f"runs/demo --to ollama --out out {MODEL}",
    "export lmstudio": f"runs/demo --to lmstudio --out out {MODEL}",
    "import": "mlx --base BASE --out out --force",
    "pull": "me/demo --out out --force",
    "data": "pairs.jsonl --hard-negatives embedder --negatives 1 --margin 0 --out out/x.jsonl",
    "report": "runs/demo --out out/x.html",
    "recipes cp": "quickstart out/x.yaml",
}
MARKS = {
    *("adapter_config.json", "config.json", "Modelfile", "demo-f32.gguf"),
    *("run.json", "metrics.jsonl", "checkpoints", "sweep.json"),
    *("distill.yaml", "recipe.schema.json", ".locks"),
}
"""Files and folders by which peftkit recognizes its own output, or that have one purpose."""
OTHERS = ("thesis.tex", "other-model.gguf", "other.safetensors", ".hidden", "sub/kept", "best/kept")


def test_every_command_and_exporter_with_an_output_has_a_case():
    writing = {
        name
        for name, command in commands().items()
        if any("--out" in p.opts or p.metavar == "DEST" for p in command.params)
    }
    covered = {name if name == "recipes cp" else name.split()[0] for name in CASES}
    assert covered == writing
    exporters = {name.split()[1] for name in CASES if name.startswith("export ")}
    assert exporters - {"serving", "merged"} == {*EXPORTERS, *TARGETS}


def test_every_function_of_the_api_with_an_output_is_one_of_a_command():
    public = (getattr(package, name) for name in package.__all__)
    writing = {
        function.__name__
        for function in filter(inspect.isfunction, public)
        if {"out", "overwrite"} & inspect.signature(function).parameters.keys()
    }
    exchange = {"export_adapter", "import_adapter", "pull_adapter"}
    assert writing == exchange | {"merge", "combine", "run", "fit", "write_report"}


@pytest.fixture(scope="session")
def sources(trained: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained project, with an input for every command. Do not write into it."""
    folder = tmp_path_factory.mktemp("sources") / "project"
    shutil.copytree(trained, folder)
    for name in ("a", "b"):
        shutil.copytree(folder / "runs" / "demo", folder / name)
    (folder / "llama").mkdir()
    (folder / "llama" / "convert_hf_to_gguf.py").write_text(CONVERTER)
    (folder / "axolotl.yaml").write_text(AXOLOTL)
    (folder / "rules.md").write_text("Be brief.\n\n## User\nthe fox?\n\n## Assistant\nthe dog\n")
    write_rows(folder / "asked.jsonl", [{"prompt": f"what is {n}?"} for n in range(12)])
    texts = ("the quick brown fox", "the lazy dog", "pizza with cheese", "extra olives", "a fox")
    pairs = [{"anchor": f"what {text[::-1]}?", "positive": text} for text in texts]
    BertModel(ARCHITECTURES["bert"]().config).save_pretrained(folder / "bert")
    framing_tokenizer().save_pretrained(folder / "bert")
    tasks = {
        "embedder": ("embedding", folder / "bert", write_rows(folder / "pairs.jsonl", pairs)),
        "classifier": (
            "sequence_classification", save_base(folder / "base"),
            write_texts(folder / "texts.jsonl"),
        ),
    }  # fmt: skip
    for name, (task, base, rows) in tasks.items():
        run_recipe(
            Recipe(
                task=task,
                base={"model": str(base), "dtype": "fp32"},
                method={"type": "lora", "rank": 2},
                data={"train": rows, "max_length": 64},
                train={"output_dir": folder / name, "max_steps": 1},
            )
        )
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def plant(folder: Path, names: set[str]) -> dict[str, bytes]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"of someone else")
    return dict.fromkeys(names, b"of someone else")


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
@pytest.mark.parametrize("case", CASES)
def test_files_of_another_origin_survive(
    case, peftkit, sources, tmp_path, model_folder, monkeypatch
):
    for path in sources.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.setenv("PATH", "/nonexistent")
    command = [case] if case == "recipes cp" else [case.split()[0]]
    words = CASES[case].replace("BASE", str(model_folder)).split()
    out = tmp_path / "out"

    def call() -> tuple[int, str]:
        done = peftkit(*" ".join(command).split(), *words)
        return done.code, done.err

    if case == "import":
        assert peftkit("export", "runs/demo", "--to", "mlx", "--out", "mlx").code == 0
    with joined_hub(monkeypatch, tmp_path / "cache"):
        if case == "pull":
            assert peftkit("push", "runs/demo", "me/demo").code == 0
        is_file = "out/x" in CASES[case]
        if is_file:
            out.mkdir()
        code, errors = call()
        assert code == 0, errors
        written = contents(out)
        # next to an output: again with all force
        others = plant(out, set(OTHERS))
        call()
        assert others.items() <= contents(out).items()
        # without peftkit's marks, its other file names are foreign too
        shutil.rmtree(out)
        names = {name for name in written if name.split("/")[0] not in MARKS}
        others = plant(out, {*OTHERS, *(() if is_file else names)})
        call()
        assert others.items() <= contents(out).items()
