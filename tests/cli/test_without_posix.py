"""Training, merging and talking on a CPU need nothing that only POSIX systems have."""

import builtins
import ctypes
import errno
import fcntl
import os
import stat
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from peftkit.kernels.device import free_bytes
from peftkit.train import checkpoint_files
from peftkit.train.metrics import peak_bytes
from peftkit_cli import about
from peftkit_cli.app import main

MODULES = ("fcntl", "resource", "readline", "termios", "pwd", "grp")


@pytest.fixture
def without_posix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take from peftkit, not from the libraries below it, what Windows does not have."""
    imports, loads, exists, opens = builtins.__import__, ctypes.CDLL, Path.exists, Path.open
    flushes = os.fsync

    def imported(name: str, globals: Any = None, *more: Any, **named: Any) -> Any:
        if name in MODULES and str((globals or {}).get("__name__", "")).startswith("peftkit"):
            raise ModuleNotFoundError(name)
        return imports(name, globals, *more, **named)

    def loaded(name: Any, *args: Any, **options: Any) -> Any:
        if name is None:
            raise TypeError("argument of type 'NoneType' is not iterable")  # as Windows says it
        return loads(name, *args, **options)

    def opened(path: Path, *args: Any, **options: Any) -> Any:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(path)
        return opens(path, *args, **options)

    def flushed(descriptor: int) -> None:
        reads = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        if reads and not stat.S_ISDIR(os.fstat(descriptor).st_mode):  # folders: see fsync_dir
            raise OSError(errno.EBADF, "Bad file descriptor")
        flushes(descriptor)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(builtins, "__import__", imported)
    monkeypatch.setattr(ctypes, "CDLL", loaded)
    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(Path, "exists", lambda p: not str(p).startswith("/proc") and exists(p))
    for name in ("sysconf", "sched_getaffinity", "pwrite", "fork"):
        monkeypatch.delattr(os, name)


@pytest.mark.covers("peftkit", "cli/peftkit_cli")
@pytest.mark.usefixtures("without_posix")
def test_a_project_is_trained_merged_and_used_in_chat(project, peftkit, monkeypatch):
    assert free_bytes() is None
    short = ("--set", "train.max_steps=2", "--set", "train.save_every=1")
    done = peftkit("train", "recipe.yaml", *short, "--set", "base.quantize=nf4").succeeded()
    assert "step 2/2" in done.err
    peftkit("merge", "runs/demo", "--out", "merged", "--dtype", "fp32").succeeded()
    monkeypatch.setattr("sys.stdin", StringIO("what is the lazy?\n"))
    done = peftkit("chat", "runs/demo", "--max-new-tokens", 3).succeeded()
    assert done.out.strip()
    done = peftkit("env").succeeded()
    assert "cores:" in done.out


@pytest.mark.usefixtures("without_posix")
def test_chat_without_readline(project, peftkit, monkeypatch):
    from peftkit_cli.conversation import Conversation

    lines = iter(["hello"])

    def typed(prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", typed)
    talk = object.__new__(Conversation)
    talk.on_terminal, talk.current = True, "adapter"
    assert list(talk.lines()) == ["hello"]


@pytest.mark.usefixtures("without_posix")
def test_what_the_system_does_not_tell_is_zero():
    import torch

    assert peak_bytes(torch.device("cpu")) == 0


def test_what_a_pipe_cannot_hold_is_replaced(monkeypatch):
    """On Windows a pipe has the code page of the machine: no lines of tables, no smileys."""
    pipe = TextIOWrapper(BytesIO(), encoding="cp1252")
    monkeypatch.setattr("sys.stdout", pipe)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr(about, "headline", lambda file: "\u2603")
    with pytest.raises(SystemExit) as ended:
        main(["recipes", "ls"])
    assert ended.value.code == 0
    assert b"dora" in pipe.buffer.getvalue()  # type: ignore[attr-defined]


def test_on_windows_no_other_process_is_signalled(monkeypatch):
    def killed(pid: int, number: int) -> None:
        raise AssertionError("there any signal ends the process")

    monkeypatch.setattr(os, "kill", killed)
    monkeypatch.setattr(sys, "platform", "win32")
    assert checkpoint_files._is_alive(os.getpid() + 1)
    assert not checkpoint_files._is_alive(os.getpid())
