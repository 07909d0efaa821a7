"""The live report: what is new comes, what is known does not, and nobody else is answered."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from peftkit.errors import DataError, OutputError
from peftkit.report.server import ReportServer
from tests.report.story import STARTED, step, write_run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    """A server of a run that has done one step, in tmp_path/run."""
    write_run(tmp_path / "run", [STARTED, step(1)])
    with ReportServer([tmp_path / "run"]) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def get(server: ReportServer, path: str = "/", **headers: str) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_a_browser_gets_what_is_new_and_only_that(server: ReportServer, tmp_path: Path) -> None:
    first, text = get(server)
    assert first.status == 200
    assert "1 of 40 steps" in text
    assert "connect-src &#x27;self&#x27;" in text
    assert 'http-equiv="refresh"' not in text
    version = first.headers["ETag"]
    known, empty = get(server, **{"If-None-Match": version})
    assert (known.status, empty, known.headers["ETag"]) == (304, "", version)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write(json.dumps(step(2)) + "\n")
    again, text = get(server, **{"If-None-Match": version})
    assert again.status == 200
    assert again.headers["ETag"] != version
    assert "2 of 40 steps" in text


def test_only_this_address_and_this_page_are_answered(server: ReportServer) -> None:
    assert server.address == f"http://127.0.0.1:{server.server_port}/"
    assert get(server, "/../run.json")[0].status == 404
    assert get(server, Host="example.org")[0].status == 403
    assert get(server, Host=f"localhost:{server.server_port}")[0].status == 200


def test_no_run_and_a_taken_port_are_one_message(server: ReportServer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no run"):
        ReportServer([tmp_path])
    with pytest.raises(OutputError, match=f"127.0.0.1:{server.server_port}"):
        ReportServer([tmp_path / "run"], server.server_port)
