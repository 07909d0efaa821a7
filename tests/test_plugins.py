"""A package outside of peftkit adds a method, a task and an export format by entry points."""

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal

import pytest

from peftkit.adapter import attach
from peftkit.config import lazy
from peftkit.config.lazy import LazyMap
from peftkit.config.schema import from_dict
from peftkit.errors import AdapterError, ConfigError
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.ia3 import IA3
from peftkit.recipe import Recipe

SCALE = '''
from typing import Any, ClassVar, Literal

import torch

from peftkit.methods.base import AdapterModule, Method
from peftkit.methods.peft_format import LAYERS, TARGETS, PeftFormat


class ScaledLinear(AdapterModule):
    """y = s W x, with one trained number s."""

    def __init__(self, base, site):
        super().__init__(base, site)
        self.s = self.new_parameter(1, dtype=torch.float32)

    def forward(self, x):
        out = self.base(x)
        return (out * self.s).to(out.dtype) if self.enabled else out

    def reset(self, generator):
        torch.nn.init.ones_(self.s)

    def state(self):
        return {"scale_s": self.s.detach()}

    def load(self, state):
        self.s.data.copy_(state["scale_s"])

    def merged_weight(self, weight, name="weight"):
        return weight * self.s.detach()


class Scale(Method):
    """One number for each layer."""

    type: Literal["scale"] = "scale"

    def wrap(self, base, site):
        return ScaledLinear(base, site)


class ScaleFormat(PeftFormat[Scale]):
    peft_type: ClassVar[str] = "SCALE"
    method_class = Scale
    known_fields: ClassVar[Any] = TARGETS
    absent_fields: ClassVar[Any] = ("bias", *LAYERS)
'''
LINES = '''
from typing import Literal

from peftkit.tasks.tokens import CausalLM, CausalLMConfig


class LinesConfig(CausalLMConfig):
    """Causal language modelling under another name."""

    type: Literal["lines"] = "lines"

    @staticmethod
    def task(model, tokenizer, config, data, **more):
        return Lines(model, tokenizer, data, config, **more)


class Lines(CausalLM):
    pass
'''
TENSORS = '''
import shutil


def export(source, out, *, base, dtype, force, on_event):
    """Copy the tensors, and nothing else."""
    shutil.copyfile(source / "adapter_model.safetensors", out)
    return {"anything": f"read {out}"}
'''
ENTRY_POINTS = """
[peftkit.methods]
scale = outside.scale:Scale
[peftkit.method_formats]
scale = outside.scale:ScaleFormat
[peftkit.tasks]
lines = outside.lines:LinesConfig
[peftkit.exporters]
tensors = outside.tensors:export
"""
PROGRAM = """
import sys
import torch
from peftkit import load_adapter, load_base
from peftkit.formats.peft.load import read_adapter
from peftkit_cli.app import run

base, recipe, out = sys.argv[1:]
assert run(["train", recipe, "--quiet"]) == 0
assert "outside.tensors" not in sys.modules
file = read_adapter(out)
assert (file.method.type, file.provenance.task["type"]) == ("scale", "lines"), file
model = load_base(base).model
ids = torch.tensor([[5, 6, 7, 8]])
before = model(ids).logits
adapter = load_adapter(model, out)
after = model(ids).logits
assert not torch.equal(before, after)
assert run(["merge", out, "--out", f"{out}-merged"]) == 0
torch.testing.assert_close(load_base(f"{out}-merged").model(ids).logits, after)
assert run(["inspect", out]) == run(["inspect", base]) == 0
assert run(["export", out, "--to", "tensors", "--out", f"{out}.bin"]) == 0
assert run(["export", out, "--to", "nothing", "--out", "x"]) == 2
"""


def write_package(folder: Path) -> None:
    (folder / "outside").mkdir(parents=True)
    (folder / "outside" / "__init__.py").touch()
    for name, text in (("scale", SCALE), ("lines", LINES), ("tensors", TENSORS)):
        (folder / "outside" / f"{name}.py").write_text(text)
    info = folder / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


@pytest.mark.covers("peftkit/methods", "peftkit/tasks", "peftkit/formats", "peftkit/config")
def test_a_package_adds_a_method_a_task_and_a_format(model_folder, tmp_path):
    write_package(tmp_path / "site")
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"prompt": "Say yes.", "completion": "yes"}) + "\n") * 4)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        dedent(f"""
        task: lines
        base: {{model: "{model_folder}", dtype: fp32}}
        method: {{type: scale, targets: [q, v]}}
        data: {{train: "{rows}", max_length: 64}}
        train: {{max_steps: 2, learning_rate: 0.1, output_dir: "{tmp_path / "out"}"}}
        """)
    )
    paths = [str(tmp_path / "site"), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model_folder), str(recipe), str(tmp_path / "out")],
        capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scale" in done.stdout
    assert "tensors" in done.stderr  # of the formats that there are
    assert (tmp_path / "out.bin").read_bytes()


class _Dist:
    name = "broken"


def table(monkeypatch: pytest.MonkeyPatch, **values: str) -> LazyMap[Any]:
    points = [EntryPoint(name, value, "peftkit.methods") for name, value in values.items()]
    for point in points:
        vars(point)["dist"] = _Dist
    monkeypatch.setattr(lazy, "entry_points", lambda group: points)
    return LazyMap({"lora": "peftkit.methods.lora:LoRA"}, "peftkit.methods")


def test_a_package_that_breaks_is_named(monkeypatch):
    names = table(monkeypatch, other="not_there.module:Other")
    assert list(names) == ["lora", "other"]
    with pytest.raises(ConfigError, match=r"'other'.*broken(.|\n)*No module named 'not_there'"):
        names["other"]
    assert names.get("nothing") is None


def test_a_built_in_name_stays_built_in(monkeypatch):
    names = table(monkeypatch, lora="not_there.module:Other")
    assert names["lora"].__module__ == "peftkit.methods.lora"
    with pytest.raises(ConfigError, match=r"two packages define 'lora'(.|\n)*peftkit.*broken"):
        list(names)


def test_entry_points_are_read_for_unknown_names_alone(monkeypatch):
    def refuse(group: str) -> None:
        raise AssertionError(group)

    monkeypatch.setattr(lazy, "entry_points", refuse)
    settings = {"base": {"model": "x"}, "data": {"train": "rows.jsonl"}, "method": {"type": "ia3"}}
    assert from_dict(Recipe, settings, "test").method == IA3()


def test_saving_a_method_needs_an_entry_point(llama, tmp_path):
    class Mine(IA3):
        type: Literal["mine"] = "mine"  # type: ignore[assignment]

    adapter = attach(llama, Mine())
    origin = Provenance("base")
    with pytest.raises(AdapterError, match=r"'mine' cannot be saved(.|\n)*peftkit.methods"):
        save_adapter(adapter, tmp_path / "out", origin)
