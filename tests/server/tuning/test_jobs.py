"""Jobs give the weights of their recipes, and responses in OpenAI's format."""

import asyncio
import base64
import csv
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from peftkit import open_adapter
from peftkit.errors import ConfigError
from peftkit.formats.peft.load import read_adapter
from peftkit.inference.generate import generate
from peftkit.recipe import load
from peftkit.report.history import read_history
from peftkit.train import checkpoint_files
from peftkit_cli.app import app
from peftkit_server.store import Store
from peftkit_server.tuning import api, jobs, progress
from peftkit_server.tuning.progress import CHECKPOINT, changing
from peftkit_server.validation import read_body
from tests.helpers.call_templates import TEMPLATES
from tests.helpers.full_disk import Full
from tests.helpers.jobs import (
    FILES,
    JOBS,
    LIKE,
    PAIRS,
    WEIGHTS,
    Client,
    Gated,
    Served,
    chats,
    graded,
    hyper,
    prompts,
    serving,
)
from tests.helpers.serving import refusal


def said(folder: Path) -> str:
    """Return what an adapter answers by itself."""
    opened = open_adapter(folder)
    how = {"style": opened.style, "max_new_tokens": 8}
    return generate(opened.base.model, opened.base.tokenizer, "the quick 3", **how)[0]


def figures(client: Client, id: str) -> list[dict[str, Any]]:
    """Return the figures of a job's steps."""
    events = client.get(f"{JOBS}/{id}/events?limit=100").json()["data"]
    return [one["data"] for one in reversed(events) if one["type"] == "metrics"]


class Trained(NamedTuple):
    """A supervised job that has ended, and what the base answered during it."""

    client: Client
    job: dict[str, Any]
    folder: Path
    answers: set[str]


