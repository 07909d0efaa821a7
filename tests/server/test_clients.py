"""What clients of the completion endpoints and connections see."""

import json
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from peftkit_server.app import make_app
from peftkit_server.limits import Limits
from peftkit_server.server import protocol
from peftkit_server.tokens import token_bytes
from tests.helpers.serving import served_app

CHAT = "/v1/chat/completions"
BODY: Any = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def test_chunks_have_the_fields_of_openai_s(client):
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    lines = client.post(CHAT, json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["total_tokens"] > 0
    whole = client.post(CHAT, json=BODY).json()
    assert {chunk["system_fingerprint"] for chunk in chunks} == {whole["system_fingerprint"]}
    assert whole["system_fingerprint"].startswith("fp_")
    plain = client.post(CHAT, json={**BODY, "stream": True}).text
    assert "usage" not in plain


def test_tokens_that_are_parts_of_characters_have_their_bytes(tokenizer):
    text = "a \N{EURO SIGN}\N{GRINNING FACE} \N{REPLACEMENT CHARACTER}é"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    parts = [token_bytes(tokenizer, token) for token in ids]
    assert b"".join(part or b"" for part in parts).decode().strip() == text
    assert any("\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token]) for token in ids)


def test_bytes_of_byte_fallback_are_read():
    class Fallback:
        def decode(self, ids: list[int]) -> str:
            return "\N{REPLACEMENT CHARACTER}"

        def convert_ids_to_tokens(self, token: int) -> str:
            return {0: "<0xE2>", 1: "\N{LOWER ONE EIGHTH BLOCK}x"}[token]

    assert token_bytes(Fallback(), 0) == b"\xe2"
    assert token_bytes(Fallback(), 1) is None


@pytest.fixture
def port(bank: Any) -> Iterator[int]:
    limits = Limits(head_seconds=1, body_seconds=1)
    with served_app(make_app(bank, limits=limits), http=protocol(1)) as port:
        yield port


HALF_SENT = {
    "nothing": b"",
    "half a head": b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    "half a body": b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n%s",
    "no route": b"POST /v1/nothing HTTP/1.1\r\nHost: 127.0.0.1\r\n%s",
    "refused": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x.example\r\n%s",
}


def test_half_sent_requests_are_closed(port):
    def answered(data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(20)
            connection.sendall(data.replace(b"%s", b"Content-Length: 99\r\n\r\n{"))
            began = time.monotonic()
            received = b""
            while part := connection.recv(4096):
                received += part
                if b"HTTP/1.1 40" in received and time.monotonic() - began < 0.5:
                    connection.sendall(b"x")  # a client that goes on
            assert time.monotonic() - began < 15
            return received

    with ThreadPoolExecutor(len(HALF_SENT)) as threads:  # all of them wait at the same time
        received = dict(zip(HALF_SENT, threads.map(answered, HALF_SENT.values()), strict=True))
    assert [kind for kind in HALF_SENT if b"HTTP/1.1 408" in received[kind]] == ["half a body"]


def test_complete_requests_share_a_connection(port):
    head = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(20)
        for _ in range(4):
            connection.sendall(head)
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(4096)
            assert received.startswith(b"HTTP/1.1 200")
            time.sleep(0.4)  # longer than a second in total


def test_a_client_that_leaves_while_it_sends_leaves_no_traceback(port, caplog):
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                connection.sendall(head + b"Content-Length: 99\r\n\r\n{")
                time.sleep(0.1)
        time.sleep(0.3)
    assert not caplog.records, caplog.text
