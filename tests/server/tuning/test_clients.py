"""Behavior that clients of the fine-tuning API rely on."""

import json
import os
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from peftkit.errors import ConfigError
from peftkit.formats.peft.load import read_adapter
from peftkit.methods.lora import LoRA
from peftkit.train import loop
from peftkit_server.tuning import jobs
from tests.helpers.bank import write_adapter
from tests.helpers.full_disk import Full
from tests.helpers.jobs import FILES, JOBS, chats, hyper
from tests.helpers.serving import refusal

GRADERS = "/v1/fine_tuning/alpha/graders"


@pytest.mark.parametrize("action", ["cancel", "pause"])
def test_a_job_that_is_stopped_while_memory_is_planned_takes_no_step(client, monkeypatch, action):
    plan, ids = loop.plan_memory_and_compile, list[str]()

    def stopping(*args: Any) -> None:
        if ids:
            assert client.post(f"{JOBS}/{ids[0]}/{action}").status_code == 200
        plan(*args)

    monkeypatch.setattr(loop, "plan_memory_and_compile", stopping)
    file = client.upload(chats())
    gate = threading.Event()
    client.app.state.worker.call(lambda: gate.wait(60))
    ids.append(client.job(training_file=file, method=hyper())["id"])
    gate.set()
    client.until(ids[0], "cancelled", "paused")
    stopped = ids.pop()
    other = client.job(training_file=file, method=hyper(n_epochs=1))["id"]
    assert client.until(other)["status"] == "succeeded"
    assert not any("Step" in text or "started" in text for text in client.events(stopped))
    if action == "pause":
        assert client.post(f"{JOBS}/{stopped}/resume").status_code == 200
        assert client.until(stopped)["status"] == "succeeded"


def test_fields_that_nothing_reads_are_reported(client):
    rows = [{**row, "foo": 1, "bar": [2]} for row in chats()]
    done = client.until(client.job(rows, method=hyper(n_epochs=1))["id"])
    assert done["status"] == "succeeded"
    (warning,) = [text for text in client.events(done["id"]) if "not used" in text]
    assert "foo" in warning
    assert "bar" in warning
    assert done["training_file"] in warning


def test_functions_of_old_rows_are_refused(client):
    call = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    turns = [{"role": "user", "content": "weather"}, call]
    rows = [{"messages": turns, "functions": [{"name": "f", "parameters": {}}]}] * 10
    error = client.until(client.job(rows)["id"])["error"]
    assert error["code"] == "invalid_training_file"
    assert "functions: the field is deprecated; use tools" in error["message"]


def test_files_and_models_are_deleted_on_a_full_disk(served, monkeypatch):
    with served() as client:
        done = client.until(client.job(chats(), method=hyper(n_epochs=1))["id"])
        file, model = done["training_file"], done["fine_tuned_model"]
        full = Full(monkeypatch)
        for url, path in (
            (f"{FILES}/{file}", client.folder / "files" / f"{file}.jsonl"),
            (f"/v1/models/{model}", client.folder / "jobs" / done["id"]),
        ):
            assert path.exists()
            full.is_full, full.file = True, path
            gone = client.delete(url)
            assert (gone.status_code, gone.json()["deleted"]) == (200, True), gone.text
            assert not path.exists()
            full.is_full = False
            assert client.get(url).status_code == 404
    with served() as client:
        assert file not in [each["id"] for each in client.get(FILES).json()["data"]]


def test_a_model_is_deleted_with_its_files(served):
    keys = ("one", "two")
    with served(keys=keys) as client:
        client.headers["Authorization"] = "Bearer one"
        done = client.until(client.job(chats(), method=hyper(n_epochs=2))["id"])
        model, folder = done["fine_tuned_model"], client.folder / "jobs" / done["id"]
        checkpoints = client.get(f"{JOBS}/{done['id']}/checkpoints").json()["data"]
        names = [each["fine_tuned_model_checkpoint"] for each in checkpoints]
        assert len(names) == 2
        client.headers["Authorization"] = "Bearer two"
        assert client.delete(f"/v1/models/{model}").status_code == 404
        client.headers["Authorization"] = "Bearer one"
        assert client.delete("/v1/models/base").status_code == 403
        answer = client.say(names[1])
        assert client.say(model)
        gone = client.delete(f"/v1/models/{model}").json()
        assert gone == {"id": model, "object": "model", "deleted": True}
        assert client.get(f"/v1/models/{model}").status_code == 404
        assert client.delete(f"/v1/models/{model}").status_code == 404
        assert not (folder / "adapter_model.safetensors").exists()
        assert client.say(names[1]) == answer  # a checkpoint is another model
        assert client.delete(f"/v1/models/{names[1]}").status_code == 200
        assert not folder.exists()
        assert client.get(f"{JOBS}/{done['id']}").json()["status"] == "succeeded"