@pytest.fixture(scope="module")
def trained(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    with serving(model_folder, tmp_path_factory.mktemp("trained")) as client:
        answers = {client.say("base")}
        valid = client.upload(chats(3))
        told = {"suffix": "My fox!", "metadata": {"a": "b"}, "method": hyper()}
        job = client.job(chats(), validation_file=valid, **told)
        assert job["status"] == "validating_files"
        while client.get(f"{JOBS}/{job['id']}").json()["status"] not in ("succeeded", "failed"):
            answers.add(client.say("base"))
        yield Trained(client, client.until(job["id"]), client.folder / "jobs" / job["id"], answers)


@pytest.mark.smoke
def test_a_supervised_job_trains_what_its_recipe_trains(trained, alone):
    done = FineTuningJob.model_validate(trained.job, strict=True)
    assert (done.status, done.seed, done.error) == ("succeeded", 7, None)
    assert done.finished_at
    assert done.metadata == {"a": "b"}
    name = done.fine_tuned_model or ""
    assert (name[:22], len(name)) == ("ft:base:local:My-fox-:", 30)
    assert (trained.folder / WEIGHTS).read_bytes() == alone
    assert trained.client.say(name) == said(trained.folder)
    listed = trained.client.get(JOBS, params={"limit": 100}).json()
    assert listed["data"][-1] == trained.job


def test_a_chat_beside_a_job_is_answered_as_without_one(trained):
    assert trained.answers == {trained.client.say("base")}


@pytest.mark.smoke
def test_checkpoints_of_a_job_are_models(trained):
    client, job = trained.client, trained.job
    listed = client.get(f"{JOBS}/{job['id']}/checkpoints").json()
    kept = [FineTuningJobCheckpoint.model_validate(one, strict=True) for one in listed["data"]]
    name = job["fine_tuned_model"]
    names = [name, f"{name}:ckpt-step-6", f"{name}:ckpt-step-3"]
    assert [one.fine_tuned_model_checkpoint for one in kept] == names
    assert [one.step_number for one in kept] == [9, 6, 3]
    assert all(one.metrics.train_loss and one.metrics.full_valid_loss for one in kept)
    models = [one["id"] for one in client.get("/v1/models").json()["data"]]
    assert {"base", *names} <= set(models)
    assert client.say(names[2]) != client.say("base")


@pytest.mark.smoke
def test_the_result_file_has_the_losses_of_each_step(trained):
    (result,) = trained.job["result_files"]
    about = trained.client.get(f"{FILES}/{result}").json()
    assert (about["filename"], about["purpose"]) == ("step_metrics.csv", "fine-tune-results")
    content = trained.client.get(f"{FILES}/{result}/content").content
    rows = list(csv.DictReader(base64.b64decode(content).decode().splitlines()))
    history = read_history(trained.folder)
    losses = [*history.curves["loss"].values()]
    assert [float(row["train_loss"]) for row in rows] == pytest.approx(losses, abs=1e-5)
    assert [row["step"] for row in rows if row["valid_loss"]] == ["3", "6", "9"]
    assert trained.job["trained_tokens"] == history.num_tokens > 0


@pytest.mark.smoke
def test_events_report_each_step_and_checkpoint(trained):
    client, job = trained.client, trained.job
    told = client.events(job["id"])
    start = told.index("Fine-tuning job started")
    assert told[:4] == [
        f"Created fine-tuning job: {job['id']}",
        f"Validating training file: {job['training_file']}",
        f"Validating validation file: {job['validation_file']}",
        "Files validated, moving job to queued state",
    ]
    assert [text.partition(":")[0] for text in told[start + 1 :]] == [
        *(f"Step {n}/9" for n in (1, 2, 3)),
        "Checkpoint created at step 3",
        *(f"Step {n}/9" for n in (4, 5, 6)),
        "Checkpoint created at step 6",
        *(f"Step {n}/9" for n in (7, 8, 9)),
        "proof.json has 4 prompts, 2 of them from the eval rows; train.proof chooses others.",
        "Checkpoint created at step 9",
        "New fine-tuned model created",
        "The job has successfully completed",
    ]
    has_loss = [", validation loss=" in text for text in told if text.startswith("Step ")]
    assert has_loss == [False, False, True] * 3
    page = client.get(f"{JOBS}/{job['id']}/events", params={"limit": 3}).json()
    assert page["has_more"] is True
    shown = [FineTuningJobEvent.model_validate(one, strict=True) for one in page["data"]]
    assert [one.message for one in shown] == told[:-4:-1]
    after = {"after": page["data"][-1]["id"], "limit": 100}
    rest = client.get(f"{JOBS}/{job['id']}/events", params=after).json()["data"]
    assert [one["message"] for one in rest] == told[-4::-1]
    assert figures(client, job["id"])[0].keys() >= {"step", "train_loss", "total_steps"}
    assert any("Step 1/9" in line for line in client.told)


def test_a_job_s_folder_is_a_run(trained, tmp_path):
    folder, command = trained.folder, CliRunner().invoke
    listed = json.loads(command(app, ["runs", str(trained.client.folder), "--json"]).stdout)
    states = {Path(one["run"]).name: (one["state"], one["step"]) for one in listed}
    assert states[folder.name] == ("finished", 9)
    assert command(app, ["report", str(folder)]).exit_code == 0
    assert command(app, ["merge", str(folder), "--out", str(tmp_path / "merged")]).exit_code == 0


def test_weights_and_tools_of_rows_are_learnt_as_they_say(client):
    worker = client.app.state.worker  # type: ignore[attr-defined]
    worker.bank.base.tokenizer.chat_template = TEMPLATES["mistral_v11"]
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"n": 1}'}}
    function = {"name": "find", "parameters": {"type": "object", "properties": {}}}
    row = {
        "messages": [
            {"role": "user", "content": "the quick"},
            {"role": "assistant", "content": "lazy dog", "weight": 0},
            {"role": "user", "content": "find"},
            {"role": "assistant", "tool_calls": [call], "weight": 1},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
            {"role": "assistant", "content": "a fox"},
        ],
        "tools": [{"type": "function", "function": function}],
        "parallel_tool_calls": False,
    }
    job = client.until(client.job([row] * 10, method=hyper(n_epochs=1))["id"])
    assert job["status"] == "succeeded", job["error"]
    facts = json.loads((client.folder / "jobs" / job["id"] / "run.json").read_text())
    learnt = "".join(text for kind, text in facts["row"] if kind == "learnt")
    shown = "".join(text for kind, text in facts["row"] if kind != "learnt")
    assert "find" in learnt
    assert "a fox" in learnt
    assert "lazy dog" in shown
    assert "lazy dog" not in learnt
    assert "parameters" in shown


def test_a_dpo_job_starts_from_the_model_of_a_job(trained):
    client = trained.client
    body = {"model": trained.job["fine_tuned_model"], "method": hyper("dpo", n_epochs=1)}
    job = client.until(client.job(PAIRS, **body)["id"])
    assert job["status"] == "succeeded", job["error"]
    assert job["fine_tuned_model"].startswith("ft:base:local::")
    folder = client.folder / "jobs" / job["id"]
    assert load(folder / "recipe.yaml").method.start_from == str(folder / "start")
    names = {"train_loss", "train_accuracy", "train_margin"}
    assert figures(client, job["id"])[0].keys() >= names
    assert client.say(job["fine_tuned_model"]) == said(folder)


