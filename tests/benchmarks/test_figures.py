"""Tables in README and docs are those of the files, and say where the code has changed since."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import all as figures
from benchmarks.entries import ENTRIES, PEERS, Benchmark

FIELDS = {
    *("commands", "commit", "code", "cpu", "cores", "threads", "load", "versions"),
    *("figures", "tables", "lines"),
}
PROGRAM = """
print('before')
print('| name | speed |')
print('| ---- | ----: |')
print('| ours | 7 x |')
print('7 seconds')
"""


def entry(program: str = "speed.py", **reads: str) -> Benchmark:
    return Benchmark((f"python {program}",), ("code.py",), "speed", "{speed} faster", reads)


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project of one file of code and one page, with one benchmark."""
    (tmp_path / "peftkit").mkdir()
    (tmp_path / "peftkit" / "code.py").write_text("answer = 7\n")
    (tmp_path / "speed.py").write_text(PROGRAM)
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    page = "<!-- figures: one -->\n<!-- end of figures -->\n\n<!-- summary: one -->\n\n\nrest\n"
    (tmp_path / "page.md").write_text(page)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "FILES", tmp_path / "figures")
    monkeypatch.setattr(figures, "PAGES", ("page.md",))
    monkeypatch.setattr(figures, "ENTRIES", {"one": entry(speed=r"(\d+ x)")})
    figures.code_of.cache_clear()
    yield tmp_path
    figures.code_of.cache_clear()


@pytest.mark.parametrize("page", figures.PAGES)
def test_the_tables_of_a_page_are_those_of_the_files(page):
    text = (figures.ROOT / page).read_text(encoding="utf-8")
    assert figures.FULL.search(text) or figures.SUMMED.search(text)
    assert figures.written(text) == text, "python -m benchmarks.all --write"


def test_no_figure_stands_in_the_readme_without_its_file():
    readme = (figures.ROOT / "README.md").read_text(encoding="utf-8")
    text = readme.partition("## Measured")[2].partition("\n## ")[0]
    marked = figures.SUMMED.search(text)
    assert marked
    assert all(figures.stored(name) for name in marked[2].split())
    assert not re.search(r"(?m)^\||\d ?%", text.replace(marked[0], ""))


def test_a_file_says_what_ran_where_but_not_on_whose_machine():
    for path in figures.FILES.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        facts = json.loads(text)
        assert facts.keys() - {"minutes"} == FIELDS, path
        assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users)/", text), path
        assert socket.gethostname() not in text.split(), path
        assert facts["figures"].keys() == ENTRIES[path.stem].reads.keys(), path
        assert facts["tables"] or facts["figures"], path


def test_what_is_measured_is_there():
    for name, known in ENTRIES.items():
        for part in known.measures:
            assert figures.place(part).exists(), (name, part)


NO_FIGURE = {"base", "config", "rows", "grpo_tools", "user_code"}
NO_FIGURE |= {"graders", "grading", "json_schema"}
"""Of tasks/: settings, checks of rows, and what takes part only where a recipe asks for it."""


def test_a_change_of_what_a_measured_task_is_made_of_marks_its_figures():
    for name, known in ENTRIES.items():
        parts = [part for part in known.measures if re.fullmatch(r"tasks/\w+\.py", part)]
        for part in parts if name != "encoding" else ():  # it runs no model
            code = (figures.ROOT / "peftkit" / part).read_text(encoding="utf-8")
            made_of = {*re.findall(r"(?m)^from peftkit\.tasks\.(\w+) import", code)} - NO_FIGURE
            assert {f"tasks/{each}.py" for each in made_of} <= {*known.measures}, (name, part)


def test_a_table_is_marked_once_the_code_has_changed_but_for_comments(house):
    def page() -> str:
        figures.code_of.cache_clear()
        list(figures.write())
        return (house / "page.md").read_text()

    assert figures.main(["one"]) == 0
    fresh = page()
    assert "| speed | 7 x faster | " in fresh
    assert "| ours |   7 x |\n\n7 seconds\n" in fresh
    assert fresh.endswith("\n\nrest\n")
    assert figures.MEANING not in fresh
    code = house / "peftkit" / "code.py"
    code.write_text('"""What it is."""\n\n# Why it is so.\nanswer = 7\n')
    assert page() == fresh
    code.write_text("answer = 8\n")
    assert figures.MEANING in page()
    assert f"7 x faster {figures.STALE} |" in page()


