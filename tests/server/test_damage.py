"""A damaged file that a server reads at its start is named in an error, or changes nothing.

Each test damages one region of one file of a server that was stopped during a job, and starts the
server again. More regions:

    PEFTKIT_DAMAGE_COUNT=400 PEFTKIT_DAMAGE_SEED=7 pytest tests/server/test_damage.py -m slow
"""

import json
import logging
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")

from peftkit.errors import PeftkitError
from tests.helpers.jobs import FILES, JOBS, WEIGHTS, Gated, chats, hyper, serving
from tests.helpers.tinker import CE_DATA
from tests.helpers.wire_client import Client as Tinker

COUNT = int(os.environ.get("PEFTKIT_DAMAGE_COUNT", "60"))
SEED = int(os.environ.get("PEFTKIT_DAMAGE_SEED", "0"))
REGIONS = 4
NOT_READ = re.compile(r"\.locks/|samples\.jsonl|/latest$|\.log$|README\.md$|\.gitattributes$")
"""Files that no server reads."""
METRICS = re.compile(r"metrics\.jsonl$|run\.json$|tasks\.json$|/facts\.json$")
"""Records for people: the adapter does not depend on them, and no hash covers them."""


class Saved(NamedTuple):
    """A stopped server: its folder, the ids of its data, and what it answers."""

    folder: Path
    done: str
    stopped: str
    queued: str
    file: str
    weights: str
    answers: dict[str, Any]


@pytest.fixture(scope="module")
def saved(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("damage") / "server"
    with serving(model_folder, folder) as client:
        done = client.until(client.job(chats(), method=hyper(n_epochs=2))["id"])["id"]
        tinker = Tinker(client)
        model = tinker.model(rank=2)
        model.forward(CE_DATA)
        model.step()
        weights = model.call("save_weights", path="x")["path"]
    gate = Gated("Step 4/9")
    with serving(model_folder, folder, say=gate.say) as client:
        file = client.upload(chats())
        stopped = client.job(training_file=file, method=hyper())["id"]
        assert gate.reached.wait(60)
        queued = client.job(training_file=file, method=hyper(n_epochs=1))["id"]
        client.until(queued, "queued")
        gate.go(0.2)
    unread = Saved(folder, done, stopped, queued, file, weights, {})
    return unread._replace(answers=answers_of(model_folder, copied(unread, "undamaged"), unread))


def copied(saved: Saved, name: str) -> Path:
    """Return a copy of the server's folder under its own path, on which recipes depend."""
    away = saved.folder.with_name(name)
    if not away.exists():
        shutil.copytree(saved.folder, away)
    return away


def answers_of(model_folder: Path, source: Path, saved: Saved) -> dict[str, Any]:
    """Return what a server over a copy of the folder answers: results or errors."""
    shutil.rmtree(saved.folder)
    shutil.copytree(source, saved.folder)
    answers: dict[str, Any] = {}
    with serving(model_folder, saved.folder) as client:
        for name in ("stopped", "queued"):
            id = getattr(saved, name)
            response = client.get(f"{JOBS}/{id}")
            if response.status_code != 200:
                answers[name] = response.text
                continue
            job = client.until(id)
            path = saved.folder / "jobs" / id / WEIGHTS
            answers[name] = job["error"] or (job["status"], path.read_bytes())
            answers[f"{name} events"] = client.events(id)
        model = client.get(f"{JOBS}/{saved.done}").json().get("fine_tuned_model", "")
        body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        answers["chat"] = _text(client.post("/v1/chat/completions", json=body))
        answers["file"] = _text(client.get(f"{FILES}/{saved.file}/content"))
        answers["listed"] = _text(client.get(f"{FILES}/{saved.file}"))
        names = [each["id"] for each in client.get("/v1/models").json()["data"]]
        answers["models"] = [name for name in names if name.endswith(saved.done[-8:])]
        tinker = Tinker(client)
        loaded = tinker.ask(
            "load_weights",
            session_id=tinker.session,
            model_seq_id=0,
            path=saved.weights,
            optimizer=True,
        )
        answers["tinker"] = _text(loaded)
        if loaded.status_code == 200:
            made = tinker.retrieve(loaded.json()["request_id"])
            answers["tinker"] = made
            if "model_id" in made:
                from tests.helpers.wire_client import Model

                model = Model(tinker, made["model_id"])
                answers["tinker"] = [
                    model.forward(CE_DATA)[0],
                    model.step(),
                    model.forward(CE_DATA)[0],
                ]
    return answers


def _text(response: Any) -> Any:
    """Return a response without what differs between two of them."""
    text = re.sub(r'"(id|created|created_at)":\s*("chatcmpl-[^"]*"|\d+)', "", response.text)
    return re.sub(r"\{[^{}]*step_metrics.csv[^{}]*\},?", "", text)


def files(folder: Path) -> list[Path]:
    """Return the files of a server's folder that it reads, relative to the folder."""
    found = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in found if not NOT_READ.search(path.as_posix())]


