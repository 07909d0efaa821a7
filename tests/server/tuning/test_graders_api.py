"""Graders run on single answers before a job trains with them."""

from typing import Any

import pytest
from openai.types.fine_tuning.alpha import GraderRunResponse

from peftkit.inference.cached_engine import CachedEngine
from tests.helpers.jobs import LIKE, Client
from tests.helpers.serving import refusal

PATH = "/v1/fine_tuning/alpha/graders"
ITEM = {"answer": "brown fox"}
SCORE = {
    "type": "score_model",
    "name": "judge",
    "model": "base",
    "input": [{"role": "user", "content": "the quick"}],
    "sampling_params": {"max_completions_tokens": 4},
}
SHARE = {
    "type": "python",
    "name": "share",
    "source": "def grade(sample, item):\n    return item['n'] / len(sample['output_text'])\n",
}


def run(client: Client, grader: dict[str, Any], sample: str, item: Any = ITEM) -> Any:
    body = {"grader": grader, "model_sample": sample, "item": item}
    done = client.post(f"{PATH}/run", json=body)
    assert done.status_code == 200, done.text
    return GraderRunResponse.model_validate(done.json(), strict=True)


def test_a_grader_is_tried_on_an_answer(shared):
    found = run(shared, LIKE, "brown fox")
    assert (found.reward, found.metadata.name, found.metadata.type) == (1.0, *_named(LIKE))
    assert not any(found.metadata.errors.model_dump().values())
    both = {
        "type": "multi",
        "name": "both",
        "graders": {"like": LIKE, "same": {**LIKE, "input": "brown fox"}},
        "calculate_output": "like + same / 2",
    }
    found = run(shared, both, "brown")
    assert found.sub_rewards == {"like": pytest.approx(10 / 14), "same": 1.0}
    assert found.reward == pytest.approx(10 / 14 + 0.5)
    found = run(shared, {**LIKE, "input": "{{sample.output_json.a}}"}, "no JSON")
    assert found.metadata.errors.sample_parse_error
    assert shared.post(f"{PATH}/validate", json={"grader": LIKE}).json() == {"grader": LIKE}


def _named(grader: dict[str, Any]) -> tuple[str, str]:
    return grader["name"], grader["type"]


def test_the_base_scores_in_its_own_thread(shared):
    found = run(shared, {**SCORE, "range": [-5, 5]}, "x")
    text = shared.say("base", "the quick")[:4]
    assert not any(sign.isdigit() for sign in text)  # a tiny model generates no number
    assert found.metadata.errors.api_model_grader_parse_error
    assert found.reward == 0.0


@pytest.mark.parametrize(
    ("grader", "status", "told"),
    [
        ({"type": "nothing"}, 400, "type"),
        ({**LIKE, "evaluation_metric": "meteor"}, 400, "evaluation_metric"),
        ({**LIKE, "input": "{{secret}}"}, 400, "{{secret}}"),
        ({**LIKE, "input": "{{item.absent}}"}, 400, "item.absent"),
        ({**SCORE, "model": "o4-mini"}, 400, "model"),
        (SHARE, 403, "--run-graders"),
        ({"type": "multi", "graders": {f"k{n}": n for n in range(5000)}}, 400, "5,000 entries"),
        ({**SCORE, "input": [{f"k{n}": "user" for n in range(5000)}]}, 400, "5,000 entries"),
    ],
)
def test_a_bad_grader_fails(shared, grader, status, told):
    body = {"grader": grader, "model_sample": "x", "item": ITEM}
    assert told in refusal(shared.post(f"{PATH}/run", json=body), status)["message"]


def test_functions_are_tried_where_the_operator_says_so(served):
    with served(allow_code=True) as client:
        assert run(client, SHARE, "four", {"n": 1}).reward == 0.25
        body = {"grader": SHARE, "model_sample": "", "item": {"n": 1}}
        assert "ZeroDivisionError" in refusal(client.post(f"{PATH}/run", json=body))["message"]
        broken = {**SHARE, "source": "def grade(:"}
        assert client.post(f"{PATH}/validate", json={"grader": broken}).status_code == 400


def test_a_failing_model_is_no_4xx(shared, monkeypatch):
    def fails(self: CachedEngine) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(CachedEngine, "step", fails)
    body = {"grader": {**SCORE, "range": [0, 9]}, "model_sample": "x", "item": ITEM}
    assert "the model failed" in refusal(shared.post(f"{PATH}/run", json=body), 500)["message"]
