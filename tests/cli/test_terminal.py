"""What is pasted or typed into a terminal of several lines is one text."""

import io
import os
import select
import subprocess
import sys

import pytest

from peftkit_cli.arguments import wrapped
from tests.helpers.command_line import environment
from tests.helpers.folders import write_rows

pytest.importorskip("pty")
readline = pytest.importorskip("readline")

PROGRAM = """
from peftkit_cli.conversation import edit_several_lines
edit_several_lines()
try:
    while True:
        print("read", repr(input("> ")))
except EOFError:
    print("done")
"""


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_messages_wrap_between_words_on_a_terminal_and_nowhere_else(columns, monkeypatch):
    text = (
        "Error: it failed.\n  Add --set data.max_length=512, or " + "a few words " * 12 + "x" * 130
    )
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = io.StringIO()
    assert wrapped(text, terminal) == text
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    first, *rest = wrapped(text, terminal).splitlines()
    assert first == "Error: it failed."
    assert " ".join([first, *rest]).split() == text.split()
    assert all(line.startswith("  ") for line in rest)
    assert [line for line in rest if len(line) > columns] == ["  " + "x" * 130]


WITHOUT_TORCH = """
import sys
from peftkit_cli.app import run
class Refused:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("no torch")
sys.meta_path.insert(0, Refused)
for line in sys.stdin:
    print("$", line, file=sys.stderr)
    run(line.split())
"""
IMPORTING = """
init --data rows.jsonl --task causal_lm --memory cpu --model m --out new.yaml
train recipe.yaml
check recipe.yaml
plan recipe.yaml
sweep recipe.yaml --over method.rank=1,2
distill rows.jsonl --base m --out new
data rows.jsonl
inspect adapter
generate adapter --prompt a
chat adapter
predict adapter --text a
eval adapter --data rows.jsonl
serve adapter
merge adapter --out new
combine adapter adapter --out new
export adapter --to gguf --out new
import adapter --out new
push adapter a/b
pull a/b --out new
prove adapter
base pack m
"""


@pytest.mark.covers("peftkit", "cli/peftkit_cli")
def test_a_command_writes_to_the_terminal_before_it_imports_torch(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    (tmp_path / "recipe.yaml").write_text("task: causal_lm")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=IMPORTING.strip(),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment() | {"FORCE_COLOR": "1", "TERM": "xterm", "TMPDIR": str(tmp_path)},
        timeout=120,
    )
    outputs = dict(part.split("\n", 1) for part in done.stderr.split("$ ")[1:])
    assert [*outputs] == IMPORTING.strip().splitlines()
    for command, output in outputs.items():
        assert "Loading PyTorch" in output, command
        assert "ModuleNotFoundError" in output.partition("Loading PyTorch")[2], command


@pytest.mark.covers("peftkit", "cli/peftkit_cli")
@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="libedit has no such paste")
def test_pasted_lines_are_one_text_and_alt_enter_begins_a_line():
    import pty

    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(environment(), TERM="xterm", INPUTRC=os.devnull)
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM])

    output = b""

    def read_until(text: bytes) -> None:
        nonlocal output
        while text not in output:
            is_ready, _, _ = select.select([terminal], [], [], 20)
            assert is_ready, f"{text!r} is not in {output!r}"
            output += os.read(terminal, 4096)
        output = output.partition(text)[2]

    try:
        prompt = b"\x1b[?2004h> "  # the terminal is asked to mark what is pasted
        read_until(prompt)
        os.write(terminal, b"\x1b[200~one\ntwo\x1b[201~ three\r")
        read_until(b"read 'one\\ntwo three'")
        read_until(prompt)  # keys that come earlier are the terminal's own
        os.write(terminal, b"a\x1b\rb\r")
        read_until(b"read 'a\\nb'")
        read_until(prompt)
        os.write(terminal, b"\x04")
        read_until(b"done")
    finally:
        os.close(terminal)
        os.waitpid(process, 0)
