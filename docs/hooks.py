"""What mkdocs asks while it makes the site: pages that lie above docs/, and the links to them."""

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
"""Files of the repository's root that are pages of the site too, and their names there."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie above docs/."""
    from mkdocs.structure.files import File

    for name, page in ABOVE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at where their targets are in the site; complete the page of the API."""
    if page.file.src_uri == "api.md":
        markdown = with_all_names(markdown)
    return site_links(markdown)


def with_all_names(markdown: str) -> str:
    """Return the page of the API with the public names that it does not list yet at its end."""
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


def site_links(markdown: str) -> str:
    """Return a page's text with links as the site has them.

    Of the root's files those that are pages become links to these; docs/ is the site's root.
    """
    for name, place in ABOVE.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{re.escape(name)}(?=[)#])", f"]({place}", markdown)
    return markdown.replace("](docs/", "](").replace('="docs/', '="../')
