"""Jobs: what they learn is what their recipe learns; what clients see has OpenAI's shapes."""

from __future__ import annotations

import asyncio
import base64
import csv
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from peftkit import open_adapter
from peftkit.defaults import PREFERENCE_RATE, learning_rate_of
from peftkit.errors import ConfigError
from peftkit.formats.peft.folder import read_adapter
from peftkit.inference.generate import generate
from peftkit.recipe import load
from peftkit.report.history import read_history
from peftkit.serve.requests import read_body
from peftkit.serve.store import Store, StoreError
from peftkit.serve.tuning import jobs, pages, progress
from peftkit.serve.tuning.documents import CHECKPOINT, changing
from peftkit.serve.tuning.recipes import ANSWER_TOKENS, ANSWERS, PROMPTS, REWARDS_RATE
from peftkit.train import checkpoint_files
from peftkit_cli.about import recipe_file
from peftkit_cli.app import app
from tests.helpers.call_templates import TEMPLATES
from tests.serve.tuning.conftest import (
    FILES,
    JOBS,
    WEIGHTS,
    Client,
    Served,
    chats,
    hyper,
    serving,
)

PAIRS = [
    {
        "input": {"messages": [{"role": "user", "content": f"the quick {n}"}]},
        "preferred_output": [{"role": "assistant", "content": "brown fox"}],
        "non_preferred_output": [{"role": "assistant", "content": "lazy dog"}],
    }
    for n in range(12)
]
LIKE = {
    "type": "text_similarity",
    "name": "like",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "evaluation_metric": "fuzzy_match",
}


def prompts(number: int = 4) -> list[dict[str, Any]]:
    """Return rows of reinforcement."""
    turns = [{"role": "user", "content": "the quick"}]
    return [{"messages": turns, "answer": f"brown fox {n}"} for n in range(number)]


def graded(grader: Any, **settings: Any) -> dict[str, Any]:
    """Return a method of reinforcement."""
    settings = {"n_epochs": 1, "batch_size": 4, "compute_multiplier": 0.25, **settings}
    section = {"grader": grader, "hyperparameters": settings}
    return {"type": "reinforcement", "reinforcement": section}


def said(folder: Path) -> str:
    """Return what an adapter answers by itself."""
    opened = open_adapter(folder)
    how = {"style": opened.style, "max_new_tokens": 8}
    return generate(opened.base.model, opened.base.tokenizer, "the quick 3", **how)[0]


def figures(client: Client, id: str) -> list[dict[str, Any]]:
    """Return the figures of a job's steps."""
    events = client.get(f"{JOBS}/{id}/events?limit=100").json()["data"]
    return [one["data"] for one in reversed(events) if one["type"] == "metrics"]


def test_a_supervised_job_from_its_rows_to_the_chat(client: Client, alone: bytes) -> None:
    valid = client.upload(chats(3))
    job = client.job(chats(), validation_file=valid, method=hyper(), suffix="My fox!")
    done = FineTuningJob.model_validate(client.until(job["id"]), strict=True)
    assert (done.status, done.seed, done.error) == ("succeeded", 7, None)
    assert done.finished_at
    name, folder = done.fine_tuned_model or "", client.folder / "jobs" / job["id"]
    assert (name[:22], len(name)) == ("ft:base:local:My-fox-:", 30)
    assert (folder / WEIGHTS).read_bytes() == alone
    assert client.say(name) == said(folder)
    # its checkpoints answer, too
    listed = client.get(f"{JOBS}/{job['id']}/checkpoints").json()
    kept = [FineTuningJobCheckpoint.model_validate(one, strict=True) for one in listed["data"]]
    names = [name, f"{name}:ckpt-step-6", f"{name}:ckpt-step-3"]
    assert [one.fine_tuned_model_checkpoint for one in kept] == names
    assert [one.step_number for one in kept] == [9, 6, 3]
    assert all(one.metrics.train_loss and one.metrics.full_valid_loss for one in kept)
    models = [one["id"] for one in client.get("/v1/models").json()["data"]]
    assert set(models) == {"base", *names}
    assert client.say(names[2]) != client.say("base")
    # the figures of each step
    (result,) = done.result_files
    about = client.get(f"{FILES}/{result}").json()
    assert (about["filename"], about["purpose"]) == ("step_metrics.csv", "fine-tune-results")
    table = base64.b64decode(client.get(f"{FILES}/{result}/content").content).decode()
    rows = list(csv.DictReader(table.splitlines()))
    losses = read_history(folder).curves["loss"]
    assert [float(row["train_loss"]) for row in rows] == pytest.approx([*losses.values()], abs=1e-5)
    assert [row["step"] for row in rows if row["valid_loss"]] == ["3", "6", "9"]
    assert done.trained_tokens == read_history(folder).num_tokens > 0


