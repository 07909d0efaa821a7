"""What is pasted or typed into a terminal of several lines is one text."""

import os
import select
import sys

import pytest

from tests.helpers.command_line import environment

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
