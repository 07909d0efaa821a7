"""The public names are what they say, whatever was imported before them."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import peftkit
from peftkit.methods.table import METHODS
from peftkit.tasks.table import TASKS

ROOT = Path(__file__).parents[1]


def test_every_public_name_is_there_and_is_no_module():
    for name in peftkit.__all__:
        assert not isinstance(getattr(peftkit, name), ModuleType), name


def test_no_module_of_the_house_has_a_public_name():
    # importing it would put the module in the name's place
    program = (
        "import pkgutil, peftkit; "
        "print({m.name for m in pkgutil.iter_modules(peftkit.__path__)} & set(peftkit.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_names_are_those_that_type_checkers_see_each_from_where_it_is_defined():
    tree = ast.parse(Path(peftkit.__file__).read_text(encoding="utf-8"))
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = [alias.asname for node in typed.body for alias in getattr(node, "names", ())]
    assert seen == peftkit.__all__
    assert peftkit.check_recipe.__module__ == "peftkit.run"
    assert peftkit.load_recipe.__name__ == "load"


def test_every_method_and_every_task_is_public():
    public = {getattr(peftkit, name) for name in peftkit.__all__}
    assert public >= set(METHODS.values())
    assert public >= set(TASKS.values())


def test_documentation_imports_from_the_public_api_alone():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    scripts = sorted((ROOT / "recipes" / "examples").glob("*.py"))
    code = [b for p in pages for b in re.findall(r"```python\n(.*?)```", p.read_text(), re.DOTALL)]
    code += [path.read_text() for path in scripts]
    assert len(code) >= 4
    for text in code:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("peftkit."):
                if node.module == "peftkit.events":  # documented in docs/api.md
                    continue
                raise AssertionError(f"from {node.module} import ...: export it from peftkit")
            if isinstance(node, ast.ImportFrom) and node.module == "peftkit":
                assert {alias.name for alias in node.names} <= set(peftkit.__all__)