def test_what_a_job_tells_while_it_runs(shared: Client) -> None:
    valid = shared.upload(chats(3))
    job = shared.job(chats(), validation_file=valid, method=hyper(n_epochs=2), metadata={"a": "b"})
    assert job["status"] == "validating_files"
    shared.until(job["id"])
    told = shared.events(job["id"])
    start = told.index("Fine-tuning job started")
    assert told[:4] == [
        f"Created fine-tuning job: {job['id']}",
        f"Validating training file: {job['training_file']}",
        f"Validating validation file: {valid}",
        "Files validated, moving job to queued state",
    ]
    assert [text.partition(":")[0] for text in told[start + 1 :]] == [
        *(f"Step {n}/6" for n in (1, 2, 3)),
        "Checkpoint created at step 3",
        *(f"Step {n}/6" for n in (4, 5, 6)),
        "Checkpoint created at step 6",
        "New fine-tuned model created",
        "The job has successfully completed",
    ]
    has_loss = [", validation loss=" in text for text in told if text.startswith("Step ")]
    assert has_loss == [False, False, True] * 2
    page = shared.get(f"{JOBS}/{job['id']}/events", params={"limit": 3}).json()
    assert page["has_more"] is True
    shown = [FineTuningJobEvent.model_validate(one, strict=True) for one in page["data"]]
    assert [one.message for one in shown] == told[:-4:-1]
    after = {"after": page["data"][-1]["id"], "limit": 100}
    rest = shared.get(f"{JOBS}/{job['id']}/events", params=after).json()["data"]
    assert [one["message"] for one in rest] == told[-4::-1]
    assert figures(shared, job["id"])[0].keys() >= {"step", "train_loss", "total_steps"}
    assert any("Step 1/6" in line for line in shared.told)
    assert shared.get(f"{JOBS}/{job['id']}").json()["metadata"] == {"a": "b"}
    listed = shared.get(JOBS, params={"limit": 1}).json()
    assert [one["id"] for one in listed["data"]] == [job["id"]]


def test_auto_becomes_numbers_by_the_rules_of_defaults(shared: Client) -> None:
    names = ("n_epochs", "batch_size", "learning_rate_multiplier")
    job = shared.job(chats(120), hyperparameters={"n_epochs": "auto"})
    assert job["hyperparameters"] == dict.fromkeys(names, "auto")
    while (found := shared.get(f"{JOBS}/{job['id']}").json())["status"] == "validating_files":
        pass
    shared.post(f"{JOBS}/{job['id']}/cancel")
    assert found["hyperparameters"] == dict(zip(names, (5, 4, 1.0), strict=True))
    told = load(shared.folder / "jobs" / job["id"] / "recipe.yaml")
    assert (told.train.learning_rate, told.train.epochs, told.method.rank) == (1e-2, 5.0, 16)
    assert not told.data.packing


def test_rates_and_answers_are_those_of_the_ready_made_recipes() -> None:
    rewards = load(recipe_file("grpo"))
    assert (rewards.train.learning_rate, rewards.train.batch_size) == (REWARDS_RATE, PROMPTS)
    task = rewards.task.model_dump()
    assert (task["answers"], task["max_new_tokens"]) == (ANSWERS, ANSWER_TOKENS)


@pytest.mark.parametrize("kind", ["old", "method"])
def test_hyperparameters_stand_in_either_place(shared: Client, kind: str) -> None:
    given = {"n_epochs": 1, "batch_size": 12, "learning_rate_multiplier": 0.5}
    body = {"hyperparameters": given} if kind == "old" else {"method": hyper(**given)}
    job = shared.until(shared.job(chats(), **body)["id"])
    assert job["hyperparameters"] == job["method"]["supervised"]["hyperparameters"] == given
    told = load(shared.folder / "jobs" / job["id"] / "recipe.yaml")
    assert told.train.learning_rate == pytest.approx(0.5 * 1e-2)
    assert [one["step"] for one in figures(shared, job["id"])] == [1]