def mutations(saved: Saved) -> list[tuple[Path, str, int]]:
    """Return all files with a kind of damage and a place for each region."""
    random.seed(SEED)
    found = []
    for path in files(saved.folder.with_name("pristine")):
        size = (saved.folder.with_name("pristine") / path).stat().st_size
        for region in range(min(REGIONS, size)):
            start, stop = size * region // REGIONS, max(size * (region + 1) // REGIONS, 1)
            place = random.randrange(start, max(stop, start + 1))
            found += [(path, kind, min(place, size - 1)) for kind in ("flip", "truncate")]
        found.append((path, "remove", 0))
    return found


def damage(path: Path, kind: str, place: int) -> None:
    if kind == "remove":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[place] ^= 1 << random.randrange(8)
        path.write_bytes(data)
    else:
        path.write_bytes(data[:place])


def check(model_folder: Path, saved: Saved, mutation: tuple[Path, str, int]) -> str:
    """Damage a copy, start the server, and return what is wrong with its answers; "": nothing."""
    path, kind, place = mutation
    source = saved.folder.with_name("damaged")
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(saved.folder.with_name("pristine"), source)
    damage(source / path, kind, place)
    names = {path.name, *path.parts, path.stem, saved.done[-8:]}  # the model's name
    try:
        found = answers_of(model_folder, source, saved)
    except PeftkitError as error:  # the server does not start
        return "" if path.name in str(error) else f"the error does not name the file: {error}"
    problems = []
    for key, expected in saved.answers.items():
        if found.get(key) == expected or key.endswith("events"):
            continue
        text = json.dumps(found.get(key), default=lambda value: f"<{len(value)} bytes>")
        is_error = "error" in text or "damaged" in text or '"code"' in text
        if not is_error or "Traceback" in text:
            problems.append(f"{key} differs: {text[:300]}")
        elif not any(name in text for name in names) and "damaged" not in text:
            problems.append(f"{key}: the error does not name the file: {text[:300]}")
    return "; ".join(problems)


@pytest.fixture(scope="module")
def pristine(saved: Saved) -> Saved:
    away = saved.folder.with_name("undamaged")
    away.rename(saved.folder.with_name("pristine"))
    return saved


def test_damaged_files_fail_what_they_belong_to(pristine, model_folder):
    saved, source = pristine, pristine.folder.with_name("damaged")
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(saved.folder.with_name("pristine"), source)
    checkpoint = next((source / "jobs" / saved.stopped).glob("checkpoints/step-4/adapter*s"))
    weights = next((source / "tinker" / "weights").glob("*/optimizer.safetensors"))
    for path in (
        source / "jobs" / saved.queued / "recipe.yaml",
        source / "jobs" / saved.done / WEIGHTS,
        checkpoint,
        weights,
    ):
        damage(path, "flip", path.stat().st_size - 2)
    found = answers_of(model_folder, source, saved)
    assert found["queued"]["message"] == "The job's recipe.yaml is damaged on the server."
    assert found["stopped"] == saved.answers["stopped"]  # from its start again
    assert any("Skipped checkpoint" in text for text in found["stopped events"])
    assert "adapter_model.safetensors" in found["chat"]
    assert str(saved.folder) not in found["chat"]
    assert "is damaged" in found["tinker"]["error"]
    assert found["file"] == saved.answers["file"]


@pytest.mark.slow
def test_a_damaged_store_or_upload_is_named(pristine, model_folder):
    saved, source = pristine, pristine.folder.with_name("damaged")
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(saved.folder.with_name("pristine"), source)
    store = source / "server.sqlite"
    data = bytearray(store.read_bytes())
    place = data.index(saved.file.encode(), data.index(b'"purpose"'))
    data[place] ^= 1
    store.write_bytes(data)
    with pytest.raises(PeftkitError, match=r"server\.sqlite is damaged"):
        answers_of(model_folder, source, saved)
    shutil.copy(saved.folder.with_name("pristine") / "server.sqlite", store)
    damage(source / "files" / f"{saved.file}.jsonl", "flip", 30)
    found = answers_of(model_folder, source, saved)
    assert saved.file in found["queued"]["message"]
    assert saved.file in found["stopped"]["message"]
    assert "is damaged on the server" in found["file"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_damage_gives_a_wrong_result(pristine, model_folder, caplog):
    chosen = [each for each in mutations(pristine) if not METRICS.search(each[0].as_posix())]
    random.seed(SEED)
    random.shuffle(chosen)
    problems = {}
    with caplog.at_level(logging.ERROR):
        for mutation in chosen[:COUNT]:
            caplog.clear()
            problem = check(model_folder, pristine, mutation)
            if os.environ.get("PEFTKIT_DAMAGE_LOG"):
                print(mutation, problem, flush=True)
            tracebacks = [record.message for record in caplog.records if record.exc_info]
            if problem or tracebacks:
                problems[mutation] = problem or tracebacks
    assert not problems, "\n".join(f"{key}: {value}" for key, value in problems.items())