SOURCE = "def grade(sample, item):\n    return sample['output_text'].count('o') / 9\n"
FUNCTION = {"type": "python", "name": "own", "source": SOURCE, "image_tag": "2025-05-08"}


def test_a_reinforcement_job_learns_from_its_grader(served):
    score = {
        "type": "score_model",
        "name": "polite",
        "model": "base",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "{{item.answer}}"}]}],
        "range": [0, 9],
        "sampling_params": {"seed": None, "max_completions_tokens": 2},
    }
    parts = {"like": LIKE, "polite": score}
    grader = {"type": "multi", "name": "all", "graders": parts, "calculate_output": "like"}
    method = graded(grader, eval_interval=1, eval_samples="auto")
    with served(allow_code=True) as client:
        valid = client.upload(prompts(1))
        job = client.until(client.job(prompts(), validation_file=valid, method=method)["id"])
        assert job["status"] == "succeeded", job["error"]
        assert job["method"]["reinforcement"]["grader"] == grader
        assert "valid_loss" in figures(client, job["id"])[-1]
        job = client.until(client.job(prompts(), method=graded(FUNCTION))["id"])
        assert job["status"] == "succeeded", job["error"]
        assert (client.folder / "jobs" / job["id"] / "grader.py").read_text() == SOURCE
        assert all(0 < one["train_reward"] < 9 for one in figures(client, job["id"]))


@pytest.mark.smoke
def test_functions_of_clients_run_only_if_the_operator_allows_it(shared):
    number = len(shared.get(JOBS, params={"limit": 100}).json()["data"])
    body = {"model": "base", "training_file": shared.upload(prompts())}
    error = refusal(shared.post(JOBS, json={**body, "method": graded(FUNCTION)}), 403)
    assert "--run-graders" in error["message"]
    assert len(shared.get(JOBS, params={"limit": 100}).json()["data"]) == number
    assert not [*shared.folder.rglob("*.py")]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["training", "validation"])
def test_a_bad_file_fails_the_job_with_the_line(shared, kind):
    bad = shared.upload([*chats(12), {"messages": "x"}])
    files = {"training_file": shared.upload(chats()), f"{kind}_file": bad}
    job = shared.until(shared.job(**files)["id"])
    error = job["error"]
    assert (error["code"], error["param"]) == (f"invalid_{kind}_file", f"{kind}_file")
    assert "Line 13" in error["message"]
    assert job["status"] == "failed"
    assert shared.events(job["id"])[-1] == f"The job failed: {error['message']}"
    assert FineTuningJob.model_validate(job, strict=True).error


def test_what_only_the_run_can_see_fails_the_job_and_not_the_next_one(shared):
    rows = chats()
    for row in rows:
        row["messages"][1]["weight"] = 0
    error = shared.until(shared.job(rows)["id"])["error"]
    assert error["code"] == "invalid_training_file"
    assert str(shared.folder) not in error["message"]
    job = shared.until(shared.job(chats(), method=hyper(n_epochs=1))["id"])
    assert job["status"] == "succeeded"


REFUSED: list[tuple[dict[str, Any], str | None, int]] = [
    ({"model": "gpt-4o-mini"}, "model", 404),
    ({"training_file": "file-x"}, "training_file", 404),
    ({"validation_file": "file-x"}, "validation_file", 404),
    ({"method": {"type": "sft"}}, "method", 400),
    ({"method": hyper(n_epochs=51)}, "method", 400),
    ({"method": hyper(batch_size=0)}, "method", 400),
    ({"method": hyper(batch_size="4")}, "method", 400),
    ({"method": hyper(learning_rate_multiplier=0)}, "method", 400),
    ({"method": hyper(beta=1)}, "method", 400),
    ({"method": hyper("dpo", beta=2.5)}, "method", 400),
    ({"method": {**hyper(), "dpo": {}}}, "method", 400),
    ({"method": {"type": "reinforcement"}}, "method", 400),
    ({"method": hyper(), "hyperparameters": {"n_epochs": 1}}, None, 400),
    ({"suffix": "x" * 65}, "suffix", 400),
    ({"seed": -1}, "seed", 400),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata", 400),
    ({"metadata": {"a": "b" * 513}}, "metadata", 400),
    ({"integrations": [{"type": "wandb", "wandb": {"project": "mine"}}]}, "integrations", 400),
    ({"integrations": [{"type": "wandb", "wandb": {"project": "peftkit"}}]}, "integrations", 400),
    ({"n_epochs": 3}, "n_epochs", 400),
    ({"method": graded({"type": "x"})}, "grader", 400),
    ({"method": graded({**LIKE, "evaluation_metric": "cosine"})}, "grader", 400),
    ({"method": graded({"type": "score_model", "model": "o4-mini"})}, "grader", 400),
    ({"method": graded(LIKE, reasoning_effort="high")}, "method", 400),
]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("body", "param", "status"), REFUSED, ids=[str(r[0])[:40] for r in REFUSED]
)
def test_invalid_jobs(shared, body, param, status):
    number = len(shared.get(JOBS, params={"limit": 100}).json()["data"])
    file = shared.upload(chats())
    refused = shared.post(JOBS, json={"model": "base", "training_file": file, **body})
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text
    assert len(shared.get(JOBS, params={"limit": 100}).json()["data"]) == number


