"""What the README and docs/ say is so: commands parse, recipes load, rows are read, links lead
somewhere."""

import importlib.util
import re
import runpy
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import peftkit
from peftkit import PeftkitError, load_recipe
from peftkit.data.format import parse as parse_rows
from peftkit.data.media.text import parse_with_media
from peftkit.data.preferences import read_pairs_of, read_verdicts
from peftkit.data.prompts import read_prompts
from peftkit.data.records import read_records
from peftkit.recipe import Recipe
from peftkit.settings import DataConfig
from peftkit.tasks.classes.labels import text_of
from peftkit.tasks.media.media_classification import iterate_media
from peftkit.tasks.media.speech import utterance
from peftkit.tasks.table import TASKS
from tests.helpers.parsed_commands import refused, root

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DESIGN = sorted((DOCS / "design").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *DESIGN]
SITE = ROOT / "mkdocs.yml"
SECTIONS = set(Recipe.model_fields)
CALL = re.compile(r"(?<!from)(?:^|[\s/])(?:peftkit|-m peftkit_cli) (?=[a-z-]|$)")
"""A call of peftkit: after variables, as a file of an environment, or by another program."""


class Block(NamedTuple):
    """A fenced block of a page; `section` is the heading above it."""

    page: Path
    line: int
    section: str
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """Return a page's path in docs/, or its name if it is in the repository's root."""
    return page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name


def blocks(page: Path) -> Iterator[Block]:
    section, fence, language, first, lines = "", False, "", 0, list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            if fence:
                yield Block(page, first, section, language, "\n".join(lines) + "\n")
            fence, language, first, lines = not fence, line[3:].strip(), number, []
        elif fence:
            lines.append(line)
        elif line.startswith("## "):
            section = line[3:]


BLOCKS = {page: [*blocks(page)] for page in PAGES}


def pages_with(*languages: str) -> Any:
    """Run a test on each page that has a block in one of some languages."""
    pages = [page for page in PAGES if any(b.language in languages for b in BLOCKS[page])]
    return pytest.mark.parametrize("page", pages, ids=name_of)


def prose_of(page: Path) -> str:
    """Return the text of a page without its fenced blocks."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands_of(text: str) -> Iterator[str]:
    """Yield the arguments of each call of peftkit in lines of a shell."""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.partition(" #")[0].rstrip().removesuffix(" &")
        for part in re.split(r"\s+(?:\||&&)\s+|;\s+", line):
            if found := CALL.search(part):
                yield part[found.end() :].rstrip("'")


def commands_on(page: Path) -> list[tuple[str, str]]:
    """Return a page's commands, in shell blocks and as `peftkit ...` in sentences, with places."""
    found = [
        (b.where, c) for b in BLOCKS[page] if b.language == "bash" for c in commands_of(b.text)
    ]
    for code in re.findall(r"`([^`]+)`", prose_of(page)):
        found += [(name_of(page), command) for command in commands_of(" ".join(code.split()))]
    return found


COMMANDS = {page: commands for page in PAGES if (commands := commands_on(page))}
PLACEHOLDERS = {"peft|gguf|mlx": "peft", "COMMAND --help": "train --help"}
"""What stands for one of several words, and one of them."""


def test_the_pages_are_full_of_commands():
    commands = {command for found in COMMANDS.values() for _, command in found}
    assert len(commands) > 90
    assert {c.split()[0] for c in commands} >= {*root().commands}


def settings_in(command: str) -> list[str]:
    """Return the settings of a recipe that a command changes; of several values, the first."""
    pairs = re.findall(r"--(set|over) (\"[^\"]+\"|\S+)", command)
    texts = ((option, text.strip('"')) for option, text in pairs)
    return [text.split(",")[0] if option == "over" else text for option, text in texts]


def wrong_in(command: str, folder: Path) -> str:
    """Return what is wrong with a command: its options, or the settings that it changes."""
    for several, one in PLACEHOLDERS.items():
        command = command.replace(several, one)
    try:
        settings = settings_in(command)
        if settings and "=" in settings[0]:
            recipe_of("", folder, ("method.type=lora", "data.eval=0.1", *settings))
    except PeftkitError as error:
        return str(error)
    return refused(command)


@pytest.mark.parametrize("page", COMMANDS, ids=name_of)
def test_commands_and_their_settings_parse(page, tmp_path):
    for where, command in COMMANDS[page]:
        assert not (wrong := wrong_in(command, tmp_path)), f"{where}: peftkit {command}: {wrong}"


@pytest.mark.parametrize(
    "wrong",
    [
        "trian recipe.yaml",
        "train recipe.yaml --epochs 3",
        "merge ADAPTER",
        "recipes list",
        "train recipe.yaml --set train.max_step=5",
        "sweep recipe.yaml --over method.ranks=8,16",
    ],
)
def test_a_wrong_command_would_be_found(wrong, tmp_path):
    assert wrong_in(wrong, tmp_path)


