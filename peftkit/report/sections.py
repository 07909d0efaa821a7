"""The parts of a report below its curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from peftkit.report.drawing import histogram
from peftkit.report.history import History
from peftkit.report.html import Html, code, element, joined, shell_word, table

NOTHING = Html("")
MAX_SAMPLE_STEPS = 12


def samples(run: History) -> Html:
    """Return what the model said to the same prompts, before, during and after."""
    steps = sorted({line["step"] for line in run.samples})
    if not steps:
        return NOTHING
    shown = {steps[n * (len(steps) - 1) // (MAX_SAMPLE_STEPS - 1)] for n in range(MAX_SAMPLE_STEPS)}
    prompts: dict[str, list[Mapping[str, Any]]] = {}
    for line in run.samples:
        if line["step"] in shown:
            prompts.setdefault(str(line.get("prompt", "")), []).append(line)
    parts: list[Html] = []
    for prompt, lines in prompts.items():
        reference = lines[-1].get("reference")
        rows = [("reference", str(reference))] if reference else []
        for said in sorted(lines, key=lambda line: line["step"]):
            when = "before" if said["step"] == 0 else f"step {said['step']:,}"
            rows.append((when, str(said.get("completion", ""))))
        parts += [code(prompt), element("blockquote", table(("", ""), rows))]
    return joined([element("h2", "Samples"), parts])


def data(run: History) -> Html:
    """Return what became of the rows, how long they are, and one as the loss sees it."""
    facts = run.facts.get("data")
    sets = facts if isinstance(facts, dict) else {}
    parts = [_tables(run, is_data=True)]
    for name, found in sets.items():
        if isinstance(found, dict) and (bars := _bars(found.get("lengths"))):
            label = f"Lengths of the {name} rows, in tokens"
            parts += [element("h3", label), histogram(bars, label)]
    parts.append(_row(run.facts.get("row")))
    return joined([element("h2", "Data"), parts]) if any(parts) else NOTHING


def _bars(found: Any) -> list[tuple[str, int]]:
    edges = found.get("edges") if isinstance(found, dict) else None
    counts = found.get("counts") if isinstance(found, dict) else None
    if not isinstance(edges, list) or not isinstance(counts, list) or len(edges) != len(counts):
        return []
    whole = all(isinstance(value, int) for value in (*edges, *counts))
    return [(f"{a:,}", n) for a, n in zip(edges, counts, strict=True)] if whole else []


def _row(found: Any) -> Html:
    if not isinstance(found, dict) or not isinstance(found.get("pieces"), list):
        return NOTHING
    pieces = [piece for piece in found["pieces"] if isinstance(piece, list) and len(piece) == 2]
    kinds = {str(kind) for kind, _ in pieces if kind}
    text: Html
    if kinds <= {"learnt"}:
        text = joined(
            element("mark", str(piece)) if kind == "learnt" else str(piece)
            for kind, piece in pieces
        )
        text = element("pre", text)
        note = "What is marked is learnt; the rest is only read."
    else:
        text = table(("", "text"), [(str(kind), str(piece)) for kind, piece in pieces])
        note = "Its parts, as the task names them."
    title = f"A row as the loss sees it: {found.get('source', '')}"
    return joined([element("h3", title), text, element("p", note, cls="soft")])


def model(run: History) -> Html:
    """Return the audit of the base and what is trained beside it."""
    told = _tables(run, is_data=False)
    paths = str(run.started.get("paths", ""))
    how = element("p", f"Computed by: {paths}.", cls="soft") if paths else None
    return joined([element("h2", "Base and adapter"), told, how]) if told or paths else NOTHING


def _tables(run: History, *, is_data: bool) -> Html:
    found = run.facts.get("tables")
    parts = []
    for known in found if isinstance(found, list) else []:
        if not isinstance(known, dict):
            continue
        title, rows = str(known.get("title", "")), known.get("rows")
        if title.startswith("Data: ") is is_data and isinstance(rows, list):
            columns = [str(name) for name in known.get("columns") or ()]
            cells = [[str(cell) for cell in row] for row in rows if isinstance(row, list)]
            parts += [element("h3", title), table(columns, cells)]
    return joined(parts)


def recipe(run: History) -> Html:
    """Return the recipe, settings that are not the default's alone."""
    text = run.facts.get("recipe_yaml")
    if not isinstance(text, str):
        return NOTHING
    return joined([element("h2", "Recipe"), code(text)])


def differences(runs: Sequence[History]) -> Html:
    """Return the settings in which runs differ, a column each."""
    recipes = [flat(run.recipe) for run in runs]
    keys = dict.fromkeys(key for known in recipes for key in known)
    rows = []
    for key in keys:
        values = [known.get(key, "-") for known in recipes]
        if key != "train.output_dir" and len(set(values)) > 1:
            rows.append((key, *values))
    if not rows:
        return element("p", "The recipes are the same.", cls="soft")
    return table(("setting", *(run.name for run in runs)), rows)


def flat(values: Any, prefix: str = "") -> dict[str, str]:
    """Return nested settings as one mapping, names joined by dots, values as JSON."""
    if not isinstance(values, Mapping):
        if isinstance(values, float):
            return {prefix: f"{values:.6g}"}
        return {prefix: values if isinstance(values, str) else json.dumps(values)}
    found: dict[str, str] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def machine(run: History) -> Html:
    """Return where it was trained, with which versions, and what identifies its parts."""
    found = run.facts.get("machine")
    rows = list(flat(found).items()) if isinstance(found, dict) and found else []
    title = element("h2", "Machine, versions, hashes")
    return joined([title, table(("", ""), rows)]) if rows else NOTHING


def notices(run: History) -> Html:
    """Return all that the run said to be careful of, once each."""
    found = run.facts.get("notices")
    before = [(0, str(text)) for text in found] if isinstance(found, list) else []
    told = [*before, *run.notices]
    if not told:
        return NOTHING
    rows = []
    for text, same in groupby(told, key=lambda pair: pair[1]):
        step, *_ = [step for step, _ in same]
        rows.append(("before" if step == 0 else f"step {step:,}", text))
    return joined([element("h2", "Notes of the run"), table(("", ""), rows)])


def commands(run: History, title: str = "h2") -> Html:
    """Return what to type next."""
    folder, next_ = shell_word(run.folder), run.facts.get("command")
    lines = [next_.replace("{folder}", folder)] if isinstance(next_, str) else []
    finished = run.state() == "finished"
    if not finished:
        lines = [f"peftkit train RECIPE.yaml --resume --out {folder}"]
    elif run.facts.get("mergeable", True):
        lines.append(f"peftkit merge {folder} --out {shell_word(str(run.folder) + '-merged')}")
    if finished:
        again = shell_word(str(run.folder) + "-again")
        lines.append(f"peftkit train {shell_word(run.folder / 'recipe.yaml')} --out {again}")
    return joined([element(title, "Next"), code("\n".join(lines))])
