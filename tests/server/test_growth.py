"""The cost of each request is linear in its size, or the request is refused.

To print the largest time and memory of each endpoint:

    PEFTKIT_GROWTH=1 pytest tests/server/test_growth.py -m slow -s
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")

from peftkit_server.tinker import wire
from peftkit_server.tuning.rows import JobError, count_rows
from tests.helpers.growth import CHANGES, Cost, bodies, measure, table
from tests.helpers.jobs import FILES, JOBS, LIKE, PAIRS, Client, serving
from tests.helpers.wire_client import API, datum, message
from tests.helpers.wire_client import Client as Tinker

GRADERS = f"{JOBS[:-5]}/alpha/graders"
TURNS = [{"role": "user", "content": "hi"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "b", "enum": ["b", "c"]}},
    "required": ["a"],
}
NUMBERS = itertools.count(10)
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
"""Bodies that are valid, or nearly: the first error of a field may hide others."""


def endpoints(tinker: Tinker, file: str) -> dict[str, Any]:
    """Return a body with all fields for each endpoint."""
    sampler, model = tinker.sampler(), tinker.model()
    session = {"session_id": tinker.session}
    call = {"role": "assistant", "content": "x", "tool_calls": [CALL]}
    reply = {"role": "tool", "tool_call_id": "c", "content": "x"}
    chat = {"model": "base", "max_tokens": 1}
    judge = {"type": "score_model", "name": "j", "model": "base", "range": [0, 1], "input": TURNS}
    formula = {"type": "multi", "name": "m", "graders": {"a": LIKE}, "calculate_output": "a + 1"}
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    place = {"model_id": model.id}
    targets = {"dtype": "int64", "shape": [2, 1], "data": [5, 6]}
    return {
        "/v1/chat/completions": {
            **chat,
            "messages": [{"role": "system", "content": [{"type": "text", "text": "x"}]}, *TURNS],
            "stop": ["x"],
            "metadata": {"a": "b"},
            "user": "x",
            "chat_template_kwargs": {"a": "b"},
        },
        "/v1/chat/completions?tools": {
            **chat,
            "messages": [*TURNS, call, reply],
            "tools": [TOOL],
            "tool_choice": "auto",
        },
        "/v1/chat/completions?schema": {**chat, "messages": TURNS, "response_format": form},
        "/v1/completions": {**chat, "prompt": ["hi"], "stop": "x", "n": 1},
        "/v1/completions?ids": {**chat, "prompt": [[5, 6]]},
        "/inference/v1/generate": {
            "model": "base",
            "token_ids": [5, 6],
            "sampling_params": {"max_tokens": 1, "stop_token_ids": [7], "stop": ["x"]},
        },
        JOBS: {
            "model": "none",
            "training_file": file,
            "suffix": "x",
            "metadata": {"a": "b"},
            "method": method,
            "integrations": [],
        },
        f"{GRADERS}/validate": {"grader": formula},
        f"{GRADERS}/run": {
            "grader": {**LIKE, "reference": "{{item.answer}} {{sample.output_text}}"},
            "model_sample": "a",
            "item": {"answer": "a"},
        },
        f"{GRADERS}/run?judge": {"grader": judge, "model_sample": "a", "item": {"answer": "a"}},
        f"{GRADERS}/run?multi": {"grader": formula, "model_sample": "a", "item": {"answer": "a"}},
        f"{API}/create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "1"},
        f"{API}/create_model": {
            **session,
            "model_seq_id": 90,
            "base_model": "none",
            "lora_config": {"rank": 2},
            "user_metadata": {"a": "b"},
        },
        f"{API}/load_weights": {
            **session,
            "model_seq_id": 91,
            "path": "tinker://a/weights/b",
            "optimizer": True,
        },
        f"{API}/asample": {
            "sampling_session_id": sampler,
            "seq_id": 5,
            "num_samples": 1,
            "prompt": PROMPT,
            "sampling_params": {"max_tokens": 1, "stop": ["x"], "seed": 1},
            "target_prompt_logprobs": targets,
        },
        f"{API}/optim_step": {**place, "seq_id": 4000, "adam_params": {"learning_rate": 0.1}},
        f"{API}/save_weights": {**place, "seq_id": 4001, "path": "x", "user_metadata": {"a": "b"}},
        f"{API}/create_sampling_session": {
            **session,
            "sampling_session_seq_id": 90,
            "model_path": "tinker://a/weights/b",
        },
        f"{API}/retrieve_future": {"request_id": "x"},
        f"{API}/weights_info": {"tinker_path": "tinker://a/weights/b"},
        f"{API}/telemetry": {"events": [{"a": "b"}]},
    }


@pytest.fixture(scope="module")
def served(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("growth")
    with serving(model_folder, folder, limits={"max_new_tokens": 1}) as client:
        yield client


def send(client: Client, endpoint: str, data: bytes) -> int:
    if endpoint.endswith("asample"):  # the same number twice is a conflict
        data = data.replace(b'"seq_id": 5', b'"seq_id": %d' % next(NUMBERS), 1)
    kind = "x-protobuf" if endpoint.endswith("forward_backward") else "json"
    headers = {"Content-Type": f"application/{kind}"}
    return client.post(endpoint, content=data, headers=headers).status_code


def show(costs: list[Cost]) -> None:
    if os.environ.get("PEFTKIT_GROWTH"):
        print(f"\n{table(costs)}")


def run(client: Client, sizes: list[int], changes: list[str]) -> list[str]:
    tinker = Tinker(client)
    file = client.post(FILES, **_form()).json()["id"]
    cases = bodies(endpoints(tinker, file), sizes, changes)
    costs, problems = measure(lambda endpoint, data: send(client, endpoint, data), cases)
    show(costs)
    return problems


def _form() -> dict[str, Any]:
    return {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "fine-tune"}}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_cost_of_a_request_is_linear(served):
    assert not run(served, [1 << 13, 1 << 16, 1 << 19], [*CHANGES])


def forwards(model_id: str, sizes: list[int]) -> Iterator[tuple[str, str, str, list[bytes]]]:
    """Yield messages of forward_backward that grow in each of their parts."""

    def of(change: str, size: int) -> bytes:
        count = size // 32
        ids, inputs = datum([5] * (size // 8)) if change == "tokens" else datum([5, 6, 7])
        if change == "names":
            inputs |= {f"x{n}": inputs["target_tokens"] for n in range(count)}
        if change == "targets":
            inputs["target_tokens"] = torch.full((2, size // 16), 5)
        config = {f"k{n}": 1.0 for n in range(count)} if change == "settings" else None
        data = [(ids, inputs)] * (count if change == "datums" else 1)
        text = message(model_id, next(NUMBERS), data, config=config)
        if change == "chunks":
            parsed = wire.parsed("ForwardBackward", text)
            for _ in range(count):
                parsed.data[0].chunks.add().text.tokens = b""
            return bytes(parsed.SerializeToString())
        return text + b"\x1a\x00" * (count if change == "empty datums" else 0)

    kinds = ("tokens", "names", "targets", "settings", "datums", "chunks", "empty datums")
    for change in kinds:
        texts = [of(change, size) for size in sizes]
        yield f"{API}/forward_backward", "message", change, texts


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_cost_of_datums_is_linear(served):
    tinker = Tinker(served)
    cases = forwards(tinker.model().id, [1 << 13, 1 << 17, 1 << 20])
    costs, problems = measure(lambda endpoint, data: send(served, endpoint, data), cases)
    show(costs)
    assert not problems


ROW = {
    "messages": [*TURNS, {"role": "assistant", "content": "x", "weight": 1}],
    "tools": [TOOL],
    "other": {"a": 1},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("method", "row"), [("supervised", ROW), ("dpo", PAIRS[0])])
def test_the_cost_of_checking_rows_is_linear(tmp_path, method, row):
    path = tmp_path / "rows.jsonl"

    def check(endpoint: str, data: bytes) -> int:
        path.write_bytes(data + b"\n")
        try:
            count_rows(path, method)
        except JobError:
            return 400
        return 200

    cases = bodies({f"rows of {method}": row}, [1 << 13, 1 << 17, 1 << 20], [*CHANGES])
    costs, problems = measure(check, cases)
    show(costs)
    assert not problems


def test_the_cost_of_small_requests_is_linear(served):
    assert not run(served, [1 << 11, 1 << 15], ["many", "depth"])