def test_weights_and_tools_of_rows_are_learnt_as_they_say(client: Client) -> None:
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


def test_a_dpo_job_prefers_and_goes_on_from_a_job_s_model(shared: Client) -> None:
    first = shared.until(shared.job(chats(), method=hyper(n_epochs=1))["id"])
    body = {"model": first["fine_tuned_model"], "method": hyper("dpo", beta=0.3, n_epochs=1)}
    job = shared.until(shared.job(PAIRS, **body)["id"])
    assert job["status"] == "succeeded", job["error"]
    assert job["fine_tuned_model"].startswith("ft:base:local::")
    folder = shared.folder / "jobs" / job["id"]
    told = load(folder / "recipe.yaml")
    assert told.method.start_from == str(folder / "start")
    assert told.task.model_dump().items() >= {"loss": "dpo", "beta": 0.3}.items()
    rate = PREFERENCE_RATE * learning_rate_of(32)
    assert told.train.learning_rate == pytest.approx(5 * rate)
    names = {"train_loss", "train_accuracy", "train_margin"}
    assert figures(shared, job["id"])[0].keys() >= names
    assert shared.say(job["fine_tuned_model"]) == said(folder)


def test_a_reinforcement_job_learns_from_its_grader(shared: Client) -> None:
    score = {
        "type": "score_model",
        "name": "polite",
        "model": "base",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "{{item.answer}}"}]}],
        "range": None,
        "sampling_params": {"seed": None, "max_completions_tokens": 2},
    }
    parts = {"like": LIKE, "polite": {**score, "range": [0, 9]}}
    grader = {"type": "multi", "name": "all", "graders": parts, "calculate_output": "like"}
    valid = shared.upload(prompts(1))
    method = graded(grader, eval_interval=1, eval_samples="auto")
    job = shared.until(shared.job(prompts(), validation_file=valid, method=method)["id"])
    assert job["status"] == "succeeded", job["error"]
    assert job["method"]["reinforcement"]["grader"] == grader
    told = load(shared.folder / "jobs" / job["id"] / "recipe.yaml")
    assert told.task.model_dump()["answers"] == 2
    assert (told.train.eval_every, told.train.schedule) == (1, "constant")
    assert "valid_loss" in figures(shared, job["id"])[-1]


def test_functions_of_clients_run_only_where_the_operator_says_so(served: Served) -> None:
    source = "def grade(sample, item):\n    return sample['output_text'].count('o') / 9\n"
    grader = {"type": "python", "name": "own", "source": source, "image_tag": "2025-05-08"}
    with served() as client:
        body = {"model": "base", "training_file": client.upload(prompts())}
        refused = client.post(JOBS, json={**body, "method": graded(grader)})
        assert refused.status_code == 403
        assert "--run-graders" in refused.json()["error"]["message"]
        assert client.get(JOBS).json()["data"] == []
        assert not [*client.folder.rglob("*.py")]
    with served(allow_code=True) as client:
        job = client.until(client.job(prompts(), method=graded(grader))["id"])
        assert job["status"] == "succeeded", job["error"]
        assert (client.folder / "jobs" / job["id"] / "grader.py").read_text() == source
        assert all(0 < one["train_reward"] < 9 for one in figures(client, job["id"]))


