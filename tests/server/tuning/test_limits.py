"""No row, file or job stops the server or the other requests."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from peftkit.base.load import load_base
from peftkit.data.chat import Chat
from peftkit.formats.peft.load import read_adapter
from peftkit.inference.bank import AdapterBank
from peftkit.methods.lora import LoRA
from peftkit.settings import BaseConfig
from peftkit_server.app import make_app
from peftkit_server.store import Store
from peftkit_server.training import TrainingOptions
from peftkit_server.tuning import jobs, progress, recipes
from peftkit_server.tuning.progress import JOB, changing
from tests.helpers.bank import write_adapter
from tests.helpers.jobs import HERE, JOBS, Client, chats, hyper


def test_a_job_is_cancelled_and_a_chat_answered_between_rows(client, monkeypatch):
    monkeypatch.setattr(progress, "PAUSE_SECONDS", 0)
    render, rendered, answers = Chat.render, [], []

    def cancelling(self: Any, *args: Any, **named: Any) -> str:
        rendered.append(len(rendered))
        if len(rendered) == 5:
            assert client.post(f"{JOBS}/{id}/cancel").status_code == 200
        return render(self, *args, **named)

    model = client.job(chats(), method=hyper(n_epochs=1))
    client.until(model["id"])
    file = client.upload(chats(500))
    monkeypatch.setattr(Chat, "render", cancelling)
    id = client.job(training_file=file, method=hyper(n_epochs=1))["id"]
    answers.append(client.say("base"))
    assert client.until(id)["status"] == "cancelled"
    other = client.job(chats(), method=hyper(n_epochs=1))["id"]
    monkeypatch.setattr(Chat, "render", render)
    assert client.until(other)["status"] == "succeeded"
    assert len(rendered) < 100
    assert answers[0]
    assert "Fine-tuning job started" not in client.events(id)


def test_a_job_that_ended_the_process_three_times_fails(served, monkeypatch):
    run_once, counted = jobs.Jobs._run_once, []

    def counting(self: Any, id: str, *args: Any) -> None:
        counted.append(self._store.get(JOB, id)["attempts"])
        run_once(self, id, *args)

    monkeypatch.setattr(jobs.Jobs, "_run_once", counting)
    with served() as client:
        id = client.job(chats(), method=hyper(n_epochs=1))["id"]
        assert client.until(id)["status"] == "succeeded"
    store = Store(client.folder)
    assert counted == [1]
    with changing(store, id) as job:
        assert job["attempts"] == 0
        job["attempts"] = 2
        job["response"]["status"], job["response"]["finished_at"] = "running", None
    store.close()
    with served() as client:  # dies once more, say
        assert client.until(id)["status"] == "succeeded"
    store = Store(client.folder)
    with changing(store, id) as job:
        job["attempts"] = 3
        job["response"]["status"], job["response"]["finished_at"] = "running", None
    store.close()
    with served() as client:
        failed = client.until(id)
        assert failed["status"] == "failed"
        assert "3 times" in failed["error"]["message"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("limit", "content", "message"),
    [
        ("line_bytes", json.dumps(chats(1)[0] | {"x": "a" * 900}) + "\n", "Line 1 has more than"),
        ("line_bytes", json.dumps(chats(20), indent=1), "The JSON array has more than"),
        (
            "row_work",
            "\n".join(json.dumps({"messages": one["messages"] * 40}) for one in chats(10)),
            "too many messages for its length",
        ),
    ],
)
def test_rows_that_take_too_much_are_refused(served, limit, content, message):
    with served(limits={limit: 900}) as client:
        error = client.until(client.job(content.encode())["id"])["error"]
    assert message in error["message"]


def test_a_job_starts_from_an_adapter_of_another_rank(client, monkeypatch):
    defaults_for = recipes.defaults_for

    def lower(*args: Any, **named: Any) -> Any:
        return dataclasses.replace(defaults_for(*args, **named), rank=4, alpha=4)

    with monkeypatch.context() as patch:
        patch.setattr(recipes, "defaults_for", lower)
        first = client.until(client.job(chats(), method=hyper(n_epochs=1))["id"])
    body = {"model": first["fine_tuned_model"], "method": hyper(n_epochs=1)}
    second = client.until(client.job(chats(), **body)["id"])
    assert second["status"] == "succeeded", second["error"]
    method = read_adapter(client.folder / "jobs" / second["id"]).method
    assert (method.rank, method.alpha) == (4, 4)


def test_a_job_adds_no_tokens_to_the_server_s_base(model_folder, tmp_path):
    base = load_base(str(model_folder), dtype="fp32")
    folder = write_adapter(base.model, LoRA(rank=16, alpha=32), tmp_path / "op", 1)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    settings = BaseConfig(model=str(model_folder), dtype="fp32")
    options = TrainingOptions(folder=tmp_path / "server", base=settings)
    size = len(base.tokenizer)
    with Client(make_app(AdapterBank(base, {"op": folder}), training=options), base_url=HERE) as c:
        job = c.until(c.job(chats(), model="op", method=hyper(n_epochs=1))["id"])
    assert (job["status"], job["error"]["code"]) == ("failed", "invalid_model")
    assert len(base.tokenizer) == size
    assert base.model.get_input_embeddings().num_embeddings == 384