def test_what_is_run_with_python_or_make_exists():
    shell = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    modules = set(re.findall(r"python -m (benchmarks\.\w+)", shell))
    assert len(modules) >= 5
    for module in modules:
        assert importlib.util.find_spec(module), module
    for script in re.findall(r"python ((?:recipes|benchmarks)/\S+\.py)", shell):
        assert (ROOT / script).is_file(), script
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?m)^make (\w+)", shell):
        assert re.search(rf"(?m)^{target}:", makefile), target


def recipe_of(text: str, folder: Path, overrides: tuple[str, ...] = ()) -> Recipe:
    """Load a recipe, or a part of one: what is not there and has to be is filled in."""
    path = folder / "recipe.yaml"
    path.write_text(text or "{}", encoding="utf-8")
    given = yaml.safe_load(text) or {}
    needed = {
        "base.model": "smollm2-135m",
        "data.train": "train.jsonl",
        "train.output_dir": "runs/demo",
    }
    filled = [
        f"{key}={value}"
        for key, value in needed.items()
        if key.partition(".")[2] not in given.get(key.partition(".")[0], {})
    ]
    return load_recipe(path, [*filled, *overrides])


@pytest.mark.parametrize("folder", ["docs", "recipes", "peftkit", "cli"])
def test_no_package_index_is_expected_to_have_peftkit(folder):
    """Extras are installed from a checkout or a wheel, and exist."""
    suffixes = {".md", ".py", ".yaml", ".yml"}
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    text = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *files])
    assert not re.findall(r"pip install [^\n]*[\s\"']peftkit\[.*", text)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = set(",".join(re.findall(r"[\"']\.\[([\w,-]+)\]", text)).split(",")) - {""}
    assert extras <= set(settings["project"]["optional-dependencies"])
    assert extras or folder in ("peftkit", "cli")


@pages_with("yaml")
def test_recipes_load(page, tmp_path):
    for block in BLOCKS[page]:
        if block.language != "yaml":
            continue
        values = yaml.safe_load(block.text)
        if set(values) <= SECTIONS:
            loads = [(block.text, ())]
        else:  # members of a sweep: settings by dotted key
            members = [[f"{key}={value}" for key, value in s.items()] for s in values.values()]
            loads = [("", ("method.type=lora", *member)) for member in members]
        for text, overrides in loads:
            try:
                recipe_of(text, tmp_path, overrides)
            except PeftkitError as error:
                pytest.fail(f"{block.where}: {error}")


def test_a_recipe_with_a_misspelt_key_would_be_found(tmp_path):
    with pytest.raises(PeftkitError):
        recipe_of("train: {learning_rates: 1e-4}\n", tmp_path)


def task_above(block: Block, folder: Path) -> Any:
    """Return the task of the last recipe before a block, in its section."""
    before = [
        b
        for b in BLOCKS[block.page]
        if (b.section, b.language) == (block.section, "yaml") and b.line < block.line
    ]
    return recipe_of(before[-1].text if before else "", folder).task


def read(block: Block, folder: Path, model: Any = None, tokenizer: Any = None) -> int:
    """Read a block of rows as its task does; return how many there are.

    Args:
        model: For readers that encode as they read, with its tokenizer.
    """
    path = folder / f"train.{block.language}"
    path.write_text(block.text, encoding="utf-8")
    task, where = task_above(block, folder), str(path)
    records = read_records(where)
    if task.type == "preference":
        (read_verdicts if task.loss == "kto" else read_pairs_of)(records, where)
    elif task.type in ("distill", "grpo"):
        read_prompts(records, where=where)
    elif task.type == "reward":
        read_pairs_of(records, where)
    elif task.type == "seq2seq":
        parse_rows(records, "auto", where=where, fields=task.fields)
    elif task.type in ("image_text", "audio_text"):
        parse_with_media(records, "auto", where=where)
    elif task.type in ("transcription", "ctc"):
        names = (task.audio, task.text)
        return len([utterance(record, names, where) for record in records])
    elif task.type in ("image_classification", "audio_classification"):
        task.resolve(DataConfig(train=where))
        return len(list(iterate_media(where, task.field, task.label)))
    elif task.type in ("embedding", "reranker"):
        return len(task.on(model, tokenizer, DataConfig(train=where)).load(where))
    elif task.type == "token_classification":
        assert task.resolve(DataConfig(train=where)).labels
        assert all(len(r.fields[task.words]) == len(r.fields[task.tags]) for r in records)
    elif task.type == "sequence_classification":
        task.resolve(DataConfig(train=where))
        for name in filter(None, (task.text, task.pair)):
            assert all(text_of(record.fields, name, "") for record in records)
    else:
        parsed = parse_rows(records, "auto", where=where)
        assert not parsed.unused
    return len(records)


