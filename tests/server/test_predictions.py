"""A server for an embedding model, a reranker or a classifier: the numbers of `predict`."""

import asyncio
import base64
import json
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertModel

from peftkit.config.schema import from_dict
from peftkit.errors import ConfigError
from peftkit.evaluation.predict import predict, predict_file
from peftkit.formats.open_adapter import Opened, open_adapter
from peftkit.recipe import Recipe
from peftkit.run import run
from tests.helpers.classifiers import LABELS, framing_tokenizer, save_base, write_texts
from tests.helpers.families import ARCHITECTURES
from tests.helpers.folders import write_rows

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
from starlette.testclient import TestClient

from peftkit_server.limits import Limits
from peftkit_server.predictions.app import make_predictor_app
from peftkit_server.predictions.predictor import Predictor
from peftkit_server.server import predicting_tasks, serve_adapters
from tests.helpers.serving import HERE, refusal, scope_of

KEY = "a-key"
EMBEDDING = [
    {"anchor": "the fox", "positive": "the quick brown fox"},
    {"anchor": "pizza", "positive": "pizza with cheese"},
]
RERANKER = [{"query": "the fox", "positive": "the quick brown fox", "negatives": ["a pizza"]}]
TASKS = ("embedding", "reranker", "sequence_classification")
LONG = "the quick brown fox " * 40


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter of each task, after one step."""
    top = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    BertModel(ARCHITECTURES["bert"]().config).save_pretrained(top / "bare")
    framing_tokenizer().save_pretrained(top / "bare")
    save_base(top / "head")
    rows = {
        "embedding": write_rows(top / "embedding.jsonl", EMBEDDING),
        "reranker": write_rows(top / "reranker.jsonl", RERANKER * 2),
        "sequence_classification": write_texts(top / "classes.jsonl"),
    }
    for task, file in rows.items():
        settings = {
            "task": {"type": task},
            "base": {
                "model": str(top / ("bare" if task == "embedding" else "head")),
                "dtype": "fp32",
            },
            "method": {"type": "lora", "rank": 2},
            "data": {"train": file, "max_length": 64},
            "train": {"output_dir": str(top / task), "max_steps": 1, "batch_size": 2}
            | {"learning_rate": 0.01, "save_every": None},
        }
        run(from_dict(Recipe, settings, "the test"))
    return {task: top / task for task in TASKS}


@pytest.fixture(scope="module")
def opened(runs: dict[str, Path]) -> dict[str, Opened]:
    return {task: open_adapter(folder) for task, folder in runs.items()}


@pytest.fixture(scope="module")
def clients(opened: dict[str, Opened]) -> dict[str, TestClient]:
    headers = {"Authorization": f"Bearer {KEY}"}
    return {
        task: TestClient(
            make_predictor_app(Predictor(each), task, keys=[KEY], limits=Limits(max_body=1 << 16)),
            base_url=HERE,
            headers=headers,
        )
        for task, each in opened.items()
    }


def post(clients: dict[str, TestClient], task: str, path: str, **fields: Any) -> Any:
    done = clients[task].post(path, json={"model": task, **fields})
    assert done.status_code == 200, done.text
    return done.json()


@pytest.mark.smoke
def test_embeddings(clients, opened, tmp_path):
    texts = ["the fox", "pizza with cheese", "olives"]
    file = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    expected = [row["embedding"] for row in predict_file(opened["embedding"], file)]
    answer = post(clients, "embedding", "/v1/embeddings", input=texts)
    vectors = [each["embedding"] for each in answer["data"]]
    assert vectors == [pytest.approx(vector, abs=1e-6) for vector in expected]
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    alone = post(clients, "embedding", "/v1/embeddings", input=texts[1])
    assert alone["data"][0]["embedding"] == pytest.approx(vectors[1], abs=1e-5)
    assert 0 < alone["usage"]["total_tokens"] < answer["usage"]["total_tokens"]
    packed = post(clients, "embedding", "/v1/embeddings", input=texts[1], encoding_format="base64")[
        "data"
    ][0]["embedding"]
    data = base64.b64decode(packed)
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == alone["data"][0]["embedding"]
    short = post(clients, "embedding", "/v1/embeddings", input=texts[1], dimensions=4)
    cut = torch.nn.functional.normalize(torch.tensor(vectors[1][:4]), dim=0)
    assert short["data"][0]["embedding"] == pytest.approx(cut.tolist(), abs=1e-5)


def test_ranks(clients, opened):
    documents = ["a pizza", "the quick brown fox", "olives"]
    pairs = [("the fox", text) for text in documents]
    expected = [each["score"] for each in predict(opened["reranker"], pairs)]
    answer = post(
        clients,
        "reranker",
        "/v1/rerank",
        query="the fox",
        documents=["a pizza", {"text": "the quick brown fox"}, "olives"],
        return_documents=True,
        top_n=2,
    )
    best = sorted(range(3), key=lambda n: -expected[n])[:2]
    assert [each["index"] for each in answer["results"]] == best
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-6)
        assert each["document"] == {"text": documents[each["index"]]}
    scored = post(clients, "reranker", "/v1/score", text_1="the fox", text_2=documents)
    assert [each["score"] for each in scored["data"]] == pytest.approx(expected, abs=1e-6)
    alone = post(clients, "reranker", "/v1/score", text_1=["the fox"], text_2=["olives"])
    assert alone["data"][0]["score"] == pytest.approx(expected[2], abs=1e-5)


def test_classes(clients, opened):
    texts = ["the lazy dog", "pizza"]
    expected = predict(opened["sequence_classification"], texts)
    answer = post(clients, "sequence_classification", "/v1/classify", input=texts)
    for each, classes in zip(answer["data"], expected, strict=True):
        listed = {one["label"]: one["score"] for one in each["predictions"]}
        assert listed == pytest.approx(classes, abs=1e-6)
        assert {*listed} == {*LABELS}
        assert each["prediction"] == next(iter(classes))


@pytest.mark.parametrize("task", TASKS)
def test_a_model_names_its_endpoints(task, clients):
    client = clients[task]
    (model,) = client.get("/v1/models").json()["data"]
    assert client.get(f"/v1/models/{task}").json() == model
    assert model["task"] == task
    for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/rerank", "/v1/classify"):
        error = refusal(client.post(path, json={}))
        is_wrong = error["code"] == "unsupported_endpoint"
        assert is_wrong == (path not in model["endpoints"])
        if is_wrong:
            assert model["endpoints"][0] in error["message"]
    assert client.get("/v1/models", headers={"Authorization": "Bearer no"}).status_code == 401


def test_a_model_of_chats_names_its_endpoints(client):
    error = refusal(client.post("/v1/embeddings", json={"model": "one", "input": "a"}))
    assert "/v1/chat/completions" in error["message"]
    assert "/v1/responses" in client.get("/v1/models/one").json()["endpoints"]


@pytest.mark.parametrize(
    ("task", "path", "fields", "status", "words"),
    [
        ("embedding", "embeddings", {"input": [1, 2]}, 400, "token ids"),
        ("embedding", "embeddings", {"input": [[1], [2]]}, 400, "token ids"),
        ("embedding", "embeddings", {"input": []}, 400, "input"),
        ("embedding", "embeddings", {"input": ["a", " "]}, 400, "text 1 is empty"),
        ("embedding", "embeddings", {"input": LONG}, 400, "reads 64 tokens"),
        ("embedding", "embeddings", {"input": "a", "dimensions": 4000}, 400, "dimensions"),
        ("embedding", "embeddings", {"input": "a", "model": "b"}, 404, "no model 'b'"),
        ("embedding", "embeddings", {"input": "a" * (1 << 17)}, 413, "65,536"),
        ("embedding", "embeddings", {"input": "a", "truncate": "END"}, 400, "truncate"),
        ("reranker", "rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("reranker", "rerank", {"query": "", "documents": ["a"]}, 400, "empty"),
        ("reranker", "score", {"text_1": ["a", "b"], "text_2": ["a"]}, 400, "same length"),
        ("sequence_classification", "classify", {"input": [["a", "b"]]}, 400, "pair"),
        ("sequence_classification", "classify", {"input": "\ud800"}, 400, ""),
    ],
)
def test_an_invalid_request(task, path, fields, status, words, clients):
    content = json.dumps({"model": task, **fields})
    done = clients[task].post(f"/v1/{path}", content=content)
    assert done.status_code == status, done.text
    assert words in done.json()["error"]["message"]


class Slow:
    """A predictor whose computation waits for a gate."""

    kind, base_name = "embedding", "x"
    endpoints = ("/v1/embeddings", "/v1/rerank", "/v1/audio/transcriptions")

    def __init__(self) -> None:
        self.gate, self.computed = threading.Event(), list[str]()

    def count(self, texts: Any) -> int:
        return len(texts)

    def _compute(self, text: str) -> None:
        self.computed.append(text)
        assert self.gate.wait(60)

    def embed(self, texts: list[str], dimensions: Any) -> list[list[float]]:
        self._compute(texts[0])
        return [[1.0, 0.0]]

    def rank(self, pairs: Any) -> list[float]:
        self._compute(pairs[0][0])
        return [0.5]

    def transcribe(self, path: Path) -> str:
        self._compute(path.read_text())
        return "text"


def sent_to(path: str, text: str) -> dict[str, Any]:
    """Return the body of a request to an endpoint of `Slow`."""
    if "audio" in path:
        return {"data": {"model": "m"}, "files": {"file": ("a", text.encode())}}
    named = {"query": text, "documents": ["d"]} if "rerank" in path else {"input": text}
    return {"json": {"model": "m", **named}}


@pytest.mark.parametrize("path", Slow.endpoints)
def test_one_key_leaves_places_and_turns_to_others(path):
    slow = Slow()
    app: Any = make_predictor_app(slow, "m", keys=["ann", "bob"], limits=Limits(max_waiting=8))  # type: ignore[arg-type]
    statuses: list[tuple[str, int]] = []
    with TestClient(app, base_url=HERE) as client:

        def send(key: str) -> None:
            done = client.post(path, headers={"X-API-Key": key}, **sent_to(path, key))
            statuses.append((key, done.status_code))

        threads = [threading.Thread(target=send, args=("ann",)) for _ in range(12)]
        for thread in threads:
            thread.start()
        while len(statuses) < 6 or not slow.computed:  # three quarters of 8 places
            time.sleep(0.001)
        threads.append(threading.Thread(target=send, args=("bob",)))
        threads[-1].start()
        while len(app.state.threads._schedule) < 6:
            time.sleep(0.001)
        slow.gate.set()
        for thread in threads:
            thread.join()
    assert sorted(statuses) == [("ann", 200)] * 6 + [("ann", 429)] * 6 + [("bob", 200)]
    assert slow.computed[:2] == ["ann", "bob"]


def test_a_request_is_not_computed_after_its_client_left():
    slow = Slow()
    app: Any = make_predictor_app(slow, "m", limits=Limits())  # type: ignore[arg-type]
    gone = asyncio.Event()

    async def request(text: str, *, stays: bool) -> int:
        statuses: list[int] = []
        body = iter([json.dumps({"model": "m", "input": text}).encode()])

        async def receive() -> dict[str, Any]:
            for data in body:
                return {"type": "http.request", "body": data}
            await (asyncio.Event() if stays else gone).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        await app(scope_of("/v1/embeddings"), receive, send)
        return statuses[0]

    async def all_of_them() -> list[int]:
        texts = ("first", "second", "third", "last")
        tasks = [
            asyncio.create_task(request(text, stays=text in ("first", "last"))) for text in texts
        ]
        while not slow.computed or len(app.state.threads._schedule) < 3:
            await asyncio.sleep(0.001)
        gone.set()
        await asyncio.gather(tasks[1], tasks[2])
        slow.gate.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(all_of_them()) == [200, 499, 499, 200]
    assert slow.computed == ["first", "last"]


@pytest.mark.parametrize(
    ("fields", "length", "status"),
    [({"model": "other"}, 1000, 404), ({"model": "m"}, 1 << 40, 413), ({"model": "m"}, 90000, 503)],
)
def test_an_upload_is_refused_before_its_file_is_written(fields, length, status, monkeypatch):
    monkeypatch.setattr(
        "peftkit_server.body.free_bytes", lambda folder: 5000 - 4000 * (status == 503)
    )
    monkeypatch.setattr("peftkit_server.body.MAX_OVERHEAD", 100)
    app = make_predictor_app(Slow(), "m", limits=Limits())  # type: ignore[arg-type]
    head = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    file = '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    parts = iter([(head + file).encode()])
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        for data in parts:
            return {"type": "http.request", "body": data, "more_body": True}
        raise AssertionError("the file was read")

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    headers = {"content-type": "multipart/form-data; boundary=x", "content-length": str(length)}
    asyncio.run(app(scope_of("/v1/audio/transcriptions", headers), receive, send))
    assert statuses[0] == status


def test_one_server_serves_one_adapter(runs):
    assert predicting_tasks(runs) == [*TASKS]
    with pytest.raises(ConfigError, match="several adapters"):
        serve_adapters(runs, port=0)
