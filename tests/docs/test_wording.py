"""Prose in the guide and the code uses the field's English: unusual constructions are rare.

The patterns are a signal, not a verdict: each also matches good sentences, so the rate is bounded
instead of every match. If a bound is exceeded, rewrite sentences in the listed files.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
CODE = tuple(sorted(path for top in ("peftkit", "cli") for path in (ROOT / top).rglob("*.py")))
LIMITS = {"guide": 1.0, "code": 1.0}
"""Maximum matches per 1,000 words."""
NUM_SHOWN = 8
"""Files that a failure lists."""

PATTERNS = {
    "software that tells": r"told|tells?(?! whether)",
    "asked, as a state": r"asked(?! (?:for )?questions?)|asks? (?:of|for)",
    "things that stand, lie or sit": r"(?:stands?|lies?|sits?)(?! (?:for|out))",
    "beside, besides": r"beside|besides(?! the)",
    "somebody": r"nobody|somebody|whoever|everybody|who (?:waits|rewrites|takes)",
    "that of": r"(?:that|those) (?:of|that|which|where|who)",
    "goes on": r"go(?:es)? on|went on",
    "of its own": r"of (?:its|their|our|one's) own",
    "as it is": r"as (?:it|they) (?:is|are|was|were|lies?)",
    "nevertheless": r"nevertheless|or else",
    "wish": r"wish(?:es|ed)?",
    "learnt, taught": r"learnt|taught",
    "so that": r"so that",
    "adverbial phrases": r"has its turn|by name|in hand|in words|at once",
}
FREE_RELATIVE = (
    r"(?:^|[.;:,] |\b(?:and|of|for|in|on|by|to) )[Ww]hat "
    r"(?:is|are|was|were|has|have|it|they|a|the|no|one|people|clients?|nobody|others?)\b"
)
HAVE_DONE = r"\b[Hh]ave (?:the|a|its|their|all|one) \w+ \w+(?:, |\.| for)"
COMPILED = {
    **{name: re.compile(rf"\b(?:{pattern})\b") for name, pattern in PATTERNS.items()},
    "what is ...": re.compile(FREE_RELATIVE),
    "have something done": re.compile(HAVE_DONE),
}


COMMENT = re.compile(r"(?m)(?:^|  ) *# ")


class Prose(NamedTuple):
    """Number of words in a file, and the matched phrases."""

    file: str
    words: int
    phrases: tuple[str, ...]


def sentences(path: Path) -> Iterator[str]:
    """Yield the text of a Markdown page, or the strings and comments of a module."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"(?s)```.*?```", " ", text)
        yield re.sub(r"(?s)<!--.*?-->|`[^`\n]*`|\(https?:[^)]*\)", " x ", text)
        return
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and len(value.split()) > 3:
            yield re.sub(r"`[^`\n]*`", " x ", value)
    if not COMMENT.search(text):  # tokens take longer than all else
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and len(token.string.split()) > 2:
            yield token.string.lstrip("# ")


def measured(paths: Iterable[Path]) -> list[Prose]:
    """Return the matches in files, the most first."""
    found = []
    for path in paths:
        text = "\n".join(sentences(path))
        phrases = [m.group().strip() for p in COMPILED.values() for m in p.finditer(text)]
        file = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        found.append(Prose(file, len(text.split()), tuple(phrases)))
    return sorted(found, key=lambda prose: -len(prose.phrases))


@pytest.mark.parametrize(("kind", "paths"), [("guide", GUIDE), ("code", CODE)], ids=list(LIMITS))
def test_unusual_constructions_are_rare(kind, paths):
    found = measured(paths)
    rate = 1000 * sum(len(p.phrases) for p in found) / sum(p.words for p in found)
    worst = [f"{p.file}: {len(p.phrases)} in {p.words}: {p.phrases}" for p in found[:NUM_SHOWN]]
    assert rate <= LIMITS[kind], "\n".join([f"{rate:.2f} per 1,000 words", *worst])


def test_constructions_are_found_in_prose_but_not_in_code(tmp_path):
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("The plan `told` of it.\n```\nasked = 1\n```\nThe server goes on, as it is.\n")
    module.write_text('told = "asked"\ndef f():\n    """Do what is wished, or else."""\n')
    by_name = {prose.file: set(prose.phrases) for prose in measured([page, module])}
    assert by_name == {"page.md": {"goes on", "as it is"}, "module.py": {"wished", "or else"}}
