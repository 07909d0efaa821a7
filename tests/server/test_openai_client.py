"""OpenAI's client, over a socket, with the server that `peftkit serve` runs."""

from collections.abc import Iterator
from typing import Any

import pytest

from peftkit.inference.bank import AdapterBank
from peftkit.inference.generate import generate

openai = pytest.importorskip("openai", reason="the official client is not installed")
pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
from peftkit_server.app import make_app  # noqa: E402
from peftkit_server.limits import Limits  # noqa: E402
from tests.helpers.serving import openai_client  # noqa: E402

KEY = "a-key-of-this-test"
ASKED = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture
def client(bank: AdapterBank) -> Iterator[Any]:
    app = make_app(bank, keys=[KEY], limits=Limits(max_body=4096, max_new_tokens=8))
    with openai_client(app, KEY) as client:
        yield client


def alone(bank: AdapterBank, name: str) -> str:
    """Return the completion of `generate`."""
    with bank.use(name):
        base = bank.base
        (text,) = generate(base.model, base.tokenizer, ASKED[0]["content"], max_new_tokens=8)
    return text


def test_a_chat_whole_and_streamed_is_what_generate_answers(client, bank):
    expected = alone(bank, "one")  # before the server uses the bank
    whole = client.chat.completions.create(model="one", messages=ASKED)
    assert whole.choices[0].message.content == expected != ""
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    options = {"include_usage": True}
    pieces = list(
        client.chat.completions.create(
            model="one", messages=ASKED, stream=True, stream_options=options
        )
    )
    text = "".join(c.delta.content or "" for piece in pieces for c in piece.choices)
    assert text == expected
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-1].usage == whole.usage
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_errors_are_the_client_s_own(client):
    for error, status, arguments in (
        (openai.NotFoundError, 404, {"model": "three", "messages": ASKED}),
        (openai.BadRequestError, 400, {"model": "one", "messages": ASKED, "temperature": -1}),
        (openai.BadRequestError, 400, {"model": "one", "messages": ASKED, "verbosity": "low"}),
        (
            *(openai.APIStatusError, 413),
            {"model": "one", "messages": [{"role": "user", "content": "a" * 5000}]},
        ),
    ):
        with pytest.raises(error) as caught:
            client.chat.completions.create(**arguments)
        assert caught.value.status_code == status
        assert caught.value.body["message"]
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()