BAD: list[tuple[Any, dict[str, Any], str, str]] = [
    (chats(9), {}, "invalid_n_examples", "9 rows; supervised takes 10 at least"),
    (b"not JSON\n" * 10, {}, "invalid_file_format", "line 1 as JSON"),
    (b"", {}, "invalid_file_format", "empty"),
    (b"\x1f\x8b\x08", {}, "invalid_file_format", "gzip"),
    (b"[" * 5000, {}, "invalid_file_format", ""),
    (b'{"a": ' * 5000, {}, "invalid_file_format", "nested too deep"),
    ([*chats(), {"messages": []}], {}, "invalid_training_file", "Line 13: messages: empty"),
    (
        [*chats(11), {"messages": [{"role": "user", "content": "x"}]}] * 7,
        {},
        "invalid_training_file",
        "7 of 84 rows cannot be used. Line 12: messages: there is no assistant turn.",
    ),
    (
        [*chats(), {"messages": [{"role": "assistant", "content": "x", "weight": 2}]}],
        {},
        "invalid_training_file",
        "Line 13: messages[0].weight: expected 0 or 1",
    ),
    ([*chats(), {"prompt": "a", "completion": "b"}], {}, "invalid_training_file", "Line 13: its"),
    ([{"text": "a"}] * 10, {}, "invalid_training_file", "Line 1: messages: missing"),
    (
        chats(),
        {"method": hyper("dpo")},
        "invalid_training_file",
        "Line 1: preferred_output: missing; its fields: messages",
    ),
    (
        [*PAIRS, {**PAIRS[0], "input": {"messages": "x"}}],
        {"method": hyper("dpo")},
        "invalid_training_file",
        "Line 13: input.messages: expected a list",
    ),
    (
        [*prompts(3), {"messages": prompts()[0]["messages"]}],
        {"method": graded(LIKE)},
        "invalid_training_file",
        "Line 4: answer: missing, and the grader reads it",
    ),
]


@pytest.mark.parametrize(("rows", "body", "code", "told"), BAD, ids=[one[3][:30] for one in BAD])
def test_a_bad_file_fails_the_job_with_the_line(
    shared: Client, rows: Any, body: dict[str, Any], code: str, told: str
) -> None:
    job = shared.until(shared.job(rows, **body)["id"])
    error = job["error"]
    assert (job["status"], error["code"], error["param"]) == ("failed", code, "training_file")
    assert told in error["message"]
    assert str(shared.folder) not in error["message"]
    assert shared.events(job["id"])[-1] == f"The job failed: {error['message']}"
    assert FineTuningJob.model_validate(job, strict=True).error


def test_a_bad_validation_file_is_named(shared: Client) -> None:
    bad = shared.upload([*chats(2), {"messages": "x"}])
    error = shared.until(shared.job(chats(), validation_file=bad)["id"])["error"]
    assert (error["code"], error["param"]) == ("invalid_validation_file", "validation_file")
    assert "Line 3" in error["message"]


def test_what_only_the_run_can_see_fails_the_job_and_not_the_next_one(shared: Client) -> None:
    rows = chats()
    for row in rows:
        row["messages"][1]["weight"] = 0
    error = shared.until(shared.job(rows)["id"])["error"]
    assert error["code"] == "invalid_training_file"
    assert str(shared.folder) not in error["message"]
    job = shared.until(shared.job(chats(), method=hyper(n_epochs=1))["id"])
    assert job["status"] == "succeeded"


GRADED: dict[str, Any] = {"type": "reinforcement"}
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


@pytest.mark.parametrize(
    ("body", "param", "status"), REFUSED, ids=[str(r[0])[:40] for r in REFUSED]
)
def test_a_job_that_cannot_be_is_refused_by_its_field(
    shared: Client, body: dict[str, Any], param: str | None, status: int
) -> None:
    number = len(shared.get(JOBS, params={"limit": 100}).json()["data"])
    file = shared.upload(chats())
    refused = shared.post(JOBS, json={"model": "base", "training_file": file, **body})
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text
    assert len(shared.get(JOBS, params={"limit": 100}).json()["data"]) == number


