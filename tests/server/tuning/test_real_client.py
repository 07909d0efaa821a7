"""OpenAI's own client, over a socket, to `peftkit serve --train`: the guide's program as it stands,
jobs that are paused and cancelled, and one whose server is killed."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.command_line import ROOT, start
from tests.helpers.jobs import JOBS, PAIRS, WEIGHTS, chats, hyper, serving

NAME = "gpt-4o-mini-2024-07-18"
KEY = "a-key-of-this-test"
PAGE = ROOT / "docs" / "openai-jobs.md"


@contextmanager
def server(model: Path, folder: Path) -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """Start a server; yield a client of it and its process."""
    command = ("serve", model, "--train", "tuning", "--as", NAME, "--port", 0, "--api-key", KEY)
    process = start(*command, cwd=folder)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), process.communicate()
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client, process


def upload(client: Any, rows: list[Any]) -> str:
    data = "\n".join(map(json.dumps, rows)).encode()
    file = client.files.create(file=("rows.jsonl", data), purpose="fine-tune")
    assert client.files.content(file.id).read() == data
    return str(file.id)


def until(client: Any, id: str, is_so: Callable[[Any], bool]) -> Any:
    while not is_so(job := client.fine_tuning.jobs.retrieve(id)):
        assert job.status != "failed", job.error
        time.sleep(0.02)
    return job


def steps(client: Any, id: str) -> int:
    """Return how many steps a job has told of."""
    told = client.fine_tuning.jobs.list_events(id, limit=100).data
    return max([event.data["step"] for event in told if event.type == "metrics"], default=0)


@pytest.mark.slow  # test_jobs.py has pauses, restarts and cancellations in this process
def test_openai_s_client_trains_and_chats_and_a_killed_server_goes_on(
    model_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    longer = hyper(n_epochs=12)
    with server(model_folder, tmp_path) as (client, process):
        # the guide's program, whose address and key are in the environment
        monkeypatch.setenv("OPENAI_BASE_URL", str(client.base_url))
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        program = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
        exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
        told = capsys.readouterr().out
        assert "The job has successfully completed" in told
        assert f"ft:{NAME}:local:colours:" in told.splitlines()[-1]
        # a job that is paused, and goes on; another one is cancelled
        jobs = client.fine_tuning.jobs
        body = {"model": NAME, "seed": 7, "training_file": upload(client, chats())}
        paused = jobs.create(**body, method=longer).id
        until(client, paused, lambda _: steps(client, paused) > 1)
        assert jobs.pause(paused).status == "paused"
        pairs = {**body, "training_file": upload(client, PAIRS)}
        preferred = jobs.create(**pairs, method=hyper("dpo", n_epochs=1)).id
        done = until(client, preferred, lambda job: job.status == "succeeded")
        assert jobs.cancel(jobs.create(**body).id).status == "cancelled"
        assert jobs.resume(paused).status == "queued"
        asked = [{"role": "user", "content": "the quick 3"}]
        answer = client.chat.completions.create(
            model=done.fine_tuned_model, messages=asked, max_tokens=8
        )
        assert answer.choices[0].message.content
        # killed in the midst of a job, with another one that waits
        killed = jobs.create(**body, method=longer).id
        waits = jobs.create(**body | {"model": done.fine_tuned_model}, method=hyper(n_epochs=1)).id
        until(client, killed, lambda _: steps(client, killed) > 3)
        process.kill()
        process.wait()
    folders = [tmp_path / "tuning" / "jobs" / id for id in (paused, killed)]
    assert [(folder / WEIGHTS).exists() for folder in folders] == [True, False]
    with serving(model_folder, tmp_path / "tuning", keys=[KEY], dtype="auto") as again:
        again.headers["Authorization"] = f"Bearer {KEY}"
        ended = [again.until(id) for id in (killed, waits)]
        assert [job["status"] for job in ended] == ["succeeded", "succeeded"]
        events = again.get(f"{JOBS}/{killed}/events?limit=100").json()["data"]
        assert any("resumed after step" in event["message"] for event in events)
        assert all(again.say(job["fine_tuned_model"]) for job in ended)
    weights = [(folder / WEIGHTS).read_bytes() for folder in folders]
    assert weights[0] == weights[1]
