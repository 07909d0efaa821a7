"""The public names are what they say, whatever was imported before them."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import peftkit


def test_every_public_name_is_there_and_is_no_module() -> None:
    for name in peftkit.__all__:
        assert not isinstance(getattr(peftkit, name), ModuleType), name


def test_no_module_of_the_house_has_a_public_name() -> None:
    # importing it would put the module in the name's place
    program = (
        "import pkgutil, peftkit; "
        "print({m.name for m in pkgutil.iter_modules(peftkit.__path__)} & set(peftkit.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
