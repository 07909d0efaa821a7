"""Hooks for mkdocs: add the pages in the repository's root to the site, and rewrite their links."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ABOVE = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages in the repository's root -> their names in the site."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages in the repository's root."""
    from mkdocs.structure.files import File

    for name, page in ABOVE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page, and complete the API page."""
    if page.file.src_uri == "api.md":
        markdown = with_all_names(markdown)
    return site_links(markdown, "../" * page.file.src_uri.count("/"))


def with_all_names(markdown: str) -> str:
    """Return the API page with a section "More" for public names that it does not list."""
    tree = ast.parse((ROOT / "peftkit" / "__init__.py").read_text(encoding="utf-8"))
    names = [
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    ]
    listed = set(re.findall(r"(?m)^::: peftkit\.(\w+)$", markdown))
    rest = [name for name in names if name not in listed]
    return "\n\n".join(
        [markdown, *(["## More"] if rest else []), *(f"::: peftkit.{n}" for n in rest)]
    )


def site_links(markdown: str, up: str = "") -> str:
    """Return a page with its links rewritten for the site, whose root is docs/.

    Args:
        up: Relative path from the page's folder to the root.
    """
    for name, place in ABOVE.items():
        link = rf"\]\((?:\.\./)*{re.escape(name)}(?=[)#])"
        markdown = re.sub(link, f"]({up}{place}", markdown)
    return markdown.replace("](docs/", "](").replace('="docs/', '="../')