def test_one_run_has_no_range(house, monkeypatch):
    (house / "speed.py").write_text(PROGRAM.replace("7 x |", "7 x (7-7) |"))
    once = entry("speed.py --repeats 1", speed=r"(\d+ x)")
    for known, has_range in ((once, False), (entry(speed=r"(\d+ x)"), True)):
        monkeypatch.setattr(figures, "ENTRIES", {"one": known})
        assert figures.main(["one"]) == 0
        assert ("(7-7)" in (house / "page.md").read_text()) == has_range


def test_commands_share_one_table_by_rows(house, monkeypatch):
    twice = Benchmark(("python speed.py", "python speed.py"), ("code.py",))
    monkeypatch.setattr(figures, "ENTRIES", {"one": twice})
    assert figures.main(["one"]) == 0
    page = (house / "page.md").read_text()
    assert page.count("| run |") == 1
    assert "| 1   | ours |   7 x |\n| 2   | ours |   7 x |\n\n- 7 seconds\n- 7 seconds\n" in page


def test_a_page_shows_the_rows_of_a_pattern(house, monkeypatch):
    rows = "| name | speed |  |\n| --- | ---: | ---: |\n| ours | 7 x |  |\n| theirs | 1 x |  |"
    (house / "speed.py").write_text(f"print({('before' + chr(10) + rows)!r})\n")
    shown = Benchmark(("python speed.py",), ("code.py",), shown_rows="ours")
    monkeypatch.setattr(figures, "ENTRIES", {"one": shown})
    assert figures.main(["one"]) == 0
    table = "| name | speed |\n| ---- | ----: |\n| ours |   7 x |\n\n"
    assert table in (house / "page.md").read_text()


def test_what_was_run_is_not_run_again_and_what_broke_has_no_file(house, monkeypatch, capsys):
    entries: dict[str, Any] = {"one": entry(speed=r"(\d+ x)"), "two": entry("broken.py")}
    monkeypatch.setattr(figures, "ENTRIES", entries)
    assert figures.main([]) == 1
    assert "ended with 3" in capsys.readouterr().err
    assert figures.stored("two") is None
    entries["two"] = entry()
    assert figures.main([]) == 0
    said = capsys.readouterr().err
    assert "one:" not in said
    assert "two:" in said


def test_an_unprinted_figure_is_an_error(house, monkeypatch):
    monkeypatch.setattr(figures, "ENTRIES", {"one": entry(speed=r"(\d+) GB")})
    with pytest.raises(ValueError, match="no speed"):
        figures.main(["one"])


@pytest.mark.parametrize("word", PEERS)
def test_a_benchmark_with_peers_waits_for_them(word, house, monkeypatch, capsys):
    needy = Benchmark((f"python -m this --there {word}",), ("code.py",))
    monkeypatch.setattr(figures, "ENTRIES", {"one": entry(speed=r"(\d+ x)"), "needy": needy})
    assert figures.main([]) == 0
    assert f"needy: left out, it needs --{word.lower()}" in capsys.readouterr().err


def test_a_command_s_variables_reach_it(house, monkeypatch):
    (house / "speed.py").write_text("import os\nprint(os.environ['OMP_NUM_THREADS'], 'x')\n")
    threads = Benchmark(
        ("OMP_NUM_THREADS=3 python speed.py",), ("code.py",), reads={"it": r"(\d+ x)"}
    )
    monkeypatch.setattr(figures, "ENTRIES", {"one": threads})
    monkeypatch.setattr(figures, "write", list)
    assert figures.main([]) == 0
    facts = figures.stored("one")
    assert facts
    assert (facts["threads"], facts["figures"]["it"]) == ("3", "3 x")


def test_shortest_commands_run_first(house, monkeypatch):
    entries = {name: entry(speed=r"(\d+ x)") for name in ("unknown", "long", "short")}
    monkeypatch.setattr(figures, "ENTRIES", entries)
    ran: list[str] = []
    monkeypatch.setattr(figures, "measure", lambda name, pythons: bool(ran.append(name)))
    (house / "figures").mkdir()
    for name, minutes in (("long", 9.0), ("short", 0.5)):
        known = {"code": "", "minutes": minutes}
        (house / "figures" / f"{name}.json").write_text(json.dumps(known))
    monkeypatch.setattr(figures, "write", list)
    figures.main([])
    assert ran == ["short", "long", "unknown"]