NONE = [b"", b"{", b"[]", b"\xff", b'{"model": NaN}', b"{" * 2000, b"x" * 2**21]


def test_bodies_are_checked_off_the_loop(shared, monkeypatch):
    def read(data: bytes, kind: Any) -> Any:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return read_body(data, kind)

    monkeypatch.setattr(api, "read_body", read)
    assert shared.post(JOBS, content=b"{}").status_code == 400


@pytest.mark.smoke
@pytest.mark.parametrize("data", NONE, ids=[str(data[:9]) for data in NONE])
def test_a_body_that_is_none_is_refused(shared, data):
    for path in (JOBS, "/v1/fine_tuning/alpha/graders/run"):
        refused = shared.post(path, content=data)
        assert refused.status_code == (413 if len(data) > 2**20 else 400)


# Jobs that are interrupted.


@contextmanager
def held(served: Served, step: int) -> Iterator[tuple[Client, str, Gated]]:
    """Serve a job that waits after a step; yield the client, the job's id and its gate."""
    gate = Gated(f"Step {step}/9")
    with served(say=gate.say) as client:
        id = client.job(chats(), method=hyper())["id"]
        assert gate.reached.wait(60)
        yield client, id, gate


def stopped_at(step: int, served: Served) -> tuple[str, Path]:
    """Return the id and the folder of a job whose server ended after a step."""
    with held(served, step) as (client, id, gate):
        gate.go(0.2)
    return id, client.folder / "jobs" / id


@pytest.mark.parametrize("what", ["pause", "the server ends"])
def test_an_interrupted_job_is_bit_equal(served, alone, what):
    with held(served, 4) as (client, id, gate):
        if what == "pause":
            assert client.post(f"{JOBS}/{id}/pause").json()["status"] == "paused"
        gate.go(0.0 if what == "pause" else 0.2)  # while the server waits for the step
        if what == "pause":
            assert client.say("base")  # the step is over
            assert client.until(id, "paused")["estimated_finish"] is None
    folder = client.folder / "jobs" / id
    assert [path.name for path in (folder / "checkpoints").glob("step-4")] == ["step-4"]
    with served() as client:
        if what == "pause":
            assert client.until(id, "paused")
            assert client.post(f"{JOBS}/{id}/resume").json()["status"] == "queued"
        assert client.until(id)["status"] == "succeeded"
        assert (folder / WEIGHTS).read_bytes() == alone
        told = client.events(id)
        assert "Fine-tuning job resumed after step 4" in told
        steps = [text.split("/")[0] for text in told if text.startswith("Step ")]
        assert steps == [f"Step {n}" for n in range(1, 10)]
        kept = client.get(f"{JOBS}/{id}/checkpoints").json()["data"]
        assert [one["step_number"] for one in kept] == [9, 6, 3]


@pytest.mark.parametrize(
    ("other", "changes"),
    [
        ({"dtype": "bf16"}, ['base.computes_in: "float32" -> "bfloat16"', "base.dtype: "]),
        pytest.param(
            {"quantize": "nf4"}, ['base.quantize: "none" -> "nf4"'], marks=pytest.mark.slow
        ),
    ],
)
def test_jobs_resume_over_another_dtype(served, other, changes):
    with held(served, 4) as (client, id, gate):
        waits = client.job(chats(), method=hyper(n_epochs=1))["id"]
        client.until(waits, "queued")
        gate.go(0.2)
    with served(**other) as client:
        assert client.until(id)["status"] == client.until(waits)["status"] == "succeeded"
        (told,) = (text for text in client.events(id) if "Resumed with these changes" in text)
        assert [change for change in changes if change in told] == changes
        (told,) = (text for text in client.events(waits) if "loaded with other settings" in text)
        ((name, value),) = other.items()
        assert f"base.{name}: " in told
        adapter = read_adapter(client.folder / "jobs" / waits)
        assert adapter.provenance.loading[name] == value


