"""A request that would take too much time or memory is refused, and the others are served."""

from __future__ import annotations

import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from peftkit.data.tokens import tokens
from peftkit_server import grammars
from peftkit_server.app import make_app
from peftkit_server.grammars import Grammars, check_grammar, json_grammar
from peftkit_server.limits import Limits
from peftkit_server.refusals import RequestError
from peftkit_server.threads import DaemonThreads
from tests.helpers.serving import HERE, refusal

CHAT = "/v1/chat/completions"
ASKED: Any = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def patterns(number: int) -> dict[str, Any]:
    """Return a schema whose compile time doubles with each pattern."""
    return {"allOf": [{"type": "string", "pattern": f"x{i}y"} for i in range(number)]}


@pytest.mark.parametrize(
    ("schema", "limits", "message"),
    [
        (patterns(40), Limits(grammar_seconds=1), "more than 1 seconds"),
        (patterns(40), Limits(grammar_bytes=300 << 20, grammar_seconds=30), "more than 300 MiB"),
        ({"enum": ["a" * 70_000]}, Limits(), "the limit is 65,536"),
        ({"type": "nothing"}, Limits(), "nothing"),
    ],
)
def test_a_costly_schema_is_refused(schema, limits, message, tokenizer):
    pytest.importorskip("llguidance", reason="the extra peftkit[json] is not installed")
    began = time.monotonic()
    with pytest.raises(RequestError, match="cannot be constrained") as refused:
        Grammars(tokenizer, 384, [2], limits).constraint(json_grammar(schema))
    assert message in str(refused.value)
    assert time.monotonic() - began < 30


def test_a_grammar_that_takes_too_long_is_compiled_once(monkeypatch):
    pytest.importorskip("llguidance", reason="the extra peftkit[json] is not installed")
    run, runs = subprocess.run, list[int]()

    def counted(*args: Any, **named: Any) -> Any:
        runs.append(1)
        return run(*args, **named)

    monkeypatch.setattr(grammars.subprocess, "run", counted)
    costly = json_grammar(patterns(42))
    for _ in range(3):
        with pytest.raises(RequestError, match="more than 1 seconds"):
            check_grammar(costly, Limits(grammar_seconds=1))
    assert len(runs) == 1


def test_a_prompt_far_beyond_the_context_is_refused_by_its_beginning(bank, monkeypatch):
    """The tokenizer reads text in proportion to the context, whatever the length of the prompt."""
    context = bank.base.model.config.max_position_embeddings
    read: list[int] = []
    call = type(bank.base.tokenizer).__call__

    def counted(tokenizer: Any, text: Any, *args: Any, **named: Any) -> Any:
        read.append(len(text))
        return call(tokenizer, text, *args, **named)

    monkeypatch.setattr(type(bank.base.tokenizer), "__call__", counted)
    long = " ".join(f"w{n}" for n in range(context * 40))
    app = make_app(bank, limits=Limits(max_body=len(long) + 1000))
    with TestClient(app, base_url=HERE) as client:
        for path, prompt in (
            (CHAT, {"messages": [{"role": "user", "content": long}]}),
            ("/v1/completions", {"prompt": long}),
        ):
            error = refusal(client.post(path, json={"model": "base", **prompt}))
            assert error["code"] == "context_length_exceeded"
        assert max(read) <= 16 * context < len(long)


def test_a_long_text_of_few_tokens_is_read_to_its_end():
    def tokenizer(text: str, **named: Any) -> dict[str, list[int]]:
        return {"input_ids": [7] * (len(text) // 100)}

    assert len(tokens(tokenizer, "word " * 2000, limit=100)) == 100


def test_a_costly_schema_delays_nobody(bank):
    pytest.importorskip("llguidance", reason="the extra peftkit[json] is not installed")
    json_schema = {"name": "x", "schema": patterns(41)}
    costly = {**ASKED, "response_format": {"type": "json_schema", "json_schema": json_schema}}
    statuses: list[int] = []
    ended: list[str] = []
    app = make_app(bank, limits=Limits(grammar_seconds=1))
    with TestClient(app, base_url=HERE) as client:

        def send(name: str, body: dict[str, Any]) -> None:
            statuses.append(client.post(CHAT, json=body).status_code)
            ended.append(name)

        first = threading.Thread(target=send, args=("costly", costly))
        first.start()
        time.sleep(0.3)
        send("other", ASKED)
        first.join()
    assert ended == ["other", "costly"]
    assert statuses == [200, 400]


def test_a_grammar_beyond_the_parser_fails_its_completion_only(bank):
    pytest.importorskip("llguidance", reason="the extra peftkit[json] is not installed")
    properties = {f"p{i}": {"type": "string"} for i in range(1000)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {**ASKED, "max_tokens": 60, "response_format": form}
    application = make_app(bank)
    with TestClient(application, base_url=HERE) as client, ThreadPoolExecutor(1) as threads:
        other = threads.submit(client.post, CHAT, json={**ASKED, "max_tokens": 60})
        failed = client.post(CHAT, json=body)
        assert other.result().status_code == 200
    assert failed.status_code == 500
    assert "by its grammar" in failed.json()["error"]["message"]


def test_white_space_of_json_is_bounded(tokenizer):
    pytest.importorskip("llguidance", reason="the extra peftkit[json] is not installed")
    constraint = Grammars(tokenizer, 384, [2]).constraint(json_grammar({"type": "object"}))
    (space,) = tokenizer(" ", add_special_tokens=False)["input_ids"][-1:]
    (brace,) = tokenizer("{", add_special_tokens=False)["input_ids"][-1:]
    constraint.take(brace)
    number = 0
    while constraint.allowed()[space]:
        constraint.take(space)
        number += 1
        assert number <= 64
    assert number


def test_calls_of_daemon_threads_never_keep_the_process():
    threads = DaemonThreads(1, "test-daemon")
    assert threads.submit(lambda: 8).result() == 8
    started, release = threading.Event(), threading.Event()
    running = threads.submit(lambda: started.set() or release.wait(30))
    waiting = threads.submit(lambda: 16)
    assert started.wait(30)
    threads.shutdown()
    assert waiting.cancelled()
    assert all(t.daemon for t in threading.enumerate() if t.name == "test-daemon")
    release.set()
    assert running.result()
