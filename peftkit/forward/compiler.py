"""The C++ compiler of torch.compile, and the fallback of blocks that are not compiled."""

from __future__ import annotations

import os
import shutil

from peftkit.events import Fallback

COMPILERS = ("c++", "g++", "clang++")


def no_compiler() -> str:
    """Return that torch.compile has no C++ compiler for a CPU; "" if it has one."""
    return "" if cpp_compiler() else f"There is no C++ compiler (CXX, {', '.join(COMPILERS)})."


def uncompiled(cause: str) -> Fallback:
    """Return the fallback of blocks that are not compiled."""
    fix = "Set train.compile: false, or remove the cause."
    if cause == no_compiler():
        fix = "Install a C++ compiler; on Debian and Ubuntu: apt-get install g++"
    cost = "Each step takes longer; its numbers are the same."
    return Fallback(path="Blocks are not compiled", cause=cause, cost=cost, fix=fix)


def cpp_compiler() -> str | None:
    """Return the C++ compiler that torch.compile would use for a CPU."""
    names = (os.environ.get("CXX", ""), *COMPILERS)
    return next((path for name in names if name and (path := shutil.which(name))), None)
