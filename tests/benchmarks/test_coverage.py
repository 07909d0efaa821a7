"""The table of benchmarks.coverage: no cell is empty, and a failure is told and ends with 1."""

import json

import pytest

from benchmarks.coverage import Key, legend, main, page, read_page, table
from tests.helpers import grid, laws
from tests.helpers.deprecations import ROOT

SMALL = ["--methods", "ia3,bitfit", "--architectures", "llama,gpt2", "--quantize", "none,nf4"]
QUICK = ["--jobs", "1", "--skip", "compiling_changes_nothing,peft_agrees"]


@pytest.mark.covers("benchmarks", "peftkit/methods")
def test_every_cell_has_its_reasons(tmp_path, capsys):
    file = tmp_path / "cells.json"
    assert main([*SMALL, *QUICK, "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for quantize in ("none", "nf4"):
        at = lines.index(f"base: {quantize}")
        assert [line.split() for line in lines[at + 1 : at + 4]] == [
            ["ia3", "bitfit"],
            ["llama", "pass", "n/a:b"],
            ["gpt2", "pass", "pass"],
        ]
    assert f"n/a:b: {grid.REASONS['b']}" in lines
    assert any(line.startswith("8 cells: 6 pass, 2 n/a, 0 FAIL") for line in lines)
    assert not any("peft_agrees" in line for line in lines)
    assert len(json.loads(file.read_text())) == 8


def test_a_failure_is_told_below_the_table():
    bad = laws.Outcome(("saved_is_loaded: it gives\n  something else",))
    found = {Key("llama", "lora", "none"): bad, Key("t5", "lora", "none"): laws.Outcome()}
    assert [line.split()[-1] for line in table(found, "none")][2:] == ["FAIL", "pass"]
    (told,) = (line for line in legend(found, []) if line.startswith("FAIL"))
    assert told == "FAIL llama lora none: saved_is_loaded: it gives something else"


def test_a_bad_cell_exits_1(monkeypatch, capsys):
    monkeypatch.setitem(grid.REFUSALS, "ia3", {"b": "llama"})  # which in truth it takes
    assert main(["--methods", "ia3", "--architectures", "llama", *QUICK]) == 1
    assert "it takes what it has no form for" in capsys.readouterr().out


def test_rows_that_a_page_keeps_are_written_again_as_they_were():
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    if not (rows := read_page(text)):
        pytest.skip("another version of transformers made the page")
    assert "\n".join(page(rows)) + "\n" == text


@pytest.mark.parametrize("flag", ["--methods", "--architectures", "--quantize", "--skip"])
def test_a_name_that_is_none_is_refused(flag):
    with pytest.raises(SystemExit, match="is called lama; there are "):
        main([flag, "lama"])