def test_wandb_is_the_recipe_s_where_it_is_installed(
    shared: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peftkit.serve.tuning.jobs.require_trackers", lambda names: None)
    asked = [{"type": "wandb", "wandb": {"project": "peftkit"}}]
    job = shared.job(chats(), integrations=asked)
    assert job["integrations"] == asked
    assert "wandb is not installed" in shared.until(job["id"])["error"]["message"]  # nor is it here
    assert load(shared.folder / "jobs" / job["id"] / "recipe.yaml").train.log_to == ("wandb",)


NONE = [b"", b"{", b"[]", b"\xff", b'{"model": NaN}', b"{" * 2000, b"x" * 2**21]


def test_bodies_are_checked_beside_the_loop(
    shared: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(data: bytes, kind: Any) -> Any:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return read_body(data, kind)

    monkeypatch.setattr(pages, "read_body", read)
    assert shared.post(JOBS, content=b"{}").status_code == 400


@pytest.mark.parametrize("data", NONE, ids=[str(data[:9]) for data in NONE])
def test_a_body_that_is_none_is_refused(shared: Client, data: bytes) -> None:
    for path in (JOBS, "/v1/fine_tuning/alpha/graders/run"):
        refused = shared.post(path, content=data)
        assert refused.status_code == (413 if len(data) > 2**20 else 400)


# Jobs that are interrupted.


class Gated:
    """Holds a job at a step until the test goes on: a terminal that waits to be read."""

    def __init__(self, step: str) -> None:
        self._step, self.reached, self._go = step, threading.Event(), threading.Event()

    def say(self, text: str) -> None:
        """Hear a line."""
        if self._step in text and not self.reached.is_set():
            self.reached.set()
            assert self._go.wait(60)

    def go(self, seconds: float = 0.0) -> None:
        """Let the job go on, at once or after some time."""
        threading.Timer(seconds, self._go.set).start()


def stopped_at(step: int, served: Served) -> tuple[str, Path]:
    """Return the id and the folder of a job whose server ended after a step."""
    gate = Gated(f"Step {step}/9")
    with served(say=gate.say) as client:
        id = client.job(chats(), method=hyper())["id"]
        assert gate.reached.wait(60)
        gate.go(0.2)
    return id, client.folder / "jobs" / id


@pytest.mark.parametrize("what", ["pause", "the server ends"])
def test_a_job_that_was_interrupted_ends_with_the_same_bits(
    served: Served, alone: bytes, what: str
) -> None:
    gate = Gated("Step 4/9")
    with served(say=gate.say) as client:
        id = client.job(chats(), method=hyper())["id"]
        assert gate.reached.wait(60)
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
        assert "Fine-tuning job goes on after step 4" in told
        steps = [text.split("/")[0] for text in told if text.startswith("Step ")]
        assert steps == [f"Step {n}" for n in range(1, 10)]
        kept = client.get(f"{JOBS}/{id}/checkpoints").json()["data"]
        assert [one["step_number"] for one in kept] == [9, 6, 3]


@pytest.mark.parametrize(
    ("other", "changes"),
    [
        ({"dtype": "bf16"}, ['base.computes_in: "float32" -> "bfloat16"', "base.dtype: "]),
        ({"quantize": "nf4"}, ['base.quantize: "none" -> "nf4"']),
    ],
)
def test_jobs_go_on_over_a_base_that_is_loaded_otherwise_and_say_so(
    served: Served, other: dict[str, Any], changes: list[str]
) -> None:
    gate = Gated("Step 4/9")
    with served(say=gate.say) as client:
        id = client.job(chats(), method=hyper())["id"]
        assert gate.reached.wait(60)
        waits = client.job(chats(), method=hyper(n_epochs=1))["id"]
        client.until(waits, "queued")
        gate.go(0.2)
    with served(**other) as client:
        assert client.until(id)["status"] == client.until(waits)["status"] == "succeeded"
        (told,) = (text for text in client.events(id) if "No exact continuation" in text)
        assert [change for change in changes if change in told] == changes
        (told,) = (text for text in client.events(waits) if "loaded otherwise" in text)
        ((name, value),) = other.items()
        assert f"base.{name}: " in told
        adapter = read_adapter(client.folder / "jobs" / waits)
        assert adapter.provenance.loading[name] == value


def test_a_job_waits_for_a_server_with_its_base(
    served: Served, model_folder: Path, tmp_path: Path
) -> None:
    id, _ = stopped_at(4, served)
    other = Path(shutil.copytree(model_folder, tmp_path / "other"))
    model = AutoModelForCausalLM.from_pretrained(other)
    torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.weight)
    model.save_pretrained(other)
    with serving(other, tmp_path / "server") as client:
        later = client.job(chats(), method=hyper(n_epochs=1))["id"]
        assert client.until(later)["status"] == "succeeded"
        assert client.get(f"{JOBS}/{id}").json()["status"] == "running"
        assert f"The job waits for a server with its base: {model_folder}" in client.events(id)
    with served() as client:
        assert client.until(id)["status"] == "succeeded"


@pytest.mark.parametrize("when", ["in its midst", "at its start"])
def test_a_job_waits_where_no_checkpoint_fits_and_goes_on(
    served: Served, alone: bytes, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
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


def test_a_job_whose_rows_say_that_a_disk_is_full_fails(served: Served) -> None:
    rows = [{"cannot save a checkpoint in a: the disk is full": 1, "The disk is full": 2}] * 12
    with served() as client:
        assert client.until(client.job(rows, method=hyper())["id"])["status"] == "failed"


def test_a_server_that_died_before_a_checkpoint_or_after_the_last_one_goes_on(
    served: Served, alone: bytes
) -> None:
    id, folder = stopped_at(2, served)
    # as if it had been killed in the midst of writing the checkpoint
    (folder / "checkpoints" / "step-2" / "MANIFEST.json").unlink()
    with served() as client:
        assert client.until(id)["status"] == "succeeded"
        assert "goes on after" not in "".join(client.events(id))
        assert (folder / WEIGHTS).read_bytes() == alone
    # as if it had been killed before it could say that it is done
    store = Store(client.folder)
    with changing(store, id) as job:
        job["told"] |= {"status": "running", "fine_tuned_model": None, "result_files": []}
    for one in store.all(CHECKPOINT, parent=id):
        store.delete(CHECKPOINT, one["told"]["id"])
    store.close()
    with served() as client:
        done = client.until(id)
        assert done["status"] == "succeeded"
        assert client.say(done["fine_tuned_model"])
        assert (folder / WEIGHTS).read_bytes() == alone


def test_a_job_is_cancelled_at_its_next_step_or_before_it_begins(served: Served) -> None:
    gate = Gated("Step 2/9")
    with served(say=gate.say) as client:
        first = client.job(chats(), method=hyper())["id"]
        assert gate.reached.wait(60)
        second = client.job(chats(), method=hyper())["id"]
        client.until(second, "queued")
        for what in ("pause", "resume") * 3:
            assert client.post(f"{JOBS}/{second}/{what}").status_code == 200
        assert len(client.app.state.worker._works) == 1  # it waits once
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
            refused = client.post(f"{JOBS}/{first}/{what}")
            assert refused.status_code == 400
            assert "is cancelled" in refused.json()["error"]["message"]


def test_the_number_of_jobs_that_wait_is_bounded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peftkit.serve.tuning.jobs.MAX_JOBS", 2)
    gate = Gated("Step 1/9")
    with served(say=gate.say) as client:
        ids = [client.job(chats(), method=hyper())["id"] for _ in range(2)]
        assert gate.reached.wait(60)
        body = {"model": "base", "training_file": client.upload(chats())}
        refused = client.post(JOBS, json=body)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        for id in ids:
            client.post(f"{JOBS}/{id}/cancel")
        gate.go()
        assert client.post(JOBS, json=body).status_code == 200


def test_a_job_s_folder_is_a_run(shared: Client, tmp_path: Path) -> None:
    job = shared.until(shared.job(chats(), method=hyper(n_epochs=1))["id"])
    folder, command = shared.folder / "jobs" / job["id"], CliRunner().invoke
    listed = json.loads(command(app, ["runs", str(shared.folder), "--json"]).stdout)
    states = {Path(one["run"]).name: (one["state"], one["step"]) for one in listed}
    assert states[folder.name] == ("finished", 3)
    assert command(app, ["report", str(folder)]).exit_code == 0
    assert command(app, ["merge", str(folder), "--out", str(tmp_path / "merged")]).exit_code == 0


def test_a_chat_beside_a_job_is_answered_as_alone_and_the_job_learns_the_same(
    client: Client, alone: bytes
) -> None:
    expected = client.say("base")
    id = client.job(chats(), method=hyper())["id"]
    heard = []
    while client.get(f"{JOBS}/{id}").json()["status"] not in ("succeeded", "failed"):
        heard.append(client.say("base"))
    assert set(heard) == {expected}
    assert (client.folder / "jobs" / id / WEIGHTS).read_bytes() == alone


class Full:
    """A disk that is full while `is_full`: the store can be read, and nothing is written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full, self.refused, execute = False, threading.Event(), Store._run

        def run(store: Store, query: str, values: Any = ()) -> Any:
            if self.is_full and query.startswith(("INSERT", "DELETE")):
                self.refused.set()
                raise StoreError("the server cannot keep its state.", found="disk is full")
            return execute(store, query, values)

        monkeypatch.setattr(Store, "_run", run)
        monkeypatch.setattr(jobs, "RETRY_SECONDS", 0.05)

    def for_a_moment(self) -> None:
        """Be full until something could not be written."""
        self.refused.clear()
        self.is_full = True
        assert self.refused.wait(60)
        self.is_full = False


def test_a_job_goes_on_when_a_disk_that_was_full_has_room_again(
    served: Served, alone: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, gate = Full(monkeypatch), Gated("Step 5/9")
    with served(say=gate.say) as client:
        id = client.job(chats(), method=hyper())["id"]
        assert gate.reached.wait(60)
        waits = client.job(chats(), method=hyper(n_epochs=1))["id"]
        client.until(waits, "queued")
        gate.go(0.1)
        full.for_a_moment()  # in the midst of the first job
        assert client.until(id)["status"] == client.until(waits)["status"] == "succeeded"
        assert (client.folder / "jobs" / id / WEIGHTS).read_bytes() == alone


@pytest.mark.parametrize("where", ["_make_recipe", "_run", "_finish"])
def test_a_full_disk_before_or_after_its_run_fails_no_job(
    served: Served, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    full, plain = Full(monkeypatch), getattr(jobs.Jobs, where)

    def at_once_full(*args: Any) -> Any:
        full.is_full = not full.refused.is_set()
        return plain(*args)

    monkeypatch.setattr(jobs.Jobs, where, at_once_full)
    with served() as client:
        id = client.job(chats(), method=hyper(n_epochs=1))["id"]
        assert full.refused.wait(60)
        full.is_full = False
        assert client.until(id)["status"] == "succeeded"


def test_a_failure_that_a_full_disk_could_not_keep_is_told_later(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, plain = Full(monkeypatch), jobs.count_rows

    def bad(*args: Any, **named: Any) -> Any:
        full.is_full = not full.refused.is_set()
        return plain(*args, **named)

    monkeypatch.setattr(jobs, "count_rows", bad)
    with served() as client:
        id = client.job(chats(9))["id"]
        assert full.refused.wait(60)
        full.is_full = False
        assert client.until(id)["error"]["code"] == "invalid_n_examples"


def test_a_full_disk_is_not_the_client_s_fault(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, full = client.upload(chats()), Full(monkeypatch)
    full.is_full = True
    refused = client.post(JOBS, json={"model": "base", "training_file": file})
    assert refused.status_code == 503
    assert refused.json()["error"]["type"] == "server_error"
    full.is_full = False
    assert client.post(JOBS, json={"model": "base", "training_file": file}).status_code == 200


def test_a_job_has_what_it_starts_from_when_that_is_gone_meanwhile(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "KEPT", 1)
    gate = Gated("Step 5/9")
    with served(say=gate.say) as client:
        first = client.job(chats(), method=hyper())["id"]
        assert gate.reached.wait(60)
        (kept,) = client.get(f"{JOBS}/{first}/checkpoints").json()["data"]
        model = kept["fine_tuned_model_checkpoint"]
        second = client.job(chats(), model=model, method=hyper(n_epochs=1))["id"]
        client.until(second, "queued")
        gate.go()
        done = client.until(second)
        assert done["status"] == "succeeded", done["error"]
        assert not (client.folder / "jobs" / first / "kept" / "step-3").exists()
        assert client.say(done["fine_tuned_model"])


@pytest.mark.parametrize(("kind", "before"), [(ConfigError, ""), (OSError, "OSError: ")])
def test_why_a_job_failed_is_told_without_the_server_s_paths(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], before: str
) -> None:
    def fails(*args: Any, **named: Any) -> None:
        raise kind(f"{client.folder / 'jobs' / 'other' / 'x.json'} is damaged.")

    monkeypatch.setattr(jobs, "run", fails)
    error = client.until(client.job(chats())["id"])["error"]
    assert error["message"] == f"{before}server/jobs/other/x.json is damaged."
