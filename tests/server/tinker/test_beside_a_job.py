"""A Tinker model and a job that train simultaneously give the same results as alone."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")

from peftkit.events import StepDone
from peftkit.execution.signals import Interrupted, stop_here
from peftkit.recipe import Recipe
from peftkit.run import run
from tests.helpers.serving import adapter_bytes, recipe
from tests.helpers.tinker import MIXED_RANKS, PROMPT, train_steps
from tests.helpers.wire_client import Client


class Job:
    """Trains a recipe in a server's worker, which serves requests between its steps."""

    def __init__(self, client: Client, recipe: Recipe) -> None:
        self.worker, self.recipe = client.http.app.state.worker, recipe
        self.steps, self.is_enough = 0, False
        self.begun, self.ended = threading.Event(), threading.Event()
        self.worker.queue(self._train)

    def _train(self, give_way: Callable[[], None]) -> None:
        def listen(event: Any) -> None:
            if isinstance(event, StepDone):
                self.steps += 1
                self.begun.set()
                if self.is_enough:
                    stop_here()
                give_way()

        with suppress(Interrupted):
            run(self.recipe, base=self.worker.bank.base, on_event=listen)
        self.ended.set()


def test_models_train_and_sample_beside_a_job_as_alone(client, tmp_path):
    alone = [train_steps(client.model(**config), 3) for config in MIXED_RANKS]
    said = client.sample(client.sampler(), PROMPT, prompt_logprobs=True)
    job = Job(client, recipe(tmp_path, "long", max_steps=100_000, save_every=100_000))
    assert job.begun.wait(60)
    before = job.steps
    assert [train_steps(client.model(**config), 3) for config in MIXED_RANKS] == alone
    assert client.sample(client.sampler(), PROMPT, prompt_logprobs=True) == said
    assert not job.ended.is_set()
    assert job.steps > before + 6
    job.is_enough = True
    assert job.ended.wait(60)
    assert train_steps(client.model(**MIXED_RANKS[0]), 3) == alone[0]


def test_a_job_beside_models_ends_bit_equal_to_one_alone(client, tmp_path):
    for name in ("alone", "beside"):
        job = Job(client, recipe(tmp_path, name, max_steps=12))
        if name == "beside":
            assert job.begun.wait(60)
            train_steps(client.model(), 4)
        assert job.ended.wait(60)
        assert job.steps == 12
    assert adapter_bytes(tmp_path / "beside") == adapter_bytes(tmp_path / "alone")
