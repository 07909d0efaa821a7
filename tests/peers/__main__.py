"""Run every program and write the table "Tested versions" of docs/use.md.

python -m tests.peers           # all; those that cannot be had are named
python -m tests.peers vLLM      # some; their rows are replaced
"""

import itertools
import sys
import tempfile
from pathlib import Path

from tests.peers.cases import CASES, Agreement, Desk
from tests.peers.environment import ROOT, UnavailableError, make, versions

PAGE = ROOT / "docs" / "use.md"
COLUMNS = ("program", "version", "input", "adapter", "equal answers", "largest difference")
HEAD = f"| {' | '.join(COLUMNS)} |\n|---|---|---|---|---:|---:|"


def row(each: Agreement) -> str:
    told = ", ".join(f"{name} {version}" for name, version in versions(each.case.peer).items())
    parts = (each.case.peer, told, each.case.given, each.method)
    return f"| {' | '.join(parts)} | {each.same} of {each.answers} | {each.difference:.0e} |"


def main(names: list[str]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEAD + "\n")
    lines = rest.splitlines(keepends=True)
    old = list(itertools.takewhile(lambda line: line.startswith("|"), lines))
    after = "".join(lines[len(old) :])
    kept = tuple(f"| {name} |" for name in names)
    rows = [line.rstrip("\n") for line in old if names and not line.startswith(kept)]
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(Path(folder))
        for case in CASES:
            if names and case.peer not in names:
                continue
            try:
                make(case.peer)
                found = [row(each) for each in desk.run(case)]
            except UnavailableError as reason:
                print(f"{case.peer} cannot be had: {reason}")
                continue
            print("\n".join(found), flush=True)
            rows += found
            PAGE.write_text(before + "\n".join([HEAD, *rows, after]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
