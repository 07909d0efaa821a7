"""/metrics: what Prometheus reads of a server."""

import pytest

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
from starlette.testclient import TestClient

from peftkit_server import metrics
from peftkit_server.app import make_app
from tests.helpers.serving import HERE, refusal

TEXT = "/v1/completions"


def test_prometheus_reads_requests_tokens_queues_and_memory(client):
    pytest.importorskip("prometheus_client", reason="the extra peftkit[metrics] is not installed")
    from prometheus_client.parser import text_string_to_metric_families as parse

    body = {"model": "one", "prompt": [5, 6, 7], "max_tokens": 4}
    answered = client.post(TEXT, json=body).json()
    with client.stream("POST", TEXT, json=body | {"stream": True}) as stream:
        assert stream.read().endswith(b"[DONE]\n\n")
    assert client.get("/v1/models/two").status_code == 200
    assert client.get("/v1/models/three").status_code == 404
    assert client.get("/v2/anything").status_code == 404
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in parse(response.text)
        for sample in family.samples
    }
    name = "peftkit_requests_total"
    assert values[name, TEXT, "200", "POST"] == 2
    assert values[name, "/v1/models/{name:path}", "200", "GET"] == 1
    assert values[name, "/v1/models/{name:path}", "404", "GET"] == 1
    assert values[name, "404", "GET", "unknown"] == 1
    assert values["peftkit_request_seconds_count", TEXT] == 2
    assert 0 < values["peftkit_request_seconds_sum", TEXT] < 60
    usage = answered["usage"]
    assert values["peftkit_prompt_tokens_total",] == 2 * usage["prompt_tokens"] == 6
    assert values["peftkit_generated_tokens_total",] == 2 * usage["completion_tokens"] > 0
    for gauge in ("prompts_waiting", "prompts_running", "jobs_waiting", "jobs_running"):
        assert values[f"peftkit_{gauge}",] == 0
    assert values["peftkit_memory_bytes", "process"] > 1 << 20


def test_invented_methods_share_a_label(client):
    pytest.importorskip("prometheus_client", reason="the extra peftkit[metrics] is not installed")
    client.request("GET", "/nothing")
    number = client.get("/metrics").text.count("\n")
    for n in range(20):
        assert client.request(f"M{n}", "/nothing").status_code in (404, 405)
    text = client.get("/metrics").text
    assert 'method="other"' in text
    assert "M1" not in text
    assert text.count("\n") <= number + 30  # one label, and the counts of /metrics itself


def test_metrics_require_the_key_of_the_server(bank):
    with TestClient(make_app(bank, keys=["sesame"]), base_url=HERE) as client:
        assert client.get("/metrics").status_code == 401


def test_without_prometheus_client_the_way_to_get_it_is_named(bank, monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with TestClient(make_app(bank), base_url=HERE) as client:
        assert "pip install -e '.[metrics]'" in refusal(client.get("/metrics"), 501)["message"]
        assert client.get("/health").status_code == 200
