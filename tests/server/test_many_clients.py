"""Many simultaneous clients: short requests next to long ones, and clients that disconnect."""

import asyncio
import random
from time import sleep
from typing import Any

import pytest
import torch

from peftkit.inference.bank import AdapterBank
from peftkit.inference.engine import Limits, Request
from peftkit.inference.sampling import Sampling
from peftkit_server.app import make_app
from peftkit_server.generation import Generation, Output
from peftkit_server.worker import Worker
from tests.helpers.bank import tiny_base
from tests.helpers.families import FAMILIES
from tests.helpers.serving import scope_of


@pytest.fixture
def bank(tokenizer: Any) -> AdapterBank:
    model = FAMILIES["llama"]()
    model.config.max_position_embeddings = 16_384
    model.generation_config.eos_token_id = None
    return AdapterBank(tiny_base(model.eval(), tokenizer))


def test_a_short_request_starts_before_a_long_prefill_ends(bank):
    seen: list[tuple[str, int]] = []

    def job(name: str, size: int, num_new: int) -> Generation:
        def tell(what: Output | Exception) -> None:
            is_over = isinstance(what, Exception) or what.reason is not None
            seen.append((name, int(is_over)))

        ids = torch.randint(5, 300, (size,), generator=torch.Generator().manual_seed(size))
        return Generation(Request(ids.tolist(), Sampling(max_new_tokens=num_new)), tell)

    bank.engine()  # probes the model
    worker = Worker(bank, limits=Limits(rows=4, prefill=256))
    worker.submit([job("long", 8000, 400)])
    worker.start()
    while worker.batch.num_running == 0:
        sleep(0.001)
    worker.submit([job("short", 20, 6)])
    while ("short", 1) not in seen:
        sleep(0.001)
    worker.stop()
    assert seen[0][0] == "short"
    assert ("long", 1) not in seen[:-1]


@pytest.mark.parametrize("number", [80, pytest.param(1000, marks=pytest.mark.slow)])
def test_clients_that_vanish_at_random_leave_nothing_stuck(number, bank):
    rng = random.Random(1)
    app = make_app(bank)
    answered: list[int] = []

    async def client(number: int, stays: bool) -> None:
        body = b'{"model": "base", "prompt": [%d, 7], "max_tokens": %d, "stream": %s}' % (
            5 + number % 200,
            rng.randrange(1, 40),
            rng.choice([b"true", b"false"]),
        )
        gone, bodies = asyncio.Event(), iter([body])

        async def receive() -> dict[str, Any]:
            for sent in bodies:
                return {"type": "http.request", "body": sent}
            await gone.wait()
            return {"type": "http.disconnect"}

        done: list[Any] = []

        async def send(message: dict[str, Any]) -> None:
            done.append(message)

        scope = scope_of("/v1/completions", {"content-type": "application/json"})
        call = asyncio.create_task(app(scope, receive, send))
        if not stays:
            await asyncio.sleep(rng.random() * 0.2)
            gone.set()
        await asyncio.wait_for(call, 60)
        if stays:
            assert done[0]["status"] == 200, done
            content = b"".join(one.get("body", b"") for one in done[1:])
            assert b'"length"' in content or b'"stop"' in content
            answered.append(number)

    async def all_of_them() -> None:
        async with app.router.lifespan_context(app):
            for start in range(0, number, 40):
                waves = [client(start + n, stays=n % 3 == 0) for n in range(40)]
                await asyncio.gather(*waves)
            for _ in range(200):  # a cancelled completion ends at the next token
                if (num := running(app)) == 0:
                    break
                await asyncio.sleep(0.02)
            assert num == 0

    asyncio.run(all_of_them())
    assert len(answered) == sum(n % 40 % 3 == 0 for n in range(number))
    worker: Worker = app.state.worker
    assert not worker.is_alive
    assert (worker.batch._active, len(worker.batch._new)) == ([], 0)


def running(app: Any) -> int:
    worker: Worker = app.state.worker
    return worker.batch.num_running + worker.batch.num_waiting