@pytest.mark.parametrize(
    ("limits", "code", "message"),
    [
        ({"key_files": 1}, "key_files", "files already"),
        ({"key_bytes": 3000}, "key_bytes", "stores"),
        ({"key_models": 1}, "key_models", "1 saved models"),
        ({"key_records": 1}, "key_records", "1 jobs, sessions and models"),
    ],
)
def test_one_key_stores_a_bounded_number_of_files_and_models(served, limits, code, message):
    with served(keys=("one", "two"), limits=limits) as client:

        def requests() -> list[Any]:
            form = {"files": {"file": ("a.jsonl", json.dumps(chats()).encode())}}
            first = client.post(FILES, **form, data={"purpose": "fine-tune"})
            if first.status_code != 200:
                return [first]
            body = {
                "model": "base",
                "training_file": first.json()["id"],
                "method": hyper(n_epochs=1),
            }
            job = client.post(JOBS, json=body)
            if job.status_code == 200:
                client.until(job.json()["id"])
            return [
                first,
                job,
                client.post(FILES, **form, data={"purpose": "fine-tune"}),
                client.post(JOBS, json=body),
            ]

        client.headers["Authorization"] = "Bearer one"
        (refused, *_) = [each for each in requests() if each.status_code != 200]
        assert refused.status_code == (429 if code == "key_records" else 507)
        error = refused.json()["error"]
        assert (error["code"], error["type"]) != (None, "server_error")
        assert message in error["message"]
        assert error["code"] == code
        assert "DELETE /v1/" in error["message"] or code == "key_records"
        client.headers["Authorization"] = "Bearer two"
        assert requests()[0].status_code == 200


def test_graders_delay_no_upload(served, monkeypatch):
    score = {
        "type": "score_model",
        "name": "judge",
        "model": "base",
        "input": [{"role": "user", "content": "the quick"}],
        "range": [0, 1],
    }
    body = {"grader": score, "model_sample": "x", "item": {}}
    statuses: list[int] = []
    with served(limits={"graders": 2, "grader_seconds": 2}) as client:
        gate = threading.Event()
        client.app.state.worker.call(lambda: gate.wait(60))

        def run() -> None:
            statuses.append(client.post(f"{GRADERS}/run", json=body).status_code)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        while not statuses and client.post(f"{GRADERS}/run", json=body).status_code != 429:
            time.sleep(0.01)
        began = time.monotonic()
        client.upload(chats())
        client.post(JOBS, json={"model": "base", "training_file": "file-x"})
        assert time.monotonic() - began < 1.5
        for thread in threads:
            thread.join()
        assert statuses == [429] * 4  # their time limit
        gate.set()
        assert client.post(f"{GRADERS}/run", json=body).status_code == 200


@pytest.mark.smoke
def test_a_grader_that_hangs_ends_with_its_process(served, tmp_path):
    mark = tmp_path / "mark"
    source = (
        "import os, time\n"
        f"open({str(mark)!r}, 'w').write(str(os.getpid()))\n"
        "def grade(sample, item):\n"
        "    print('noise')\n"
        "    while item['hangs']: time.sleep(0.01)\n"
        "    return 1\n"
    )
    grader = {"type": "python", "name": "g", "source": source}
    with served(allow_code=True, limits={"grader_seconds": 1}) as client:
        body = {"grader": grader, "model_sample": "x", "item": {"hangs": True}}
        error = refusal(client.post(f"{GRADERS}/run", json=body))
        assert "longer than 1 seconds" in error["message"]
        with suppress(ProcessLookupError):
            for _ in range(1000):  # it is killed a moment later
                os.kill(int(mark.read_text()), 0)
                time.sleep(0.01)
            pytest.fail("the grader's process runs")
        body["item"] = {"hangs": False}
        done = client.post(f"{GRADERS}/run", json=body)
        assert done.json()["reward"] == 1.0
        for text in ("raise SystemExit(3)", "import os; os._exit(7)", "return 'x'", "return None"):
            source = f"def grade(sample, item):\n    {text}\n"
            body["grader"] = {**grader, "source": source}
            assert client.post(f"{GRADERS}/run", json=body).status_code == 400, text


@pytest.mark.smoke
def test_errors_of_a_job_hide_the_operator_s_folders(model_folder, tmp_path, served, monkeypatch):
    with served() as client:
        base = client.app.state.worker.bank.base
        folder = write_adapter(base.model, LoRA(rank=2), tmp_path / "secret" / "op", 1)
        client.app.state.worker.bank.add("op", folder)

        def fails(*args: Any, **named: Any) -> None:
            raise ConfigError(f"{folder} is damaged.")

        monkeypatch.setattr(jobs, "run", fails)
        error = client.until(client.job(chats())["id"])["error"]
    assert error["message"] == "op is damaged."
    assert read_adapter(folder)


def test_folders_of_a_killed_server_are_removed(served):
    with served() as client:
        done = client.until(client.job(chats(), method=hyper(n_epochs=1))["id"])
        folder = client.folder / "jobs" / done["id"]
    checkpoints = client.folder / "checkpoints"
    left = [folder / ".start-0a1b2c3d", checkpoints / f".{done['id']}-step-3-0a1b2c3d"]
    for path in left:
        path.mkdir(parents=True)
        (path / "adapter_model.safetensors").touch()
    with served() as client:
        assert not any(path.exists() for path in left)
        assert client.say(done["fine_tuned_model"])
