"""Take the pictures of docs/studio.md from a running studio.

    python docs/studio_pictures.py 'http://127.0.0.1:8100/#key=...' orders orders.jsonl

Needs Chromium and Playwright's client (pip install playwright).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from shutil import which

HERE = Path(__file__).parent
SCHEMES = ("light", "dark")
SECONDS = 180


def main() -> None:
    """Write studio-new.png and studio-run.png; with --out, all views in both schemes and widths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="The address that peftkit studio printed.")
    parser.add_argument("run", help="A finished run.")
    parser.add_argument("file", help="A file in data/.")
    parser.add_argument("--out", type=Path, help="Folder for pictures of all views.")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as client:
        path = which("chromium") or which("google-chrome")
        browser = client.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for scheme in SCHEMES if arguments.out else SCHEMES[:1]:
            for width in (1280, 390) if arguments.out else (1280,):
                size = {"width": width, "height": 860}
                page = browser.new_page(viewport=size, color_scheme=scheme)
                page.set_default_timeout(1000 * SECONDS)
                page.goto(arguments.address)
                page.wait_for_selector("main h1")
                folder = arguments.out or HERE
                suffix = f"-{scheme}-{width}" if arguments.out else ""
                for name in ("runs", "run", "new") if arguments.out else ("run", "new"):
                    show(page, name, arguments.run, arguments.file)
                    page.screenshot(path=folder / f"studio-{name}{suffix}.png")
                page.close()


def show(page, name: str, run: str, file: str) -> None:  # type: ignore[no-untyped-def]
    """Open a view and wait until it is complete."""
    path = {"run": f"run/{run}"}.get(name, name)
    page.evaluate(f"location.hash = '#/{path}'")
    if name == "run":
        page.wait_for_selector(".charts figure polyline")
    if name == "new":
        page.click(f".chip:has-text('{file}')")
        page.wait_for_selector(".tokens mark")
        page.wait_for_selector(".verdict")
    page.wait_for_timeout(1500)


if __name__ == "__main__":
    main()
