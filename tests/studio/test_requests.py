"""The studio's requests: keys and origins, names and uploads, runs, recipes and processes."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any, get_args, get_origin
from urllib.parse import quote

import pytest

from peftkit.config.explain import sections_of
from peftkit.config.lazy import options_of
from peftkit.config.schema import Config, dump_yaml, load_text, locations
from peftkit.errors import PeftkitError
from peftkit.recipe import Recipe
from peftkit_server.refusals import RequestError
from peftkit_studio import app as studio_app
from peftkit_studio import drafting, processes
from peftkit_studio.app import make_studio
from peftkit_studio.assets import ASSETS
from peftkit_studio.drafting import FORM, Drafting
from peftkit_studio.edits import Edit
from peftkit_studio.folder import Folder, file_name, is_name
from tests.helpers.serving import served_app
from tests.helpers.studio import KEY, Client, append_steps, hold, write_run

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the studio needs Linux or macOS")
RECIPE = """task: {task}
base:
  model: {model}
data:
  train: {rows}
train:
  output_dir: {out}
"""
GRPO = "{type: grpo, rewards: [{use: 'rewards.py:score'}]}"


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "home"
    write_run(home / "runs" / "first", 10)
    write_run(home / "runs" / "sweep" / "second", 4, rank=4, done=False)
    return home


@pytest.fixture
def studio(folder, monkeypatch):
    """A served studio whose drafts are computed in this process, which has imported torch."""

    async def run(self, function, *arguments):
        result = drafting._call(function, arguments)
        if "problem" in result:
            raise PeftkitError(result["problem"], found=result["found"], fix=result["fix"])
        return result

    monkeypatch.setattr(Drafting, "run", run)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(drafting, "_roots", (folder.resolve(),))
    monkeypatch.setattr(drafting, "_runs_code", False)
    with served_app(make_studio(folder, [KEY])) as port:
        yield Client(port)


def recipe(**changes):
    fields = {"task": "causal_lm", "model": "org/m", "rows": "data/a.jsonl", "out": "runs/new"}
    return RECIPE.format(**fields | changes)


def test_only_the_files_of_the_page_are_served_without_the_key(studio):
    page = studio.get("/", key="")
    assert page.status == 200
    assert b"/static/app.js" in page.content
    scripts = {f"/static/{name}" for name in ASSETS if name.endswith(".js")}
    assert set(re.findall("<(.*?)>; rel=modulepreload", page.headers["link"])) == scripts
    for path in ("/api/state", "/api/events", "/api/run?id=first", "/nowhere", "/static/../app.py"):
        assert studio.get(path, key="").status == 401, path
        assert studio.get("/api/state", key="wrong").status == 401
    for path in ("/static/app.py", "/static/__init__.py", "/static/%2e%2e%2fapp.py"):
        assert studio.get(path).status == 404, path


def test_other_origins_and_other_names_of_the_host_are_refused(studio):
    own = studio.url.removeprefix("http://")
    assert studio.get("/api/state", Origin=studio.url).status == 200
    assert studio.get("/api/state", Origin="http://evil.example").status == 403
    assert studio.get("/api/state", Origin=f"http://{own}.evil.example").status == 403
    assert studio.get("/", key="", Host="evil.example").status == 403


def test_the_policy_allows_no_script_of_another_origin_and_no_inline_script(studio):
    for path in ("/", "/static/app.js", "/api/state", "/nowhere"):
        headers = studio.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    assert not [name for name, (content, _, _) in ASSETS.items() if b"innerHTML" in content]


@pytest.mark.smoke
def test_a_run_is_found_by_its_name_only(studio):
    for id in ("../home/runs/first", "/etc", "first/../../x", "%2e%2e", "nowhere", ""):
        for path in ("run", "charts", "report"):
            assert studio.get(f"/api/{path}?id={id}").status == 404, id
        assert studio.post("/api/resume", id=id).status == 404
        assert studio.post("/api/stop", id=id).status in (400, 409)


def test_an_upload_is_bounded_and_never_replaces_a_file(studio, folder, monkeypatch):
    def upload(content, name="rows.jsonl"):
        return studio.put(f"/api/files/{name}", content)

    assert upload(b'{"text": "a"}').json == {"name": "rows.jsonl", "bytes": 13}
    assert upload(b'{"text": "a"}').json["name"] == "rows.jsonl"
    assert upload(b'{"text": "b"}').json["name"] == "rows-2.jsonl"
    assert (folder / "data" / "rows.jsonl").read_bytes() == b'{"text": "a"}'
    for name in ("rows.py", "..%2Frows.jsonl", ".hidden.jsonl", "a..jsonl", "a%00.jsonl", "a" * 90):
        assert upload(b"", name).status in (400, 404), name
    monkeypatch.setattr(studio_app, "MAX_UPLOAD", 10)
    assert upload(b"x" * 11, "large.jsonl").status == 413
    names = sorted(path.name for path in (folder / "data").iterdir())
    assert names == ["rows-2.jsonl", "rows.jsonl"]


def test_parallel_uploads_of_a_name_are_all_stored(tmp_path):
    folder, begin = Folder(tmp_path), threading.Barrier(8)

    def publish(number: int) -> Path:
        new = tmp_path / ".studio" / f"new-{number}"
        new.write_text(str(number))
        begin.wait()
        return folder.publish(new, folder.rows_file("rows.jsonl"))

    with ThreadPoolExecutor(8) as threads:
        paths = [*threads.map(publish, range(8))]
    assert [path.read_text() for path in paths] == [str(number) for number in range(8)]
    assert sorted(paths) == sorted((tmp_path / "data").iterdir())


@pytest.mark.smoke
def test_a_new_run_and_its_new_steps_appear(studio, folder):
    runs = {row["run"]: row for row in studio.get("/api/state").json["runs"]}
    assert {name: row["state"] for name, row in runs.items()} == {
        "first": "finished",
        "sweep/second": "stopped",  # no process trains there, however recent its last line
    }
    assert runs["first"]["differs"]["method.rank"] == "16"
    write_run(folder / "runs" / "third", 2, done=False)
    charts = studio.get("/api/charts?id=third")
    assert charts.json["charts"][0]["lines"][0]["points"] == [[1, 2.0], [2, 1.0]]
    etag = charts.headers["etag"]
    assert studio.get("/api/charts?id=third", **{"If-None-Match": etag}).status == 304
    append_steps(folder / "runs" / "third", range(3, 5))
    assert studio.get("/api/charts?id=third", **{"If-None-Match": etag}).status == 200
    assert studio.get("/api/run?id=third").json["row"]["step"] == 4


def test_two_runs_are_compared(studio):
    compared = studio.get("/api/compare?id=first&id=sweep/second").json
    assert [row["differs"]["method.rank"] for row in compared["rows"]] == ["16", "4"]
    assert compared["loss_name"] == "loss (mean of the last 10 steps)"
    names = [f"loss (mean of the last {steps} steps)" for steps in (10, 4)]
    assert [row["loss_name"] for row in compared["rows"]] == names
    assert len(studio.get("/api/charts?id=first&id=sweep/second").json["charts"][0]["lines"]) >= 2
    assert b"sweep/second" in studio.get("/api/report?id=first&id=sweep/second").content


def test_each_error_of_a_recipe_has_its_line(studio):
    text = recipe(model="{}").replace("data:", "data:\n  pakcing: true") + "  epochs: many\n"
    problems = studio.post("/api/validate", recipe=text).json["problems"]
    assert [problem["line"] for problem in problems] == [3, 5, 9]
    assert "Did you mean 'packing'" in problems[1]["text"]
    assert studio.post("/api/validate", recipe="").json["problems"][0]["line"] == 1


def test_a_valid_recipe_has_its_command_and_starts_as_a_process(studio, folder, monkeypatch):
    script = "import sys; print(sys.argv)"
    started = []

    def popen(command, **options):
        started.append(command)
        return real([sys.executable, "-c", script, *command[3:]], **options)

    real = processes.subprocess.Popen
    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    checked = studio.post("/api/validate", recipe=recipe()).json
    assert checked["command"] == "peftkit train recipes/new.yaml"
    assert not checked["is_taken"]
    begun = studio.post("/api/train", recipe=recipe()).json
    assert (begun["id"], begun["command"]) == ("new", checked["command"])
    assert started[0][1:] == ["-P", "-m", "peftkit_cli", "train", "recipes/new.yaml"]
    assert (folder / "recipes" / "new.yaml").read_text() == recipe()
    deadline = time.time() + 20
    while (ended := studio.get("/api/log?name=new").json)["code"] is None:
        assert time.time() < deadline
        time.sleep(0.1)
    assert ended["code"] == 0
    assert "recipes/new.yaml" in ended["log"]
    again = studio.post("/api/train", recipe=recipe(out="runs/first"))
    assert (again.status, again.json["error"]["code"]) == (409, "run_exists")


def configs_of(kind):
    """Yield a config class and those of its sections."""
    yield kind
    for field in kind.model_fields.values():
        for section in sections_of(field):
            yield from configs_of(section)
        for option in get_args(field.annotation):  # tuples of sections, and unions in them
            for inner in (option, *get_args(option), *chain(*map(get_args, get_args(option)))):
                if isinstance(inner, type) and issubclass(inner, Config):
                    yield from configs_of(inner)


def leaves(declared):
    inner = [leaf for part in get_args(declared) for leaf in leaves(part)]
    return inner or [declared]


NEVER_OPENED = """
revision rope_scaling new_tokens chat_template_kwargs best_metric sample_prompts proof
targets train_fully token_rows rank_pattern alpha_pattern feedforward
prompt completion labels text pair label class_weights words tags prefix source target image audio
margin anchor positive negatives query score template answers tokens language
pattern name input content reference calculate_output graders
"""
"""Fields with text that is never a path or URL: names of columns, tokens, layers; prompts."""


def test_every_text_of_a_recipe_is_a_location_or_never_opened():
    fields = {
        (kind, name): field
        for kind in dict.fromkeys(configs_of(Recipe))
        for name, field in kind.model_fields.items()
        if {str, Path, Any} & set(leaves(field.annotation))
    }
    marked = {}
    for (kind, name), field in fields.items():
        inner = [origin for o in options_of(field.annotation) if (origin := get_origin(o))]
        wrap = {tuple: lambda text: (text,), dict: lambda text: {"a": text}}
        text = Path("x") if Path in leaves(field.annotation) else "x"
        values = [text, *(wrap[origin]("x") for origin in inner if origin in wrap)]
        empty = dict.fromkeys(kind.model_fields)
        made = [kind.model_construct(**empty | {name: value}) for value in values]
        marked[kind, name] = all((name, "x") in locations(config) for config in made)
    names = {name for (_, name), is_marked in marked.items() if not is_marked}
    assert names == set(NEVER_OPENED.split())
    opened = {f"{kind.__name__}.{name}" for (kind, name), is_marked in marked.items() if is_marked}
    assert len(opened) >= 17, opened


def recipes_with(text):
    """Yield a recipe for each field that names a file, with the text in it."""
    code = f"{text.removesuffix('.jsonl')}.py:f"
    for section in (
        {"base": {"model": text}},
        {"data": {"train": text}},
        {"data": {"train": [{"path": text}]}},
        {"data": {"train": "data/a.jsonl", "eval": text}},
        {"data": {"train": "data/a.jsonl", "chat_template": text}},
        {"method": {"type": "lora", "start_from": text}},
        {"train": {"upload": text}},
        {"train": {"trackers": {"mlflow": {"a": {"b": [text]}}}}},
        {"train": {"drift": {"on": text}}, "data": {"train": "data/a.jsonl", "eval": 0.5}},
        {"task": {"type": "distill", "teacher": {"prompt": text}}},
        {"task": {"type": "distill", "teacher": {"model": text}}},
        {"task": {"type": "distill", "teacher": {"adapter": text}}},
        {"task": {"type": "grpo", "rewards": [{"use": "adapter", "adapter": text}]}},
        {"task": {"type": "grpo", "rewards": [{"use": "json_schema", "schema_file": text}]}},
        {"task": {"type": "grpo", "rewards": [{"use": code}]}},
        {"task": {"type": "grpo", "rewards": [{"use": "length", "max_chars": 1}],
                  "tools": [code]}},
    ):  # fmt: skip
        whole = {"base": {"model": "org/m"}, "data": {"train": "data/a.jsonl"}, **section}
        whole["train"] = {**whole.get("train", {}), "output_dir": "runs/new"}
        yield json.dumps(whole)


_touched = []
"""Paths and addresses that this process opened while a test reads them; None: none does."""


def _audit(event, arguments):
    if _touched and event in ("open", "os.scandir", "os.listdir", "socket.connect"):
        _touched.append(str(arguments[1] if event == "socket.connect" else arguments[0]))


sys.addaudithook(_audit)


@pytest.mark.parametrize("runs_code", [False, True])
def test_no_location_leaves_the_folder_on_any_route(studio, folder, monkeypatch, runs_code):
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "secret.jsonl").write_text('{"text": "a"}\n')
    (outside / "secret.py").write_text("")
    (folder / "data" / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / "data" / "link").symlink_to(outside)
    (folder / "data" / "circle").symlink_to("circle")
    monkeypatch.setattr(drafting, "_runs_code", runs_code)
    monkeypatch.setenv("HOME", str(outside))
    hostile = (
        f"{outside}/secret.jsonl",
        "/" * 5000 + f"{outside}/secret.jsonl",
        "../outside/secret.jsonl",
        "~/secret.jsonl",
        "data/link/secret.jsonl",
        "data/link:split",
        "data/link@main",
        "data/*/secret.jsonl",
        "data/*/../outside/secret.jsonl",
        "data/circle/x",
        "/**/ a comment? /**/",
        "../**/*.jsonl",
        "a\0b",
        "https://127.0.0.1:8443/rows.jsonl",
        "s3://bucket/rows.jsonl",
        "simplecache::s3://bucket/rows.jsonl",
        "file:/etc/passwd",
    )
    facts = json.loads((folder / "runs" / "first" / "run.json").read_text())
    for text in hostile:
        _touched.append("")
        drafted = studio.post("/api/draft", file="a.jsonl", task="causal_lm", model=text)
        assert "base is not allowed" in drafted.json["error"]["message"], text
        for number, recipe_yaml in enumerate(recipes_with(text)):
            problems = studio.post("/api/validate", recipe=recipe_yaml).json["problems"]
            assert problems, (text, recipe_yaml)
            for path in ("train", "plan", "preview") if number < 3 else ():
                assert studio.post(f"/api/{path}", recipe=recipe_yaml).status == 400, text
        touched = [path for path in _touched if "outside/secret" in path or "8443" in path]
        touched += [path for path in _touched if path in ("/", "/proc", str(folder.parent))]
        _touched.clear()
        assert touched == [], text
        facts["recipe_yaml"] = recipe_yaml
        (folder / "runs" / "first" / "run.json").write_text(json.dumps(facts))
        assert studio.post("/api/resume", id="first").status == 400, text
    assert not list((folder / "recipes").iterdir())
    monkeypatch.setattr(drafting, "_opens_urls", True)
    allowed = recipe(rows="s3://bucket/rows.jsonl")
    assert studio.post("/api/validate", recipe=allowed).json["problems"] == []


def test_cheap_requests_do_not_wait_for_a_plan(folder, monkeypatch):
    begun, ended = Event(), Event()

    async def run(self, function, *arguments):
        async with self.__dict__.setdefault("lock", asyncio.Lock()):  # one process
            if function is drafting.estimate:
                begun.set()
                await asyncio.to_thread(ended.wait, 20)
            return {"problems": [{"line": 1, "text": "a"}]}

    monkeypatch.setattr(Drafting, "run", run)
    with served_app(make_studio(folder, [KEY])) as port, ThreadPoolExecutor() as pool:
        studio = Client(port)
        plan = pool.submit(studio.post, "/api/plan", recipe="")
        assert begun.wait(20)
        assert studio.post("/api/validate", recipe="").status == 200
        assert studio.post("/api/train", recipe="").status == 400
        for path in ("survey", "draft"):
            assert studio.post(f"/api/{path}", file="a.jsonl").status == 200
        assert not plan.done()
        ended.set()


def test_a_call_that_does_not_end_is_ended_and_the_next_one_is_served(folder, monkeypatch):
    monkeypatch.setattr(drafting, "MAX_SECONDS", 1)

    async def call():
        drafts = Drafting(folder)
        with pytest.raises(PeftkitError, match="ended"):
            await drafts.run(time.sleep, 60)
        assert await drafts.run(dict) == {}
        drafts.close()

    asyncio.run(call())


FORBIDDEN = (
    {"rows": "../secret.jsonl"},
    {"rows": "~/secret.jsonl"},
    {"rows": "data/link.jsonl"},
    {"rows": "../*.jsonl"},
    {"model": "../secret.jsonl"},
    {"out": "../elsewhere"},
    {"out": "runs/../../x"},
    {"out": "recipes/new"},
    {"task": GRPO},
)


def test_a_recipe_may_not_leave_the_folder_or_name_code(studio, folder, monkeypatch):
    (folder.parent / "secret.jsonl").write_text('{"text": "a"}')
    (folder / "data" / "link.jsonl").symlink_to(folder.parent / "secret.jsonl")
    monkeypatch.setenv("HOME", str(folder.parent))
    for changes in FORBIDDEN:
        text = recipe(**changes)
        (problem,) = studio.post("/api/validate", recipe=text).json["problems"]
        (value,) = changes.values()
        assert value in text.splitlines()[problem["line"] - 1], problem
        for path in ("train", "plan", "preview"):
            assert studio.post(f"/api/{path}", recipe=text).status == 400, changes
    assert not list((folder / "recipes").iterdir())
    monkeypatch.setattr(drafting, "_runs_code", True)
    assert studio.post("/api/validate", recipe=recipe(task=GRPO)).json["problems"] == []


def test_code_in_the_recipe_of_a_copied_run_is_not_resumed(studio, folder):
    facts = json.loads((folder / "runs" / "first" / "run.json").read_text())
    facts["recipe_yaml"] = recipe(task=GRPO)
    (folder / "runs" / "first" / "run.json").write_text(json.dumps(facts))
    refused = studio.post("/api/resume", id="first")
    assert refused.status == 400
    assert "--run-code" in refused.json["error"]["message"]
    assert not list((folder / "recipes").iterdir())


def test_only_the_process_that_trains_is_stopped(studio, folder):
    sleeping = subprocess.Popen(["sleep", "60"])
    python = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        hold(folder / "runs" / "first", sleeping.pid)  # not Python
        hold(folder / "runs" / "sweep" / "second", python.pid, since=time.time() - 3600)
        for id in ("first", "sweep/second"):
            assert studio.post("/api/stop", id=id).status == 409
        assert sleeping.poll() is python.poll() is None
        write_run(folder / "runs" / "third", 2, done=False)
        hold(folder / "runs" / "third", python.pid)
        assert studio.get("/api/run?id=third").json["row"]["state"] == "running"
        assert studio.post("/api/stop", id="third").status == 200
        assert python.wait(20) == -15
        assert studio.get("/api/run?id=third").json["row"]["state"] == "stopped"
    finally:
        for process in (sleeping, python):
            process.kill()
            process.wait()


def test_a_process_of_an_earlier_server_is_running_until_it_ends(tmp_path, monkeypatch):
    """A second one of its name would replace its recipe and its log."""
    monkeypatch.setattr(processes, "python", lambda *arguments: ["sleep", "600"])
    earlier, later = (processes.Processes(Folder(tmp_path)) for _ in range(2))
    pid = earlier.start("run", ["train"])["pid"]
    with pytest.raises(RequestError, match="is already running"):
        later.start("run", ["train", "--overwrite"])
    assert later.get("run")["pid"] == pid
    later.stop(tmp_path / "runs" / "run", "run")
    earlier._running["run"].wait()
    later.refuse_running("run")
    with pytest.raises(RequestError, match="is not running"):
        later.stop(tmp_path / "runs" / "run", "run")


def test_the_key_is_not_in_the_environment_of_a_command(monkeypatch):
    monkeypatch.setenv("PEFTKIT_API_KEY", KEY)
    assert KEY not in processes._environment().values()
    assert os.environ["PEFTKIT_API_KEY"] == KEY


LORA = "method: {type: lora, dropout: 0.1}"
RECIPES = (
    recipe() + "  epochs: 2.5  # passes\n" + LORA,
    "# \N{PILE OF POO}\n" + recipe() + LORA + "  # rank\n",
    recipe().replace("base:", "method:\n  type: dora\n  rank: 5\nbase:"),
    "train: {output_dir: runs/new}\n" + recipe().partition("train:\n")[0] + LORA,
    recipe() + "  batch_size:\n" + "method:\n  type: lora\n  targets:\n  - q\n\n",
    recipe() + "  max_steps: 9\n  epochs: 3\n" + LORA,
)


@pytest.mark.parametrize("text", RECIPES)
def test_the_form_sets_each_setting_and_nothing_else(text):
    def values_of(text):
        return load_text(Recipe, text.replace("  batch_size:\n", ""), "a").model_dump()

    form = drafting._form(text, None)
    keys = [key.replace("epochs", "max_steps") if "max_steps" in text else key for key in FORM]
    assert [field["key"] for field in form] == keys
    for field in form:
        section, name = field["key"].split(".")
        edit = Edit(*(field[name] for name in Edit._fields))
        changed, expected = edit.applied(text, "7"), values_of(text)
        assert edit.value in ("", str(expected[section][name]))
        expected[section][name] = 7
        assert values_of(changed) == expected
        assert re.findall("#.*", changed) == re.findall("#.*", text)


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "train: 1", "train: {}", "[" * 5000])
def test_a_text_without_sections_has_no_form(text):
    assert drafting._form(text, None) == []


def test_the_form_of_a_valid_recipe_has_its_fields_and_their_defaults(studio):
    answer = studio.post("/api/validate", recipe=recipe() + "method: {type: ia3}").json
    fields = {field["key"]: (field["value"], field["default"]) for field in answer["form"]}
    assert "method.rank" not in fields
    assert fields["train.epochs"] == ("", 3.0)


def test_files_of_the_folder_are_offered_and_only_those_in_data_are_removed(studio, folder):
    (folder / "outer.jsonl").write_text('{"text": "outer"}\n')
    (folder / "both.jsonl").write_text('{"text": "outer"}\n')
    (folder / "data" / "both.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (folder.parent / "secret.jsonl").write_text('{"text": "a"}\n')
    (folder / "link.jsonl").symlink_to(folder.parent / "secret.jsonl")
    files = {file["name"]: file["removable"] for file in studio.get("/api/state").json["files"]}
    assert files == {"outer.jsonl": False, "both.jsonl": True, "link.jsonl": False}
    assert studio.post("/api/survey", file="both.jsonl").json["num_rows"] == 2
    assert studio.post("/api/survey", file="outer.jsonl").json["where"] == "outer.jsonl"
    assert studio.post("/api/survey", file="link.jsonl").status == 400
    for name, status in (("outer.jsonl", 404), ("../outer.jsonl", 404), ("both.py", 400)):
        assert studio.delete(f"/api/files/{quote(name, safe='')}").status in (status, 400), name
    write_run(folder / "runs" / "reads", 2, done=False)
    facts = {"recipe_yaml": recipe(rows="data/both.jsonl")}
    (folder / "runs" / "reads" / "run.json").write_text(json.dumps(facts))
    hold(folder / "runs" / "reads", os.getpid())
    assert studio.delete("/api/files/both.jsonl").status == 409
    (folder / "runs" / "reads" / ".locks" / "holder").unlink()
    starting = {"command": "", "pid": os.getpid(), "began": time.time(), "code": None}
    (folder / ".studio" / "starting.json").write_text(json.dumps(starting))
    (folder / "recipes" / "starting.yaml").write_text(recipe(rows="data/both.jsonl"))
    assert studio.delete("/api/files/both.jsonl").status == 409
    (folder / ".studio" / "starting.json").unlink()
    assert studio.delete("/api/files/both.jsonl").status == 200
    assert (folder / "both.jsonl").exists()
    assert not (folder / "data" / "both.jsonl").exists()


def test_a_corrected_answer_has_the_fields_of_its_run_and_trains_again(studio, folder):
    def facts(task):
        text = recipe(task=task, out="runs/first") + "  epochs: 2  # passes\n"
        facts = {"recipe": {"task": json.loads(task)}, "recipe_yaml": text}
        (folder / "runs" / "first" / "run.json").write_text(json.dumps(facts))

    def save(*contents):
        turns = zip(("user", "assistant") * 2, contents, strict=False)
        row = {"messages": [{"role": role, "content": text} for role, text in turns]}
        return studio.post("/api/save", kind="row", row=row, id="first")

    facts('{"type": "causal_lm"}')
    assert save("a", "b", "c", "d").json["file"] == "chat-rows.jsonl"
    facts('{"type": "causal_lm", "prompt": "q", "completion": "a"}')
    assert save("a", "b", "c", "d").status == 400
    file = save("a", "b").json["file"]
    assert json.loads((folder / "data" / file).read_text()) == {"q": "a", "a": "b"}
    text = studio.post("/api/again", id="first", file=file).json["recipe"]
    first = load_text(Recipe, text, "a")
    assert [source.path for source in first.data.train] == ["data/a.jsonl", f"data/{file}"]
    assert (first.train.output_dir.name, first.train.epochs) == ("first-2", 2)
    assert "# passes" in text
    for written in (text, dump_yaml(first)):  # as the page and as a run of the command line does
        added = drafting.add_rows(written, f"data/{file}", "runs/x")["recipe"]
        assert load_text(Recipe, added, "a").data == first.data


def test_the_score_of_samples_counts_fields_of_json_and_exact_short_answers(studio, folder):
    order, wrong = '{"a": 1, "b": [2]}', '{"b": [2], "a": 2, "c": 3}'
    pairs = [(0, "x", order), (0, "no", "yes"), (9, wrong, order), (9, "yes ", "yes")]
    pairs += [(9, '{"b":[2], "a":1}', order), (0, "x", None), (0, "x", "long " * 99)]
    lines = [
        json.dumps({"step": step, "prompt": str(n), "completion": a, "reference": b})
        for n, (step, a, b) in enumerate(pairs)
    ]
    (folder / "runs" / "first" / "samples.jsonl").write_text("\n".join(lines))
    run = studio.get("/api/run?id=first").json
    scores = [[0, 2], [0, 1], [1, 3], [1, 1], [2, 2], None, None]
    assert [sample["score"] for sample in run["samples"]] == scores
    assert run["scores"] == [[0, "0 of 2 exact, 0 of 3 fields"], [9, "2 of 3 exact, 4 of 6 fields"]]
    assert b"2 of 3 exact" in studio.get("/api/report?id=first").content


def test_the_page_weighs_at_most_83_kb():
    assert sum(len(content) for content, _, _ in ASSETS.values()) < 83_500


def test_rows_of_chats_are_appended(studio, folder):
    row = {"messages": [{"role": "user", "content": "😀 <b>"}], "label": True}
    assert studio.post("/api/save", kind="label", row=row).json["num_rows"] == 1
    assert studio.post("/api/save", kind="label", row=row).json["num_rows"] == 2
    lines = (folder / "data" / "chat-labels.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [row, row]
    assert studio.post("/api/save", kind="../x", row=row).status == 400
    (folder / "data" / "chat-rows.jsonl").write_text('{"text": "a"}')  # written by another program
    assert studio.post("/api/save", kind="row", row=row).json["num_rows"] == 2
    lines = (folder / "data" / "chat-rows.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"text": "a"}, row]


IDS = (
    *("a", "team/a", "team-a", "team--a", "team/a/b", "team-a/b", "日本", "日/本", "é"),
    *("a b", "-a", ".a", "a..b", "a.b", "x" * 80, "x" * 81, "x" * 200, "y/" + "x" * 200, "x\nb"),
)


def test_two_runs_never_share_the_name_of_a_file():
    names = [file_name(id) for id in IDS]
    names += [file_name(name) for name in names if name not in IDS]  # a run of such a name
    assert len({name.lower() for name in names}) == len(names)
    assert all(is_name(name) for name in names)
    assert [file_name(id) for id in ("a", "team-a", "a.b")] == ["a", "team-a", "a.b"]


def test_runs_of_any_name_are_shown_and_only_a_run_s_own_recipe_is_resumed(studio, folder):
    for id in ("team/a", "team-a", "日本", "x" * 200):
        write_run(folder / "runs" / id, 2)
        assert studio.get(f"/api/run?id={quote(id)}").json["row"]["file"] == file_name(id)
        assert studio.get(f"/api/report?id={quote(id)}").status == 200
    (folder / "recipes" / "team-a.yaml").write_text(recipe(out="runs/team-a"))
    refused = studio.post("/api/resume", id="team/a")
    assert refused.status == 400
    (folder / "recipes" / f"{file_name('team/a')}.yaml").write_text(recipe(out="runs/team-a"))
    refused = studio.post("/api/resume", id="team/a")
    assert (refused.status, "is of another run" in refused.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize("name", ["日本", "x" * 81, "x" * 300, "a..b", ".a", "a b", '"a\\0b"'])
def test_names_of_new_runs_that_cannot_be_files_are_refused(name, studio):
    text = recipe(out=f"runs/{name}" if name[0] != '"' else '"runs/a\\0b"')
    assert studio.post("/api/validate", recipe=text).json["problems"]
    assert studio.post("/api/train", recipe=text).status == 400
    for path in ("run", "charts", "report", "log"):
        assert studio.get(f"/api/{path}?id={quote(name)}&name={quote(name)}").status in (400, 404)


def test_requests_are_bounded_and_objects(studio):
    assert studio.post("/api/validate", recipe="x" * (2 << 20)).status == 413
    assert studio.put("/api/validate", b"{}").status == 405
    assert studio.post("/api/chat", ids=[]).status == 400
    assert studio.post("/v1/chat/completions", messages=[]).status == 409
    assert studio.post("/api/export", id="first", to="../x").status == 400