@pages_with("jsonl", "csv")
def test_rows_are_read(page, tmp_path, llama, tokenizer):
    for block in BLOCKS[page]:
        if block.language in ("jsonl", "csv"):
            try:
                num_rows = read(block, tmp_path, llama, tokenizer)
            except PeftkitError as error:
                pytest.fail(f"{block.where}: {error}")
            assert num_rows, block.where


def test_rows_of_no_known_format_would_be_found(tmp_path):
    wrong = Block(PAGES[0], 0, "", "jsonl", '{"ask": "x", "reply": "y"}\n')
    with pytest.raises(PeftkitError):
        read(wrong, tmp_path)


def test_there_are_rows_for_each_task(tmp_path):
    rows = [b for b in BLOCKS[DOCS / "data.md"] if b.language == "jsonl"]
    assert {task_above(block, tmp_path).type for block in rows} == set(TASKS)


PROSE = {page: prose_of(page) for page in (*PAGES, ROOT / "CONTRIBUTING.md")}


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site and GitHub make them."""
    text = prose_of(page)
    found = set()
    for heading in re.findall(r"(?m)^#+ (.+)$", text):
        bare = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        found.add(re.sub(r"[\s-]+", "-", bare))
    return found


def test_every_link_within_the_house_leads_somewhere():
    broken = []
    for page, text in PROSE.items():
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.is_file() or (anchor and anchor not in anchors(target)):
                broken.append(f"{name_of(page)}: {link}")
    assert not broken


TRACKED = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("[!.]*/**/*.py")]
TABLES = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("cli/*/*.yaml")]


@cache
def words_of_code() -> set[str]:
    return {
        word
        for path in (*TRACKED, *TABLES)
        for word in re.findall(r"\w+", (ROOT / path).read_text(encoding="utf-8"))
    }


EXAMPLES = {"reward_funcs", "unsloth_zoo"}
"""Names of other programs that the pages mention."""


def test_files_and_names_that_a_page_mentions_exist():
    wrong = []
    for page, text in PROSE.items():
        for file in re.findall(r"`([\w/]+\.py)`", text):
            if not any(f"/{path}".endswith(f"/{file}") for path in TRACKED):
                wrong.append(f"{name_of(page)}: {file}")
        names = set(re.findall(r"`([a-z]\w*_\w+)`", text)) - EXAMPLES - words_of_code()
        wrong += [f"{name_of(page)}: {name}" for name in names]
    assert not wrong


def test_functions_in_the_pictures_of_the_design_pages_are_in_their_files():
    text = "\n".join(page.read_text(encoding="utf-8") for page in DESIGN)
    pairs = re.findall(r"(?m)^[│├└─ ]*([\w/]+\.py) +([A-Za-z_.]+)", text)
    assert len(pairs) > 60
    for file, function in pairs:
        folders = (ROOT, ROOT / "peftkit", ROOT / "cli")
        (path,) = (folder / file for folder in folders if (folder / file).is_file())
        name = function.rpartition(".")[2]
        assert re.search(rf"(def|class) {name}\b", path.read_text(encoding="utf-8")), (file, name)


def test_every_page_is_in_the_menu_of_the_site():
    menu = set(re.findall(r"(?m)^ +- .+: (\S+\.md)$", SITE.read_text(encoding="utf-8")))
    hooks = (ROOT / "docs" / "hooks.py").read_text(encoding="utf-8")
    above = set(re.findall(r'"(\w+\.md)": "(\w+\.md)"', hooks))
    assert menu == {name_of(page) for page in PAGES[1:]} | {page for _, page in above}
    assert all((ROOT / name).is_file() for name, _ in above)


def test_links_to_pages_in_the_root_are_rewritten_for_the_site():
    site_links = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["site_links"]
    assert site_links("[a](../CHANGELOG.md)") == "[a](changelog.md)"
    assert site_links("[a](../../README.md#x)", "../") == "[a](../readme.md#x)"
    assert site_links("[a](docs/design/run.md)") == "[a](design/run.md)"


def test_the_api_page_has_every_public_name_once():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    for text in (page, page.replace("::: peftkit.attach\n", "")):  # the site adds what is missing
        named = re.findall(r"(?m)^::: peftkit\.(\w+)$", hooks["with_all_names"](text))
        assert sorted(named) == sorted(peftkit.__all__)


def test_the_page_of_errors_has_every_kind_with_its_exit_code():
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    for kind in PeftkitError.__subclasses__():
        if kind.__module__ == "peftkit.errors":
            assert f"Exit code {kind.exit_code}." in sections[kind.__name__]