def test_a_job_waits_for_its_base(served, model_folder, tmp_path):
    id, _ = stopped_at(4, served)
    other = Path(shutil.copytree(model_folder, tmp_path / "other"))
    model = AutoModelForCausalLM.from_pretrained(other)
    torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.weight)
    model.save_pretrained(other)
    with serving(other, tmp_path / "server") as client:
        later = client.job(chats(), method=hyper(n_epochs=1))["id"]
        assert client.until(later)["status"] == "succeeded"
        assert client.get(f"{JOBS}/{id}").json()["status"] == "running"
        assert f"The job waits for a server with its base: {model_folder.name}" in client.events(id)
    with served() as client:
        assert client.until(id)["status"] == "succeeded"


@pytest.mark.parametrize(
    "when", ["in its midst", pytest.param("at its start", marks=pytest.mark.slow)]
)
def test_a_job_waits_for_space(served, alone, monkeypatch, when):
    """As `tests/train/test_disk.py`; the store is smaller, and can still write."""
    space = {"free": 1 << 40}
    monkeypatch.setattr(jobs, "RETRY_SECONDS", 0.05)
    tries: list[int] = []

    def tried(folder: Path) -> int:
        if space["free"] == 1:
            tries.append(1)
            if len(tries) == 4:
                space["free"] = 1 << 40
        return space["free"]

    def say(text: str) -> None:
        if "Step 3/9" in text and when == "in its midst" and not tries:
            space["free"] = 1

    monkeypatch.setattr(checkpoint_files, "free_bytes", tried)
    space["free"] = 1 if when == "at its start" else space["free"]
    with served(say=say) as client:
        id = client.job(chats(), method=hyper())["id"]
        assert client.until(id)["status"] == "succeeded"
        assert (client.folder / "jobs" / id / WEIGHTS).read_bytes() == alone
        told = client.events(id)
        assert told.count("The job waits: the server's disk is full") == 1
        others = [text for text in told if not text.startswith(("Step ", "Fine-tuning job "))]
        assert len(others) == len(set(others))


def test_a_job_whose_rows_say_that_a_disk_is_full_fails(served):
    rows = [{"cannot save a checkpoint in a: the disk is full": 1, "The disk is full": 2}] * 12
    with served() as client:
        assert client.until(client.job(rows, method=hyper())["id"])["status"] == "failed"


@pytest.mark.smoke
def test_a_server_killed_around_a_checkpoint_resumes(served, alone):
    id, folder = stopped_at(2, served)
    # as if it had been killed in the midst of writing the checkpoint
    (folder / "checkpoints" / "step-2" / "MANIFEST.json").unlink()
    with served() as client:
        assert client.until(id)["status"] == "succeeded"
        assert "resumed after" not in "".join(client.events(id))
        assert (folder / WEIGHTS).read_bytes() == alone
    # as if it had been killed before it could say that it is done
    store = Store(client.folder)
    with changing(store, id) as job:
        job["response"] |= {"status": "running", "fine_tuned_model": None, "result_files": []}
    for one in store.all(CHECKPOINT, parent=id):
        store.delete(CHECKPOINT, one["response"]["id"])
    store.close()
    with served() as client:
        done = client.until(id)
        assert done["status"] == "succeeded"
        assert client.say(done["fine_tuned_model"])
        assert (folder / WEIGHTS).read_bytes() == alone


