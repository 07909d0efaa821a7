"""/v1/audio/transcriptions: the text of `generate --audio`, from an uploaded file."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("soundfile", reason="the extra peftkit[audio] is not installed")
pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
from starlette.testclient import TestClient

from peftkit.evaluation.predict import transcribe
from peftkit.formats.open_adapter import Opened, open_adapter
from peftkit.methods.lora import LoRA
from peftkit.recipe import Recipe
from peftkit.run import run
from peftkit.settings import BaseConfig, DataConfig, TrainConfig
from peftkit.tasks.media.ctc import CTCConfig
from peftkit_server.limits import Limits
from peftkit_server.predictions.app import make_predictor_app
from peftkit_server.predictions.predictor import Predictor
from tests.helpers.serving import HERE, refusal
from tests.helpers.speech import saved, wav2vec2, write_speech_rows

PATH = "/v1/audio/transcriptions"
ROWS = [{"audio": [400.0, 700.0], "text": "one"}, {"audio": [900.0, 300.0], "text": "two"}]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    top = tmp_path_factory.mktemp("speech")
    run(
        Recipe(
            base=BaseConfig(model=str(saved(top / "base", wav2vec2())), dtype="fp32"),
            data=DataConfig(train=str(write_speech_rows(top, ROWS))),
            method=LoRA(rank=2, targets=("q", "v")),
            task=CTCConfig(),
            train=TrainConfig(output_dir=top / "run", max_steps=1),
        )
    )
    return open_adapter(top / "run")


@pytest.fixture(scope="module")
def client(opened: Opened) -> TestClient:
    limits = Limits(upload_bytes=1 << 16)
    app = make_predictor_app(Predictor(opened), "speech", limits=limits)
    return TestClient(app, base_url=HERE)


@pytest.fixture
def sound(opened: Opened) -> Path:
    return next(opened.file.folder.parent.glob("rows.jsonl.*.wav"))


def post(client: TestClient, content: bytes, **fields: Any) -> Any:
    return client.post(
        PATH, data={"model": "speech", **fields}, files={"file": ("../a.wav", content)}
    )


def test_the_transcript_is_that_of_the_command(client, opened, sound):
    (expected,) = transcribe(opened, [sound])
    assert expected
    done = post(client, sound.read_bytes())
    assert done.json() == {"text": expected}
    assert post(client, sound.read_bytes(), response_format="text").text == f"{expected}\n"


@pytest.mark.parametrize(
    ("content", "fields", "status", "words"),
    [
        (b"no sound", {}, 400, "the file"),
        (b"", {}, 400, "the file"),
        (b"a" * (1 << 17), {}, 413, "65,536"),
        (None, {"language": "en"}, 400, "language"),
        (None, {"response_format": "verbose_json"}, 400, "response_format"),
        (None, {"model": "other"}, 404, "no model 'other'"),
    ],
)
def test_an_invalid_request(content, fields, status, words, client, sound):
    done = post(client, sound.read_bytes() if content is None else content, **fields)
    message = refusal(done, status)["message"]
    assert words in message
    assert "/tmp" not in message


def test_a_request_without_a_form(client):
    assert client.post(PATH, json={"model": "speech"}).status_code == 400
    done = client.post("/v1/embeddings", json={})
    assert PATH in done.json()["error"]["message"]