def test_a_job_is_cancelled_at_its_next_step_or_before_it_begins(served):
    with held(served, 2) as (client, first, gate):
        second = client.job(chats(), method=hyper())["id"]
        client.until(second, "queued")
        for what in ("pause", "resume") * 3:
            assert client.post(f"{JOBS}/{second}/{what}").status_code == 200
        assert len(client.app.state.worker._training_runs) == 1  # it waits once
        file = client.get(f"{JOBS}/{first}").json()["training_file"]
        assert client.delete(f"{FILES}/{file}").json()["error"]["code"] == "file_in_use"
        for id in (second, first):
            told = client.post(f"{JOBS}/{id}/cancel").json()
            assert told["status"] == "cancelled"
            assert told["finished_at"]
        gate.go()
        third = client.until(client.job(chats(), method=hyper(n_epochs=1))["id"])
        assert third["status"] == "succeeded"
        assert client.events(first)[-1] == "The job is cancelled"
        assert not any("Step 3" in text for text in client.events(first))
        assert not any("Step" in text for text in client.events(second))
        assert len(client.get("/v1/models").json()["data"]) == 2
        assert client.delete(f"{FILES}/{file}").status_code == 200
        for what in ("cancel", "pause", "resume"):
            assert "is cancelled" in refusal(client.post(f"{JOBS}/{first}/{what}"))["message"]


def test_waiting_jobs_are_bounded(served):
    gate = Gated("Step 1/9")
    with served(say=gate.say, limits={"key_jobs": 2}) as client:
        ids = [client.job(chats(), method=hyper())["id"] for _ in range(2)]
        assert gate.reached.wait(60)
        body = {"model": "base", "training_file": client.upload(chats())}
        assert refusal(client.post(JOBS, json=body), 429)["code"] == "queue_full"
        for id in ids:
            client.post(f"{JOBS}/{id}/cancel")
        gate.go()
        assert client.post(JOBS, json=body).status_code == 200


def test_a_job_survives_a_full_disk(served, alone, monkeypatch):
    full = Full(monkeypatch)
    with held(served, 5) as (client, id, gate):
        waits = client.job(chats(), method=hyper(n_epochs=1))["id"]
        client.until(waits, "queued")
        gate.go(0.1)
        full.for_a_moment()  # in the midst of the first job
        assert client.until(id)["status"] == client.until(waits)["status"] == "succeeded"
        assert (client.folder / "jobs" / id / WEIGHTS).read_bytes() == alone


@pytest.mark.parametrize("where", ["_make_recipe", "_run", "_finish", "count_rows"])
def test_a_full_disk_around_a_run_delays_its_end_alone(served, monkeypatch, where):
    is_failure = where == "count_rows"  # of a file with too few rows
    full, place = Full(monkeypatch), jobs if is_failure else jobs.Jobs
    plain = getattr(place, where)

    def at_once_full(*args: Any, **named: Any) -> Any:
        full.is_full = not full.refused.is_set()
        return plain(*args, **named)

    monkeypatch.setattr(place, where, at_once_full)
    with served() as client:
        id = client.job(chats(9 if is_failure else 12), method=hyper(n_epochs=1))["id"]
        assert full.refused.wait(60)
        full.is_full = False
        job = client.until(id)
        expected = ("failed", "invalid_n_examples") if is_failure else ("succeeded", None)
        assert (job["status"], (job["error"] or {}).get("code")) == expected


def test_a_full_disk_is_a_server_error(client, monkeypatch):
    file, full = client.upload(chats()), Full(monkeypatch)
    full.is_full = True
    error = refusal(client.post(JOBS, json={"model": "base", "training_file": file}), 503)
    assert error["type"] == "server_error"
    full.is_full = False
    assert client.post(JOBS, json={"model": "base", "training_file": file}).status_code == 200


def test_a_job_keeps_its_start_adapter(served, monkeypatch):
    monkeypatch.setattr(progress, "MAX_CHECKPOINTS", 1)
    with held(served, 5) as (client, first, gate):
        (kept,) = client.get(f"{JOBS}/{first}/checkpoints").json()["data"]
        model = kept["fine_tuned_model_checkpoint"]
        second = client.job(chats(), model=model, method=hyper(n_epochs=1))["id"]
        client.until(second, "queued")
        gate.go()
        done = client.until(second)
        assert done["status"] == "succeeded", done["error"]
        assert not (client.folder / "checkpoints" / f"{first}-step-3").exists()
        assert client.say(done["fine_tuned_model"])


@pytest.mark.parametrize(("kind", "before"), [(ConfigError, ""), (OSError, "OSError: ")])
def test_why_a_job_failed_is_told_without_the_server_s_paths(client, monkeypatch, kind, before):
    def fails(*args: Any, **named: Any) -> None:
        raise kind(f"{client.folder / 'jobs' / 'other' / 'x.json'} is damaged.")

    monkeypatch.setattr(jobs, "run", fails)
    error = client.until(client.job(chats())["id"])["error"]
    assert error["message"] == f"{before}server/jobs/other/x.json is damaged."
